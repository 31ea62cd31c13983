"""Weights of draft steps and of goals. Knows no loss term.

A mean is a sum of weights over a denominator, and both add over packs and ranks: neither padding nor the way in which
sequences are dealt out changes it.

Shapes: N goals, S draft steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from mtp_train.core.errors import UserError

MEANS = ("tokens", "sequences")


def geometric(steps: int, decay: float) -> Tensor:
    """decay^s for s = 0 .. steps-1, normalised to sum 1 (HASS and EAGLE-3 use such weights)."""
    if not 0 < decay <= 1:
        raise UserError("loss.decay must lie in (0, 1]", decay, "use 0.7, or 1 for equal weights")
    weight = decay ** torch.arange(steps, dtype=torch.float32)
    return weight / weight.sum()


# A later draft only counts when all before it were accepted. FastMTP (arXiv 2509.18362, equation 2) weighs a step with
# 0.6 of the one before it, normalised: .51, .31, .18 for three.
STEP_WEIGHTS: dict[str, Callable[[int, float], Tensor]] = {
    "geometric": geometric,
    "fastmtp": lambda steps, _decay: geometric(steps, 0.6),
    "uniform": lambda steps, _decay: geometric(steps, 1.0),
}


def step_weights(rule: str, steps: int, decay: float) -> Tensor:
    """Weights [S] of sum 1 by the name of their rule; `decay` is geometric's."""
    if rule not in STEP_WEIGHTS:
        raise UserError(
            "loss.step_weights must be one of " + ", ".join(STEP_WEIGHTS), rule, "choose one"
        )
    return STEP_WEIGHTS[rule](steps, decay)


def goal_weights(goal_N: Tensor, offsets: Sequence[int], mean_over: str) -> Tensor:
    """Weight [N] of each goal of packed documents, float32.

    `tokens`: every goal counts the same. `sequences`: every document counts the same, however many goals it has. To be
    summed over packs and divided by `denominator` over the same documents.
    """
    weight_N = torch.ones(len(goal_N), device=goal_N.device)
    if mean_over == "tokens":
        return weight_N
    edge = torch.as_tensor(offsets, dtype=goal_N.dtype, device=goal_N.device)
    document_N = torch.searchsorted(edge, goal_N, right=True) - 1
    return weight_N / document_N.bincount(minlength=len(edge))[document_N]


def denominator(goals: Iterable[int], mean_over: str) -> int:
    """What the weighted sum over documents with so many goals each is divided by: goals, or documents with any."""
    return sum(goals) if mean_over == "tokens" else sum(count > 0 for count in goals)
