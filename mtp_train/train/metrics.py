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
    """Adds up packs. Everything is a sum or a count, so ranks and packs add.

    terms: the loss terms that are reported, by name, and alpha and agreement with them.
    """

    steps: int
    terms: tuple[str, ...] = ("kl",)
    sums: dict[str, list[float]] = field(init=False)
    count: list[float] = field(init=False)  # goals with a row at this step
    prefix: list[float] = field(init=False)  # chains whose steps 0..s all agree
    chains: float = 0.0

    def __post_init__(self) -> None:
        names = dict.fromkeys(("kl", *self.terms, "alpha", "agree"))
        self.sums = {name: [0.0] * self.steps for name in names}
        self.count, self.prefix = [0.0] * self.steps, [0.0] * self.steps

    def add(self, loss: PackLoss) -> None:
        values, valid = loss.values, loss.rollout.valid_SN
        found = values.terms | {"alpha": values.alpha_SN, "agree": values.agree_SN}
        for name in self.sums:
            self.sums[name] = _add(self.sums[name], (found[name].float() * valid).sum(1))
        self.count = _add(self.count, valid.sum(1))
        prefix, chains = joint_prefix(loss)
        self.prefix = _add(self.prefix, prefix)
        self.chains += chains

    def reduce(self, total: Callable[[Tensor], Tensor]) -> None:
        """Add up over ranks: `total` sums a tensor over all of them."""
        chains = [self.chains] * self.steps
        table = [*self.sums.values(), self.count, self.prefix, chains]
        *rows, self.count, self.prefix, chains = total(
            torch.tensor(table, dtype=torch.float64)
        ).tolist()
        self.sums = dict(zip(self.sums, rows, strict=True))
        self.chains = chains[0]

    def summary(self) -> dict[str, float]:
        """Means per step (`kl/1` is the first draft's), and tau by joint prefixes: never a product of marginals."""
        means: dict[str, float] = {}
        for step in range(self.steps):
            count = max(self.count[step], 1.0)
            for name, sums in self.sums.items():
                means[f"{name}/{step + 1}"] = sums[step] / count
            means[f"prefix/{step + 1}"] = self.prefix[step] / max(self.chains, 1.0)
        means["tau_teacher_forced"] = 1.0 + sum(self.prefix) / max(self.chains, 1.0)
        return means


def _add(old: list[float], new_S: Tensor) -> list[float]:
    return [left + right for left, right in zip(old, new_S.tolist(), strict=True)]


def joint_prefix(loss: PackLoss) -> tuple[Tensor, float]:
    """Chains whose first s+1 drafts all equal the target's choices [S], and how many chains there are.

    A chain counts where every one of its steps has a trained goal.
    """
    source, valid = loss.rollout.source_SN, loss.rollout.valid_SN
    steps, rows = valid.shape[0], loss.rollout.offsets[-1]
    hit = torch.zeros(steps, rows, dtype=torch.bool, device=valid.device)
    present = torch.zeros_like(hit)
    for step in range(steps):
        start = source[step][valid[step]]
        hit[step, start] = loss.values.agree_SN[step][valid[step]]
        present[step, start] = True
    whole = present.all(0)
    return (hit.cumprod(0).bool() & whole).sum(1).float(), float(whole.sum())
