"""How text is turned down: by a record, or, deep inside one row's parts, by an exception. Knows nothing else."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Refusal:
    """Why a row, a conversation or a record can't be used."""

    reason: str


class RowRefused(ValueError):
    """Raised inside the parsing of one row, caught by the source that reads it.

    Args:
        reason: the same for all rows with the same fault: rows are counted by it.
        detail: of this row.
    """

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(reason)
        self.reason = reason
        self.detail = detail
