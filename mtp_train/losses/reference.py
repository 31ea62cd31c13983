"""The losses by their slow equations: the definition that the chunked twin is held to.

Builds [N, V] logits: for tests and small vocabularies.

Shapes: N goals, S draft steps, D hidden width, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional


def kl(student_SND: Tensor, teacher_ND: Tensor, head_VD: Tensor) -> Tensor:
    """KL(p || q) per step and goal [S, N]: p the target's distribution at the goal, q the head's."""
    log_p = torch.log_softmax(teacher_ND @ head_VD.T, dim=-1)
    log_q = torch.log_softmax(student_SND @ head_VD.T, dim=-1)
    return (log_p.exp() * (log_p - log_q)).sum(-1)


def alpha(student_SND: Tensor, teacher_ND: Tensor, head_VD: Tensor) -> Tensor:
    """Chance of acceptance under sampling, sum_x min(p(x), q(x)), per step and goal [S, N]."""
    p = torch.softmax(teacher_ND @ head_VD.T, dim=-1)
    q = torch.softmax(student_SND @ head_VD.T, dim=-1)
    return torch.minimum(p, q).sum(-1)


def agreement(student_SND: Tensor, teacher_ND: Tensor, head_VD: Tensor) -> Tensor:
    """Whether head and target choose the same token, per step and goal [S, N]."""
    return (student_SND @ head_VD.T).argmax(-1) == (teacher_ND @ head_VD.T).argmax(-1)


def smooth_l1(student_SND: Tensor, teacher_ND: Tensor) -> Tensor:
    """Mean smooth L1 distance of states per step and goal [S, N] (EAGLE's regression loss)."""
    target = teacher_ND.expand_as(student_SND)
    return functional.smooth_l1_loss(student_SND, target, reduction="none").mean(-1)
