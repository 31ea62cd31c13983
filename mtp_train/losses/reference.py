"""The loss terms by their slow equations: the definition that the chunked twins are held to.

Those over the vocabulary build [N, V] logits: for tests and small vocabularies. Those on states are what training
uses. Knows no weights and no means: every term is one value per draft step and goal.

p is the target's distribution at a goal, q the head's, both over the rows of `head_VD` (a part of the vocabulary
renormalises both). `student_head` is the head's own output matrix [V, E] or, one per draft step, [S, V, E]; without
it the head shares the target's. `softcap` is that of the target's logits, c tanh(x / c); it belongs to the target's
lm_head, and so to the head's logits where that is shared.

Shapes: N goals, S draft steps, D the target's width, E the head's width (D unless its output matrix is its own),
V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

# --- on states ------------------------------------------------------------------------------------------------


def smooth_l1(student_SND: Tensor, teacher_ND: Tensor) -> Tensor:
    """Mean smooth L1 distance of states per step and goal [S, N] (EAGLE's regression loss, arXiv 2401.15077)."""
    target = teacher_ND.expand_as(student_SND)
    return functional.smooth_l1_loss(student_SND, target, reduction="none").mean(-1)


def l2(student_SND: Tensor, teacher_ND: Tensor) -> Tensor:
    """Mean squared distance of states per step and goal [S, N]."""
    return (student_SND - teacher_ND).square().mean(-1)


def cosine(student_SND: Tensor, teacher_ND: Tensor) -> Tensor:
    """1 - cosine of the angle between states, per step and goal [S, N]."""
    return 1 - functional.cosine_similarity(student_SND, teacher_ND.expand_as(student_SND), dim=-1)


# --- on the target's distribution -----------------------------------------------------------------------------


def kl(
    student_SNE: Tensor,
    teacher_ND: Tensor,
    head_VD: Tensor,
    student_head: Tensor | None = None,
    softcap: float | None = None,
) -> Tensor:
    """KL(p || q) per step and goal [S, N]."""
    log_p, log_q = log_probabilities(student_SNE, teacher_ND, head_VD, student_head, softcap)
    return (log_p.exp() * (log_p - log_q)).sum(-1)


def reverse_kl(
    student_SNE: Tensor,
    teacher_ND: Tensor,
    head_VD: Tensor,
    student_head: Tensor | None = None,
    softcap: float | None = None,
) -> Tensor:
    """KL(q || p) per step and goal [S, N]."""
    log_p, log_q = log_probabilities(student_SNE, teacher_ND, head_VD, student_head, softcap)
    return (log_q.exp() * (log_q - log_p)).sum(-1)


def soft_ce(
    student_SNE: Tensor,
    teacher_ND: Tensor,
    head_VD: Tensor,
    student_head: Tensor | None = None,
    softcap: float | None = None,
) -> Tensor:
    """Cross-entropy -sum_x p log q per step and goal [S, N]: KL plus the entropy of p, with KL's gradient."""
    log_p, log_q = log_probabilities(student_SNE, teacher_ND, head_VD, student_head, softcap)
    return -(log_p.exp() * log_q).sum(-1)


def alpha(
    student_SNE: Tensor,
    teacher_ND: Tensor,
    head_VD: Tensor,
    student_head: Tensor | None = None,
    softcap: float | None = None,
) -> Tensor:
    """Chance of acceptance under sampling, sum_x min(p(x), q(x)), per step and goal [S, N]."""
    log_p, log_q = log_probabilities(student_SNE, teacher_ND, head_VD, student_head, softcap)
    return torch.minimum(log_p.exp(), log_q.exp()).sum(-1)


def tv(
    student_SNE: Tensor,
    teacher_ND: Tensor,
    head_VD: Tensor,
    student_head: Tensor | None = None,
    softcap: float | None = None,
) -> Tensor:
    """Total variation 1 - alpha per step and goal [S, N]."""
    return 1 - alpha(student_SNE, teacher_ND, head_VD, student_head, softcap)


def l1(
    student_SNE: Tensor,
    teacher_ND: Tensor,
    head_VD: Tensor,
    student_head: Tensor | None = None,
    softcap: float | None = None,
) -> Tensor:
    """sum_x |q - p| per step and goal [S, N]: twice total variation (DSpark, arXiv 2607.05147)."""
    log_p, log_q = log_probabilities(student_SNE, teacher_ND, head_VD, student_head, softcap)
    return (log_q.exp() - log_p.exp()).abs().sum(-1)


def nla(
    student_SNE: Tensor,
    teacher_ND: Tensor,
    head_VD: Tensor,
    student_head: Tensor | None = None,
    softcap: float | None = None,
) -> Tensor:
    """-log alpha per step and goal [S, N] (the likelihood form of LK losses, arXiv 2602.23881)."""
    overlap = alpha(student_SNE, teacher_ND, head_VD, student_head, softcap)
    return -overlap.clamp(min=torch.finfo(overlap.dtype).tiny).log()


def lk(
    student_SNE: Tensor,
    teacher_ND: Tensor,
    head_VD: Tensor,
    student_head: Tensor | None = None,
    softcap: float | None = None,
    *,
    eta: float = 3.0,
) -> Tensor:
    """lambda KL + (1 - lambda) TV per step and goal [S, N], lambda = exp(-eta alpha), without a gradient through it.

    The LK hybrid of arXiv 2602.23881 (its best eta is 3). There lambda is one number per draft step, from alpha's mean
    over the batch; here each goal has its own, so that neither packing nor the number of ranks changes the loss.
    """
    of = (student_SNE, teacher_ND, head_VD, student_head, softcap)
    blend = torch.exp(-eta * alpha(*of).detach())
    return blend * kl(*of) + (1 - blend) * tv(*of)


# --- on labels ------------------------------------------------------------------------------------------------


def hard_ce(
    student_SNE: Tensor,
    head_VD: Tensor,
    label_N: Tensor,
    student_head: Tensor | None = None,
    softcap: float | None = None,
) -> Tensor:
    """-log q(label) per step and goal [S, N]; labels are rows of the head's matrix, 0 where the label is -1."""
    log_q = torch.log_softmax(_logits(student_SNE, head_VD, student_head, softcap), dim=-1)
    index_SN1 = label_N.clamp(min=0).expand(student_SNE.shape[:2]).unsqueeze(-1)
    return -log_q.gather(-1, index_SN1).squeeze(-1) * (label_N >= 0)


# --- on the head's confidence ---------------------------------------------------------------------------------


def confidence(confidence_SN: Tensor, tv_SN: Tensor) -> Tensor:
    """Binary cross-entropy of sigmoid(confidence) with the chance of acceptance 1 - TV, [S, N] (DSpark)."""
    chance_SN = (1 - tv_SN).detach().to(confidence_SN.dtype)
    return functional.binary_cross_entropy_with_logits(
        confidence_SN, chance_SN.clamp(0, 1), reduction="none"
    )


# --- not a loss -----------------------------------------------------------------------------------------------


def agreement(
    student_SNE: Tensor,
    teacher_ND: Tensor,
    head_VD: Tensor,
    student_head: Tensor | None = None,
    softcap: float | None = None,
) -> Tensor:
    """Whether head and target choose the same token, per step and goal [S, N]."""
    chosen = _logits(student_SNE, head_VD, student_head, softcap).argmax(-1)
    return chosen == _capped(teacher_ND @ head_VD.T, softcap).argmax(-1)


def log_probabilities(
    student_SNE: Tensor,
    teacher_ND: Tensor,
    head_VD: Tensor,
    student_head: Tensor | None = None,
    softcap: float | None = None,
) -> tuple[Tensor, Tensor]:
    """log p [N, V] and log q [S, N, V]."""
    log_p = torch.log_softmax(_capped(teacher_ND @ head_VD.T, softcap), dim=-1)
    return log_p, torch.log_softmax(_logits(student_SNE, head_VD, student_head, softcap), dim=-1)


def _logits(
    student_SNE: Tensor, head_VD: Tensor, student_head: Tensor | None, softcap: float | None
) -> Tensor:
    if student_head is not None:
        return student_SNE @ student_head.mT
    return _capped(student_SNE @ head_VD.mT, softcap)


def _capped(logits: Tensor, softcap: float | None) -> Tensor:
    return logits if softcap is None else softcap * torch.tanh(logits / softcap)
