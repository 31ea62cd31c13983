"""What may be replaced, renamed or removed: places that bear our mark, and names of our own in them.

No other module of the package removes, renames or replaces a file (tests/test_owned.py reads the sources). A place is
ours if it is new, empty, or holds a mark: a small JSON file that only we write. Whatever else lies in it is the user's
and stays. A folder is replaced by renaming the old one aside first; whoever is killed in between leaves the old one or
the new one, and the next start puts the old one back. Knows no format: kinds of folders are described where they are
written.
"""

from __future__ import annotations

import errno
import fcntl
import glob
import json
import os
import re
import shutil
import socket
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import IO, Any

from mtp_train.core.errors import UserError
from mtp_train.core.progress import say

MARK = "mtp_train.json"
VERSION = 1  # of marks
LOCK = ".mtp_train.lock"
# In a scratch folder: what goes in place, what was there, and what the new is made from.
NEW, OLD, SOURCE = "new", "old", "source"
TEMPORARY = re.compile(r"\.(.+)\.\d+\.part")  # a file or a scratch folder on its way to its name
PROBE = re.compile(r"\.write-probe(-\d+)?")
ASIDE = re.compile(r"(.+)\.before(?:-(\d+))?")
NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)
NAMED = 4  # foreign names in a message


@dataclass(frozen=True)
class Kind:
    """A kind of folder that we write.

    Attributes:
        name: as messages say it.
        marks: relative path of a JSON file -> keys that its object has; any one of them makes a folder ours.
        names: patterns of the files that we write in it, relative (`*` matches within a name). What a mark at the top
            lists under `files` is ours too.
    """

    name: str
    marks: Mapping[str, tuple[str, ...]]
    names: tuple[str, ...] = ()


# --- whose a place is -----------------------------------------------------------------------------------------


def require_own(folder: Path, kind: Kind, remedy: str) -> None:
    """Raise unless `folder` is new, empty or bears a mark of its kind.

    Raises:
        UserError: it holds something else, or a mark that is no JSON.
    """
    if folder.exists() and not folder.is_dir():
        raise UserError(f"a {kind.name} must be a folder", f"{folder}, a file", remedy)
    held = contents(folder)
    if not held or bears_mark(folder, kind):
        return
    named = ", ".join(held[:NAMED]) + (f" and {len(held) - NAMED} more" * (len(held) > NAMED))
    raise UserError(
        f"a {kind.name} must be new, empty or written by mtp-train",
        f"{folder} with {named}",
        remedy,
    )


def claim(folder: Path, kind: Kind, remedy: str) -> None:
    """Make a folder ours, which it must be already, or new or empty; put back what a kill left half replaced."""
    require_own(folder, kind, remedy)
    require_writable(folder)
    if not (folder / MARK).is_file():
        write_mark(folder, kind.name)
    recover(folder)


def contents(folder: Path) -> list[str]:
    """Names in `folder`, sorted, without locks and what a killed process left; none if there is no such folder."""
    if not folder.is_dir():
        return []
    return sorted(name for name in os.listdir(folder) if not is_temporary(name))


def is_temporary(name: str) -> bool:
    """Whether a name is one that we give to locks, probes and files that are being written."""
    return name == LOCK or bool(PROBE.fullmatch(name) or TEMPORARY.fullmatch(name))


def bears_mark(folder: Path, kind: Kind) -> bool:
    return any(_is_mark(folder / name, keys) for name, keys in kind.marks.items())


def write_mark(folder: Path, kind: str, **more: Any) -> None:
    """Make a folder ours."""
    with atomic_path(folder / MARK) as temporary:
        temporary.write_text(
            json.dumps({"kind": kind, "version": VERSION} | more) + "\n", encoding="utf-8"
        )


def _is_mark(path: Path, keys: Sequence[str]) -> bool:
    if not path.is_file():
        return False
    if not keys:  # its name alone says enough
        return True
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(
            "a JSON file must be well-formed",
            f"{path}: {error}",
            "delete it and run its stage again, or name another folder if it is not mtp-train's",
        ) from error
    return isinstance(value, dict) and set(keys) <= set(value)


_held: set[Path] = set()  # by this process


@contextmanager
def held(folder: Path, command: str = "") -> Iterator[None]:
    """Hold a folder for this process alone; the system drops the lock when the process ends, however it ends.

    Raises:
        UserError: another process holds it; the message says which.
    """
    key = folder.resolve()
    if key in _held:
        yield
        return
    require_writable(folder)
    with open(folder / LOCK, "a+", encoding="utf-8") as file:
        if not _locked(file):
            raise UserError(
                "one process at a time may write to a folder",
                f"{folder}, held by {_holder(file)}",
                "wait for that process or end it, or name another folder",
            )
        file.truncate(0)
        since = time.strftime("%Y-%m-%d %H:%M:%S")
        note = {"pid": os.getpid(), "host": socket.gethostname(), "since": since}
        file.write(json.dumps(note | {"command": command or " ".join(sys.argv)}))
        file.flush()
        _held.add(key)
        try:
            yield
        finally:
            _held.discard(key)


@contextmanager
def one_at_a_time(lock: Path) -> Iterator[None]:
    """Hold a lock file, after waiting for it; the system drops it when the process ends, however it ends."""
    with open(lock, "a", encoding="utf-8") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _locked(file: IO[Any]) -> bool:
    """Take the lock of an open file; False if another process has it. A file system without locks gives none."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in NO_LOCKS:
            raise
    return True


def _holder(file: IO[str]) -> str:
    file.seek(0)
    try:
        note = json.loads(file.read())
        return f"process {note['pid']} on {note['host']} since {note['since']}: {note['command']}"
    except (ValueError, KeyError, TypeError):
        return "another process"


def require_writable(folder: Path) -> None:
    """Create `folder` and prove that it can be written to, or raise `UserError`."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / f".write-probe-{os.getpid()}"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise UserError(
            "an output folder must be writable", f"{folder} ({error.strerror})", "name another one"
        ) from error


# --- files ----------------------------------------------------------------------------------------------------


def require_own_file(path: Path, mark: str, remedy: str) -> None:
    """Raise unless nothing lies at `path`, or a file of ours: `mark` stands near its beginning."""
    if not os.path.lexists(path):
        return
    with suppress(OSError), open(path, "rb") as file:
        if mark.encode() in file.read(4096):
            return
    raise UserError("a file to write must be new or written by mtp-train", path, remedy)


@contextmanager
def atomic_path(path: Path) -> Iterator[Path]:
    """Yield a temporary path beside `path`; move it into place when the block ends without an error.

    A reader sees the old file or the whole new one, never a part of it, also after the machine went down.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        yield temporary
        usual_mode(temporary)
        sync(temporary)
        os.replace(temporary, path)
        sync(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


def move_file(source: Path, path: Path) -> None:
    """Give a file of ours another name of ours."""
    os.replace(source, path)
    sync(path.parent)


def remove_file(path: Path) -> None:
    """Remove a file that the caller knows by a name of its own, if it is there."""
    path.unlink(missing_ok=True)


def sync(path: Path) -> None:
    """Have the system write a file's bytes, or a folder's names, to disk."""
    opened = os.open(path, os.O_RDONLY)
    try:
        with suppress_unsupported():
            os.fsync(opened)
    finally:
        os.close(opened)


@contextmanager
def suppress_unsupported() -> Iterator[None]:
    """Some file systems sync no folders."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP, errno.EBADF):
            raise


def _umask() -> int:
    """Read once: setting it, even for a moment, changes what other threads write."""
    try:
        status = Path("/proc/self/status").read_text(encoding="ascii", errors="replace")
        return int(next(line for line in status.splitlines() if line.startswith("Umask:"))[6:], 8)
    except (OSError, StopIteration, ValueError):
        mask = os.umask(0o022)
        os.umask(mask)
        return mask


UMASK = _umask()


def usual_mode(path: Path) -> None:
    """Give a file the permissions that the umask asks for: safetensors writes for its owner alone, and a serving
    engine often runs as another user.
    """
    path.chmod(0o666 & ~UMASK)


# --- folders --------------------------------------------------------------------------------------------------


@contextmanager
def replaced_folder(folder: Path, kind: Kind, remedy: str = "name another one") -> Iterator[Path]:
    """Yield a new folder; put it in place of `folder` when the block ends without an error.

    What was there is renamed aside before, and its files of our names are removed after. Files of the user's in it are
    kept in `<folder>.before-<n>`.

    Raises:
        UserError: what is there is not of this kind.
    """
    folder = folder.resolve()  # through a link: what it leads to is replaced, not the link
    require_own(folder, kind, remedy)
    _recover_replaced(folder, kind)
    scratch = folder.with_name(f".{folder.name}.{os.getpid()}.part")
    require_writable(scratch)
    with open(scratch / MARK, "w", encoding="utf-8") as mark:
        _locked(mark)
        json.dump({"kind": "scratch", "version": VERSION}, mark)
        mark.flush()
        try:
            (scratch / NEW).mkdir()
            yield scratch / NEW
            _sync_tree(scratch / NEW)
            _swap(scratch, folder)
        finally:
            _clear(scratch, folder, kind)


def _swap(scratch: Path, folder: Path) -> None:
    if folder.exists():
        os.rename(folder, scratch / OLD)
    os.rename(scratch / NEW, folder)
    sync(folder.parent)


def _clear(scratch: Path, folder: Path, kind: Kind) -> None:
    """End a scratch folder: what was there goes back if nothing took its place, else its files of our names go."""
    old = scratch / OLD
    if old.exists() and not folder.exists():
        os.rename(old, folder)
    elif old.exists() and remove_own(old, kind):
        kept = aside_name(folder)
        os.rename(old, kept)
        say(f"{folder} held files that are not mtp-train's; they are kept in {kept}")
    shutil.rmtree(scratch)


def recover(folder: Path) -> None:
    """Put back what killed processes had renamed aside in a folder that this process holds, and in folders of it."""
    for found in [*folder.glob(".*.part"), *folder.glob("*/.*.part")]:
        match = TEMPORARY.fullmatch(found.name)
        if match and _abandoned(found):
            old, place = found / OLD, found.with_name(match[1])
            if old.exists() and not place.exists():
                os.rename(old, place)
            if (
                not old.exists()
            ):  # what replaced files of the user's is cleared by who knows its names
                shutil.rmtree(found)
        elif match and found.is_file() and not found.is_symlink():
            found.unlink()


def _recover_replaced(folder: Path, kind: Kind) -> None:
    """End the scratch folders that killed processes left of this one."""
    for found in folder.parent.glob(f".{glob.escape(folder.name)}.*.part"):
        match = TEMPORARY.fullmatch(found.name)
        if match and match[1] == folder.name and _abandoned(found):
            _clear(found, folder, kind)


def remove_abandoned(path: Path) -> None:
    """Remove what a killed process left on its way to its name; what is at work, or was replaced, stays.

    Raises:
        UserError: it stays.
    """
    if not path.exists():
        return
    if path.is_file() and TEMPORARY.fullmatch(path.name):
        path.unlink()
    elif _abandoned(path) and not (path / OLD).exists():
        shutil.rmtree(path)
    else:
        rule = "what a killed process left is removed when nothing of worth is in it"
        raise UserError(rule, path, "run the stage that it belongs to again: it puts this back")


def _abandoned(scratch: Path) -> bool:
    """Whether a folder is a scratch folder of ours, and no process is at work in it."""
    mark = scratch / MARK
    if not (mark.is_file() and set(os.listdir(scratch)) <= {MARK, NEW, OLD, SOURCE}):
        return False
    with open(mark, encoding="utf-8") as file:
        return _locked(file)


def aside_name(folder: Path) -> Path:
    """A name that nothing has, for what `folder` holds: `<name>.before-<n>`."""
    numbers = [
        int(match[2] or 0)
        for match in map(ASIDE.fullmatch, os.listdir(folder.parent))
        if match and match[1] == folder.name
    ]
    return folder.with_name(f"{folder.name}.before-{max(numbers, default=0) + 1}")


def set_aside(folder: Path) -> Path:
    """Rename a folder to a name of its own; earlier ones stay as they are. Returns where it is."""
    kept = aside_name(folder)
    os.rename(folder, kept)
    sync(folder.parent)
    return kept


def remove_own(folder: Path, kind: Kind) -> list[str]:
    """Remove the files of our names in `folder`, then folders that are empty. Returns what is left, sorted.

    Links are not followed: a link of our name goes, what it leads to stays.
    """
    names = [*kind.marks, *kind.names, *_listed(folder, kind)]
    marks, left = [], []
    for path in sorted(_files(folder)):
        relative = path.relative_to(folder).as_posix()
        if not (is_temporary(path.name) or _matches(relative, names)):
            left.append(relative)
        elif relative in kind.marks:
            marks.append(path)  # last: a folder half removed is still known as ours
        else:
            path.unlink()
    for path in marks:
        path.unlink()
    for current, _, _ in os.walk(folder, topdown=False):
        with suppress(OSError):  # the user's files are in it
            os.rmdir(current)
    return left


def _listed(folder: Path, kind: Kind) -> list[str]:
    """Files that a mark names as its own; a damaged one names none."""
    found: list[str] = []
    for name in (name for name, keys in kind.marks.items() if "files" in keys):
        with suppress(OSError, ValueError):
            found += json.loads((folder / name).read_text(encoding="utf-8"))["files"]
    return found


def _files(folder: Path) -> Iterator[Path]:
    for current, folders, files in os.walk(folder):
        links = [name for name in folders if (Path(current) / name).is_symlink()]
        yield from (Path(current) / name for name in [*files, *links])


def _matches(relative: str, patterns: Sequence[str]) -> bool:
    parts = relative.split("/")
    return any(
        len(parts) == len(wanted)
        and all(fnmatchcase(part, pattern) for part, pattern in zip(parts, wanted, strict=True))
        for wanted in (pattern.split("/") for pattern in patterns)
    )


def _sync_tree(folder: Path) -> None:
    for current, _, files in os.walk(folder):
        for name in files:
            sync(Path(current) / name)
        sync(Path(current))
