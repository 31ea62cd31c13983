"""Validation figures with the field's names, per draft step and joint.

Shapes: T rows, N goals, S draft steps.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from mtp_train.train.step import PackLoss


@dataclass
class ValidationSums:
    """Adds up packs. Everything is a sum or a count, so ranks and packs add."""

    steps: int
    kl: list[float] = field(init=False)
    state: list[float] = field(init=False)
    alpha: list[float] = field(init=False)
    agree: list[float] = field(init=False)
    terms: list[float] = field(init=False)
    prefix: list[float] = field(init=False)  # chains whose steps 0..s all agree
    chains: float = 0.0

    def __post_init__(self) -> None:
        self.kl, self.state, self.alpha, self.agree, self.terms, self.prefix = (
            [0.0] * self.steps for _ in range(6)
        )

    def add(self, loss: PackLoss) -> None:
        valid = loss.rollout.valid_SN
        for name, value in (
            ("kl", loss.distill.kl_SN),
            ("state", loss.state_SN),
            ("alpha", loss.distill.alpha_SN),
            ("agree", loss.distill.agree_SN),
        ):
            sums = (value.float() * valid).sum(1).tolist()
            setattr(
                self, name, [old + new for old, new in zip(getattr(self, name), sums, strict=True)]
            )
        self.terms = [old + new for old, new in zip(self.terms, valid.sum(1).tolist(), strict=True)]
        prefix, chains = joint_prefix(loss)
        self.prefix = [old + new for old, new in zip(self.prefix, prefix.tolist(), strict=True)]
        self.chains += chains

    def reduce(self, total: Callable[[Tensor], Tensor]) -> None:
        """Add up over ranks: `total` sums a tensor over all of them."""
        names = ("kl", "state", "alpha", "agree", "terms", "prefix")
        table = torch.tensor(
            [getattr(self, name) for name in names] + [[self.chains] * self.steps],
            dtype=torch.float64,
        )
        rows = total(table).tolist()
        for name, row in zip(names, rows, strict=False):
            setattr(self, name, row)
        self.chains = rows[-1][0]

    def summary(self) -> dict[str, float]:
        """Means per step (`kl/1` is the first draft's), and tau by joint prefixes: never a product of marginals."""
        means: dict[str, float] = {}
        for step in range(self.steps):
            count = max(self.terms[step], 1.0)
            for name in ("kl", "state", "alpha", "agree"):
                means[f"{name}/{step + 1}"] = getattr(self, name)[step] / count
            means[f"prefix/{step + 1}"] = self.prefix[step] / max(self.chains, 1.0)
        means["tau_teacher_forced"] = 1.0 + sum(self.prefix) / max(self.chains, 1.0)
        return means


def joint_prefix(loss: PackLoss) -> tuple[Tensor, float]:
    """Chains whose first s+1 drafts all equal the target's choices [S], and how many chains there are.

    A chain counts where every one of its steps has a trained goal.
    """
    source, valid = loss.rollout.source_SN, loss.rollout.valid_SN
    steps, rows = valid.shape[0], loss.rollout.token_ST.shape[1]
    hit = torch.zeros(steps, rows, dtype=torch.bool, device=valid.device)
    present = torch.zeros_like(hit)
    for step in range(steps):
        start = source[step][valid[step]]
        hit[step, start] = loss.distill.agree_SN[step][valid[step]]
        present[step, start] = True
    whole = present.all(0)
    return (hit.cumprod(0).bool() & whole).sum(1).float(), float(whole.sum())
