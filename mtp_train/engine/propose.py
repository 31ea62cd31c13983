"""Proposers: who drafts. `observe` shows it verified rows, `propose` asks for drafts.

Knows neither requests nor verification; the engine plans the batch.

A head of one module per depth needs more than its newest row. Its first module sees verified rows once, in `observe`.
Module s needs token x[r+1+s] of row r, so that its last s rows are waiting for tokens, and are read all the same by the
rows after them. `propose` runs them with drafts in the tokens' places, and again when the tokens are known: every time
over all rows that have come since, and over D-1 before, in one causal pass per module, as in training.

    x[0..5] known, D = 3     row  0   1   2   3   4
    module 0                     x1  x2  x3  x4  x5   verified: run once
    module 1                     x2  x3  x4  x5  d1   d1, d2: this step's drafts
    module 2                     x3  x4  x5  d1  d2

Shapes: T rows, B sequences, K drafts, D hidden width, V vocabulary, U the head's own vocabulary, W waiting rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from mtp_train.attention.paged import BatchPlan, PagedContext, PagedKV, plan_before
from mtp_train.core.errors import UserError
from mtp_train.engine.clock import Clock
from mtp_train.engine.sampling import Randomness, Sampling, draw, probabilities
from mtp_train.heads.base import DraftHead
from mtp_train.models.target import Target


@dataclass(frozen=True)
class Waiting:
    """Newest verified rows of one sequence, which later modules still have to run."""

    token_W: Tensor  # x[p+1] of each row
    state_WD: Tensor  # the first module's output

    def after(self, earlier: Waiting, kept: int) -> Waiting:
        """With the last `kept` rows of those before."""
        return Waiting(
            torch.cat([earlier.token_W[-kept:], self.token_W]),
            torch.cat([earlier.state_WD[-kept:], self.state_WD]),
        )


@dataclass(frozen=True)
class Carry:
    """What a proposer keeps per sequence between steps: the head's output at the newest verified row.

    waiting: one per sequence for a head of one module per depth, else none.
    lag: rows whose deepest tokens were not known at the last step.
    """

    state_BD: Tensor
    logits_BU: Tensor
    waiting: tuple[Waiting, ...] = ()
    lag: int = 0

    def select(self, keep: list[int]) -> Carry:
        index = torch.tensor(keep, dtype=torch.int64, device=self.state_BD.device)
        waiting = tuple(self.waiting[at] for at in keep) if self.lag else ()
        return Carry(self.state_BD[index], self.logits_BU[index], waiting, self.lag)

    def join(self, other: Carry) -> Carry:
        return Carry(
            torch.cat([self.state_BD, other.state_BD]),
            torch.cat([self.logits_BU, other.logits_BU]),
            self.waiting + other.waiting,
            self.lag,
        )

    def after(self, earlier: Carry | None) -> Carry:
        """The carry of the same sequences' next rows."""
        if earlier is None or not self.lag:
            return self
        pairs = zip(self.waiting, earlier.waiting, strict=True)
        return replace(self, waiting=tuple(new.after(old, self.lag) for new, old in pairs))


@dataclass(frozen=True)
class Draft:
    """Proposed tokens, and the distributions they were drawn from unless they are argmaxes."""

    token_BK: Tensor
    p_BKV: Tensor | None


class Proposer(Protocol):
    drafts: int  # K, 0 for plain decoding
    cache_layers: int  # layers it needs in the paged cache, after the target's
    states: tuple[str, ...]  # target states that it is shown, by name
    ahead: int  # row p reads token x[p+ahead]: 1 beside the target's state, 0 without one

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

    def propose(
        self,
        cache: PagedKV,
        plans: list[BatchPlan],
        carry: Carry | None,
        sampling: Sampling,
        random: Randomness,
        clock: Clock,
    ) -> Draft:
        """Draft K tokens per sequence. plans[s] holds the row of draft step s+1 (K-1 plans)."""
        ...


class NoProposer:
    """Plain decoding: nothing is drafted, every step yields one token."""

    drafts = 0
    cache_layers = 0
    states: tuple[str, ...] = ()
    ahead = 1

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

    def propose(
        self,
        cache: PagedKV,
        plans: list[BatchPlan],
        carry: Carry | None,
        sampling: Sampling,
        random: Randomness,
        clock: Clock,
    ) -> Draft:
        raise AssertionError("a plain engine never asks for drafts")


class ChainProposer:
    """A head drafts a chain: its own output state and token are the next step's input.

    Raises:
        UserError: more drafts than the head has steps.
    """

    def __init__(self, target: Target, head: DraftHead, drafts: int) -> None:
        assert drafts >= 1, "a chain drafts at least one token"
        if head.steps is not None and drafts > head.steps:
            rule = f"a {head.family} head drafts {head.steps} tokens at most, as it was trained"
            raise UserError(rule, drafts, "lower the number of drafts")
        self.target = target
        self.head = head.to(target.dtype).eval().requires_grad_(False)
        self.cache_layers = head.cache_layers
        self.states = head.states
        self.ahead = head.ahead
        self.drafts = drafts
        self.lag = min(head.depths, drafts) - 1

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
            out_TD = self._rows(cache, plan, next_T, self.head.fuse(states), 0)
            state_BD = out_TD[row_B]
            waiting = _waiting(plan, next_T, out_TD, row_B) if self.lag else ()
        with clock("lm_head of the head"):
            logits_BU = self.head.logits(self.target, state_BD, 0)
        return Carry(state_BD, logits_BU, waiting, self.lag)

    def propose(
        self,
        cache: PagedKV,
        plans: list[BatchPlan],
        carry: Carry | None,
        sampling: Sampling,
        random: Randomness,
        clock: Clock,
    ) -> Draft:
        assert carry is not None, "observe before propose"
        tokens: list[Tensor] = []
        dists = []
        depths = self._depths(cache, plans, carry, tokens)
        state_BD, logits_BU = carry.state_BD, carry.logits_BU
        for step in range(self.drafts):
            with clock("sampling"):
                token_B, p_BV = self._choose(logits_BU, sampling, random)
            tokens.append(token_B)
            dists.append(p_BV)
            if step == self.drafts - 1:
                break
            with clock("head"):
                if step < self.lag:
                    state_BD = next(depths)
                else:
                    plan = plans[step - self.lag]
                    state_BD = self._rows(cache, plan, token_B, state_BD, step + 1)
            with clock("lm_head of the head"):
                logits_BU = self.head.logits(self.target, state_BD, step + 1)
        stacked = (
            None if sampling.greedy else torch.stack([p for p in dists if p is not None], dim=1)
        )
        return Draft(torch.stack(tokens, dim=1), stacked)

    def _depths(
        self, cache: PagedKV, plans: list[BatchPlan], carry: Carry, drafted: list[Tensor]
    ) -> Iterator[Tensor]:
        """The outputs [B, D] of modules 1, 2, ... at each sequence's newest row; `drafted` grows in between."""
        if not self.lag:
            return
        plan = plan_before(plans[0], [len(rows.token_W) for rows in carry.waiting])
        last_B = plan.last_rows()
        state_TD = torch.cat([rows.state_WD for rows in carry.waiting])
        for step in range(1, self.lag + 1):
            draft_BS = torch.stack(drafted, dim=1)
            token_T = torch.cat(
                [
                    torch.cat([rows.token_W, draft_S])[step:]
                    for rows, draft_S in zip(carry.waiting, draft_BS, strict=True)
                ]
            )
            state_TD = self._rows(cache, plan, token_T, state_TD, step)
            yield state_TD[last_B]

    def _choose(
        self, logits_BU: Tensor, sampling: Sampling, random: Randomness
    ) -> tuple[Tensor, Tensor | None]:
        """As `choose`, in the target's vocabulary: what the head can't draft has chance 0."""
        token_B, p_BU = choose(logits_BU, sampling, random)
        vocabulary_U = self.head.vocabulary
        if vocabulary_U is None:
            return token_B, p_BU
        if p_BU is None:
            return vocabulary_U[token_B], None
        p_BV = p_BU.new_zeros(len(p_BU), self.target.vocab_size)
        return vocabulary_U[token_B], p_BV.index_copy_(1, vocabulary_U, p_BU)

    def _rows(
        self, cache: PagedKV, plan: BatchPlan, token_T: Tensor, state_TD: Tensor, step: int
    ) -> Tensor:
        """The head's outputs at draft step `step`: module s keeps row p, at position p+s, in row p's slot."""
        position_T = plan.positions + min(step, self.lag)
        context = PagedContext.of(cache, plan)
        embedding_TD = self.head.embed(self.target, token_T)
        return self.head.at(step)(embedding_TD, state_TD, position_T, context)


def _waiting(plan: BatchPlan, next_T: Tensor, out_TD: Tensor, row_B: Tensor) -> tuple[Waiting, ...]:
    """Each sequence's rows up to its row `row_B`."""
    spans = [
        slice(first, last + 1)
        for first, last in zip(plan.qo_indptr[:-1].tolist(), row_B.tolist(), strict=True)
    ]
    return tuple(Waiting(next_T[span], out_TD[span]) for span in spans)


def choose(
    logits_BV: Tensor, sampling: Sampling, random: Randomness
) -> tuple[Tensor, Tensor | None]:
    """A token per sequence [B], and the distribution it was drawn from [B, V] unless greedy."""
    if sampling.greedy:
        return logits_BV.argmax(dim=-1), None
    p_BV = probabilities(logits_BV, sampling.temperature)
    return draw(p_BV, random), p_BV
