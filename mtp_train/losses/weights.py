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
D_PACE = "d_pace"


def geometric(steps: int, decay: float) -> Tensor:
    """decay^s for s = 0 .. steps-1, normalised to sum 1 (HASS and EAGLE-3 use such weights)."""
    if not 0 < decay <= 1:
        raise UserError("loss.decay must lie in (0, 1]", decay, "use 0.7, or 1 for equal weights")
    weight = decay ** torch.arange(steps, dtype=torch.float32)
    return weight / weight.sum()


def exponential(steps: int, gamma: float) -> Tensor:
    """exp(-s / gamma) for s = 0 .. steps-1, normalised to sum 1.

    DFlash has 7, 5 or 4 for blocks of 16, 10 or 8 (arXiv 2602.06036), DSpark 4 (2607.05147).
    """
    if gamma <= 0:
        raise UserError("train.gamma must be above 0", gamma, "use 4 for blocks of 7 or 8")
    weight = torch.exp(-torch.arange(steps, dtype=torch.float32) / gamma)
    return weight / weight.sum()


def d_pace(chance_SN: Tensor, start_SN: Tensor, valid_SN: Tensor) -> Tensor:
    """Weights [S, N] by how far each chain gets (D-PACE, arXiv 2605.18810), without a gradient.

    With s_i = (q_i + 1) / 2, q_i the student's chance of draft i's label, step k weighs sum over j >= k of the product
    of s_1 .. s_j: what the chain's length gains from it. Normalised so that a whole chain, sure of itself, weighs 1.

    Args:
        chance_SN: q of each step and goal.
        start_SN: int64, which chain each belongs to.
        valid_SN: whether there is such a value. A step that is missing has no part in the sum; to the steps behind it,
            of which it is not known whether they are reached, it is one with q = 0.
    """
    steps = len(chance_SN)
    chains = int(start_SN.max()) + 1 if start_SN.numel() else 0
    table_SC = chance_SN.new_zeros(steps, chains)
    there_SC = chance_SN.new_zeros(steps, chains)
    for step in range(steps):
        valid_N = valid_SN[step]
        chain_M = start_SN[step, valid_N]
        table_SC[step, chain_M] = chance_SN[step, valid_N]
        there_SC[step, chain_M] = 1
    reached_SC = ((table_SC + 1) / 2).cumprod(0) * there_SC
    weight_SC = reached_SC.flip(0).cumsum(0).flip(0) * (2 / (steps * (steps + 1)))
    return weight_SC.gather(1, start_SN).detach()


# A later draft only counts when all before it were accepted. FastMTP (arXiv 2509.18362, equation 2) weighs a step with
# 0.6 of the one before it, normalised: .51, .31, .18 for three.
STEP_WEIGHTS: dict[str, Callable[[int, float], Tensor]] = {
    "geometric": geometric,
    "fastmtp": lambda steps, _decay: geometric(steps, 0.6),
    "uniform": lambda steps, _decay: geometric(steps, 1.0),
    "exponential": lambda steps, gamma: exponential(steps, gamma),
    D_PACE: lambda steps, _decay: torch.ones(steps),  # each chain has its own: `d_pace`
}


def step_weights(rule: str, steps: int, decay: float, gamma: float = 4.0) -> Tensor:
    """Weights [S] of sum 1 by the name of their rule; `decay` is geometric's, `gamma` exponential's."""
    if rule not in STEP_WEIGHTS:
        raise UserError(
            "loss.step_weights must be one of " + ", ".join(STEP_WEIGHTS), rule, "choose one"
        )
    return STEP_WEIGHTS[rule](steps, gamma if rule == "exponential" else decay)


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
