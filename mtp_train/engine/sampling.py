"""The sampling rules: logits to probabilities and draws. Pure tensor arithmetic.

Knows no model, no head, no batch of requests; who occurs in a text is given as tensors of flags.

The rules and their order are those of vLLM 0.32 (`vllm/v1/sample/sampler.py`, `Sampler.forward` and `.sample`;
`logits_processor/builtin.py`; `ops/topk_topp_sampler.py`, `apply_top_k_top_p_pytorch`): repetition penalty,
temperature, min-p, top-k, top-p. With speculation vLLM has no min-p; here it applies as without.

Shapes: B sequences, R rows of each, N drafts, V vocabulary, U a head's own vocabulary; `...` any dimensions.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mtp_train.core.errors import UserError

# One generator for the batch, or one per row: a row's draws are then its own, whatever the batch it runs in.
Randomness = torch.Generator | Sequence[torch.Generator]

COLDEST = 1e-5  # vLLM takes temperatures below this for greedy; logits divided by them overflow
CANDIDATES = 512  # most nuclei of a language model lie within; on a CPU, sorting 49,152 logits costs ten times more


@dataclass(frozen=True)
class Sampling:
    """How tokens are chosen.

    Attributes:
        temperature: divides the logits; 0 is greedy, which no filter changes.
        top_k: only the k most likely tokens, and those as likely as the last of them (0: off).
        top_p: only the most likely tokens that together have this chance, and those as likely as the last of them
            (1: off).
        min_p: only tokens at least this times as likely as the most likely one (0: off).
        repetition_penalty: divides positive logits of tokens that occur in prompt or output, multiplies negative
            ones (1: off). Greedy choices heed it too.

    Raises:
        UserError: a value outside its range.
    """

    temperature: float = 0.0
    seed: int = 0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0

    def __post_init__(self) -> None:
        warm = math.isfinite(self.temperature) and self.temperature >= COLDEST
        _demand(
            self.temperature == 0 or warm,
            f"a temperature must be 0, or {COLDEST} or more",
            self.temperature,
            "use 0 for greedy decoding",
        )
        _demand(self.top_k >= 0, "top_k must be 0 or more", self.top_k, "use 0 to leave it out")
        _demand(
            0 < self.top_p <= 1, "top_p must lie in (0, 1]", self.top_p, "use 1 to leave it out"
        )
        _demand(
            0 <= self.min_p <= 1, "min_p must lie in [0, 1]", self.min_p, "use 0 to leave it out"
        )
        _demand(
            math.isfinite(self.repetition_penalty) and self.repetition_penalty > 0,
            "repetition_penalty must be above 0",
            self.repetition_penalty,
            "use 1 to leave it out",
        )

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    @property
    def plain(self) -> bool:
        """No filter and no penalty: temperature alone."""
        return (self.top_k, self.top_p, self.min_p, self.repetition_penalty) == (0, 1, 0, 1)


def _demand(holds: bool, rule: str, received: object, remedy: str) -> None:
    if not holds:
        raise UserError(rule, received, remedy)


@dataclass(frozen=True)
class Rules:
    """The sampling rules of a batch, one per sequence. What needs none of a rule's work is known on the host."""

    samplings: tuple[Sampling, ...]
    greedy_B: Tensor  # bool
    temperature_B: Tensor  # 1 where greedy
    top_k_B: Tensor  # int64
    top_p_B: Tensor
    min_p_B: Tensor
    penalty_B: Tensor

    @staticmethod
    def of(samplings: Sequence[Sampling], device: torch.device) -> Rules:
        values = [
            (s.temperature or 1.0, s.top_k, s.top_p, s.min_p, s.repetition_penalty, s.greedy)
            for s in samplings
        ]
        columns = torch.tensor(values, dtype=torch.float32).T.contiguous().to(device)
        temperature_B, top_k_B, top_p_B, min_p_B, penalty_B, greedy_B = columns
        return Rules(
            tuple(samplings),
            greedy_B.bool(),
            temperature_B,
            top_k_B.long(),
            top_p_B,
            min_p_B,
            penalty_B,
        )

    @property
    def greedy(self) -> bool:
        """All sequences are greedy."""
        return all(sampling.greedy for sampling in self.samplings)

    @property
    def penalised(self) -> bool:
        """Some sequence has a repetition penalty: `seen` must be given."""
        return any(sampling.repetition_penalty != 1 for sampling in self.samplings)

    def logits(self, logits: Tensor, seen: Tensor | None = None) -> Tensor:
        """The logits [B, ..., V] that greedy choices are made by, penalties applied; the input itself without any.

        seen: bool [B, ..., V], which tokens occur before the row's own.
        """
        if not self.penalised:
            return logits
        assert seen is not None, "a repetition penalty needs to know what has been seen"
        return penalise(logits.float(), seen, _beside(self.penalty_B, logits))

    def probabilities(self, logits: Tensor, seen: Tensor | None = None) -> Tensor:
        """The distribution that each row's token is drawn from, float32 [B, ..., V]; greedy rows are one-hot."""
        logits = self.logits(logits, seen)
        if self.greedy:
            return one_hot(logits)
        scaled = logits.float() / _beside(self.temperature_B, logits)
        p = torch.softmax(self._filtered(scaled), dim=-1)
        return self._greedy_rows(p, logits)

    def draft_probabilities(self, logits: Tensor) -> Tensor:
        """The distribution that drafts are drawn from, float32 [B, ..., U]: temperature alone; one-hot if greedy."""
        if self.greedy:
            return one_hot(logits)
        p = torch.softmax(logits.float() / _beside(self.temperature_B, logits), dim=-1)
        return self._greedy_rows(p, logits)

    def _filtered(self, scaled: Tensor) -> Tensor:
        """-inf in place of the logits [B, ..., V] that some filter leaves out."""
        sampled = [sampling for sampling in self.samplings if not sampling.greedy]
        if any(sampling.min_p for sampling in sampled):
            scaled = keep_min_p(scaled, _beside(self.min_p_B, scaled))
        if any(sampling.top_k for sampling in sampled):
            most = max(sampling.top_k for sampling in sampled)
            scaled = keep_top_k(scaled, _beside(self.top_k_B, scaled), most)
        if any(sampling.top_p < 1 for sampling in sampled):
            scaled = keep_top_p(scaled, _beside(self.top_p_B, scaled))
        return scaled

    def _greedy_rows(self, p: Tensor, logits: Tensor) -> Tensor:
        if not any(sampling.greedy for sampling in self.samplings):
            return p
        return torch.where(_beside(self.greedy_B, p), one_hot(logits), p)


def penalise(logits: Tensor, seen: Tensor, penalty: Tensor) -> Tensor:
    """Logits of seen tokens: positive ones divided by the penalty, negative ones multiplied (arXiv 1909.05858, 4.1)."""
    return torch.where(seen, torch.where(logits > 0, logits / penalty, logits * penalty), logits)


def keep_min_p(logits: Tensor, min_p: Tensor) -> Tensor:
    """-inf for tokens less likely than `min_p` times the most likely one (arXiv 2407.01082)."""
    p = torch.softmax(logits, dim=-1)
    return logits.masked_fill(p < min_p * p.amax(dim=-1, keepdim=True), -math.inf)


def keep_top_k(logits: Tensor, top_k: Tensor, most: int) -> Tensor:
    """-inf for tokens below the k-th most likely; those level with it stay. 0 keeps all.

    most: the largest k, known on the host.
    """
    most = min(most, logits.shape[-1])
    best = logits.topk(most, dim=-1).values
    at = (top_k.clamp(1, most) - 1).expand(*best.shape[:-1], 1)
    least = best.gather(-1, at).masked_fill(top_k == 0, -math.inf)
    return logits.masked_fill(logits < least, -math.inf)


def keep_top_p(logits: Tensor, top_p: Tensor) -> Tensor:
    """-inf for tokens that others, all more likely, have a chance of p without (arXiv 1904.09751, 3.1). 1 keeps all.

    Equally likely tokens stay or go together; vLLM drops any of them.
    """
    rows_NV = logits.reshape(-1, logits.shape[-1])
    top_p_N = top_p.expand(*logits.shape[:-1], 1).flatten()
    candidates = CANDIDATES if logits.device.type == "cpu" else logits.shape[-1]
    least_N = _least_of_nucleus(rows_NV, top_p_N, candidates)
    return logits.masked_fill(logits < least_N.view(*logits.shape[:-1], 1), -math.inf)


def _least_of_nucleus(logits_NV: Tensor, top_p_N: Tensor, candidates: int) -> Tensor:
    """The smallest logit that stays in each row [N], sought among the best candidates first.

    Asking whether they were enough waits for the device: where that matters, let all be candidates.
    """
    count = min(candidates, logits_NV.shape[1])
    best_NC = logits_NV.topk(count, dim=1).values
    p_NC = torch.exp(best_NC - logits_NV.logsumexp(dim=1, keepdim=True))
    mass_NC = p_NC.cumsum(dim=1)
    last_N1 = ((mass_NC - p_NC) < top_p_N.unsqueeze(1)).sum(dim=1, keepdim=True) - 1
    least_N = best_NC.gather(1, last_N1).squeeze(1).masked_fill(top_p_N >= 1, -math.inf)
    if count < logits_NV.shape[1]:
        short_N = (mass_NC[:, -1] < top_p_N) & (top_p_N < 1)
        if short_N.any():
            least_N[short_N] = _least_of_nucleus(
                logits_NV[short_N], top_p_N[short_N], candidates * 16
            )
    return least_N


def best(logits: Tensor) -> Tensor:
    """The argmax of each row [...]: `max` finds it in a sixth of `argmax`'s time on bfloat16 rows of the CPU."""
    return logits.max(dim=-1).indices


def one_hot(logits: Tensor) -> Tensor:
    """All chance on the argmax, float32, shaped as `logits` [..., V]."""
    p = torch.zeros_like(logits, dtype=torch.float32)
    return p.scatter_(-1, logits.argmax(dim=-1, keepdim=True), 1.0)


def seen_tokens(tokens: Sequence[Sequence[int]], vocabulary: int, device: torch.device) -> Tensor:
    """Which tokens occur in each sequence, bool [B, V]."""
    seen_BV = torch.zeros(len(tokens), vocabulary, dtype=torch.bool, device=device)
    flat = [at * vocabulary + token for at, row in enumerate(tokens) for token in row]
    seen_BV.view(-1)[torch.tensor(flat, dtype=torch.int64, device=device)] = True
    return seen_BV


def seen_with_drafts(seen_BV: Tensor, token_BN: Tensor, ancestors_BNN: Tensor) -> Tensor:
    """Which tokens occur before the choice at each verified row, bool [B, N+1, V]: memory of that size.

    Row 0 is the root's, after the known tokens; row 1+i has draft i and those above it beside them.

    ancestors_BNN: bool, entry [b, i, j] says that draft j is i or above it; for a chain the lower triangle.
    """
    seen_BRV = seen_BV.unsqueeze(1).repeat(1, token_BN.shape[1] + 1, 1)
    own_BN1, other_B1N = token_BN.unsqueeze(2), token_BN.unsqueeze(1)
    path_BNN = torch.where(ancestors_BNN, other_B1N, own_BN1)  # no token twice with two flags
    seen_BRV[:, 1:].scatter_(2, path_BNN, True)
    return seen_BRV


def draw(weights: Tensor, random: Randomness, rows: Sequence[int] | None = None) -> Tensor:
    """One index per row, with chance proportional to `weights` [..., V] -> [...].

    The exponential race: argmax of w/e with e ~ Exp(1) is index i with chance w_i / sum(w).

    rows: how many rows of each sequence of weights [B, R, V] are wanted; the others take nothing of its randomness.
    """
    race = torch.ones_like(weights)
    if rows is None or isinstance(random, torch.Generator):
        parts = list(_parts(race, random))
    else:
        parts = [
            (part[:count], generator)
            for (part, generator), count in zip(_parts(race, random), rows, strict=True)
        ]
    for part, generator in parts:
        part.exponential_(generator=generator)
    return (weights / race).argmax(dim=-1)


def uniform_like(values: Tensor, random: Randomness) -> Tensor:
    """Uniform draws from [0, 1), shaped as `values` [B, ...]."""
    drawn = torch.empty_like(values)
    for part, generator in _parts(drawn, random):
        part.uniform_(generator=generator)
    return drawn


def _parts(values: Tensor, random: Randomness) -> Iterator[tuple[Tensor, torch.Generator]]:
    """What each generator fills: all of `values`, or a row each."""
    if isinstance(random, torch.Generator):
        return iter([(values, random)])
    return zip(values, random, strict=True)


def _beside(value_B: Tensor, logits: Tensor) -> Tensor:
    """A value per sequence, shaped to go with `logits` [B, ..., V]."""
    return value_B.view(-1, *(1,) * (logits.dim() - 1))
