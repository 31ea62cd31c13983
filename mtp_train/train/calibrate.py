"""Temperatures that make a head's confidence a chance: one per draft step, fitted from left to right on held-out text.

The chance that the first s drafts are all accepted is the product of sigmoid(c_i / t_i), i <= s. Step s's temperature
is the one that makes what happened likeliest, given those before it: sequential temperature scaling (DSpark, arXiv
2607.05147). What it is held against is whether drafts are the target's own choices, as greedy decoding accepts them.

Knows no head.

Shapes: S draft steps, N chains.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from mtp_train.train.step import PackLoss

LOWEST, HIGHEST = 0.05, 20.0
TRIED = 200  # temperatures, evenly in their logarithm
BINS = 10


@dataclass
class Confidences:
    """What a head said of whole chains, and whether their drafts agreed."""

    logit: list[Tensor] = field(default_factory=list)  # [S, N] each
    agree: list[Tensor] = field(default_factory=list)  # bool, likewise

    def add(self, loss: PackLoss) -> None:
        """Add a pack's chains all of whose steps have a trained goal."""
        if loss.confidence_SN is None:
            return
        whole_N = loss.rollout.valid_SN.all(0)
        self.logit.append(loss.confidence_SN[:, whole_N].detach().float().cpu())
        self.agree.append(loss.values.agree_SN[:, whole_N].cpu())

    def joined(self) -> tuple[Tensor, Tensor]:
        """All of them, [S, N] each."""
        if not self.logit:
            return torch.zeros(0, 0), torch.zeros(0, 0, dtype=torch.bool)
        return torch.cat(self.logit, dim=1), torch.cat(self.agree, dim=1)


def fit_temperatures(logit_SN: Tensor, agree_SN: Tensor) -> Tensor:
    """A temperature per step [S]; 1 for all where there is no chain."""
    steps, chains = logit_SN.shape
    if not chains:
        return torch.ones(steps)
    hit_SN = agree_SN.long().cumprod(0).bool()
    tried_K1 = torch.logspace(
        torch.tensor(LOWEST).log10().item(), torch.tensor(HIGHEST).log10().item(), TRIED
    ).unsqueeze(1)
    before_N = torch.zeros(chains)
    chosen = []
    for logit_N, hit_N in zip(logit_SN, hit_SN, strict=True):
        log_KN = before_N + logsigmoid(logit_N / tried_K1)
        best = int(_surprise(log_KN, hit_N).argmin())
        chosen.append(tried_K1[best, 0])
        before_N = log_KN[best]
    return torch.stack(chosen)


def chances(logit_SN: Tensor, temperature_S: Tensor) -> Tensor:
    """That the drafts up to each step are all accepted [S, N]."""
    return logsigmoid(logit_SN / temperature_S.unsqueeze(1)).cumsum(0).exp()


def calibration_error(chance_SN: Tensor, agree_SN: Tensor) -> list[float]:
    """Per step: the mean distance of chance and share of hits over bins of equal width, weighted by their chains."""
    hit_SN = agree_SN.long().cumprod(0).float()
    errors = []
    for chance_N, hit_N in zip(chance_SN, hit_SN, strict=True):
        bin_N = (chance_N * BINS).long().clamp(max=BINS - 1)
        gap_B = torch.zeros(BINS).index_add_(0, bin_N, chance_N - hit_N)
        errors.append(float(gap_B.abs().sum()) / max(len(hit_N), 1))
    return errors


def _surprise(log_KN: Tensor, hit_N: Tensor) -> Tensor:
    """Mean negative log-likelihood of the hits [K]."""
    miss_KN = torch.log1p(-log_KN.exp().clamp(max=1 - 1e-6))
    return -torch.where(hit_N, log_KN, miss_KN).mean(1)
