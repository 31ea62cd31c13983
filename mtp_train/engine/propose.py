"""Proposers: who drafts. `observe` shows it verified rows, `propose` asks for drafts.

Knows neither requests nor verification; the engine plans the batch.

Shapes: T rows, B sequences, N drafts, D hidden width, V vocabulary, U the head's own vocabulary, W waiting rows.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from mtp_train.attention.paged import BatchPlan, PagedKV
from mtp_train.core.errors import UserError
from mtp_train.engine.clock import Clock
from mtp_train.engine.sampling import Randomness, Rules
from mtp_train.heads.base import Carry, DraftHead, Drafting, Planner
from mtp_train.models.spread import spread_block
from mtp_train.models.target import Target


@dataclass(frozen=True)
class Draft:
    """Proposed tokens.

    Attributes:
        q_BNV: the distributions that they were drawn from, or stand in for; absent where nobody asked.
        parent_BN: the row that each draft hangs on, as in `tree`; none is a chain.
        count_B: drafts per sequence, where some have fewer than N; the rest is padding.
    """

    token_BN: Tensor
    q_BNV: Tensor | None = None
    parent_BN: np.ndarray | None = None
    count_B: tuple[int, ...] | None = None

    def one(self, index: int) -> Draft:
        """That of one sequence of a chain."""
        part = slice(index, index + 1)
        return Draft(self.token_BN[part], None if self.q_BNV is None else self.q_BNV[part])

    @classmethod
    def join(cls, parts: Sequence[Draft]) -> Draft:
        kept = [part.q_BNV for part in parts if part.q_BNV is not None]
        return cls(torch.cat([part.token_BN for part in parts]), torch.cat(kept) if kept else None)


@dataclass(frozen=True)
class Proposing:
    """What a proposer is given to draft one step of B sequences.

    Attributes:
        newest: position of each sequence's newest token.
        tokens: every sequence's tokens so far.
        drawn: draw drafts from q, rather than take its best; verification then needs q.
        keep: rules by which q is wanted of drafts that aren't drawn.
    """

    cache: PagedKV
    plan: Planner
    newest: list[int]
    tokens: list[list[int]]
    carry: Carry | None
    rules: Rules
    random: Randomness
    clock: Clock
    drawn: bool
    keep: Rules | None

    def drafting(self) -> Drafting:
        """What a head needs of it."""
        token = [tokens[-1] for tokens in self.tokens]
        return Drafting(self.cache, self.plan, self.newest, token, self.clock)


class Proposer(Protocol):
    """
    Attributes:
        drafts: N, tokens drafted per step; 0 for plain decoding.
        depth: of the longest path among them; N for a chain.
        room: rows past the newest token that drafting writes at most.
        cache_layers: layers it needs in the paged cache, after the target's.
        states: target states that it is shown, by name.
        ahead: row p reads token x[p+ahead]: 1 beside the target's state, 0 without one.
        reach: tokens after a row on which what it caches there depends; None: pages can't be shared.
        early: whether it can draft with no plan but its carry.
        positions: the longest sequence that it drafts for; 0: as long as the target's.
    """

    drafts: int
    depth: int
    room: int
    cache_layers: int
    states: tuple[str, ...]
    ahead: int
    reach: int | None
    early: bool
    positions: int

    def observe(
        self,
        cache: PagedKV,
        plan: BatchPlan,
        next_T: Tensor,
        states: dict[str, Tensor],
        row_B: Tensor,
        clock: Clock,
    ) -> Carry | None:
        """Run over rows that are new; carry the output of row `row_B` of each sequence, from which its drafts follow.

        A head that is one token ahead is shown verified rows with the target's states, others the newest tokens.

        next_T: token x[p+ahead] of each row p. Rows past `row_B` of a sequence hold nothing yet and are overwritten.
        """
        ...

    def propose(self, step: Proposing) -> Draft | None:
        """Draft N tokens per sequence; None if there is nothing to draft for any."""
        ...


class NoProposer:
    """Plain decoding: nothing is drafted, every step yields one token."""

    drafts = 0
    depth = 0
    room = 0
    cache_layers = 0
    states: tuple[str, ...] = ()
    ahead = 1
    reach: int | None = 0
    early = False
    positions = 0

    def observe(
        self,
        cache: PagedKV,
        plan: BatchPlan,
        next_T: Tensor,
        states: dict[str, Tensor],
        row_B: Tensor,
        clock: Clock,
    ) -> None:
        return None

    def propose(self, step: Proposing) -> Draft | None:
        return None


class HeadRunner:
    """What every proposer that drafts with a head does: show it rows, tell its tokens from the target's."""

    def __init__(self, target: Target, head: DraftHead, depth: int) -> None:
        """depth: of the longest path of drafts.

        Raises:
            UserError: the head has fewer draft steps.
        """
        require_steps(head, depth)
        self.target, self.depth = target, depth
        self.head = spread(target, head.to(target.dtype)).serving(target)
        self.cache_layers = head.cache_layers
        self.states = head.states
        self.ahead = head.ahead
        self.positions = head.positions
        self.reach = head.reach(depth)

    def observe(
        self,
        cache: PagedKV,
        plan: BatchPlan,
        next_T: Tensor,
        states: dict[str, Tensor],
        row_B: Tensor,
        clock: Clock,
    ) -> Carry:
        seen = self.head.observe(self.target, cache, plan, next_T, states, self.depth, clock)
        return seen.carry(row_B)

    def over_target(self, q_BU: Tensor) -> Tensor:
        """A distribution over the target's vocabulary [B, V]: what the head can't draft has chance 0."""
        vocabulary_U = self.head.vocabulary
        if vocabulary_U is None:
            return q_BU
        q_BV = q_BU.new_zeros(len(q_BU), self.target.vocab_size)
        return q_BV.index_copy_(1, vocabulary_U, q_BU)


def spread(target: Target, head: DraftHead) -> DraftHead:
    """The head, or a copy that holds this rank's share of its blocks where several hold the target."""
    if target.tensor_parallel == 1 or not head.decoder_blocks():
        return head
    own = copy.deepcopy(head)
    for block in own.decoder_blocks():
        spread_block(target, block)
    return own


def require_steps(head: DraftHead, drafts: int) -> None:
    """Raise if a head has fewer draft steps than a path is deep."""
    if head.steps is not None and drafts > head.steps:
        rule = f"a {head.family} head drafts {head.steps} tokens at most, as it was trained"
        raise UserError(rule, drafts, "lower the number of drafts")
