"""Which stage of how many `mtp-train run` is at, and how long the rest will take."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

from mtp_train.core.progress import say, show_place


class Timetable:
    """The stages of one run and their expected seconds, scaled by how long the stages so far took.

    Args:
        expected: seconds of each stage where they were measured (`plan.stage_seconds`); without them no time is said.
    """

    def __init__(self, stages: Sequence[str], expected: Mapping[str, float]) -> None:
        self.stages = list(stages)
        self.expected = expected if set(stages) <= set(expected) else {}
        self._took: dict[str, float] = {}

    def run(self, stage: str, work: Callable[[], None]) -> None:
        """Do a stage's work, its place in the run shown before it and on its progress bars."""
        place = f"{self.stages.index(stage) + 1}/{len(self.stages)}"
        left = self.left()
        rest = f", about {clock(left)} left" if left is not None else ""
        say(f"run: stage {place}, {stage}{rest} ({', '.join(self.stages)})")
        began = time.perf_counter()
        with show_place(f"[{place}] "):
            work()
        self._took[stage] = time.perf_counter() - began

    def left(self) -> float | None:
        """Seconds of the stages that are not done."""
        if not self.expected:
            return None
        return self._pace() * sum(self.expected[s] for s in self.stages if s not in self._took)

    def _pace(self) -> float:
        """How much longer stages take here than expected; those found done say nothing."""
        ran = [
            stage for stage, seconds in self._took.items() if seconds > 0.2 * self.expected[stage]
        ]
        expected = sum(self.expected[stage] for stage in ran)
        return sum(self._took[stage] for stage in ran) / expected if expected else 1.0


def clock(seconds: float) -> str:
    """Seconds as minutes, where they are."""
    return f"{seconds:.0f} s" if seconds < 90 else f"{seconds / 60:.0f} min"
