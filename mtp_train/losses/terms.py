"""The loss terms by name, and their weighted sum over a pack of goals.

Knows no head, no target class and no data: states, matrices and weights of goals come from the caller.

Shapes: N goals, S draft steps, C goals of a chunk, D the target's width, E the head's width, V vocabulary, R rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from mtp_train.core.errors import UserError
from mtp_train.losses import reference
from mtp_train.losses.chunked import CHUNK, LossValues, distill
from mtp_train.losses.weights import D_PACE, MEANS, d_pace, step_weights


@dataclass(frozen=True)
class Term:
    """A loss term: what it compares, and its definition.

    Attributes:
        on: states, distribution (the target's), labels, or confidence (the head's own).
        fused: the name in `chunked` that computes it, and how many times as large it is; none: the definition is
            differentiated chunk by chunk.
    """

    on: str
    reference: Callable[..., Tensor]
    fused: tuple[str, float] | None = None


TERMS = {
    "kl": Term("distribution", reference.kl, ("kl", 1.0)),
    "reverse_kl": Term("distribution", reference.reverse_kl, ("reverse_kl", 1.0)),
    "soft_ce": Term("distribution", reference.soft_ce, ("soft_ce", 1.0)),
    "tv": Term("distribution", reference.tv, ("tv", 1.0)),
    "l1": Term("distribution", reference.l1, ("tv", 2.0)),
    "nla": Term("distribution", reference.nla, ("nla", 1.0)),
    "lk": Term("distribution", reference.lk, ("lk", 1.0)),
    "hard_ce": Term("labels", reference.hard_ce, ("hard_ce", 1.0)),
    "smooth_l1": Term("states", reference.smooth_l1),
    "l2": Term("states", reference.l2),
    "cosine": Term("states", reference.cosine),
    "confidence": Term("confidence", reference.confidence),
}


def default_weights() -> dict[str, float]:
    return dict.fromkeys(TERMS, 0.0) | {"kl": 1.0, "smooth_l1": 0.1}


@dataclass(frozen=True)
class LossConfig:
    """A weighted sum of terms, over draft steps and goals.

    Attributes:
        weights: by the names of TERMS; 0 is off.
        lk_eta: how fast `lk` turns from KL to total variation as acceptance grows.
        step_weights, decay, gamma: weights of draft steps (see `weights.step_weights` and `weights.d_pace`).
        mean_over: tokens, or sequences: each goal counts the same, or each sequence.
    """

    weights: dict[str, float] = field(default_factory=default_weights)
    lk_eta: float = 3.0
    step_weights: str = "geometric"
    decay: float = 0.7
    mean_over: str = "tokens"
    gamma: float = 4.0

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
        step_weights(self.step_weights, 1, self.decay, self.gamma)

    def enabled(self, *on: str) -> dict[str, float]:
        """The weights above 0: all of them, or those of terms on states, distribution or labels."""
        return {
            name: weight
            for name, weight in self.weights.items()
            if weight and (not on or TERMS[name].on in on)
        }

    def step_weight(self, steps: int) -> Tensor:
        """Weights of draft steps [S]."""
        return step_weights(self.step_weights, steps, self.decay, self.gamma)


@dataclass(frozen=True)
class Compared:
    """What a loss compares.

    Attributes:
        student: what the head's lm_head reads [S, N, E].
        teacher: the target's states at the goals, [N, D] for every step alike, or [S, N, D].
        head_VD: the frozen lm_head, or its rows of a part of the vocabulary.
        label: int64, rows of that matrix, -1 where the label is none of them: [N] for every step alike, or [S, N].
        student_head: the head's own output matrix, as `chunked.distill` has it.
        bias: (read [S, N, R], matrix [V, R]) of a low rank, whose product is added to the student's logits.
        confidence_SN: the head's logit of a draft's chance.
        softcap: of the target's logits.
    """

    student: Tensor
    teacher: Tensor
    head_VD: Tensor
    label: Tensor | None = None
    student_head: Tensor | None = None
    bias: tuple[Tensor, Tensor] | None = None
    confidence_SN: Tensor | None = None
    softcap: float | None = None

    def with_bias(self) -> tuple[Tensor, Tensor | None]:
        """Student and output matrix, the low rank beside them: one product gives the sum.

        For definitions, which know no low rank; `chunked.distill` multiplies each alone.
        """
        if self.bias is None:
            return self.student, self.student_head
        read_SNR, matrix_VR = self.bias
        own = self.student_head
        if own is None:
            assert self.softcap is None, "a low rank is added to logits that have no cap"
            own = self.head_VD
        matrix = matrix_VR.expand(*own.shape[:-1], -1)
        joined = torch.cat([own.to(matrix.dtype), matrix], dim=-1)
        return torch.cat([self.student, read_SNR.to(self.student.dtype)], dim=-1), joined

    @property
    def parts(self) -> list[Compared]:
        """The same comparison in parts whose steps all have the same goals and labels.

        One of all steps where they have them already, one of a single step of S * N goals, or one of each step where
        each step has an output matrix of its own.
        """
        if self.teacher.ndim == 2 and (self.label is None or self.label.ndim == 1):
            return [self]
        if self.student_head is None or self.student_head.ndim == 2:
            return [self._flat]
        return [self._step(step) for step in range(len(self.student))]

    def goals(self, part: slice) -> Compared:
        """Some of the goals, of a comparison whose steps all have the same."""
        return replace(
            self,
            student=self.student[:, part],
            teacher=self.teacher[part],
            label=None if self.label is None else self.label[part],
            bias=self.bias and (self.bias[0][:, part], self.bias[1]),
            confidence_SN=None if self.confidence_SN is None else self.confidence_SN[:, part],
        )

    @property
    def _flat(self) -> Compared:
        shape = self.student.shape[:2]
        bias = self.bias and (self.bias[0].flatten(0, 1).unsqueeze(0), self.bias[1])
        return replace(
            self,
            student=self.student.flatten(0, 1).unsqueeze(0),
            teacher=self.teacher.expand(*shape, -1).flatten(0, 1),
            label=None if self.label is None else self.label.expand(shape).flatten(),
            bias=bias,
            confidence_SN=None if self.confidence_SN is None else self.confidence_SN.reshape(1, -1),
        )

    def _step(self, step: int) -> Compared:
        one = slice(step, step + 1)
        teacher, label, own = self.teacher, self.label, self.student_head
        return replace(
            self,
            student=self.student[one],
            teacher=teacher if teacher.ndim == 2 else teacher[step],
            label=label if label is None or label.ndim == 1 else label[step],
            student_head=None if own is None else own[step],
            bias=self.bias and (self.bias[0][one], self.bias[1]),
            confidence_SN=None if self.confidence_SN is None else self.confidence_SN[one],
        )


def weighted_loss(
    config: LossConfig,
    of: Compared,
    *,
    weight_SN: Tensor,
    start_SN: Tensor | None = None,
    valid_SN: Tensor | None = None,
    measure: bool = False,
    chunk: int = CHUNK,
) -> LossValues:
    """Sum of weight_SN * sum_k weight_k term_k over steps and goals.

    Divide by the global `weights.denominator`.

    Args:
        start_SN, valid_SN: which chain each value belongs to, if any: for the weights of D-PACE, which cost a second
            projection of the student's states.

    Raises:
        UserError: a term compares states of unequal width, or a confidence that the head has not.
    """
    if config.step_weights == D_PACE:
        assert start_SN is not None and valid_SN is not None, "D-PACE weighs chains"
        weight_SN = weight_SN * d_pace(label_chances(of, chunk), start_SN, valid_SN)
    parts = of.parts
    weight_of = weight_SN.reshape(len(parts), *parts[0].student.shape[:2])
    values = [
        _weighted(config, part, weight, measure, chunk)
        for part, weight in zip(parts, weight_of, strict=True)
    ]
    return values[0] if parts[0] is of else _joined(values, of)


def _joined(values: list[LossValues], of: Compared) -> LossValues:
    """The values of parts as those of the whole."""
    outside = values[0].outside if of.label is None else (of.label < 0).sum()

    def whole(tensors: Iterable[Tensor]) -> Tensor:
        return torch.cat(list(tensors)).reshape(of.student.shape[:2])

    return LossValues(
        loss=torch.stack([one.loss for one in values]).sum(),
        terms={name: whole(one.terms[name] for one in values) for name in values[0].terms},
        alpha_SN=whole(one.alpha_SN for one in values),
        agree_SN=whole(one.agree_SN for one in values),
        outside=outside,
    )


@torch.no_grad()
def label_chances(of: Compared, chunk: int = CHUNK) -> Tensor:
    """The student's chance of each label [S, N]; 0 of one that is not among the rows."""
    assert of.label is not None, "a chance is of a label"
    found = [
        distill(
            part.student,
            part.teacher,
            part.head_VD,
            {"hard_ce": 1.0},
            label_N=part.label,
            student_head=part.student_head,
            bias=part.bias,
            softcap=part.softcap,
            chunk=chunk,
        ).terms["hard_ce"]
        for part in of.parts
    ]
    shape = of.student.shape[:2]
    return torch.exp(-torch.cat(found).reshape(shape)) * (of.label >= 0).expand(shape)


def _weighted(
    config: LossConfig, of: Compared, weight_SN: Tensor, measure: bool, chunk: int
) -> LossValues:
    weights = config.enabled("distribution", "labels")
    known = {name: TERMS[name].fused for name in weights}
    fused: dict[str, float] = {}
    for name, twin in known.items():
        if twin is not None:
            fused[twin[0]] = fused.get(twin[0], 0.0) + twin[1] * weights[name]
    sure = config.enabled("confidence")
    values = distill(
        of.student,
        of.teacher,
        of.head_VD,
        fused,
        weight_SN=weight_SN,
        label_N=of.label,
        student_head=of.student_head,
        bias=of.bias,
        lk_eta=config.lk_eta,
        softcap=of.softcap,
        measure=measure,
        report=("tv",) if sure else (),
        chunk=chunk,
    )
    loss, found = values.loss, values.terms
    terms = {name: twin[1] * found[twin[0]] for name, twin in known.items() if twin is not None}
    terms |= {"kl": found["kl"]} if "kl" in found else {}
    for name in (name for name, twin in known.items() if twin is None):
        terms[name], part = by_autograd(TERMS[name], of, weight_SN, chunk)
        loss = loss + weights[name] * part
    for name, value_SN in _on_states(config, of).items():
        loss = loss + config.weights[name] * (value_SN * weight_SN).sum()
        terms[name] = value_SN.detach()
    for name, weight in sure.items():
        if of.confidence_SN is None:
            rule = f"{name} is a loss of heads that say how sure they are"
            raise UserError(rule, "a head that does not", f"set train.loss.{name} to 0")
        said_SN = of.confidence_SN.to(found["tv"].dtype)  # float32 at least
        value_SN = TERMS[name].reference(said_SN, found["tv"])
        loss = loss + weight * (value_SN * weight_SN).sum()
        terms[name] = value_SN.detach()
    return replace(values, loss=loss, terms=terms)


def _on_states(config: LossConfig, of: Compared) -> dict[str, Tensor]:
    enabled = config.enabled("states")
    student, teacher = of.student, of.teacher
    if enabled and student.shape[-1] != teacher.shape[-1]:
        rule = f"{', '.join(enabled)} compare states of equal width"
        raise UserError(rule, (student.shape[-1], teacher.shape[-1]), "set these weights to 0")
    teacher = teacher.to(torch.promote_types(teacher.dtype, student.dtype))
    return {name: TERMS[name].reference(student, teacher) for name in enabled}


def by_autograd(
    term: Term, of: Compared, weight_SN: Tensor, chunk: int = CHUNK
) -> tuple[Tensor, Tensor]:
    """A term by its definition, a chunk of goals at a time: its values [S, N], and their weighted sum with gradients.

    A chunk is computed again in the backward pass, so that logits of one exist at a time.
    """

    def value(some: Compared) -> Tensor:
        student_SCE, own = some.with_bias()
        rows, teacher, own = (
            None if tensor is None else tensor.to(student_SCE.dtype)
            for tensor in (some.head_VD, some.teacher, own)
        )
        if term.on == "labels":
            return term.reference(student_SCE, rows, some.label, own, some.softcap)
        return term.reference(student_SCE, teacher, rows, own, some.softcap)

    found: list[Tensor] = []
    total = of.student.new_zeros(())
    for first in range(0, of.student.shape[1], chunk):
        part = slice(first, first + chunk)
        value_SC = checkpoint(value, of.goals(part), use_reentrant=False)
        total = total + (value_SC * weight_SN[:, part]).sum()
        found.append(value_SC.detach())
    return (torch.cat(found, dim=1) if found else torch.zeros_like(weight_SN)), total
