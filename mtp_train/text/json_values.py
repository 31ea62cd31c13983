"""JSON that arrives in blocks: values one after the other, arrays and wrapped arrays row by row. Knows no file."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from typing import Any

from mtp_train.text.rows import Fault, Row

WRAPPERS = (
    "data",
    "rows",
    "train",
    "examples",
    "instances",
)  # keys that hold the rows of a wrapped file
BLOCK = 1 << 20  # characters read at a time
NOT_JSON = "not valid JSON in UTF-8"


class TwiceError(ValueError):
    """A key that an object has twice: readers differ in which value they take."""


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) < len(pairs):
        raise TwiceError("a key twice in one JSON object")
    return value


DECODER = json.JSONDecoder(object_pairs_hook=_unique)


def parse(text: str) -> Any:
    """The one JSON value of a text. Raises ValueError, also for numbers and nesting beyond Python's limits."""
    try:
        return DECODER.decode(text)
    except RecursionError:
        raise ValueError("nested too deeply") from None


class _Scanner:
    """JSON values one after the other out of a text that arrives in blocks."""

    def __init__(self, blocks: Iterable[bytes]) -> None:
        self.blocks = iter(blocks)
        self.text, self.at, self.line = "", 0, 1
        self.left = b""  # bytes of a character that is not whole yet
        self.ended = False

    def peek(self) -> str:
        """The next character that is no white space; empty at the end."""
        while True:
            while self.at < len(self.text) and self.text[self.at] in " \t\r\n\ufeff":
                self.line += self.text[self.at] == "\n"
                self.at += 1
            if self.at < len(self.text):
                return self.text[self.at]
            if not self._more():
                return ""

    def take(self, expected: str) -> None:
        if self.peek() != expected:
            raise ValueError(f"`{expected}` expected")
        self.at += 1

    def value(self) -> Any:
        self.peek()
        while True:
            try:
                value, end = DECODER.raw_decode(self.text, self.at)
                if end == len(self.text) and self._more():
                    continue  # a number may go on
                self.line += self.text.count("\n", self.at, end)
                self.at = end
                return value
            except TwiceError:
                raise
            except RecursionError:
                raise ValueError("nested too deeply") from None
            except ValueError:
                if not self._more():
                    raise

    def _more(self) -> bool:
        """Read on, as much again as is held: a long value is parsed a few times, not once per block."""
        if self.ended:
            return False
        self.text, self.at = self.text[self.at :], 0
        pieces, wanted = [self.left], max(BLOCK, len(self.text))
        while wanted > 0 and not self.ended:
            block = next(self.blocks, b"")
            self.ended = not block
            pieces.append(block)
            wanted -= len(block)
        data = b"".join(pieces)
        cut = len(data) if self.ended else _whole_characters(data)
        self.left = data[cut:]
        self.text += data[:cut].decode("utf-8")
        return bool(data)


def _whole_characters(data: bytes) -> int:
    """Length of `data` without a last UTF-8 character that is cut short."""
    for back in range(1, min(4, len(data)) + 1):
        byte = data[-back]
        if byte >= 0xC0:  # the first byte of a character of 2, 3 or 4
            size = 2 if byte < 0xE0 else 3 if byte < 0xF0 else 4
            return len(data) - back if size > back else len(data)
        if byte < 0x80:
            break
    return len(data)


def read_values(place: str, blocks: Iterable[bytes]) -> Iterator[Row]:
    """Rows of a file without lines: arrays, single objects, objects around an array, one after the other."""
    scanner = _Scanner(blocks)
    try:
        while start := scanner.peek():
            if start == "[":
                yield from _elements(place, scanner)
            elif start == "{":
                yield from _object(place, scanner)
            else:
                yield Row(f"{place}:{scanner.line}", scanner.value())
    except TwiceError as error:
        yield Row(f"{place}:{scanner.line}", Fault(f"{error}; the rest of the file is lost", True))
    except ValueError:
        fault = Fault(f"{NOT_JSON}; the rest of the file is lost", of_file=True)
        yield Row(f"{place}:{scanner.line}", fault)


def _elements(place: str, scanner: _Scanner) -> Iterator[Row]:
    scanner.take("[")
    while scanner.peek() != "]":
        line = scanner.line
        yield Row(f"{place}:{line}", scanner.value())
        if scanner.peek() != "]":
            scanner.take(",")
    scanner.take("]")


def _object(place: str, scanner: _Scanner) -> Iterator[Row]:
    """The rows inside an object that wraps an array of them, else the object as a row."""
    line, row, wraps = scanner.line, {}, ""
    lines: dict[str, int] = {}  # where each value begins
    scanner.take("{")
    while scanner.peek() != "}":
        key = scanner.value()
        scanner.take(":")
        if key in WRAPPERS and scanner.peek() == "[":
            wraps = f"{wraps}, {key}" if wraps else key
            yield from _elements(place, scanner)
        elif key in row:
            raise TwiceError("a key twice in one JSON object")
        else:
            lines[key] = scanner.line
            row[key] = scanner.value()
        if scanner.peek() != "}":
            scanner.take(",")
    scanner.take("}")
    if not wraps:
        yield Row(f"{place}:{line}", row)
        return
    for key, value in row.items():  # a split of other rows, which nobody has asked for
        if isinstance(value, list) and any(isinstance(part, dict) for part in value):
            fault = Fault(f"in a list beside `{wraps}`, which alone is read: `{key}`")
            yield from (Row(f"{place}:{lines[key]}", fault) for _ in value)
