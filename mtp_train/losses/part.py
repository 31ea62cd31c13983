"""Acceptance of a head that can draft a part of the vocabulary only: everything else has chance 0.

The loss renormalises the target over the part, which would flatter such a head; acceptance is against the whole.

Shapes: N goals, S draft steps, C goals of a chunk, D the target's width, E the head's, V vocabulary, U its part, R
rank.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mtp_train.losses.chunked import CHUNK


@torch.no_grad()
def part_acceptance(
    student_SNE: Tensor,
    teacher: Tensor,
    head_VD: Tensor,
    student_head: Tensor,
    vocabulary_U: Tensor,
    softcap: float | None = None,
    chunk: int = CHUNK,
    bias: tuple[Tensor, Tensor] | None = None,
    student_softcap: float | None = None,
) -> tuple[Tensor, Tensor]:
    """sum over the part of min(p, q), p over the whole vocabulary [S, N]; and whether both choose the same token.

    Args:
        softcap: of the target's logits; student_softcap: of the head's, which shares the lm_head's rows.
        teacher: [N, D] where every step has the same goals, else [S, N, D].
        student_head: [U, E], or one per step, [S, U, E].
        bias: (read [S, N, R], matrix [U, R]), whose product is added to the student's logits.
    """
    if bias is not None:  # one product gives the sum
        read_SNR, matrix_UR = bias
        matrix = matrix_UR.expand(*student_head.shape[:-1], -1)
        student_head = torch.cat([student_head, matrix.to(student_head.dtype)], dim=-1)
        student_SNE = torch.cat([student_SNE, read_SNR.to(student_SNE.dtype)], dim=-1)
    output = head_VD, student_head, vocabulary_U, softcap, chunk, student_softcap
    if teacher.ndim == 2:
        return _compared(student_SNE, teacher, *output)
    alphas, agreements = [], []
    for step, teacher_ND in enumerate(teacher):
        own_UE = student_head if student_head.ndim == 2 else student_head[step]
        alpha_1N, agree_1N = _compared(
            student_SNE[step : step + 1], teacher_ND, head_VD, own_UE, *output[2:]
        )
        alphas.append(alpha_1N)
        agreements.append(agree_1N)
    return torch.cat(alphas), torch.cat(agreements)


def _compared(
    student_SNE: Tensor,
    teacher_ND: Tensor,
    head_VD: Tensor,
    student_head: Tensor,
    vocabulary_U: Tensor,
    softcap: float | None,
    chunk: int,
    student_softcap: float | None,
) -> tuple[Tensor, Tensor]:
    steps, own = len(student_SNE), student_head.to(head_VD.dtype)
    own_SUE = own.expand(steps, *own.shape[-2:])
    alphas, agreements = [], []
    for start in range(0, max(teacher_ND.shape[0], 1), chunk):
        teacher_CD = teacher_ND[start : start + chunk].to(head_VD.dtype)
        student_SCE = student_SNE[:, start : start + chunk].to(head_VD.dtype)
        logits_CV = _capped((teacher_CD @ head_VD.T).float(), softcap)
        choice_C, p_CU = logits_CV.argmax(-1), torch.softmax(logits_CV, dim=-1)[:, vocabulary_U]
        for student_CE, own_UE in zip(student_SCE, own_SUE, strict=True):
            logits_CU = _capped((student_CE @ own_UE.T).float(), student_softcap)
            alphas.append(torch.minimum(p_CU, torch.softmax(logits_CU, dim=-1)).sum(-1))
            agreements.append(vocabulary_U[logits_CU.argmax(-1)] == choice_C)
    return _joined(alphas, steps), _joined(agreements, steps)


def _capped(logits: Tensor, softcap: float | None) -> Tensor:
    return logits if softcap is None else torch.tanh(logits / softcap) * softcap


def _joined(parts: list[Tensor], steps: int) -> Tensor:
    """Chunks of every step in turn, as [S, N]."""
    return torch.stack([torch.cat(parts[step::steps]) for step in range(steps)])
