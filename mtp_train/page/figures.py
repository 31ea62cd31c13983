"""How a number is written. Knows nothing of what the number means."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

MISSING = "\N{EM DASH}"


def known(value: Any) -> bool:
    """Whether there is a number to show: neither absent nor infinite nor undefined."""
    return isinstance(value, int | float) and math.isfinite(value)


def figure(value: float | None, digits: int = 3) -> str:
    """A measurement with a fixed number of decimals, so that columns align."""
    if value is None or not known(value):
        return MISSING
    return f"{value:,.{digits}f}".replace("-", "\N{MINUS SIGN}")


def small(value: float | None) -> str:
    """A number of unknown magnitude (a logit gap), to three significant digits."""
    return f"{value:.3g}" if value is not None and known(value) else MISSING


def scientific(value: float | None) -> str:
    """A number that falls by orders of magnitude down its column."""
    return f"{value:.2e}" if value is not None and known(value) else MISSING


def count(value: int | None) -> str:
    return MISSING if value is None else f"{value:,}"


def rounded(value: int) -> str:
    """A bound of a bin, short enough for an axis: 256, 1k (1,000 or 1,024), 2.5k, 1M."""
    base = 1024 if value % 1024 == 0 else 1000
    power = 2 if value >= base**2 else 1 if value >= base else 0
    return f"{value / base**power:g}{('', 'k', 'M')[power]}"


def signed(value: float, digits: int = 3) -> str:
    """A difference; its sign is always shown."""
    return ("+" if value >= 0 else "") + figure(value, digits)


def interval(bounds: Sequence[float] | None, digits: int = 3) -> str:
    if not bounds:
        return MISSING
    return f"[{figure(bounds[0], digits)}, {figure(bounds[1], digits)}]"


def times(ratio: float | None) -> str:
    """A speed ratio: 1.18 is written with a multiplication sign."""
    written = figure(ratio, 2)
    return written if written == MISSING else written + "\N{MULTIPLICATION SIGN}"


def duration(seconds: float) -> str:
    """Seconds as a person says them: `42.0 s`, `3 min 05 s`, `1 h 02 min`."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    return f"{minutes // 60} h {minutes % 60:02d} min"


def anything(value: Any) -> str:
    """A value whose meaning this page does not know, such as a line of provenance."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list | tuple):
        return ", ".join(map(anything, value)) or MISSING
    if value is None:
        return MISSING
    if isinstance(value, int):
        return count(value)
    return small(value) if isinstance(value, float) else str(value)
