"""Which drafts the target accepts. Pure tensor arithmetic: no model, no cache, no Python loop over sequences.

Shapes: B sequences, K drafts, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mtp_train.engine.sampling import Randomness, draw, uniform_like


def verify_greedy(draft_BK: Tensor, choice_BR: Tensor) -> tuple[Tensor, Tensor]:
    """Accept the drafts that equal the target's choice, up to the first that does not.

    choice_BR [B, K+1] are the target's argmaxes at the row of the last known token and of each draft.
    Returns accepted [B] (0..K) and the token that follows the accepted ones [B].
    """
    accepted_B = leading(draft_BK == choice_BR[:, :-1])
    return accepted_B, choice_BR.gather(1, accepted_B.unsqueeze(1)).squeeze(1)


def verify_sampled(
    draft_BK: Tensor, draft_p_BKV: Tensor, target_p_BRV: Tensor, random: Randomness
) -> tuple[Tensor, Tensor]:
    """Speculative sampling: the output is distributed exactly as the target's (arXiv 2211.17192, algorithm 1).

    Draft x is accepted with chance min(1, p(x)/q(x)); at the first rejection the token is drawn from
    max(p - q, 0), normalised; when all are accepted a bonus token is drawn from p.
    """
    index = draft_BK.unsqueeze(-1)
    p_BK = target_p_BRV[:, :-1].gather(2, index).squeeze(-1)
    q_BK = draft_p_BKV.gather(2, index).squeeze(-1)
    accepted_B = leading(uniform_like(p_BK, random) * q_BK < p_BK)
    row = accepted_B.view(-1, 1, 1)
    p_BV = target_p_BRV.gather(1, row.expand(-1, 1, target_p_BRV.shape[-1])).squeeze(1)
    q_BRV = torch.cat(
        [draft_p_BKV, torch.zeros_like(target_p_BRV[:, :1])], dim=1
    )  # nothing was drafted for the bonus
    q_BV = q_BRV.gather(1, row.expand(-1, 1, q_BRV.shape[-1])).squeeze(1)
    return accepted_B, draw((p_BV - q_BV).clamp(min=0), random)


def leading(flag_BK: Tensor) -> Tensor:
    """How many of each row's first flags are true [B]."""
    return flag_BK.long().cumprod(dim=1).sum(dim=1)
