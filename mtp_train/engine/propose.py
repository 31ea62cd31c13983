"""Proposers: who drafts. `observe` shows it verified rows, `propose` asks for drafts.

Knows neither requests nor verification; the engine plans the batch.

Shapes: T rows, B sequences, K drafts, D hidden width, V vocabulary, U the head's own vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from mtp_train.attention.paged import BatchPlan, PagedContext, PagedKV
from mtp_train.core.errors import UserError
from mtp_train.engine.clock import Clock
from mtp_train.engine.sampling import Randomness, Sampling, draw, probabilities
from mtp_train.heads.base import DraftHead
from mtp_train.models.target import Target


@dataclass(frozen=True)
class Carry:
    """What a proposer keeps per sequence between steps: the head's output at the newest verified row."""

    state_BD: Tensor
    logits_BU: Tensor

    def select(self, keep: list[int]) -> Carry:
        index = torch.tensor(keep, dtype=torch.int64, device=self.state_BD.device)
        return Carry(self.state_BD[index], self.logits_BU[index])

    def join(self, other: Carry) -> Carry:
        return Carry(
            torch.cat([self.state_BD, other.state_BD]), torch.cat([self.logits_BU, other.logits_BU])
        )


@dataclass(frozen=True)
class Draft:
    """Proposed tokens, and the distributions they were drawn from unless they are argmaxes."""

    token_BK: Tensor
    p_BKV: Tensor | None


class Proposer(Protocol):
    drafts: int  # K, 0 for plain decoding
    cache_layers: int  # layers it needs in the paged cache, after the target's
    states: tuple[str, ...]  # target states that it is shown, by name

    def observe(
        self,
        cache: PagedKV,
        plan: BatchPlan,
        next_T: Tensor,
        states: dict[str, Tensor],
        row_B: Tensor,
        clock: Clock,
    ) -> Carry | None:
        """Run over verified rows with the target's states; carry the output of row `row_B` of each sequence.

        next_T: token x[p+1] of each row p. Rows past `row_B` of a sequence hold nothing yet and are overwritten.
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
        self.drafts = drafts

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
            out_TD = self._rows(cache, plan, next_T, self.head.fuse(states))
            state_BD = out_TD[row_B]
        with clock("lm_head of the head"):
            return Carry(state_BD, self.head.logits(self.target, state_BD, 0))

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
        tokens, dists = [], []
        state_BD, logits_BU = carry.state_BD, carry.logits_BU
        for step in range(self.drafts):
            with clock("sampling"):
                token_B, p_BV = self._choose(logits_BU, sampling, random)
            tokens.append(token_B)
            dists.append(p_BV)
            if step == self.drafts - 1:
                break
            with clock("head"):
                state_BD = self._rows(cache, plans[step], token_B, state_BD)
            with clock("lm_head of the head"):
                logits_BU = self.head.logits(self.target, state_BD, step + 1)
        stacked = (
            None if sampling.greedy else torch.stack([p for p in dists if p is not None], dim=1)
        )
        return Draft(torch.stack(tokens, dim=1), stacked)

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

    def _rows(self, cache: PagedKV, plan: BatchPlan, token_T: Tensor, state_TD: Tensor) -> Tensor:
        return self.head(
            self.target.embed(token_T), state_TD, plan.positions, PagedContext.of(cache, plan)
        )


def choose(
    logits_BV: Tensor, sampling: Sampling, random: Randomness
) -> tuple[Tensor, Tensor | None]:
    """A token per sequence [B], and the distribution it was drawn from [B, V] unless greedy."""
    if sampling.greedy:
        return logits_BV.argmax(dim=-1), None
    p_BV = probabilities(logits_BV, sampling.temperature)
    return draw(p_BV, random), p_BV
