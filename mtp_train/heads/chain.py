"""A head drafts a chain: its own output state and token are the next step's input.

    state = fuse(target's states)                   enters step 0
    out_s = at(s)(embedding_s, state_s, position_s) state_0 = state, state_s+1 = out_s
    logits_s = lm_head(readout(out_s, s))

Row p of step s reads token x[p+ahead+s]. Training and engine run this one forward: training over packed documents, all
chains at once, the engine over its paged cache.

A head of one module per depth needs more than its newest row. Its first module sees verified rows once, in `observe`.
Module s needs token x[r+1+s] of row r, so that its last s rows are waiting for tokens, and are read all the same by the
rows after them. `drafts` runs them with drafts in the tokens' places, and again when the tokens are known: every time
over all rows that have come since, and over D-1 before, in one causal pass per module, as in training.

    x[0..5] known, D = 3     row  0   1   2   3   4
    module 0                     x1  x2  x3  x4  x5   verified: run once
    module 1                     x2  x3  x4  x5  d1   d1, d2: this step's drafts
    module 2                     x3  x4  x5  d1  d2

Knows no family. Shifts nothing.

Shapes: T rows, N rows chosen from them, S draft steps, B sequences, C chains of one sequence, W waiting rows, D hidden
width, U the head's own vocabulary.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor, nn

from mtp_train.attention.interface import AttentionContext
from mtp_train.attention.packed import RolloutContext
from mtp_train.attention.paged import BatchPlan, PagedKV, plan_before
from mtp_train.batches.align import Rollout, chains, draft_rows, next_tokens, rollout
from mtp_train.core.errors import UserError
from mtp_train.heads.base import DraftHead, Drafting, Drafts, NextDraft, Timer, Unrolled
from mtp_train.models.target import Target


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
class ChainCarry:
    """The head's output at each sequence's newest verified row.

    waiting: one per sequence for a head of one module per depth, else none.
    lag: rows whose deepest tokens are not known.
    """

    state_BD: Tensor
    logits_BU: Tensor
    waiting: tuple[Waiting, ...] = ()
    lag: int = 0

    def one(self, index: int) -> ChainCarry:
        part = slice(index, index + 1)
        return ChainCarry(self.state_BD[part], self.logits_BU[part], self.waiting[part], self.lag)

    @classmethod
    def join(cls, parts: Sequence[Self]) -> Self:
        waiting = tuple(rows for part in parts for rows in part.waiting)
        return cls(
            torch.cat([part.state_BD for part in parts]),
            torch.cat([part.logits_BU for part in parts]),
            waiting,
            parts[0].lag,
        )

    def after(self, earlier: ChainCarry | None) -> ChainCarry:
        if earlier is None or not self.lag:
            return self
        pairs = zip(self.waiting, earlier.waiting, strict=True)
        return replace(self, waiting=tuple(new.after(old) for new, old in pairs))

    def used(self) -> ChainCarry:
        return replace(self, waiting=tuple(rows.last(self.lag) for rows in self.waiting))


class ChainHead(DraftHead):
    """A head whose every draft is a forward of its own.

    Attributes:
        depths: modules; `at(s)` is module s, and the last one from step `depths` - 1 on.
    """

    depths: int = 1

    @abstractmethod
    def forward(
        self, embedding_TD: Tensor, state_TD: Tensor, position_T: Tensor, context: AttentionContext
    ) -> Tensor:
        """Of rows (x[p+ahead], state, p): what is fed back as the next step's state [T, D]."""

    def at(self, step: int) -> nn.Module:
        """What runs draft step `step` (from 0)."""
        return self

    def readout(self, out_ND: Tensor, step: int) -> Tensor:
        """What the lm_head of draft step `step` (from 0) reads of outputs [N, D]."""
        return out_ND

    def logits(self, target: Target, out_ND: Tensor, step: int) -> Tensor:
        """Logits of draft step `step` [N, U]."""
        return self.project(target, self.readout(out_ND, step), step)

    @property
    def parts(self) -> int:
        return self.steps or self.depths

    def require_rollout(self, steps: int) -> None:
        super().require_rollout(steps)
        if steps < self.depths:
            rule = f"train.rollout_steps must be {self.depths} or more: each module serves a step"
            raise UserError(rule, steps, "change it, or head.modules")

    # --- over packed documents --------------------------------------------------------------------------------

    def align(
        self,
        token_T: Tensor,
        loss_mask_T: Tensor,
        offsets: Sequence[int],
        steps: int,
        *,
        start_N: Tensor | None = None,
        seed: int | None = None,
    ) -> Rollout:
        aligned = rollout(token_T, loss_mask_T, offsets, steps, self.ahead)
        return aligned if start_N is None else chains(aligned, start_N, self.ahead)

    def unroll(self, target: Target, aligned: Rollout, states: dict[str, Tensor]) -> Unrolled:
        outs = self.outputs(target, aligned, states)
        return Unrolled(
            torch.stack(
                [
                    self.readout(out_TD.index_select(0, source_N), step)
                    for step, (out_TD, source_N) in enumerate(
                        zip(outs, aligned.source_SN, strict=True)
                    )
                ]
            )
        )

    def outputs(self, target: Target, aligned: Rollout, states: dict[str, Tensor]) -> list[Tensor]:
        """Outputs at every step [T, D], rows indexed by where their chain starts."""
        context, state_TD = RolloutContext(aligned.offsets), self.fuse(states)
        outs: list[Tensor] = []
        for step, (token_T, position_T) in enumerate(
            zip(aligned.token_ST, aligned.position_ST, strict=True)
        ):
            embedding_TD = self.embed(target, token_T)
            state_TD = self.at(step)(embedding_TD, state_TD, position_T, context)
            context = context.then()
            outs.append(state_TD)
        return outs

    # --- over the paged cache ---------------------------------------------------------------------------------

    def reach(self, drafts: int) -> int | None:
        # Later modules come to a row after the first one did: a page that looks complete may not be.
        return None if self.lag(drafts) else self.ahead

    def early(self, drafts: int) -> bool:
        return drafts == 1 and self.ahead == 1

    def no_tree(self) -> str:
        return f"{self.depths} modules" if self.depths > 1 else ""

    def lag(self, drafts: int) -> int:
        """Rows that wait for tokens before the last module has read them."""
        return min(self.depths, drafts) - 1

    def observe(
        self,
        target: Target,
        cache: PagedKV,
        plan: BatchPlan,
        next_T: Tensor,
        states: dict[str, Tensor],
        drafts: int,
        clock: Timer,
    ) -> ObservedChain:
        with clock("head"):
            out_TD = self.run(target, cache, plan, next_T, self.fuse(states), 0)
        return ObservedChain(self, target, cache, plan, next_T, out_TD, self.lag(drafts), clock)

    def drafts(self, target: Target, where: Drafting, carry: ChainCarry, count: int) -> Drafts:
        plans = [
            where.plan(rows, [1] * len(rows), None)
            for rows in draft_rows(where.newest, count, self.ahead)
        ]
        lag, drafted = self.lag(count), list[Tensor]()
        depths = self._depths(target, where, carry, plans, drafted)
        state_BD, logits_BU = carry.state_BD, carry.logits_BU
        for number in range(count):
            drafted.append((yield NextDraft(logits_BU)))
            if number == count - 1:
                break
            with where.clock("head"):
                if number < lag:
                    state_BD = next(depths)
                else:
                    state_BD = self.run(
                        target,
                        where.cache,
                        plans[number - lag],
                        drafted[-1],
                        state_BD,
                        number + 1,
                        min(number + 1, lag),
                    )
            with where.clock("lm_head of the head"):
                logits_BU = self.logits(target, state_BD, number + 1)

    def run(
        self,
        target: Target,
        cache: PagedKV,
        plan: BatchPlan,
        token_T: Tensor,
        state_TD: Tensor,
        step: int,
        later: int = 0,
    ) -> Tensor:
        """Outputs at draft step `step`, at positions `later` after the plan's [T, D]."""
        context = cache.context(plan)
        embedding_TD = self.embed(target, token_T)
        return self.at(step)(embedding_TD, state_TD, plan.positions + later, context)

    def _depths(
        self,
        target: Target,
        where: Drafting,
        carry: ChainCarry,
        plans: list[BatchPlan],
        drafted: list[Tensor],
    ) -> Iterator[Tensor]:
        """The outputs [B, D] of modules 1, 2, ... at each sequence's newest row; `drafted` grows in between."""
        waiting = carry.waiting
        plan = plan_before(plans[0], [len(rows.token_W) for rows in waiting])
        last_B = plan.last_rows()
        state_TD = torch.cat([rows.state_WD for rows in waiting])
        for number in range(1, carry.lag + 1):
            draft_BS = torch.stack(drafted, dim=1)
            token_T = torch.cat(
                [
                    torch.cat([rows.token_W, draft_S])[number:]
                    for rows, draft_S in zip(waiting, draft_BS, strict=True)
                ]
            )
            state_TD = self.run(target, where.cache, plan, token_T, state_TD, number, number)
            yield state_TD[last_B]


@dataclass(frozen=True)
class ObservedChain:
    """Rows that a head's first module has read."""

    head: ChainHead
    target: Target
    cache: PagedKV
    plan: BatchPlan
    next_T: Tensor
    out_TD: Tensor
    lag: int
    clock: Timer

    def carry(self, row_B: Tensor) -> ChainCarry:
        firsts = self.plan.qo_indptr[:-1].tolist() if self.lag else []
        return self._carry(row_B, firsts)

    def chains(self, row_C: Tensor) -> ChainCarry:
        """Later modules have their rows before from `settle`."""
        firsts = [max(row - self.lag, 0) for row in row_C.tolist()] if self.lag else []
        return self._carry(row_C, firsts)

    def settle(self) -> None:
        """Run later modules over the only sequence, all of whose tokens are known."""
        token_T, state_TD = self.next_T, self.out_TD
        for number in range(1, self.lag + 1):
            token_T = next_tokens(token_T, self.plan.last_rows(), token_T[-1:])
            state_TD = self.head.run(
                self.target, self.cache, self.plan, token_T, state_TD, number, number
            )

    def _carry(self, row_B: Tensor, firsts: list[int]) -> ChainCarry:
        state_BD = self.out_TD[row_B]
        waiting: tuple[Waiting, ...] = ()
        if self.lag:
            spans = [
                slice(first, last + 1) for first, last in zip(firsts, row_B.tolist(), strict=True)
            ]
            waiting = tuple(Waiting(self.next_T[span], self.out_TD[span]) for span in spans)
        with self.clock("lm_head of the head"):
            logits_BU = self.head.logits(self.target, state_BD, 0)
        return ChainCarry(state_BD, logits_BU, waiting, self.lag)
