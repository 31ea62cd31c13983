"""Acceptance of a head that can draft a part of the vocabulary only: everything else has chance 0.

The loss renormalises the target over the part, which would flatter such a head; acceptance is against the whole.

Shapes: N goals, S draft steps, C goals of a chunk, D the target's width, E the head's, V vocabulary, U its part.
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
    student_head_UE: Tensor,
    vocabulary_U: Tensor,
    softcap: float | None = None,
    chunk: int = CHUNK,
    student_softcap: float | None = None,
) -> tuple[Tensor, Tensor]:
    """sum over the part of min(p, q), p over the whole vocabulary [S, N]; and whether both choose the same token.

    Args:
        softcap: of the target's logits; student_softcap: of the head's, which shares the lm_head's rows.
        teacher: [N, D] where every step has the same goals, else [S, N, D].
    """
    output = head_VD, student_head_UE, vocabulary_U, softcap, chunk, student_softcap
    if teacher.ndim == 2:
        return _compared(student_SNE, teacher, *output)
    pairs = zip(student_SNE.unsqueeze(1), teacher, strict=True)
    alphas, agreements = zip(
        *(_compared(one_1NE, teacher_ND, *output) for one_1NE, teacher_ND in pairs), strict=True
    )
    return torch.cat(alphas), torch.cat(agreements)


def _compared(
    student_SNE: Tensor,
    teacher_ND: Tensor,
    head_VD: Tensor,
    student_head_UE: Tensor,
    vocabulary_U: Tensor,
    softcap: float | None,
    chunk: int,
    student_softcap: float | None,
) -> tuple[Tensor, Tensor]:
    own_UE = student_head_UE.to(head_VD.dtype)
    alphas, agreements = [], []
    for start in range(0, max(teacher_ND.shape[0], 1), chunk):
        teacher_CD = teacher_ND[start : start + chunk].to(head_VD.dtype)
        student_SCE = student_SNE[:, start : start + chunk].to(head_VD.dtype)
        logits_CV = _capped((teacher_CD @ head_VD.T).float(), softcap)
        choice_C, p_CU = logits_CV.argmax(-1), torch.softmax(logits_CV, dim=-1)[:, vocabulary_U]
        for student_CE in student_SCE:
            logits_CU = _capped((student_CE @ own_UE.T).float(), student_softcap)
            alphas.append(torch.minimum(p_CU, torch.softmax(logits_CU, dim=-1)).sum(-1))
            agreements.append(vocabulary_U[logits_CU.argmax(-1)] == choice_C)
    steps = len(student_SNE)
    return _joined(alphas, steps), _joined(agreements, steps)


def _capped(logits: Tensor, softcap: float | None) -> Tensor:
    return logits if softcap is None else torch.tanh(logits / softcap) * softcap


def _joined(parts: list[Tensor], steps: int) -> Tensor:
    """Chunks of every step in turn, as [S, N]."""
    return torch.stack([torch.cat(parts[step::steps]) for step in range(steps)])
