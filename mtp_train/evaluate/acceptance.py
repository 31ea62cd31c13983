"""Acceptance figures with the field's names, from the engine's own steps. Knows no engine and no report.

Definitions (vLLM's, see README): a *draft* is one verification step that had drafts.
    tau                 1 + accepted / drafts: tokens per draft, the target's own token included
    tokens per step     1 + accepted / steps, those that had no drafts among them: equal to tau where every step drafts
    per position i      steps whose drafts 0..i were all accepted / steps (unconditional)
    conditional i       the same / steps whose drafts 0..i-1 were all accepted
    acceptance rate     accepted / drafted tokens
    alpha expected i    mean of sum_x min(p(x), q(x)) over the steps that reached position i
Intervals are 95 % bootstrap intervals; conversations are resampled, not steps, since steps of one prompt go together,
and so do the turns of one conversation.

Shapes: n completions, K drafts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from mtp_train.engine.sequences import Completion

RESAMPLES = 1000
EDGES = (0, 256, 1024, 4096, 16384, 65536, 262144, 1048576)  # of the ranges of tokens


@dataclass(frozen=True)
class Turn:
    """Where a completion stands in its conversation."""

    conversation: str
    number: int  # from 1


def acceptance(
    completions: Sequence[Completion],
    categories: Mapping[str, str],
    temperature: float,
    drafts: int,
    turns: Mapping[str, Turn] | None = None,
) -> dict[str, Any]:
    """Figures over all completions, by category, by turn, by prompt length and by place in the output.

    Args:
        categories: key -> category.
        turns: key -> turn; completions without one are a conversation each.
    """
    places = [(turns or {}).get(item.key) or Turn(item.key, 1) for item in completions]
    whole = Table.of(completions, places, drafts)
    return {
        "temperature": temperature,
        **figures(whole),
        **_expected(completions, places, drafts),
        "by_turn": [
            {"turn": number, **_short(whole.rows(np.array([p.number == number for p in places])))}
            for number in sorted({place.number for place in places})
        ],
        "by_prompt_length": _by_prompt_length(whole, completions),
        "by_output_position": _by_output_position(completions, places, drafts),
        "categories": {
            name: {"temperature": temperature}
            | figures(whole.rows(np.array([categories[c.key] == name for c in completions])))
            for name in sorted({categories[item.key] for item in completions})
        },
    }


def figures(table: Table) -> dict[str, Any]:
    """The record of one group of completions, each figure with what stands behind it."""
    low, high = table.intervals()
    drafts = table.drafts
    point = _ratios(table.sums())[0]
    names = [("tau", 0), ("tokens_per_step", 1), ("acceptance_rate", 2)]
    lists = [("per_position", slice(3, 3 + drafts)), ("conditional", slice(3 + drafts, None))]
    found: dict[str, Any] = table.counts()
    for name, at in names:
        found |= {name: float(point[at]), f"{name}_ci": [float(low[at]), float(high[at])]}
    macro, bounds = table.macro()
    found |= {"tau_macro": macro, "tau_macro_ci": bounds}
    for name, part in lists:
        pairs = zip(low[part].tolist(), high[part].tolist(), strict=True)
        found |= {name: point[part].tolist(), f"{name}_ci": [list(pair) for pair in pairs]}
    return found


def _short(table: Table) -> dict[str, Any]:
    """The record of a part, without what only a whole needs."""
    kept = ("prompts", "tokens", "drafts", "tau", "tau_ci", "per_position", "per_position_ci")
    found = figures(table)
    return {name: found[name] for name in kept}


def _by_prompt_length(whole: Table, completions: Sequence[Completion]) -> list[dict[str, Any]]:
    lengths = np.array([len(item.prompt) for item in completions], dtype=np.int64)
    return [
        {"from": low, "to": high, **_short(whole.rows(inside))}
        for low, high in pairwise(EDGES)
        if (inside := (lengths >= low) & (lengths < high)).any()
    ]


def _by_output_position(
    completions: Sequence[Completion], places: Sequence[Turn], drafts: int
) -> list[dict[str, Any]]:
    """A step belongs where its first token stands in the output."""
    found = []
    for low, high in pairwise(EDGES):
        part = Table.of(completions, places, drafts, low, high)
        part = part.rows(part.token_n > 0)
        if len(part.token_n):
            found.append({"from": low, "to": high, **_short(part)})
    return found


def _expected(
    completions: Sequence[Completion], places: Sequence[Turn], drafts: int
) -> dict[str, Any]:
    """alpha expected per position, where the engine measured it."""
    count = np.zeros((len(completions), drafts))
    total = np.zeros_like(count)
    for row, completion in enumerate(completions):
        for step in completion.steps:
            count[row, : len(step.alphas)] += 1
            total[row, : len(step.alphas)] += step.alphas
    if not count.any():
        return {}

    def means(both: np.ndarray) -> np.ndarray:
        return both[:, drafts:] / np.maximum(both[:, :drafts], 1)

    both = np.concatenate([count, total], axis=1)
    low, high = _interval(both, [place.conversation for place in places], means)
    return {
        "alpha_expected": {
            "per_position": means(both.sum(0, keepdims=True))[0].tolist(),
            "per_position_ci": [list(p) for p in zip(low.tolist(), high.tolist(), strict=True)],
            "steps": count.sum(0).astype(int).tolist(),
        }
    }


@dataclass(frozen=True)
class Table:
    """What is counted of each completion."""

    step_nC: (
        np.ndarray
    )  # steps, then steps that accepted more than i drafts, i = 0 .. K-1 [n, 1 + K]
    every_n: np.ndarray  # steps, those without drafts among them
    node_n: np.ndarray  # drafted tokens
    token_n: np.ndarray  # tokens of the output
    conversation: tuple[str, ...]

    @classmethod
    def of(
        cls,
        completions: Sequence[Completion],
        places: Sequence[Turn],
        drafts: int,
        low: int = 0,
        high: int | None = None,
    ) -> Table:
        """Of the steps and tokens in places low .. high of the outputs (high None: to the end)."""
        token_n = [min(len(c.tokens), high or len(c.tokens)) - low for c in completions]
        rows = [_steps(completion, drafts, low, high) for completion in completions]
        step_nC = np.array([row for row, _ in rows]).reshape(len(rows), 1 + drafts)
        # Where steps without drafts stand is not kept: they count in no part of an output.
        undrafted = [item.undrafted * (low == 0 and high is None) for item in completions]
        return cls(
            step_nC,
            step_nC[:, 0] + np.array(undrafted, dtype=float),
            np.array([nodes for _, nodes in rows]),
            np.maximum(np.array(token_n, dtype=np.int64), 0),
            tuple(place.conversation for place in places),
        )

    @property
    def drafts(self) -> int:
        return self.step_nC.shape[1] - 1

    def rows(self, keep_n: np.ndarray) -> Table:
        names = tuple(np.array(self.conversation, dtype=object)[keep_n])
        step_nC, every_n = self.step_nC[keep_n], self.every_n[keep_n]
        return Table(step_nC, every_n, self.node_n[keep_n], self.token_n[keep_n], names)

    def counts(self) -> dict[str, Any]:
        return {
            "prompts": len(self.token_n),
            "conversations": len(set(self.conversation)),
            "tokens": int(self.token_n.sum()),
            "drafts": int(self.step_nC[:, 0].sum()),
            "steps": int(self.every_n.sum()),
        }

    def sums(self) -> np.ndarray:
        """[1, 3 + K]: all steps, drafted tokens, then the columns of `step_nC`."""
        return self._columns().sum(0, keepdims=True)

    def intervals(self) -> tuple[np.ndarray, np.ndarray]:
        return _interval(self._columns(), self.conversation, _ratios)

    def macro(self) -> tuple[float, list[float]]:
        """Mean of the completions' own tau, those without a step left out, and its interval."""
        drafted = self.step_nC[:, 0] > 0
        if not drafted.any():
            return 1.0, [1.0, 1.0]
        tau_n = _ratios(self._columns()[drafted])[:, :1]
        names = self.rows(drafted).conversation
        both = np.concatenate([np.ones_like(tau_n), tau_n], axis=1)
        low, high = _interval(both, names, lambda sums: sums[:, 1:] / np.maximum(sums[:, :1], 1))
        return float(tau_n.mean()), [float(low[0]), float(high[0])]

    def _columns(self) -> np.ndarray:
        return np.concatenate([self.every_n[:, None], self.node_n[:, None], self.step_nC], axis=1)


def count_steps(completions: Sequence[Completion], drafts: int) -> np.ndarray:
    """Per completion: steps, then steps that accepted more than i drafts, i = 0 .. drafts-1 [prompts, 1 + drafts]."""
    rows = [_steps(completion, drafts, 0, None)[0] for completion in completions]
    return np.array(rows).reshape(len(rows), 1 + drafts)


def _steps(
    completion: Completion, drafts: int, low: int, high: int | None
) -> tuple[np.ndarray, float]:
    """The counts [1 + K] of the steps whose first token stands in low .. high of the output, and their drafted tokens.

    The output's first token is the prefill's; each step adds the accepted drafts and one more.
    """
    accepted = np.array([step.accepted for step in completion.steps], dtype=np.int64)
    nodes = np.array([s.nodes or len(s.drafted) for s in completion.steps], dtype=float)
    start = 1 + np.concatenate([[0], np.cumsum(accepted + 1)])[:-1]
    here = (start >= low) & (start < (np.inf if high is None else high))
    deep = [(accepted[here] > position).sum() for position in range(drafts)]
    return np.array([here.sum(), *deep], dtype=float), float(nodes[here].sum())


def weights(size: int) -> np.ndarray:
    """How often each of `size` units is drawn in each of the bootstrap's samples [RESAMPLES, size]."""
    rng = np.random.default_rng(0)
    return rng.multinomial(size, np.full(size, 1 / max(size, 1)), size=RESAMPLES).astype(float)


def by_unit(rows_nC: np.ndarray, units: Sequence[str]) -> np.ndarray:
    """The rows of each unit added up [units, C]."""
    index = {name: at for at, name in enumerate(dict.fromkeys(units))}
    summed = np.zeros((len(index), rows_nC.shape[1]))
    np.add.at(summed, [index[name] for name in units], rows_nC)
    return summed


def _interval(
    rows_nC: np.ndarray, units: Sequence[str], statistic: Callable[[np.ndarray], np.ndarray]
) -> tuple[np.ndarray, np.ndarray]:
    """Bounds of a statistic of sums [samples, C] -> [samples, F], with units resampled."""
    summed = by_unit(rows_nC, units)
    low, high = np.percentile(statistic(weights(len(summed)) @ summed), [2.5, 97.5], axis=0)
    return low, high


def _ratios(sum_nC: np.ndarray) -> np.ndarray:
    """tau, tokens per step, acceptance rate, per position and conditional acceptance of sums [rows, 3 + K] ->
    [rows, 3 + 2 K].
    """
    every, nodes, steps, deep = sum_nC[:, :1], sum_nC[:, 1:2], sum_nC[:, 2:3], sum_nC[:, 3:]
    accepted = deep.sum(1, keepdims=True)
    tau = 1 + accepted / np.maximum(steps, 1)
    before = np.concatenate([steps, deep[:, :-1]], axis=1)
    conditional = np.divide(deep, before, out=np.zeros_like(deep), where=before > 0)
    per_step = 1 + accepted / np.maximum(every, 1)
    rate = accepted / np.maximum(nodes, 1)
    return np.concatenate([tau, per_step, rate, deep / np.maximum(steps, 1), conditional], axis=1)
