"""Drafts in a row: each chosen from what the head makes of those before it. Knows no family.

Shapes: B sequences, K drafts, V vocabulary, U the head's own vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mtp_train.engine.propose import Draft, HeadRunner, Proposing
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
        super().__init__(target, head, drafts)
        self.drafts = drafts
        self.room = head.room(drafts)
        self.early = head.early(drafts)

    def propose(self, step: Proposing) -> Draft:
        assert step.carry is not None, "observe before propose"
        tokens: list[Tensor] = []
        dists: list[Tensor] = []
        drafts = self.head.drafts(self.target, step.drafting(), step.carry, self.drafts)
        following = next(drafts)
        for number in range(self.drafts):
            with step.clock("sampling"):
                token_B, q_BV = self._choose(following.logits_BU, step)
            tokens.append(token_B)
            dists += [] if q_BV is None else [q_BV]
            if number < self.drafts - 1:
                following = drafts.send(token_B)
        return Draft(torch.stack(tokens, dim=1), torch.stack(dists, dim=1) if dists else None)

    def _choose(self, logits_BU: Tensor, step: Proposing) -> tuple[Tensor, Tensor | None]:
        """A draft per sequence [B], in the target's vocabulary, and q [B, V] where it is wanted."""
        if not step.drawn:
            token_B = self.head.in_target(best(logits_BU))
            q_BU = step.keep.draft_probabilities(logits_BU) if step.keep else None
        else:
            q_BU = step.rules.draft_probabilities(logits_BU)
            token_B = self.head.in_target(draw(q_BU, step.random))
        return token_B, None if q_BU is None else self.over_target(q_BU)
