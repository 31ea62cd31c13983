"""Progress bars with time left, on standard error; one line per stage in logs. Knows no stage."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tqdm import tqdm

_place = ""  # of the stage in a whole run, before the name of every bar


@contextmanager
def show_place(place: str) -> Iterator[None]:
    """Put `place` before the name of every bar in this block."""
    global _place
    _place = place
    try:
        yield
    finally:
        _place = ""


def progress(
    total: int | None, what: str, unit: str, *, initial: int = 0, shown: bool = True
) -> tqdm[Any]:
    """A bar that shows rate and time left; on a file instead of a terminal it prints a line now and then."""
    interval = 0.2 if sys.stderr.isatty() else 15.0
    return tqdm(
        total=total,
        desc=_place + what,
        unit=unit,
        initial=initial,
        disable=not shown,
        mininterval=interval,
        dynamic_ncols=True,
        unit_scale=(total or 0) > 20_000,
    )


def say(message: str) -> None:
    """A line to the person who runs the stage."""
    tqdm.write(message, file=sys.stderr)
