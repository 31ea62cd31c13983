"""Validation figures through the engine: its paged target and its head, in the dtype that serves. No training code.

Every chain that predicts tokens of an answer is followed with the answer's own tokens for its drafts. The chains of one
sequence share the pages of the verified rows before them, and each has pages of its own for the rows that it drafts:

    verified rows   0 .. p     page p holds row p (a page holds one row here)
    chain of row p  p+1 ..     pages of its own, in the places that the engine would overwrite

Shapes: L tokens of one sequence, C chains, S draft steps, D hidden width, V vocabulary, U the head's.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from mtp_train.attention.paged import PagedContext, PagedKV, plan_batch
from mtp_train.batches.align import answer_rows, next_tokens
from mtp_train.heads.base import DraftHead, Drafting
from mtp_train.models.target import Target
from mtp_train.text.sources import Answer

CHAINS = 64  # that draft at once: their cached rows are gathered for each of them
FIGURES = ("kl", "alpha", "agree")


def names(depths: int) -> list[str]:
    """The figures, as `train` names them: `kl/1` is the first draft's."""
    per_depth = [f"{name}/{s}" for s in range(1, depths + 1) for name in (*FIGURES, "prefix")]
    return [*per_depth, "tau_teacher_forced"]


def engine_validation(
    target: Target, head: DraftHead, answers: Sequence[Answer], depths: int = 1
) -> dict[str, float]:
    """The figures of draft steps 1 .. `depths` over the answers' tokens, means and joint prefixes as `train`'s."""
    return summary([answer_sums(target, head, answer, depths) for answer in answers], depths)


@torch.inference_mode()
def answer_sums(target: Target, head: DraftHead, answer: Answer, depths: int) -> list[float]:
    """Sums that answers add: per step KL, alpha, agreement and tokens, then chains that agree up to each step, and
    whole chains [5 * depths + 1].
    """
    token_L = torch.tensor(answer.prompt_ids + answer.output_ids, device=target.device)
    prompt, rows = len(answer.prompt_ids), len(token_L)
    chains = _Chains(target, head, token_L, depths)
    goals, _ = answer_rows(prompt, rows, head.ahead)
    sums = torch.zeros(depths, 4, dtype=torch.float64, device=target.device)
    prefix_S = torch.zeros(depths, dtype=torch.float64, device=target.device)
    whole = 0.0
    first, last = max(goals.start - head.ahead - depths + 1, 0), goals.stop - head.ahead
    for begin in range(first, last, CHAINS):
        start_C = torch.arange(begin, min(begin + CHAINS, last), device=target.device)
        goal_SC = torch.stack([start_C + head.ahead + step for step in range(depths)])
        valid_SC = (goal_SC >= goals.start) & (goal_SC < goals.stop)
        near = chains.state_LD[begin + head.ahead : begin + head.ahead + CHAINS + depths - 1]
        p_NV = torch.softmax(target.logits(near).float(), dim=-1)
        hit_SC = torch.zeros_like(valid_SC)
        for step, logits_CU in enumerate(chains.logits(start_C)):
            chosen_C = valid_SC[step]
            log_q = torch.log_softmax(logits_CU[chosen_C].float(), dim=-1)
            p_CV = p_NV[goal_SC[step, chosen_C] - begin - head.ahead]
            values = _compare(p_CV, log_q, head.vocabulary)
            sums[step] += torch.cat([values, torch.ones_like(values[:1])]).double().sum(1)
            hit_SC[step, chosen_C] = values[2].bool()
        whole_C = valid_SC.all(0)
        prefix_S += (hit_SC.long().cumprod(0).bool() & whole_C).sum(1)
        whole += float(whole_C.sum())
    return [*sums.flatten().tolist(), *prefix_S.tolist(), whole]


def summary(sums: Sequence[Sequence[float]], depths: int) -> dict[str, float]:
    """The figures of all answers' sums."""
    total = torch.tensor(sums, dtype=torch.float64).reshape(-1, 5 * depths + 1).sum(0).tolist()
    prefixes, chains = total[4 * depths : -1], max(total[-1], 1.0)
    means: dict[str, float] = {}
    for step in range(depths):
        *values, count = total[4 * step : 4 * step + 4]
        pairs = zip(FIGURES, values, strict=True)
        means |= {f"{name}/{step + 1}": value / max(count, 1.0) for name, value in pairs}
        means[f"prefix/{step + 1}"] = prefixes[step] / chains
    return means | {"tau_teacher_forced": 1.0 + sum(prefixes) / chains}


class _Chains:
    """The chains of one sequence over a paged cache of its own.

    Attributes:
        state_LD: what the target's lm_head reads.
    """

    def __init__(self, target: Target, head: DraftHead, token_L: Tensor, depths: int) -> None:
        self.target, self.head, self.depths = target, head, depths
        self.token_L = token_L
        rows = len(token_L)
        self.own = head.room(depths) + head.ahead  # rows that a chain may write
        layers = target.layers + head.cache_layers
        pages = rows + CHAINS * self.own
        self.cache = PagedKV(layers, pages, 1, dtype=target.dtype, device=target.device)
        plan = plan_batch([range(rows)], [0], [rows], 1, target.device)
        wanted = tuple(dict.fromkeys((target.state, *head.states)))
        states = target.capture(token_L, plan.positions, PagedContext.of(self.cache, plan), wanted)
        self.state_LD = states[target.state]
        next_L = next_tokens(token_L, plan.last_rows(), token_L[-1:], head.ahead)
        self.seen = head.observe(target, self.cache, plan, next_L, states, depths, _untimed)
        self.seen.settle()

    def logits(self, start_C: Tensor) -> Iterator[Tensor]:
        """Logits [C, U] of draft steps 0, 1, ... of the chains that start at these rows."""
        starts, rows = start_C.tolist(), len(self.token_L)
        pages = [
            [*range(row + 1), *range(rows + index * self.own, rows + (index + 1) * self.own)]
            for index, row in enumerate(starts)
        ]
        newest = [row + self.head.ahead for row in starts]
        where = Drafting(
            self.cache,
            lambda first, count, trees: plan_batch(
                pages, first, count, 1, self.token_L.device, trees
            ),
            newest,
            self.token_L[newest].tolist(),
            _untimed,
        )
        carry = self.seen.chains(start_C)
        drafts = self.head.drafts(self.target, where, carry, self.depths)
        following = next(drafts)
        for step in range(1, self.depths):
            yield following.logits_BU
            place = [min(row + step, rows - 1) for row in newest]  # past the end: predicts nothing
            following = drafts.send(self.token_L[place])
        yield following.logits_BU


def _untimed(part: str) -> AbstractContextManager[None]:
    return nullcontext()


def _compare(p_NV: Tensor, log_q_NU: Tensor, vocabulary_U: Tensor | None) -> Tensor:
    """KL, alpha and agreement [3, N]; q has chance 0 outside its vocabulary, and the KL is over that part alone."""
    q, choice, part = log_q_NU.exp(), log_q_NU.argmax(-1), p_NV
    if vocabulary_U is not None:
        choice, part = vocabulary_U[choice], p_NV[:, vocabulary_U]
    within = part / part.sum(-1, keepdim=True)
    kl = torch.special.xlogy(within, within).sum(-1) - (within * log_q_NU).sum(-1)
    agree = p_NV.argmax(-1) == choice
    return torch.stack([kl, torch.minimum(part, q).sum(-1), agree.float()])
