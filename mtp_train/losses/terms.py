"""The loss terms by name, and their weighted sum over a pack of goals.

Knows no head, no target class and no data: states, matrices and weights of goals come from the caller.

Shapes: N goals, S draft steps, D the target's width, E the head's width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from mtp_train.core.errors import UserError
from mtp_train.losses import reference
from mtp_train.losses.chunked import CHUNK, LossValues, distill
from mtp_train.losses.weights import MEANS, step_weights


@dataclass(frozen=True)
class Term:
    """A loss term: what it compares, and its definition."""

    on: str  # states, distribution (the target's) or labels
    reference: Callable[..., Tensor]


TERMS = {
    "kl": Term("distribution", reference.kl),
    "reverse_kl": Term("distribution", reference.reverse_kl),
    "soft_ce": Term("distribution", reference.soft_ce),
    "tv": Term("distribution", reference.tv),
    "nla": Term("distribution", reference.nla),
    "lk": Term("distribution", reference.lk),
    "hard_ce": Term("labels", reference.hard_ce),
    "smooth_l1": Term("states", reference.smooth_l1),
    "l2": Term("states", reference.l2),
    "cosine": Term("states", reference.cosine),
}


def default_weights() -> dict[str, float]:
    return dict.fromkeys(TERMS, 0.0) | {"kl": 1.0, "smooth_l1": 0.1}


@dataclass(frozen=True)
class LossConfig:
    """A weighted sum of terms, over draft steps and goals.

    Attributes:
        weights: by the names of TERMS; 0 is off.
        lk_eta: how fast `lk` turns from KL to total variation as acceptance grows.
        step_weights, decay: weights of draft steps (see `weights.step_weights`).
        mean_over: tokens, or sequences: each goal counts the same, or each sequence.
    """

    weights: dict[str, float] = field(default_factory=default_weights)
    lk_eta: float = 3.0
    step_weights: str = "geometric"
    decay: float = 0.7
    mean_over: str = "tokens"

    def __post_init__(self) -> None:
        unknown = sorted(set(self.weights) - set(TERMS))
        if unknown:
            names = ", ".join(TERMS)
            raise UserError(f"loss terms must be among {names}", ", ".join(unknown), "choose one")
        if any(weight < 0 for weight in self.weights.values()) or not any(self.weights.values()):
            rule = "loss weights must be 0 or more, and one above 0"
            raise UserError(rule, self.weights, "use kl: 1.0")
        if self.lk_eta < 0:
            raise UserError("loss.lk_eta must be 0 or more", self.lk_eta, "use 3.0")
        if self.mean_over not in MEANS:
            raise UserError(
                "loss.mean_over must be one of " + ", ".join(MEANS), self.mean_over, "choose one"
            )
        step_weights(self.step_weights, 1, self.decay)

    def enabled(self, *on: str) -> dict[str, float]:
        """The weights above 0: all of them, or those of terms on states, distribution or labels."""
        return {
            name: weight
            for name, weight in self.weights.items()
            if weight and (not on or TERMS[name].on in on)
        }

    def step_weight(self, steps: int) -> Tensor:
        """Weights of draft steps [S]."""
        return step_weights(self.step_weights, steps, self.decay)


def weighted_loss(
    config: LossConfig,
    student_SNE: Tensor,
    teacher_ND: Tensor,
    head_VD: Tensor,
    *,
    weight_SN: Tensor,
    label_N: Tensor | None = None,
    student_head: Tensor | None = None,
    softcap: float | None = None,
    measure: bool = False,
    chunk: int = CHUNK,
) -> LossValues:
    """Sum of weight_SN * sum_k weight_k term_k over steps and goals; arguments as `chunked.distill` has them.

    Divide by the global `weights.denominator`. Raises UserError where a term compares states of unequal width.
    """
    values = distill(
        student_SNE,
        teacher_ND,
        head_VD,
        config.enabled("distribution", "labels"),
        weight_SN=weight_SN,
        label_N=label_N,
        student_head=student_head,
        lk_eta=config.lk_eta,
        softcap=softcap,
        measure=measure,
        chunk=chunk,
    )
    loss, terms = values.loss, dict(values.terms)
    on_states = config.enabled("states")
    if on_states and student_SNE.shape[-1] != teacher_ND.shape[-1]:
        widths = (student_SNE.shape[-1], teacher_ND.shape[-1])
        rule = f"{', '.join(on_states)} compare states of equal width"
        raise UserError(rule, widths, "set these weights to 0")
    teacher = teacher_ND.to(torch.promote_types(teacher_ND.dtype, student_SNE.dtype))
    for name, weight in on_states.items():
        value_SN = TERMS[name].reference(student_SNE, teacher)
        loss = loss + weight * (value_SN * weight_SN).sum()
        terms[name] = value_SN.detach()
    return replace(values, loss=loss, terms=terms)
