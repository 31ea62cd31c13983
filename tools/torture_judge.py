"""What counts as right after a fault: the reference's bytes, or one line; anything else is a failure.

Knows files and what a process said, not how either came about.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from torture_processes import Ended

SAME, LINE, FAILED = "same bytes", "one line", "FAILED"
ERROR = "mtp-train: error: "
# What two runs without any fault write differently, and why. Everything else is compared byte by byte.
MAY_DIFFER = {
    "train/stage.json": ("seconds", "files"),
    "evaluate/stage.json": ("seconds", "files", "outputs"),
    "*/stage.json": ("seconds",),
    "precompute/*/speed.json": ("tokens_per_second", "tokens"),
    "train/curves.jsonl": ("seconds",),
    "train/checkpoints/*/progress.json": ("seconds", "seal"),
    "train/checkpoints/*/head.json": ("progress.json", "seal"),
    "evaluate/evaluation.json": ("speed", "speed_model", "seal"),
}
WHY = {
    "seconds": "seconds that a stage or step took",
    "tokens_per_second": "measured speed",
    "tokens": "those made since the last kill",
    "speed": "measured speed",
    "speed_model": "predicted from measured speed",
    "files": "digests of files with timings in them",
    "outputs": "digest of files with timings in them",
    "progress.json": "digest of a file with timings in it",
    "seal": "digest of a file with such values",
}


@dataclass(frozen=True)
class Outcome:
    """How a trial ended: `SAME`, `LINE` or `FAILED`, and what was said or is wrong."""

    verdict: str
    detail: str = ""

    def __str__(self) -> str:
        return f"{self.verdict}: {self.detail}" if self.detail else self.verdict


def failed(detail: str) -> Outcome:
    return Outcome(FAILED, detail)


def spoken(ended: Ended) -> Outcome | None:
    """What a process said that ended with an error: one line, or a failure; none if it ended well."""
    if "Traceback (most recent call last)" in ended.err:
        last = [line for line in ended.err.splitlines() if line.strip()][-1]
        return failed(f"a traceback: {last[:200]}")
    if ended.killed:
        return failed("it hung")
    if not any(ended.statuses):
        return None
    lines = list(dict.fromkeys(line for line in ended.err.splitlines() if ERROR in line))
    if set(ended.statuses) - {0, 2, -9} or 2 not in ended.statuses:
        return failed(f"exit status {ended.statuses}")
    if len(lines) != 1:
        return failed(f"{len(lines)} lines with the error" + "".join(f" | {x}" for x in lines))
    return Outcome(LINE, lines[0].partition(ERROR)[2])


def names(outcome: Outcome, path: Path) -> bool:
    """Whether a line names the file, or the folder of a set that it belongs to."""
    return path.name in outcome.detail or f"/{path.parent.name} " in outcome.detail


def differences(reference: Path, found: Path, under: str = "") -> list[str]:
    """Relative names of files that are not what the reference has; `under`: only of one folder.

    Hidden files are no results: locks, and what a killed writer left under a temporary name.
    """
    there, here = files(reference, under), files(found, under)
    wrong = [f"{name} is missing" for name in sorted(there - here)]
    wrong += [f"{name} is left over" for name in sorted(here - there)]
    return wrong + [
        f"{name} differs" for name in sorted(there & here) if not _same(reference, found, name)
    ]


def files(root: Path, under: str = "") -> set[str]:
    """Relative names of the files below `root` that are not hidden and in no hidden folder."""
    names = (path.relative_to(root) for path in (root / under).rglob("*") if path.is_file())
    return {name.as_posix() for name in names if not any(p.startswith(".") for p in name.parts)}


def snapshot(root: Path, paths: Iterable[Path]) -> dict[str, bytes]:
    return {path.relative_to(root).as_posix(): path.read_bytes() for path in paths}


def changed(root: Path, before: dict[str, bytes]) -> list[str]:
    """Files of a snapshot that are gone or have other bytes."""
    return [
        name
        for name, data in before.items()
        if not (root / name).is_file() or (root / name).read_bytes() != data
    ]


def _same(reference: Path, found: Path, name: str) -> bool:
    one, other = (root / name for root in (reference, found))
    if one.stat().st_size == other.stat().st_size and one.read_bytes() == other.read_bytes():
        return True
    keys = next((keys for pattern, keys in MAY_DIFFER.items() if fnmatchcase(name, pattern)), ())
    return bool(keys) and without(one, keys) == without(other, keys)


def without(path: Path, keys: tuple[str, ...]) -> Any:
    """A JSON or JSON lines file's values without these keys, at any depth; its bytes if it is neither."""
    data = path.read_bytes()
    try:
        lines = data.splitlines() if path.suffix == ".jsonl" else [data]
        return [_dropped(json.loads(line), keys) for line in lines]
    except ValueError:
        return data


def _dropped(value: Any, keys: tuple[str, ...]) -> Any:
    if isinstance(value, dict):
        return {key: _dropped(item, keys) for key, item in value.items() if key not in keys}
    return [_dropped(item, keys) for item in value] if isinstance(value, list) else value
