"""KL to the frozen target through the lm_head both share, without logits for the batch.

Value and gradient are computed together, a chunk of goals at a time; one projection of the target's states serves
every draft step. Memory is one chunk of logits, whatever the number of goals. Twin of `reference.kl`.

Shapes: N goals, S draft steps, C goals of a chunk, D hidden width, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

CHUNK = 256  # goals; larger chunks gain nothing on the machines tried and take memory


@dataclass(frozen=True)
class DistillOutput:
    """One value per draft step and goal."""

    kl_SN: Tensor  # carries the gradient to the student's states
    alpha_SN: (
        Tensor  # sum_x min(p, q), the chance of acceptance under sampling; zeros unless measured
    )
    agree_SN: Tensor  # bool: head and target choose the same token


def distill(
    student_SND: Tensor,
    teacher_ND: Tensor,
    head_VD: Tensor,
    *,
    measure: bool = False,
    chunk: int = CHUNK,
) -> DistillOutput:
    """KL(p || q) from the target's distribution p to the head's q, at every step and goal.

    Args:
        student_SND: the head's output states; gradients flow to them.
        teacher_ND: the target's states at the goals (post-norm).
        head_VD: the frozen lm_head; matmuls run in its dtype, everything else at least in float32.
        measure: compute alpha too.
    """
    return DistillOutput(*_Distill.apply(student_SND, teacher_ND, head_VD, measure, chunk))


class _Distill(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, student: Tensor, teacher: Tensor, head: Tensor, measure: bool, chunk: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        steps, goals, _ = student.shape
        work = _Buffers(min(chunk, max(goals, 1)), head)
        kl = torch.zeros(steps, goals, dtype=work.p.dtype, device=student.device)
        alpha = torch.zeros_like(kl)
        agree = torch.zeros(steps, goals, dtype=torch.bool, device=student.device)
        gradient = torch.empty_like(student) if ctx.needs_input_grad[0] else None
        for start in range(0, goals, chunk):
            part = slice(start, min(start + chunk, goals))
            work.teach(teacher[part])
            for step in range(steps):
                kl[step, part], agree[step, part] = work.term(student[step, part])
                if measure:
                    alpha[step, part] = work.alpha()
                if gradient is not None:
                    gradient[step, part] = work.gradient()
        ctx.save_for_backward(gradient)
        ctx.mark_non_differentiable(alpha, agree)
        return kl, alpha, agree

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = ctx.saved_tensors
        return gradient * upstream[0].unsqueeze(-1).to(gradient.dtype), None, None, None, None


class _Buffers:
    """One chunk's logits and probabilities, allocated once: fresh [C, V] tensors cost more in page faults than the
    arithmetic on them does.
    """

    def __init__(self, chunk: int, head_VD: Tensor) -> None:
        self.head = head_VD
        size = (chunk, head_VD.shape[0])
        wide = torch.promote_types(head_VD.dtype, torch.float32)
        self.projected = torch.empty(
            size, dtype=head_VD.dtype, device=head_VD.device
        )  # logits, later their gradient
        self.taught, self.logits, self.p, self.q, self.product = (
            torch.empty(size, dtype=wide, device=head_VD.device) for _ in range(5)
        )

    def teach(self, state_CD: Tensor) -> None:
        """Take in a chunk of goals: the target's distribution, its negative entropy and its choice."""
        self.rows = len(state_CD)
        self.state = state_CD
        torch.mm(state_CD.to(self.head.dtype), self.head.T, out=self.projected[: self.rows])
        logits = self.taught[: self.rows].copy_(self.projected[: self.rows])
        p = torch.softmax(logits, dim=-1, out=self.p[: self.rows])
        peak, self.choice = logits.max(-1)
        self.negative_entropy = self._dot(p, logits) - _log_sum(peak, self.choice, p)

    def term(self, state_CD: Tensor) -> tuple[Tensor, Tensor]:
        """KL and agreement of the chunk at one step [C].

        The student's logits are the target's plus the projected difference of the states: rounding is relative to
        the difference, which the gradient q - p is made of, and not to logits that are a hundred times as large.
        """
        difference_CD = state_CD - self.state.to(state_CD.dtype)
        torch.mm(difference_CD.to(self.head.dtype), self.head.T, out=self.projected[: self.rows])
        logits = torch.add(
            self.taught[: self.rows], self.projected[: self.rows], out=self.logits[: self.rows]
        )
        q = torch.softmax(logits, dim=-1, out=self.q[: self.rows])
        peak, choice = logits.max(-1)
        cross = self._dot(self.p[: self.rows], logits) - _log_sum(peak, choice, q)  # sum_x p log q
        return self.negative_entropy - cross, choice == self.choice

    def alpha(self) -> Tensor:
        """sum_x min(p, q) of the last term [C]."""
        return torch.minimum(
            self.p[: self.rows], self.q[: self.rows], out=self.product[: self.rows]
        ).sum(-1)

    def gradient(self) -> Tensor:
        """Gradient of the last term by the student's states [C, D]: q - p, projected back."""
        self.q[: self.rows].sub_(self.p[: self.rows])
        return self.projected[: self.rows].copy_(self.q[: self.rows]) @ self.head

    def _dot(self, left_CV: Tensor, right_CV: Tensor) -> Tensor:
        return torch.mul(left_CV, right_CV, out=self.product[: self.rows]).sum(-1)


def _log_sum(peak_C: Tensor, choice_C: Tensor, softmax_CV: Tensor) -> Tensor:
    """log sum exp of the logits [C], read off their largest entry: one gather in place of another pass over V."""
    return peak_C - softmax_CV.gather(1, choice_C.unsqueeze(1)).squeeze(1).log()
