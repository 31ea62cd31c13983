"""What a file gives: a row in its place, or the fault that stands there. Knows no file and no form."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Fault:
    """Why there is no row in this place.

    Attributes:
        of_file: it costs the file, or what is left of it: each such place is named.
    """

    reason: str
    of_file: bool = False


@dataclass(frozen=True)
class Row:
    """A value and where it stood."""

    place: str
    value: Any  # a JSON value, or the Fault that stands for it
