"""Several ranks' answers to one set, in files of their own while they work and in one when they are done.

    set.jsonl                  what is there: of an earlier start, in the end everything in order
    set.rank-0.journal ...     what each rank has added since

A rank that is killed loses the line it was writing. Whoever starts next, on however many ranks, gathers the journals
first and goes on with what is missing. Knows not what the rows say.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from mtp_train.core.dist import Ranks
from mtp_train.core.owned import atomic_path, remove_file
from mtp_train.dialogue.journal import Journal, read_row

REST = ".rank-others.journal"


class SharedJournal:
    """What one rank sees: the rows that all ranks began with, and its own.

    Opening and finishing are meetings: every rank opens the same journals in the same order.
    """

    def __init__(self, path: Path, ranks: Ranks) -> None:
        self.path = path
        self.ranks = ranks
        if ranks.main:
            gather(path)
        ranks.wait()
        self.before = Journal(path)
        # Ranks that hold one target together do the same work; one of them keeps it.
        own = path.with_suffix(f".rank-{ranks.rank}.journal")
        self._scratch = None if ranks.leader else TemporaryDirectory()
        self._own = Journal(Path(self._scratch.name) / own.name if self._scratch else own)

    def __contains__(self, key: str) -> bool:
        return key in self._own or key in self.before

    def __len__(self) -> int:
        return len(self.before) + len(self._own)

    def append(self, row: dict[str, Any]) -> None:
        self._own.append(row)

    def row(self, key: str) -> dict[str, Any]:
        return (self._own if key in self._own else self.before).row(key)

    def close(self) -> None:
        self._own.close()
        self.before.close()
        if self._scratch:
            self._scratch.cleanup()

    def finish(self, order: Iterable[str]) -> None:
        """Put all ranks' rows into the one file, in the order of these keys. Rows with other keys stay beside it."""
        self.close()
        self.ranks.wait()
        if self.ranks.main:
            gather(self.path, order)
        self.ranks.wait()


def gather(path: Path, order: Iterable[str] | None = None) -> None:
    """Put the journals beside `path` into it. A kill in between leaves rows in both places: a key counts once.

    order: of the file's rows; others are kept as a journal, for when they are asked for again.
    """
    parts = sorted(path.parent.glob(f"{path.stem}.rank-*.journal"))
    if path.is_file() and not parts:
        return
    lines: dict[str, bytes] = {}
    for part in [path, *parts]:
        lines |= dict(_lines(part))
    kept = list(lines) if order is None else [key for key in order if key in lines]
    others = set(lines) - set(kept)
    rest = path.with_suffix(REST)
    for place, keys in ((rest, [key for key in lines if key in others]), (path, kept)):
        if keys or place == path:
            with atomic_path(place) as temporary:
                temporary.write_bytes(b"".join(lines[key] for key in keys))
    for part in parts:
        if part != rest or not others:
            remove_file(part)


def read_rows(path: Path) -> Iterator[dict[str, Any]]:
    """The rows of a finished file."""
    with open(path, "rb") as file:
        for line in file:
            yield read_row(line)


def _lines(path: Path) -> Iterator[tuple[str, bytes]]:
    """A file's rows by key, as they stand there."""
    if not path.is_file():
        return
    journal = Journal(path)
    for key in journal:
        yield key, journal.line(key)
    journal.close()
