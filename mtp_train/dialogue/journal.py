"""Answers on disk while a set is being answered: one line each, found by key. Knows not what they say.

A line is whole or it is not there: what a kill cut short is dropped when the journal is opened again. Each line ends
with a checksum of what stands before it, so that a byte that changed on disk is no answer: its key is answered again.
Lines without one, as earlier versions wrote them, are taken as they are. Memory holds a key and an offset per answer,
never the answers.
"""

from __future__ import annotations

import json
import re
import zlib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mtp_train.core.owned import move_file
from mtp_train.core.progress import say

CHECK = "check"
SEALED = re.compile(rb'(?P<body>.*), "check": "(?P<sum>[0-9a-f]{8})"}\n', re.DOTALL)


class Journal:
    """An append-only file of rows {"id", "finish", ...}.

    Args:
        done: the finished file that the journal becomes in the end. Where a run was killed after this set was done,
            it is the journal again. None: the journal is that file itself.
    """

    def __init__(self, path: Path, done: Path | None = None) -> None:
        self.path = path
        if done is not None and not path.is_file() and done.is_file():
            move_file(done, path)
        self._file = open(path, "a+b")  # noqa: SIM115  (open as long as the journal is)
        self._offsets: dict[str, int] = {}
        self.finishes: Counter[str] = Counter()  # how the answers ended
        self._end = self._scan()

    def __contains__(self, key: str) -> bool:
        return key in self._offsets

    def __len__(self) -> int:
        return len(self._offsets)

    def __iter__(self) -> Iterator[str]:
        """Its keys, in the order in which they came."""
        return iter(self._offsets)

    def append(self, row: dict[str, Any]) -> None:
        line = sealed(row)
        self._note(row, self._end)
        self._file.write(line)
        self._file.flush()
        self._end += len(line)

    def line(self, key: str) -> bytes:
        self._file.seek(self._offsets[key])
        return self._file.readline()

    def row(self, key: str) -> dict[str, Any]:
        return read_row(self.line(key))

    def close(self) -> None:
        self._file.close()

    def _scan(self) -> int:
        """Index the rows that are there; returns where the next one goes."""
        self._file.seek(0)
        offset = damaged = 0
        for line in self._file:
            if not line.endswith(b"\n"):
                self._file.truncate(offset)
                break
            row = _parse(line)
            if row is not None:
                self._note(row, offset)
            damaged += row is None
            offset += len(line)
        if damaged:
            say(f"{self.path}: {damaged} damaged lines; what they held is made again")
        return offset

    def _note(self, row: dict[str, Any], offset: int) -> None:
        self._offsets[row["id"]] = offset
        self.finishes[row["finish"]] += 1


def sealed(row: dict[str, Any]) -> bytes:
    """A row as a line, with its checksum (CRC-32 of the line's bytes before it)."""
    body = json.dumps(row, ensure_ascii=False).encode()[:-1]
    return body + f', "{CHECK}": "{zlib.crc32(body):08x}"}}\n'.encode()


def read_row(line: bytes) -> dict[str, Any]:
    """The row of a whole line."""
    row = dict(json.loads(line))
    row.pop(CHECK, None)
    return row


def _parse(line: bytes) -> dict[str, Any] | None:
    """The row of a line; None for a damaged one, which is answered again."""
    seal = SEALED.fullmatch(line)
    if seal and zlib.crc32(seal["body"]) != int(seal["sum"], 16):
        return None
    try:
        row = json.loads(line)
    except ValueError:
        return None
    return row if isinstance(row, dict) and {"id", "finish"} <= set(row) else None
