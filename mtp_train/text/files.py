"""Rows of files: JSON lines, JSON, Parquet, Arrow, gzipped text, data sets saved to disk or held by a hub.

A row comes with its place, `file:line` (or `file[row]` where a file has no lines). What can't be read comes as a
`Fault` in its place, and costs only itself: the rows of other lines and files go on. Nothing is held but the row at
hand and the file's current block.

Knows no form of row, no tokenizer.
"""

from __future__ import annotations

import filecmp
import glob
import gzip
import os
import zlib
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import IO, Any, cast

from mtp_train.core.errors import UserError
from mtp_train.core.provenance import digest, file_digest
from mtp_train.text import json_values
from mtp_train.text.json_values import NOT_JSON, WRAPPERS, TwiceError, parse
from mtp_train.text.rows import Fault, Row
from mtp_train.text.tables import is_saved, read_arrow, read_hub, read_parquet, read_saved

HUB = "hub:"
TEXT_SUFFIXES = (".jsonl", ".ndjson", ".json")
TABLE_SUFFIXES = (".parquet", ".arrow")
BLANK = b"\xef\xbb\xbf \t\r\n"


def read_source(path: str, split: str = "train", name: str = "") -> Iterator[Row]:
    """The rows of a file, a folder, a glob, a data set saved to disk, or (`hub:NAME`) a hub's data set.

    Args:
        split: of a data set with several; ignored for files.
        name: configuration of a hub's data set.

    Raises:
        UserError: where nothing is there to read.
    """
    if path.startswith(HUB):
        yield from read_hub(path.removeprefix(HUB), split, name)
        return
    if is_saved(Path(path)):
        yield from read_saved(Path(path), split)
        return
    for file in find_files(path):
        if is_saved(file):
            yield from read_saved(file, split)
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
        found = [file for file in matches if file.is_file() or is_saved(file)]
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
    found = [at] if is_saved(at) else find_files(path)
    files = [
        file
        for item in found
        for file in (sorted(item.rglob("*")) if item.is_dir() else [item])
        if file.is_file()
    ]
    return digest([file_digest(file) for file in files])


def same_data(one: tuple[str, str, str], other: tuple[str, str, str]) -> str:
    """What two sources (path, split, name) both read: a file, a copy of it, or a data set; empty if nothing.

    What is not there reads nothing.
    """
    mine, theirs = _read_by(*one), _read_by(*other)
    shared = sorted(set(mine) & set(theirs))
    if shared:
        return shared[0][0]
    sizes: dict[int, list[str]] = {}
    for file in _files(theirs):
        sizes.setdefault(os.path.getsize(file), []).append(file)
    for file in _files(mine):
        size = os.path.getsize(file)
        for copy in sizes.get(size, []) if size else []:
            if filecmp.cmp(file, copy, shallow=False):
                return f"{file} and {copy}"
    return ""


def _files(read: list[tuple[str, str]]) -> list[str]:
    """What of it is a file, rather than a part of a data set."""
    return [name for name, split in read if not split]


def _read_by(path: str, split: str, name: str) -> list[tuple[str, str]]:
    """(file, "") of each file that a source reads, (data set, split) where it reads a part of one."""
    if path.startswith(HUB):
        return [(path, f"{name} {split}")]
    try:
        found = [Path(path)] if is_saved(Path(path)) else find_files(path)
    except UserError:
        return []
    return [(os.path.realpath(file), split if is_saved(file) else "") for file in found]


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
        yield Row(place, Fault(f"a file that can't be read: {error.strerror}", of_file=True))
        return
    gzipped = head.startswith(b"\x1f\x8b")
    if head.startswith(b"version https://git-lfs"):
        yield Row(f"{place}:1", Fault("a Git LFS pointer instead of the data", of_file=True))
    elif head.startswith(b"PAR1") or path.suffix == ".parquet":
        yield from read_parquet(path)
    elif head.startswith(b"ARROW1") or path.suffix == ".arrow":
        yield from read_arrow(path)
    elif gzipped or path.suffix in (*TEXT_SUFFIXES, ""):
        yield from _text(path, gzipped)
    else:
        yield Row(place, Fault(f"a file of unknown kind ({path.suffix})", of_file=True))


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


def _text(path: Path, gzipped: bool) -> Iterator[Row]:
    """JSON lines, or JSON values that span lines; the beginning tells which."""
    number = 0
    try:
        with _open(path, gzipped) as file:
            head = _head(file)
            if _spans_lines(path, [line for line in head if line.strip(BLANK)]):
                blocks = chain(head, iter(lambda: file.read(json_values.BLOCK), b""))
                yield from json_values.read_values(str(path), blocks)
                return
            for number, line in enumerate(_lines(head, file), start=1):
                if line.strip(BLANK):
                    yield Row(f"{path}:{number}", _line(line))
    except (OSError, EOFError, zlib.error) as error:
        yield Row(f"{path}:{number + 1}", Fault(f"a file that breaks off: {error}", of_file=True))


def _head(file: IO[bytes]) -> list[bytes]:
    """Lines up to the second that isn't blank; the last may be cut, so that a file of one line isn't held whole."""
    head: list[bytes] = []
    filled = 0
    while filled < 2 and (line := file.readline(json_values.BLOCK)):
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
    except TwiceError as error:
        return Fault(str(error))
    except ValueError:
        start = line.lstrip()
        if start.startswith((b"//", b"#")):
            return Fault("a comment, not a row")
        if start.startswith((b"{'", b"[{'")):
            return Fault("a Python literal, not JSON")
        return Fault(NOT_JSON)
