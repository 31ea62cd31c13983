"""Validation figures through the engine: its paged target and its head, in the dtype that serves. No training code.

Every chain that predicts tokens of an answer is followed with the answer's own tokens for its drafts. The chains of one
sequence share the pages of the verified rows before them, and each has pages of its own for the rows that it drafts:

    verified rows   0 .. p     page p holds row p (a page holds one row here)
    chain of row p  p+1 ..     pages of its own, in the places that the engine would overwrite

Modules of their own depth read all rows at once, as the engine's do (engine/propose.py).

Shapes: L tokens of one sequence, C chains, N rows that predict a token of the answer, D hidden width, V vocabulary,
U the head's.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from mtp_train.attention.paged import BatchPlan, PagedContext, PagedKV, plan_batch
from mtp_train.batches.align import answer_rows, next_tokens
from mtp_train.heads.base import DraftHead
from mtp_train.models.target import Target
from mtp_train.text.sources import Answer

CHAINS = 64  # that draft at once: their cached rows are gathered for each of them
ROWS = 512  # whose logits are held at once
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
    chains = _Chains(target, head, token_L, prompt, depths)
    outs = list(chains.outputs())
    sums = torch.zeros(depths, 4, dtype=torch.float64, device=target.device)
    agree_SL = torch.zeros(depths, rows, dtype=torch.bool, device=target.device)
    valid_SL = torch.zeros_like(agree_SL)
    goals, _ = answer_rows(prompt, rows, head.ahead)
    for begin in range(goals.start, goals.stop, ROWS):
        part = slice(begin, min(begin + ROWS, goals.stop))
        p_NV = torch.softmax(target.logits(chains.state_LD[part]).float(), dim=-1)
        for step, out_LD in enumerate(outs):
            first, source = _sources(prompt, rows, head.ahead + step, part)
            log_q = torch.log_softmax(head.logits(target, out_LD[source], step).float(), dim=-1)
            values = _compare(p_NV[first:], log_q, head.vocabulary)
            sums[step] += torch.cat([values, torch.ones_like(values[:1])]).double().sum(1)
            agree_SL[step, source], valid_SL[step, source] = values[2].bool(), True
    whole_L = valid_SL.all(0)
    prefix_S = (agree_SL.long().cumprod(0).bool() & whole_L).sum(1)
    return [*sums.flatten().tolist(), *map(float, prefix_S.tolist()), float(whole_L.sum())]


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

    def __init__(
        self, target: Target, head: DraftHead, token_L: Tensor, prompt: int, depths: int
    ) -> None:
        self.target, self.head, self.depths = target, head, depths
        self.token_L = token_L
        self.rows = len(token_L)
        self.first = max(prompt - 1 - head.ahead - depths + 1, 0)  # row of the first chain
        self.lag = min(head.depths, depths) - 1
        pages = self.rows + CHAINS * (depths - 1)
        layers = target.layers + head.cache_layers
        self.cache = PagedKV(layers, pages, 1, dtype=target.dtype, device=target.device)
        plan = plan_batch([range(self.rows)], [0], [self.rows], 1, target.device)
        wanted = tuple(dict.fromkeys((target.state, *head.states)))
        context = PagedContext.of(self.cache, plan)
        self.plan = plan
        self.states = target.capture(token_L, plan.positions, context, wanted)
        self.state_LD = self.states[target.state]

    def outputs(self) -> Iterator[Tensor]:
        """The head's outputs of draft steps 0, 1, ... [L, D], in the places of the rows where their chains start; rows
        that start no chain hold nothing.
        """
        out_LD = self.head.fuse(self.states)
        for step in range(self.lag + 1):
            out_LD = self._run(step, self._tokens(step), out_LD, self.plan)
            yield out_LD
        later = [
            self._drafted(list(range(begin, min(begin + CHAINS, self.rows))), out_LD)
            for begin in range(self.first, self.rows, CHAINS)
        ]
        for outs in zip(*later, strict=True):
            whole_LD = torch.zeros_like(out_LD)
            whole_LD[self.first :] = torch.cat(outs)
            yield whole_LD

    def _drafted(self, chain_C: list[int], out_LD: Tensor) -> list[Tensor]:
        """Outputs [C, D] of these chains at the steps after the last module's first."""
        state_CD = out_LD[chain_C]
        found = []
        drafted = self.depths - 1 - self.lag
        pages = []
        for index, row in enumerate(chain_C):
            own = self.rows + index * drafted
            pages.append([*range(row + 1), *range(own, own + drafted)])
        for step in range(self.lag + 1, self.depths):
            starts = [row + step - self.lag for row in chain_C]
            plan = plan_batch(pages, starts, [1] * len(chain_C), 1, self.token_L.device)
            token_C = self._tokens(step)[chain_C]
            state_CD = self._run(step, token_C, state_CD, plan)
            found.append(state_CD)
        return found

    def _run(self, step: int, token_T: Tensor, state_TD: Tensor, plan: BatchPlan) -> Tensor:
        context = PagedContext.of(self.cache, plan)
        embedding_TD = self.head.embed(self.target, token_T)
        position_T = plan.positions + min(step, self.lag)
        return self.head.at(step)(embedding_TD, state_TD, position_T, context)

    def _tokens(self, step: int) -> Tensor:
        """Token x[p+ahead+step] of each row p [L]; rows without one get some other token and predict nothing."""
        token_L = self.token_L
        for _ in range(self.head.ahead + step):
            token_L = next_tokens(token_L, self.plan.last_rows(), token_L[-1:])
        return token_L


def _sources(prompt: int, rows: int, ahead: int, part: slice) -> tuple[int, slice]:
    """How many of the goals `part` have no row that predicts them from `ahead` before, and the others' rows."""
    goals, sources = answer_rows(prompt, rows, ahead)
    begin = min(max(part.start, goals.start), part.stop)
    shift = sources.start - goals.start
    return begin - part.start, slice(begin + shift, part.stop + shift)


def _compare(p_NV: Tensor, log_q_NU: Tensor, vocabulary_U: Tensor | None) -> Tensor:
    """KL, alpha and agreement [3, N]; q has chance 0 outside its vocabulary, and the KL is over that part alone."""
    q, choice, part = log_q_NU.exp(), log_q_NU.argmax(-1), p_NV
    if vocabulary_U is not None:
        choice, part = vocabulary_U[choice], p_NV[:, vocabulary_U]
    within = part / part.sum(-1, keepdim=True)
    kl = torch.special.xlogy(within, within).sum(-1) - (within * log_q_NU).sum(-1)
    agree = p_NV.argmax(-1) == choice
    return torch.stack([kl, torch.minimum(part, q).sum(-1), agree.float()])
