"""Where a store lies: a local folder or any fsspec address. The one file that knows the difference.

Local files are memory-mapped and written by an atomic rename; remote objects are read by byte ranges and written whole.
Knows no format.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
from fsspec import AbstractFileSystem
from fsspec.core import url_to_fs
from fsspec.implementations.local import LocalFileSystem

from mtp_train.core.errors import UserError
from mtp_train.core.owned import atomic_path, remove_file, require_writable

FIRST = 1 << 16  # bytes of a remote object that come with its opening: the header of most
PIECE = 1 << 24  # bytes hashed at a time


class Bytes(Protocol):
    """An opened object, read by ranges."""

    size: int

    def read(self, ranges: Sequence[tuple[int, int]]) -> list[np.ndarray]:
        """The bytes [start, stop) of each range, uint8; writing into them changes no file."""
        ...


class Place:
    """A folder of objects. Errors of the file system are `OSError`, a missing object `FileNotFoundError`."""

    def __init__(self, address: str | Path) -> None:
        self.address = str(address).rstrip("/") or "/"
        try:
            self._files, self._root = _connect(self.address)
        except (ValueError, ImportError) as error:
            raise UserError(
                "a store's address must be a folder or an address that fsspec knows",
                f"{address} ({error})",
                "correct it, or install the package that it names",
            ) from error
        self.local = isinstance(self._files, LocalFileSystem)

    def __str__(self) -> str:
        return self.address

    def names(self) -> list[str]:
        """Names of the objects here, sorted; none if there is no such folder."""
        return sorted(self.sizes())

    def sizes(self) -> dict[str, int]:
        """Bytes of every object here, by one listing."""
        self._files.invalidate_cache()  # other ranks write here too
        try:
            found = self._files.ls(self._root, detail=True)
        except FileNotFoundError:
            return {}
        return {
            item["name"].rstrip("/").rsplit("/", 1)[-1]: int(item["size"])
            for item in found
            if item["type"] == "file"
        }

    def exists(self, name: str) -> bool:
        self._files.invalidate_cache()
        return bool(self._files.isfile(self._path(name)))

    def open(self, name: str) -> Bytes:
        """Open an object for reading by ranges."""
        return Mapped(self._path(name)) if self.local else Ranged(self._files, self._path(name))

    def read(self, name: str) -> bytes:
        """A whole object."""
        return bytes(self._files.cat_file(self._path(name)))

    def digest(self, name: str) -> str:
        """SHA-256 (64 hex digits) of an object, a piece at a time."""
        found = hashlib.sha256()
        data = self.open(name)
        for start in range(0, data.size, PIECE):
            (piece,) = data.read([(start, min(start + PIECE, data.size))])
            found.update(piece.data)
        return found.hexdigest()

    def write(self, name: str, data: bytes) -> None:
        """Write a whole object: a reader sees the old one or the new one, never a part."""
        if not self.local:
            self._files.pipe_file(self._path(name), data)
            return
        with atomic_path(Path(self._path(name))) as temporary:
            save_bytes(data, temporary)

    def remove(self, name: str) -> None:
        """Remove an object that the caller knows by a name of its own, if there is one."""
        if self.local:
            remove_file(Path(self._path(name)))
        elif self.exists(name):
            self._files.rm_file(self._path(name))

    def require_writable(self) -> None:
        """Prove that the place can be written to, or raise `UserError`."""
        if self.local:
            require_writable(Path(self._root))
            return
        try:
            self._files.makedirs(self._root, exist_ok=True)
            self.write(".write-probe", b"")
            self.remove(".write-probe")
        except OSError as error:
            raise UserError(
                "a store's address must be writable", f"{self} ({error})", "name another one"
            ) from error

    def _path(self, name: str) -> str:
        return f"{self._root.rstrip('/')}/{name}"


class Mapped:
    """A local file, memory-mapped copy-on-write: ranges are views and cost no memory until they are read."""

    def __init__(self, path: str) -> None:
        try:
            self._map = np.memmap(path, dtype=np.uint8, mode="c")
        except ValueError:  # an empty file can not be mapped
            self._map = np.zeros(0, dtype=np.uint8)  # type: ignore[assignment]
        self.size = len(self._map)

    def read(self, ranges: Sequence[tuple[int, int]]) -> list[np.ndarray]:
        return [np.asarray(self._map[start:stop]) for start, stop in ranges]


class Ranged:
    """A remote object. Its first bytes come with the opening; the ranges of one call are asked for together."""

    def __init__(self, files: AbstractFileSystem, path: str) -> None:
        self._files, self._path = files, path
        self.size = int(files.size(path))
        self._first = self._fetch([(0, min(FIRST, self.size))])[0] if self.size else np.zeros(0)

    def read(self, ranges: Sequence[tuple[int, int]]) -> list[np.ndarray]:
        far = [span for span in ranges if span[1] > len(self._first)]
        fetched = dict(zip(far, self._fetch(far), strict=True))
        return [
            fetched[span] if span in fetched else self._first[span[0] : span[1]].copy()
            for span in ranges
        ]

    def _fetch(self, ranges: Sequence[tuple[int, int]]) -> list[np.ndarray]:
        if not ranges:
            return []
        starts, stops = [span[0] for span in ranges], [span[1] for span in ranges]
        pieces = self._files.cat_ranges([self._path] * len(ranges), starts, stops, on_error="raise")
        return [np.frombuffer(bytearray(piece), dtype=np.uint8) for piece in pieces]


def save_bytes(data: bytes, path: Path) -> None:
    path.write_bytes(data)


def split(address: str | Path) -> tuple[Place, str]:
    """An object's folder and its name there."""
    folder, _, name = str(address).rpartition("/")
    return Place(folder or "."), name


def join(address: str | Path, name: str) -> str:
    """The address of an object in a folder."""
    return f"{str(address).rstrip('/')}/{name}"


def _connect(address: str) -> tuple[AbstractFileSystem, str]:
    files, root = url_to_fs(address)
    return files, str(root)
