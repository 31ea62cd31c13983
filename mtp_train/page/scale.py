"""Axes: from values to percentages of a plot, with round ticks. Knows nothing of what is drawn."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from mtp_train.page.figures import known


@dataclass(frozen=True)
class Scale:
    """A linear axis whose ends lie on ticks."""

    low: float
    high: float
    step: float

    def percent(self, value: float) -> float:
        """Where `value` lies between the ends, 0 to 100; outside them it is drawn at the end."""
        share = (value - self.low) / (self.high - self.low)
        return 100 * min(1.0, max(0.0, share))

    def ticks(self) -> list[tuple[float, str]]:
        """(value, label) from low to high."""
        digits = max(0, -math.floor(math.log10(self.step) + 1e-9))
        values = (
            self.low + self.step * i for i in range(round((self.high - self.low) / self.step) + 1)
        )
        return [(value, f"{value:,.{digits}f}") for value in values]


def fit(values: Iterable[float | None], zero: bool = False, parts: int = 4) -> Scale:
    """An axis that holds `values` in about `parts` round steps; `zero` starts it at nought, as bars must."""
    shown = [value for value in values if value is not None and known(value)] or [0.0, 1.0]
    low, high = (0.0 if zero else min(shown)), max(shown)
    step = round_step((high - low or abs(high) or 1.0) / parts)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return Scale(first * step, max(last, first + 1) * step, step)


def whole_steps(low: int, high: int, parts: int = 6) -> Scale:
    """An axis over whole numbers that ends where the data ends, on a tick or not."""
    step = max(1.0, round_step(max(high - low, 1) / parts))
    return Scale(low, max(high, low + 1), step)


def round_step(rough: float) -> float:
    """The smallest of 1, 2, 5 times a power of ten that is at least `rough`."""
    power = 10.0 ** math.floor(math.log10(rough))
    return next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough * (1 - 1e-9))
