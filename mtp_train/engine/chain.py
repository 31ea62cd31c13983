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

    def propose(self, step: Proposing) -> Draft | None:
        return self.drafted(step, self.drafts)[0]

    def drafted(self, step: Proposing, count: int) -> tuple[Draft, Tensor | None]:
        """`count` drafts, and the logit of each one's chance [count, B] where the head says it."""
        assert step.carry is not None, "observe before propose"
        tokens: list[Tensor] = []
        dists: list[Tensor] = []
        said: list[Tensor] = []
        drafts = self.head.drafts(self.target, step.drafting(), step.carry, count)
        following = next(drafts)
        for number in range(count):
            with step.clock("sampling"):
                token_B, q_BV = self._choose(following.logits_BU, step)
            tokens.append(token_B)
            dists += [] if q_BV is None else [q_BV]
            said += [] if following.confidence_B is None else [following.confidence_B]
            if number < count - 1:
                following = drafts.send(token_B)
        q_BNV = torch.stack(dists, dim=1) if dists else None
        return Draft(torch.stack(tokens, dim=1), q_BNV), torch.stack(said) if said else None

    def _choose(self, logits_BU: Tensor, step: Proposing) -> tuple[Tensor, Tensor | None]:
        """A draft per sequence [B], in the target's vocabulary, and q [B, V] where it is wanted."""
        if not step.drawn:
            token_B = self.head.in_target(best(logits_BU))
            q_BU = step.keep.draft_probabilities(logits_BU) if step.keep else None
        else:
            q_BU = step.rules.draft_probabilities(logits_BU)
            token_B = self.head.in_target(draw(q_BU, step.random))
        return token_B, None if q_BU is None else self.over_target(q_BU)
