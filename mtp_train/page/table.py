"""A table of text. Knows no markup: a cell is text, and whoever writes it escapes it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

Row = tuple[str, ...]


@dataclass(frozen=True)
class Table:
    """`labels` leading columns are words; the rest are figures, set flush right."""

    title: str
    header: Row
    rows: Sequence[Row]
    labels: int = 1
    note: str = ""
