"""Proposers: who drafts. `observe` shows it verified rows, `propose` asks for drafts.

Knows neither requests nor verification; the engine plans the batch.

Shapes: T rows, B sequences, N drafts, D hidden width, V vocabulary, U the head's own vocabulary, W waiting rows.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from mtp_train.attention.paged import BatchPlan, PagedKV, TreeRows
from mtp_train.core.errors import UserError
from mtp_train.engine.clock import Clock
from mtp_train.engine.sampling import Randomness, Rules
from mtp_train.heads.base import DraftHead
from mtp_train.models.spread import spread_block
from mtp_train.models.target import Target

# (starts, rows, trees) of the step's sequences, in order -> their plan.
Planner = Callable[[list[int], list[int], "list[TreeRows] | None"], BatchPlan]


@dataclass(frozen=True)
class Waiting:
    """Newest verified rows of one sequence, which later modules still have to run."""

    token_W: Tensor  # x[p+1] of each row
    state_WD: Tensor  # the first module's output

    def last(self, rows: int) -> Waiting:
        return Waiting(self.token_W[-rows:], self.state_WD[-rows:])

    def after(self, earlier: Waiting) -> Waiting:
        return Waiting(
            torch.cat([earlier.token_W, self.token_W]),
            torch.cat([earlier.state_WD, self.state_WD]),
        )


@dataclass(frozen=True)
class Carry:
    """What a proposer keeps per sequence between steps: the head's output at the newest verified row.

    waiting: one per sequence for a head of one module per depth, else none.
    lag: rows whose deepest tokens are not known.
    """

    state_BD: Tensor
    logits_BU: Tensor
    waiting: tuple[Waiting, ...] = ()
    lag: int = 0

    def one(self, index: int) -> Carry:
        """That of one sequence."""
        part = slice(index, index + 1)
        return Carry(self.state_BD[part], self.logits_BU[part], self.waiting[part], self.lag)

    @classmethod
    def join(cls, parts: Sequence[Carry]) -> Carry:
        waiting = tuple(rows for part in parts for rows in part.waiting)
        return cls(
            torch.cat([part.state_BD for part in parts]),
            torch.cat([part.logits_BU for part in parts]),
            waiting,
            parts[0].lag,
        )

    def after(self, earlier: Carry | None) -> Carry:
        """The carry of the same sequences' next rows: none of those before was drafted from, or `used` was."""
        if earlier is None or not self.lag:
            return self
        pairs = zip(self.waiting, earlier.waiting, strict=True)
        return replace(self, waiting=tuple(new.after(old) for new, old in pairs))

    def used(self) -> Carry:
        """What is left to carry once drafts were made from it."""
        return replace(self, waiting=tuple(rows.last(self.lag) for rows in self.waiting))


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
class Drafting:
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

    def propose(self, step: Drafting) -> Draft | None:
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

    def propose(self, step: Drafting) -> Draft | None:
        return None


class HeadRunner:
    """What every proposer that drafts with a head does: run it over planned rows, read its logits."""

    lag = 0

    def __init__(self, target: Target, head: DraftHead) -> None:
        self.target = target
        self.head = spread(target, head.to(target.dtype)).serving(target)
        self.cache_layers = head.cache_layers
        self.states = head.states
        self.ahead = head.ahead
        self.positions = head.positions

    def observe(
        self,
        cache: PagedKV,
        plan: BatchPlan,
        next_T: Tensor,
        states: dict[str, Tensor],
        row_B: Tensor,
        clock: Clock,
    ) -> Carry:
        with clock("head"):
            out_TD = self.rows(cache, plan, next_T, self.head.fuse(states), 0)
            state_BD = out_TD[row_B]
            waiting = self.waiting(plan, next_T, out_TD, row_B)
        with clock("lm_head of the head"):
            logits_BU = self.logits(state_BD, 0)
        return Carry(state_BD, logits_BU, waiting, self.lag)

    def waiting(
        self, plan: BatchPlan, next_T: Tensor, out_TD: Tensor, row_B: Tensor
    ) -> tuple[Waiting, ...]:
        """Rows of each sequence that later modules have to run; none for a head of one."""
        return ()

    def rows(
        self,
        cache: PagedKV,
        plan: BatchPlan,
        token_T: Tensor,
        state_TD: Tensor,
        step: int,
        later: int = 0,
    ) -> Tensor:
        """The head's outputs at draft step `step`, at positions `later` after the plan's [T, D]."""
        context = cache.context(plan)
        embedding_TD = self.head.embed(self.target, token_T)
        return self.head.at(step)(embedding_TD, state_TD, plan.positions + later, context)

    def logits(self, state_ND: Tensor, step: int) -> Tensor:
        return self.head.logits(self.target, state_ND, step)

    def in_target(self, token: Tensor) -> Tensor:
        """The head's ids as the target's."""
        vocabulary_U = self.head.vocabulary
        return token if vocabulary_U is None else vocabulary_U[token]

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
