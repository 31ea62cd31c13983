"""What timed runs say: medians with intervals, and in which of them nobody should believe. Runs nothing.

A unit is one group of prompts in one round. Schemes are compared unit by unit: the same prompts, minutes apart at most.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mtp_train.engine.engine import RunStats

SPREAD = (
    0.15  # of a ratio between rounds, or between wall and processor time; more is no measurement
)
OWN_CORE = 0.85  # processor time per wall time below which a single-threaded process would have waited for others
RESAMPLES = 1000


@dataclass(frozen=True)
class Timed:
    """One group of prompts completed once.

    Attributes:
        number, group: of the round, of the group in it.
        cpu: processor seconds of this process, all threads.
        drafts, accepted: verification steps that had drafts, and the drafts that they accepted.
        steps: of all sequences, those without drafts among them.
    """

    number: int
    group: int
    stats: RunStats
    cpu: float
    drafts: int
    accepted: int
    steps: int


def summed(runs: Mapping[int, Sequence[Timed]], device: str) -> dict[str, Any]:
    """`plain` and `speculative` by k, of the runs by k (0: plain decoding)."""
    ordered = {
        k: sorted(timed, key=lambda one: (one.number, one.group)) for k, timed in runs.items()
    }
    plain = ordered.pop(0)
    return {
        "plain": _rates(plain),
        "speculative": {
            str(k): _rates(timed) | _against(timed, plain, device) for k, timed in ordered.items()
        },
    }


def _rates(timed: Sequence[Timed]) -> dict[str, Any]:
    """Sums over all units, and the median unit's rate."""
    rate_n = _rate(timed)
    parts = sorted({part for one in timed for part in one.stats.seconds})
    return {
        "tokens_per_s": float(np.median(rate_n)),
        "tokens_per_s_ci": _median_interval(rate_n),
        "wall": sum(one.stats.wall for one in timed),
        "cpu": sum(one.cpu for one in timed),
        "tokens": sum(one.stats.tokens for one in timed),
        "steps": sum(one.stats.steps for one in timed),
        "seconds": {part: sum(o.stats.seconds.get(part, 0.0) for o in timed) for part in parts},
    }


def _against(timed: Sequence[Timed], plain: Sequence[Timed], device: str) -> dict[str, Any]:
    """A scheme's ratio to plain decoding, tokens per step, and what speaks against the ratio."""
    ratio_n = _rate(timed) / _rate(plain)
    cpu_n = _rate(timed, "cpu") / _rate(plain, "cpu")
    number_n = np.array([one.number for one in timed])
    by_round = [float(np.median(ratio_n[number_n == r])) for r in sorted(set(number_n.tolist()))]
    accepted, drafts = (sum(getattr(one, name) for one in timed) for name in ("accepted", "drafts"))
    steps = max(sum(one.steps for one in timed), 1)
    found = {
        "tau": 1 + accepted / max(drafts, 1),
        "tokens_per_step": 1 + accepted / steps,
        "running": steps / max(sum(one.stats.steps for one in timed), 1),
        "ratio": float(np.median(ratio_n)),
        "ratio_ci": _median_interval(ratio_n),
        "rounds": by_round,
        "cpu_ratio": float(np.median(cpu_n)),
    }
    shares = [one.cpu / one.stats.wall for one in (*timed, *plain)]
    return found | {"warnings": warnings(found, shares if device == "cpu" else ())}


def warnings(run: Mapping[str, Any], shares: Sequence[float]) -> list[str]:
    """Why a ratio is not to be believed; empty where nothing speaks against it.

    Args:
        shares: processor time per wall time of the runs; nothing where a GPU does the work.
    """
    found = []
    ratio, most, by_round = run["ratio"], run["tokens_per_step"], run["rounds"]
    if ratio > most:
        found.append(
            f"the ratio {ratio:.2f} exceeds the {most:.2f} tokens per step, which no schedule can"
        )
    spread = (max(by_round) - min(by_round)) / ratio
    if spread > SPREAD:
        ends = f"{min(by_round):.2f} to {max(by_round):.2f}"
        found.append(f"rounds disagree: {ends}, more than {SPREAD:.0%} of the median apart")
    if shares and abs(run["cpu_ratio"] / ratio - 1) > SPREAD:
        found.append(
            f"wall time says {ratio:.2f}, processor time {run['cpu_ratio']:.2f}: the machine was busy"
        )
    waited = float(np.median(shares)) if shares else 1.0
    if waited < OWN_CORE:
        found.append(
            f"the process had a processor for {waited:.0%} of the wall time: the machine was busy"
        )
    return found


def _rate(timed: Sequence[Timed], clock: str = "wall") -> np.ndarray:
    """Tokens per second of each unit."""
    return np.array(
        [
            one.stats.tokens / max(one.cpu if clock == "cpu" else one.stats.wall, 1e-9)
            for one in timed
        ]
    )


def _median_interval(value_n: np.ndarray) -> list[float]:
    """95 % bootstrap interval of the median."""
    rng = np.random.default_rng(0)
    drawn = rng.choice(value_n, size=(RESAMPLES, len(value_n)))
    return [float(bound) for bound in np.percentile(np.median(drawn, axis=1), [2.5, 97.5])]
