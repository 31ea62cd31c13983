"""A head drafts a chain: its own output state and token are the next step's input.

A head of one module per depth needs more than its newest row. Its first module sees verified rows once, in `observe`.
Module s needs token x[r+1+s] of row r, so that its last s rows are waiting for tokens, and are read all the same by the
rows after them. `propose` runs them with drafts in the tokens' places, and again when the tokens are known: every time
over all rows that have come since, and over D-1 before, in one causal pass per module, as in training.

    x[0..5] known, D = 3     row  0   1   2   3   4
    module 0                     x1  x2  x3  x4  x5   verified: run once
    module 1                     x2  x3  x4  x5  d1   d1, d2: this step's drafts
    module 2                     x3  x4  x5  d1  d2

Shapes: T rows, B sequences, K drafts, D hidden width, V vocabulary, U the head's own vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from mtp_train.attention.paged import BatchPlan, plan_before
from mtp_train.batches.align import draft_rows
from mtp_train.engine.propose import Draft, Drafting, HeadRunner, Waiting, require_steps
from mtp_train.engine.sampling import best, draw
from mtp_train.heads.base import DraftHead
from mtp_train.models.target import Target


class ChainProposer(HeadRunner):
    """Drafts K tokens in a row.

    Raises:
        UserError: more drafts than the head has steps.
    """

    def __init__(self, target: Target, head: DraftHead, drafts: int) -> None:
        assert drafts >= 1, "a chain drafts at least one token"
        require_steps(head, drafts)
        super().__init__(target, head)
        self.drafts = self.depth = self.room = drafts
        self.lag = min(head.depths, drafts) - 1
        # Later modules come to a row after the first one did: a page that looks complete may not be.
        self.reach = None if self.lag else self.ahead
        self.early = drafts == 1 and self.ahead == 1

    def waiting(
        self, plan: BatchPlan, next_T: Tensor, out_TD: Tensor, row_B: Tensor
    ) -> tuple[Waiting, ...]:
        return _waiting(plan, next_T, out_TD, row_B) if self.lag else ()

    def propose(self, step: Drafting) -> Draft:
        assert step.carry is not None, "observe before propose"
        tokens: list[Tensor] = []
        dists: list[Tensor] = []
        plans = [
            step.plan(rows, [1] * len(rows), None)
            for rows in draft_rows(step.newest, self.drafts, self.ahead)
        ]
        depths = self._depths(step, plans, tokens)
        state_BD, logits_BU = step.carry.state_BD, step.carry.logits_BU
        for number in range(self.drafts):
            with step.clock("sampling"):
                token_B, q_BV = self._choose(logits_BU, step)
            tokens.append(token_B)
            dists += [] if q_BV is None else [q_BV]
            if number == self.drafts - 1:
                break
            with step.clock("head"):
                if number < self.lag:
                    state_BD = next(depths)
                else:
                    plan = plans[number - self.lag]
                    state_BD = self.rows(
                        step.cache, plan, token_B, state_BD, number + 1, min(number + 1, self.lag)
                    )
            with step.clock("lm_head of the head"):
                logits_BU = self.logits(state_BD, number + 1)
        return Draft(torch.stack(tokens, dim=1), torch.stack(dists, dim=1) if dists else None)

    def _depths(
        self, step: Drafting, plans: list[BatchPlan], drafted: list[Tensor]
    ) -> Iterator[Tensor]:
        """The outputs [B, D] of modules 1, 2, ... at each sequence's newest row; `drafted` grows in between."""
        if not self.lag or step.carry is None:
            return
        waiting = step.carry.waiting
        plan = plan_before(plans[0], [len(rows.token_W) for rows in waiting])
        last_B = plan.last_rows()
        state_TD = torch.cat([rows.state_WD for rows in waiting])
        for number in range(1, self.lag + 1):
            draft_BS = torch.stack(drafted, dim=1)
            token_T = torch.cat(
                [
                    torch.cat([rows.token_W, draft_S])[number:]
                    for rows, draft_S in zip(waiting, draft_BS, strict=True)
                ]
            )
            state_TD = self.rows(step.cache, plan, token_T, state_TD, number, number)
            yield state_TD[last_B]

    def _choose(self, logits_BU: Tensor, step: Drafting) -> tuple[Tensor, Tensor | None]:
        """A draft per sequence [B], in the target's vocabulary, and q [B, V] where it is wanted."""
        if not step.drawn:
            token_B = self.in_target(best(logits_BU))
            q_BU = step.keep.draft_probabilities(logits_BU) if step.keep else None
        else:
            q_BU = step.rules.draft_probabilities(logits_BU)
            token_B = self.in_target(draw(q_BU, step.random))
        return token_B, None if q_BU is None else self.over_target(q_BU)


def _waiting(plan: BatchPlan, next_T: Tensor, out_TD: Tensor, row_B: Tensor) -> tuple[Waiting, ...]:
    """Each sequence's rows up to its row `row_B`."""
    spans = [
        slice(first, last + 1)
        for first, last in zip(plan.qo_indptr[:-1].tolist(), row_B.tolist(), strict=True)
    ]
    return tuple(Waiting(next_T[span], out_TD[span]) for span in spans)
