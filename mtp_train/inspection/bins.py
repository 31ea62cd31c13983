"""Counted lengths in a few bins with round edges. Knows nothing of what was counted or how it is drawn."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from dataclasses import dataclass
from itertools import pairwise

from mtp_train.page.scale import round_step

BINS = 16  # about as many, where bins are of equal width
SPREAD = 8  # lengths that span more than this ratio are binned by ratio


@dataclass(frozen=True)
class Bin:
    """Whole numbers from `low` to `high`, both within it."""

    low: int
    high: int
    count: int

    @property
    def name(self) -> str:
        if self.low == self.high:
            return f"{self.low:,}"
        return f"{self.low:,}\N{EN DASH}{self.high:,}"


def binned(counts: Counter[int]) -> list[Bin]:
    """Bins that cover all that was counted; of equal ratio where the lengths differ widely, else of equal width."""
    if not counts:
        return []
    low, high = min(counts), max(counts)
    edges = by_ratio(low, high) if high > SPREAD * max(low, 1) else by_width(low, high)
    sums = Counter[int]()
    for value, times in counts.items():
        sums[bisect_right(edges, value) - 1] += times
    return [Bin(a, b - 1, sums[index]) for index, (a, b) in enumerate(pairwise(edges))]


def by_width(low: int, high: int) -> list[int]:
    """Edges at multiples of a round number; the last one lies above `high`."""
    step = max(1, round(round_step(max(high - low, 1) / BINS)))
    first = low // step * step
    return list(range(first, high + step + 1, step))[: (high - first) // step + 2]


def by_ratio(low: int, high: int) -> list[int]:
    """Edges at powers of two and half way between them: 0, 1, 2, 3, 4, 6, 8, 12, 16, ..."""
    edges = sorted(
        {0, 1, *(edge for k in range(high.bit_length() + 1) for edge in (2**k, 3 * 2**k // 2))}
    )
    first = bisect_right(edges, low) - 1
    return edges[first : bisect_right(edges, high) + 1]
