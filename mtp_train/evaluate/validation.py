"""Validation loss through the engine: its paged target and its head, in the dtype that serves. No training code.

Shapes: L tokens of one sequence, N rows that speak of the answer, D hidden width, V vocabulary, U the head's.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from mtp_train.attention.paged import PagedContext, PagedKV, plan_batch
from mtp_train.batches.align import answer_rows, next_tokens
from mtp_train.heads.base import DraftHead
from mtp_train.models.target import Target
from mtp_train.text.sources import Answer

PAGE = 16


@torch.inference_mode()
def engine_validation(
    target: Target, head: DraftHead, answers: Sequence[Answer]
) -> dict[str, float]:
    """Mean KL, alpha and agreement of the first draft over the answers' tokens, as `train` names them."""
    totals = torch.zeros(3, dtype=torch.float64)
    count = 0
    for answer in answers:
        values = _first_draft(target, head, answer)
        totals += values.sum(1).double().cpu()
        count += values.shape[1]
    means = (totals / max(count, 1)).tolist()
    return dict(zip(("kl/1", "alpha/1", "agree/1"), means, strict=True))


def _first_draft(target: Target, head: DraftHead, answer: Answer) -> Tensor:
    """KL, alpha and agreement at each row that predicts a token of the answer [3, rows].

    The target reads the sequence over its paged cache, the head the same rows under the same plan; the head's row p
    and the target's row p+ahead speak of the same token.
    """
    token_L = torch.tensor(answer.prompt_ids + answer.output_ids, device=target.device)
    rows = len(token_L)
    pages = [list(range(-(-rows // PAGE)))]
    cache = PagedKV(
        target.layers + head.cache_layers,
        len(pages[0]),
        PAGE,
        dtype=target.dtype,
        device=target.device,
    )
    plan = plan_batch(pages, [0], [rows], PAGE, target.device)
    context = PagedContext.of(cache, plan)
    names = tuple(dict.fromkeys((target.state, *head.states)))
    states = target.capture(token_L, plan.positions, context, names)
    state_LD = states[target.state]
    following = next_tokens(token_L, plan.last_rows(), token_L[-1:], head.ahead)
    embedding_LD = head.embed(target, following)
    out_LD = head(embedding_LD, head.fuse(states), plan.positions, context)
    goals, sources = answer_rows(len(answer.prompt_ids), rows, head.ahead)
    p = torch.softmax(target.logits(state_LD[goals]).float(), dim=-1)
    log_q = torch.log_softmax(head.logits(target, out_LD[sources], 0).float(), dim=-1)
    return _compare(p, log_q, head.vocabulary)


def _compare(p_NV: Tensor, log_q_NU: Tensor, vocabulary_U: Tensor | None) -> Tensor:
    """KL, alpha and agreement [3, N]; q has chance 0 outside its vocabulary, and the KL is over that part alone."""
    q, choice, part = log_q_NU.exp(), log_q_NU.argmax(-1), p_NV
    if vocabulary_U is not None:
        choice, part = vocabulary_U[choice], p_NV[:, vocabulary_U]
    within = part / part.sum(-1, keepdim=True)
    kl = torch.special.xlogy(within, within).sum(-1) - (within * log_q_NU).sum(-1)
    agree = p_NV.argmax(-1) == choice
    return torch.stack([kl, torch.minimum(part, q).sum(-1), agree.float()])
