"""Which drafts the target accepts. Pure tensor arithmetic: no model, no cache, no Python loop over sequences.

Three rules, all but the last lossless:

    rejection   a draft x drawn from q is accepted with chance min(1, p(x)/q(x)), and the token after the last accepted
                one is drawn from what q left out of p (arXiv 2211.17192, algorithm 1). Chains.
    one_hot     the target's own choice is drawn from p at every row; drafts are accepted as long as they are those
                choices. It is the rule above for a q that is certain of one token, and vLLM's default; siblings of a
                tree do not disturb it, since at most one of them is the choice.
    typical     drafts are accepted that are likely enough (Medusa, arXiv 2401.10774, section 3.3): NOT lossless.

Shapes: B sequences, K drafts of a chain, N drafts of a tree, R = K + 1 or N + 1 rows, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mtp_train.engine.sampling import Randomness, draw, uniform_like
from mtp_train.engine.tree import deepest

# Medusa's defaults: epsilon, and delta = sqrt(epsilon).
TYPICAL_FLOOR, TYPICAL_ENTROPY = 0.09, 0.3


def verify_greedy(draft_BK: Tensor, choice_BR: Tensor) -> tuple[Tensor, Tensor]:
    """Accept the drafts that equal the target's choice, up to the first that does not.

    choice_BR [B, K+1] are the target's choices at the row of the last known token and of each draft.
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
    # a q that is no distribution accepts nothing and leaves out nothing
    return accepted_B, draw((p_BV - q_BV.nan_to_num(0)).clamp(min=0), random)


def verify_tree(
    draft_BN: Tensor, choice_BR: Tensor, parent_BN: Tensor, seen_BRR: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Follow the target's choices down a tree as far as they were drafted.

    choice_BR: what the target says after each row; parent_BN and seen_BRR as in `tree`.
    Returns the row that was reached [B], how deep it lies [B], and the token that follows it [B].
    """
    match_BN = draft_BN == choice_BR.gather(1, parent_BN)
    row_B, accepted_B = deepest(match_BN, seen_BRR)
    return row_B, accepted_B, choice_BR.gather(1, row_B.unsqueeze(1)).squeeze(1)


def verify_typical(
    draft_BN: Tensor, p_BRV: Tensor, parent_BN: Tensor, seen_BRR: Tensor, random: Randomness
) -> tuple[Tensor, Tensor, Tensor]:
    """Accept drafts that are typical of the target: p(x) > min(epsilon, delta exp(-entropy(p))). Changes the output.

    Returns as `verify_tree`; the token that follows is drawn from p there.
    """
    chance_BN = p_BRV.flatten(0, 1)[_flat(parent_BN, p_BRV.shape[1]), draft_BN]
    entropy_BR = -torch.special.xlogy(p_BRV, p_BRV).sum(-1)
    floor_BR = torch.clamp(TYPICAL_ENTROPY * torch.exp(-entropy_BR), max=TYPICAL_FLOOR)
    match_BN = chance_BN > floor_BR.gather(1, parent_BN)
    row_B, accepted_B = deepest(match_BN, seen_BRR)
    p_BV = p_BRV[torch.arange(len(row_B), device=row_B.device), row_B]
    return row_B, accepted_B, draw(p_BV, random)


def expected_acceptance(p_BKV: Tensor, q_BKV: Tensor) -> Tensor:
    """alpha of each draft position [B, K]: sum_x min(p, q) = 1 - TV(p, q); 0 where q is not a number."""
    return torch.minimum(p_BKV, q_BKV).sum(-1).nan_to_num(0)


def leading(flag_BK: Tensor) -> Tensor:
    """How many of each row's first flags are true [B]."""
    return flag_BK.long().cumprod(dim=1).sum(dim=1)


def _flat(row_BN: Tensor, rows: int) -> Tensor:
    """Rows of each sequence as rows of the flattened batch [B, N]."""
    return row_BN + torch.arange(len(row_BN), device=row_BN.device).unsqueeze(1) * rows
