"""The drafting schemes by name: who proposes, for a head or without one."""

from __future__ import annotations

from dataclasses import dataclass

from mtp_train.core.errors import UserError
from mtp_train.engine.adaptive import AdaptiveProposer, StepCosts
from mtp_train.engine.branch import TreeConfig, TreeProposer
from mtp_train.engine.chain import ChainProposer
from mtp_train.engine.ngram import NgramProposer
from mtp_train.engine.propose import NoProposer, Proposer
from mtp_train.heads.base import DraftHead
from mtp_train.models.target import Target

SCHEMES = ("chain", "adaptive", "dynamic", "fixed", "ngram", "none")


@dataclass(frozen=True)
class SchemeConfig:
    """How drafts are made.

    Attributes:
        kind: `chain`, an `adaptive` one that stops where drafts no longer pay, a `dynamic` (EAGLE-2) or `fixed` tree
            of the head's drafts, `ngram` (prompt lookup, no head), or `none`.
        drafts: drafted tokens per step: k of a chain, the size of a tree.
        depth: of a tree's deepest draft.
        top_k: children of a draft in a tree; of a dynamic one also the drafts of a level that are read on.
        table: (batch size, drafts) pairs of an adaptive chain with a head that says no confidence.
        seconds: (batch size, seconds of a step with 0, 1, .. drafts) pairs of one with a head that does.
    """

    kind: str = "chain"
    drafts: int = 3
    depth: int = 3
    top_k: int = 4
    table: tuple[tuple[int, int], ...] = ()
    seconds: tuple[tuple[int, tuple[float, ...]], ...] = ()

    def __post_init__(self) -> None:
        if self.kind not in SCHEMES:
            raise UserError(
                "a drafting scheme must be one of " + ", ".join(SCHEMES), self.kind, "choose one"
            )
        if self.drafts < 1:
            raise UserError("a scheme's drafts must be 1 or more", self.drafts, "raise it")
        if self.kind in ("dynamic", "fixed"):
            self.tree()

    @property
    def positions(self) -> int:
        """Drafts on the longest path: as many places acceptance is counted at."""
        return self.depth if self.kind in ("dynamic", "fixed") else self.drafts

    def tree(self) -> TreeConfig:
        return TreeConfig(self.kind, self.drafts, self.depth, self.top_k)


def make_proposer(
    target: Target,
    head: DraftHead | None,
    scheme: SchemeConfig,
) -> Proposer:
    """The proposer of a scheme. The head is cast to the target's dtype in place: give a copy where it goes on training.

    Raises:
        UserError: a scheme that needs a head without one, or one that the head can't draft.
    """
    if scheme.kind == "none":
        return NoProposer()
    if scheme.kind == "ngram":
        return NgramProposer(scheme.drafts)
    if head is None:
        raise UserError(f"the scheme {scheme.kind} drafts with a head", "none", "name a head")
    if scheme.kind == "chain":
        return ChainProposer(target, head, scheme.drafts)
    if scheme.kind == "adaptive":
        costs = StepCosts(dict(scheme.seconds)) if scheme.seconds else None
        return AdaptiveProposer(target, head, scheme.drafts, costs, dict(scheme.table) or None)
    return TreeProposer(target, head, scheme.tree())
