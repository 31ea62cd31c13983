"""Rows of files: JSON lines, JSON, Parquet, Arrow, gzipped text, data sets saved to disk or held by a hub.

A row comes with its place, `file:line` (or `file[row]` where a file has no lines). What can't be read comes as a
`Fault` in its place, and costs only itself: the rows of other lines and files go on. Nothing is held but the row at
hand and the file's current block.

Knows no form of row, no tokenizer.
"""

from __future__ import annotations

import glob
import gzip
import json
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import IO, Any, cast

from mtp_train.core.errors import UserError
from mtp_train.core.provenance import digest, file_digest

HUB = "hub:"
TEXT_SUFFIXES = (".jsonl", ".ndjson", ".json")
TABLE_SUFFIXES = (".parquet", ".arrow")
WRAPPERS = (
    "data",
    "rows",
    "train",
    "examples",
    "instances",
)  # keys that hold the rows of a wrapped file
BLOCK = 1 << 20  # characters read at a time from JSON that has no lines
BLANK = b"\xef\xbb\xbf \t\r\n"
NOT_JSON = "not valid JSON in UTF-8"


@dataclass(frozen=True)
class Fault:
    """Why there is no row in this place."""

    reason: str


@dataclass(frozen=True)
class Row:
    """A value and where it stood."""

    place: str
    value: Any  # a JSON value, or the Fault that stands for it


def read_source(path: str, split: str = "train", name: str = "") -> Iterator[Row]:
    """The rows of a file, a folder, a glob, a data set saved to disk, or (`hub:NAME`) a hub's data set.

    Args:
        split: of a data set with several; ignored for files.
        name: configuration of a hub's data set.

    Raises:
        UserError: where nothing is there to read.
    """
    if path.startswith(HUB):
        yield from _hub(path.removeprefix(HUB), split, name)
        return
    if _is_saved(Path(path)):
        yield from _saved(Path(path), split)
        return
    for file in find_files(path):
        if _is_saved(file):
            yield from _saved(file, split)
        else:
            yield from read_file(file)


def find_files(path: str) -> list[Path]:
    """The data files that a path, a folder or a glob names, in the order of their names."""
    at = Path(path)
    if at.is_file():
        return [at]
    if at.is_dir():
        found = [file for file in sorted(at.rglob("*")) if file.is_file() and _has_rows(file)]
    else:
        matches = sorted(map(Path, glob.glob(path, recursive=True)))
        found = [file for file in matches if file.is_file() or _is_saved(file)]
    if not found:
        raise UserError(
            "a data file must exist",
            path,
            f"name a file, a glob, a folder with {', '.join(TEXT_SUFFIXES + TABLE_SUFFIXES)} files, or hub:NAME",
        )
    return found


def content_digest(path: str) -> str:
    """Digest of the bytes that `read_source` reads; of a hub's data set, its name."""
    if path.startswith(HUB):
        return path
    at = Path(path)
    found = [at] if _is_saved(at) else find_files(path)
    files = [
        file
        for item in found
        for file in (sorted(item.rglob("*")) if item.is_dir() else [item])
        if file.is_file()
    ]
    return digest([file_digest(file) for file in files])


def _has_rows(file: Path) -> bool:
    plain = file.name.removesuffix(".gz")
    hidden = any(part.startswith(".") for part in file.parts[-2:])
    return plain.endswith(TEXT_SUFFIXES + TABLE_SUFFIXES) and not hidden


def read_file(path: Path) -> Iterator[Row]:
    """The rows of one file, by what it is rather than what its name says."""
    place = str(path)
    try:
        with open(path, "rb") as file:
            head = file.read(64)
    except OSError as error:
        yield Row(place, Fault(f"a file that can't be read: {error.strerror}"))
        return
    gzipped = head.startswith(b"\x1f\x8b")
    if head.startswith(b"version https://git-lfs"):
        yield Row(f"{place}:1", Fault("a Git LFS pointer instead of the data"))
    elif head.startswith(b"PAR1") or path.suffix == ".parquet":
        yield from _batches(path, _parquet_batches)
    elif head.startswith(b"ARROW1") or path.suffix == ".arrow":
        yield from _batches(path, _arrow_batches)
    elif gzipped or path.suffix in (*TEXT_SUFFIXES, ""):
        yield from _text(path, gzipped)
    else:
        yield Row(place, Fault(f"a file of unknown kind ({path.suffix})"))


def read_rows(path: str | Path) -> Iterator[tuple[int, Any]]:
    """(line number, value) of each line of a JSON-lines file; a damaged line yields its `ValueError`."""
    source = Path(path)
    if not source.is_file():
        raise UserError("a data file must exist", source, "check data paths")
    with open(source, "rb") as file:
        for number, line in enumerate(file, start=1):
            if line.strip():
                try:
                    yield number, parse(line.decode("utf-8-sig"))
                except ValueError as error:
                    yield number, error


# --- JSON -----------------------------------------------------------------------------------------------------


class _TwiceError(ValueError):
    """A key that an object has twice: readers differ in which value they take."""


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) < len(pairs):
        raise _TwiceError("a key twice in one JSON object")
    return value


DECODER = json.JSONDecoder(object_pairs_hook=_unique)


def parse(text: str) -> Any:
    """The one JSON value of a text. Raises ValueError, also for numbers and nesting beyond Python's limits."""
    try:
        return DECODER.decode(text)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def _text(path: Path, gzipped: bool) -> Iterator[Row]:
    """JSON lines, or JSON values that span lines; the beginning tells which."""
    number = 0
    try:
        with _open(path, gzipped) as file:
            head = _head(file)
            if _spans_lines(path, [line for line in head if line.strip(BLANK)]):
                blocks = chain(head, iter(lambda: file.read(BLOCK), b""))
                yield from _values(str(path), blocks)
                return
            for number, line in enumerate(_lines(head, file), start=1):
                if line.strip(BLANK):
                    yield Row(f"{path}:{number}", _line(line))
    except (OSError, EOFError, zlib.error) as error:
        yield Row(f"{path}:{number + 1}", Fault(f"a file that breaks off: {error}"))


def _head(file: IO[bytes]) -> list[bytes]:
    """Lines up to the second that isn't blank; the last may be cut, so that a file of one line isn't held whole."""
    head: list[bytes] = []
    filled = 0
    while filled < 2 and (line := file.readline(BLOCK)):
        head.append(line)
        filled += bool(line.strip(BLANK))
    return head


def _lines(head: list[bytes], file: IO[bytes]) -> Iterator[bytes]:
    """Whole lines, from pieces of the first ones and the rest of the file."""
    line = b""
    for piece in chain(head, file):
        line += piece
        if line.endswith(b"\n"):
            yield line
            line = b""
    if line:
        yield line


def _open(path: Path, gzipped: bool) -> IO[bytes]:
    return cast(IO[bytes], gzip.open(path, "rb")) if gzipped else open(path, "rb")


def _spans_lines(path: Path, lines: list[bytes]) -> bool:
    """Whether a file's first lines are pieces of longer values rather than rows."""
    if not lines:
        return False
    first, named_json = lines[0].strip(BLANK), path.name.removesuffix(".gz").endswith(".json")
    try:
        value = parse(first.decode("utf-8"))
    except ValueError:
        return first in (b"{", b"[") or first.startswith((b"[{", b"[[") + (b"{", b"[") * named_json)
    if isinstance(value, dict):
        return named_json and any(isinstance(value.get(key), list) for key in WRAPPERS)
    return isinstance(value, list) and len(lines) == 1


def _line(line: bytes) -> Any:
    try:
        return parse(line.decode("utf-8-sig"))
    except _TwiceError as error:
        return Fault(str(error))
    except ValueError:
        start = line.lstrip()
        if start.startswith((b"//", b"#")):
            return Fault("a comment, not a row")
        if start.startswith((b"{'", b"[{'")):
            return Fault("a Python literal, not JSON")
        return Fault(NOT_JSON)


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
            except _TwiceError:
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


def _values(place: str, blocks: Iterable[bytes]) -> Iterator[Row]:
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
    except _TwiceError as error:
        yield Row(f"{place}:{scanner.line}", Fault(f"{error}; the rest of the file is lost"))
    except ValueError:
        fault = Fault(f"{NOT_JSON}; the rest of the file is lost")
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
    line, row, wraps = scanner.line, {}, False
    scanner.take("{")
    while scanner.peek() != "}":
        key = scanner.value()
        scanner.take(":")
        if key in WRAPPERS and scanner.peek() == "[":
            wraps = True
            yield from _elements(place, scanner)
        elif key in row:
            raise _TwiceError("a key twice in one JSON object")
        else:
            row[key] = scanner.value()
        if scanner.peek() != "}":
            scanner.take(",")
    scanner.take("}")
    if not wraps:
        yield Row(f"{place}:{line}", row)


# --- tables ---------------------------------------------------------------------------------------------------


def _batches(path: Path, batches: Callable[[Path], Iterator[Any]]) -> Iterator[Row]:
    import pyarrow

    index = 0
    try:
        for batch in batches(path):
            for row in batch.to_pylist():
                yield Row(f"{path}[{index}]", _without_null(row))
                index += 1
    except (pyarrow.ArrowException, OSError) as error:
        reason = str(error).splitlines()[0][:120]
        yield Row(f"{path}[{index}]", Fault(f"a damaged table: {reason}"))


def _parquet_batches(path: Path) -> Iterator[Any]:
    from pyarrow import parquet

    with parquet.ParquetFile(path) as file:
        yield from file.iter_batches(batch_size=256)


def _arrow_batches(path: Path) -> Iterator[Any]:
    """Either of Arrow's formats: the file (with a footer) and the stream (what `datasets` writes)."""
    from pyarrow import ipc, memory_map

    with memory_map(str(path)) as source:
        is_file = source.read(6) == b"ARROW1"
        source.seek(0)
        if is_file:
            reader = ipc.open_file(source)
            for index in range(reader.num_record_batches):
                yield from _slices(reader.get_batch(index))
        else:
            for batch in ipc.open_stream(source):
                yield from _slices(batch)


def _slices(batch: Any) -> Iterator[Any]:
    """A batch may hold a whole file: turn 256 rows at a time into Python objects."""
    for start in range(0, batch.num_rows, 256):
        yield batch.slice(start, 256)


def _is_saved(path: Path) -> bool:
    """Whether `datasets` wrote this folder with save_to_disk."""
    return (path / "dataset_dict.json").is_file() or (path / "state.json").is_file()


def _saved(path: Path, split: str) -> Iterator[Row]:
    from datasets import DatasetDict, load_from_disk

    try:
        data = load_from_disk(str(path))
    except Exception as error:  # whatever a damaged folder makes the library raise
        yield Row(str(path), Fault(f"a damaged data set: {str(error).splitlines()[0][:120]}"))
        return
    if isinstance(data, DatasetDict):
        if split not in data:
            raise UserError("a split must exist", f"{path}: {split}", f"use one of {list(data)}")
        data = data[split]
    yield from (Row(f"{path}[{index}]", _without_null(row)) for index, row in enumerate(data))


def _hub(dataset: str, split: str, name: str) -> Iterator[Row]:
    """A hub's data set, streamed. No code of the data set is run."""
    from datasets import load_dataset

    try:
        data = load_dataset(dataset, name or None, split=split, streaming=True)
    except Exception as error:  # network, names and formats: the library has no common class
        message = (str(error).splitlines() or [type(error).__name__])[0][:200]
        raise UserError(
            "a hub's data set must load",
            f"{dataset} ({name or 'default'}, {split}): {message}",
            "check the name, its configuration and split, and the network",
        ) from error
    yield from (Row(f"{dataset}[{index}]", _without_null(row)) for index, row in enumerate(data))


def _without_null(value: Any) -> Any:
    """A table's row without the keys that it lacks: a column's structure is that of all its rows together."""
    if isinstance(value, dict):
        return {key: _without_null(part) for key, part in value.items() if part is not None}
    return [_without_null(part) for part in value] if isinstance(value, list) else value
