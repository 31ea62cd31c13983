"""Acceptance figures with the field's names, from the engine's own steps. Knows no engine and no report.

Definitions (vLLM's, see README): a *draft* is one verification step that had drafts.
    tau                 1 + accepted / drafts: tokens per step, the target's own token included
    per position i      steps whose drafts 0..i were all accepted / steps (unconditional)
    conditional i       the same / steps whose drafts 0..i-1 were all accepted
    acceptance rate     accepted / drafted tokens
Intervals are 95 % bootstrap intervals; prompts are resampled, not steps, since steps of one prompt go together.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from mtp_train.engine.sequences import Completion

RESAMPLES = 1000


def acceptance(
    completions: Sequence[Completion], categories: dict[str, str], temperature: float, drafts: int
) -> dict[str, Any]:
    """Figures over all completions and by category (key -> category)."""
    whole = _figures(completions, temperature, drafts)
    names = sorted({categories[completion.key] for completion in completions})
    by_name = {
        name: [completion for completion in completions if categories[completion.key] == name]
        for name in names
    }
    return whole | {
        "categories": {
            name: _figures(members, temperature, drafts) for name, members in by_name.items()
        }
    }


def _figures(completions: Sequence[Completion], temperature: float, drafts: int) -> dict[str, Any]:
    counts = count_steps(completions, drafts)
    point = _ratios(counts.sum(0, keepdims=True))
    rng = np.random.default_rng(0)
    picks = rng.integers(len(counts), size=(RESAMPLES, len(counts)))
    low, high = np.percentile(_ratios(counts[picks].sum(1)), [2.5, 97.5], axis=0)
    steps = counts[:, 0]
    return {
        "temperature": temperature,
        "prompts": len(completions),
        "tokens": sum(len(completion.tokens) for completion in completions),
        "drafts": int(steps.sum()),
        "tau": float(point[0, 0]),
        "tau_ci": [float(low[0]), float(high[0])],
        "tau_macro": float(np.mean(_ratios(counts[steps > 0])[:, 0])) if (steps > 0).any() else 1.0,
        "acceptance_rate": float((point[0, 0] - 1) / drafts),
        "per_position": point[0, 1:].tolist(),
        "per_position_ci": [[float(a), float(b)] for a, b in zip(low[1:], high[1:], strict=True)],
        "conditional": _conditional(point[0, 1:]).tolist(),
    }


def count_steps(completions: Sequence[Completion], drafts: int) -> np.ndarray:
    """Per completion: steps, then steps that accepted more than i drafts, i = 0 .. drafts-1 [prompts, 1 + drafts]."""
    table = np.zeros((len(completions), 1 + drafts))
    for row, completion in zip(table, completions, strict=True):
        accepted = np.array([step.accepted for step in completion.steps], dtype=np.int64)
        row[0] = len(accepted)
        row[1:] = [(accepted > position).sum() for position in range(drafts)]
    return table


def _ratios(counts: np.ndarray) -> np.ndarray:
    """tau and per-position acceptance of each row of counts [rows, 1 + drafts]."""
    per_position = counts[:, 1:] / np.maximum(counts[:, :1], 1)
    return np.concatenate([1 + per_position.sum(1, keepdims=True), per_position], axis=1)


def _conditional(per_position: np.ndarray) -> np.ndarray:
    before = np.concatenate([[1.0], per_position[:-1]])
    return np.divide(per_position, before, out=np.zeros_like(per_position), where=before > 0)
