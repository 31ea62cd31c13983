"""`mtp-train clean RUN [NAME ...]`: what lies in a run folder, with sizes; removes our files of what is named."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from mtp_train.cli.run_folder import RUN, STAGES, RunFolder
from mtp_train.core.errors import UserError
from mtp_train.core.owned import (
    ASIDE,
    Kind,
    bears_mark,
    is_temporary,
    remove_abandoned,
    remove_own,
)
from mtp_train.core.progress import say
from mtp_train.export.stage import EXPORT
from mtp_train.precompute.estimate import readable
from mtp_train.store.corpus import FILES as TEXT_FILES

HEAD = (
    "head.json",
    "head.safetensors",
    "optimizer.safetensors",
    "average.safetensors",
    "progress.json",
)
TEXT = (*TEXT_FILES, "corpus.json", "live.json")
STORE = (
    *("contract.json", "manifest.json", "speed.json", "reference.json", "index.safetensors"),
    "shard-*.safetensors",
    "shard-*.json",
)
# Files that each stage writes, relative to its folder.
WRITTEN = {
    "regenerate": ("*.jsonl", "*.journal", "accounting.json"),
    "precompute": tuple(
        f"{place}/{name}"
        for base in ("train", "heldout")
        for place, names in ((base, STORE), (f"{base}.text", TEXT))
        for name in names
    ),
    "plan": tuple(f"{base}.text/{name}" for base in ("train", "heldout") for name in TEXT),
    "train": (
        "curves.jsonl",
        *(f"{place}/{name}" for place in ("head", "best", "best.before-*") for name in HEAD),
        *(f"checkpoints/step-*/{name}" for name in HEAD),
    ),
    "evaluate": ("evaluation.json", "completions/*.jsonl", "completions/*.journal"),
    "report": ("index.html", "report.md", "report.json"),
    "export": (),  # each layout's record names its files
}
OWN = ("mtp_train.json", "stage.json", "inputs.json")


def tool(arguments: Sequence[str]) -> None:
    """Show a run folder, or remove parts of it."""
    asked = parse(arguments)
    root: Path = asked.run
    if not root.is_dir() or not bears_mark(root, RUN):
        raise UserError("clean takes a run folder", root, "name one that mtp-train wrote")
    parts = dict(removable(root))
    unknown = sorted(set(asked.names) - set(parts))
    if unknown:
        raise UserError(
            f"clean removes what `mtp-train clean {root}` shows",
            ", ".join(unknown),
            "take names from its table",
        )
    if not asked.names:
        show(parts, Console(markup=False, highlight=False, emoji=False))
        return
    with RunFolder(root).held():
        for name in asked.names:
            remove(root, name)


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="mtp-train clean",
        description="Shows what lies in a run folder, with sizes. With names from that table it removes these, and of "
        "them only files that mtp-train wrote.",
    )
    parser.add_argument("run", type=Path, metavar="RUN", help="the run folder")
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help="what to remove, as the table has it"
    )
    return parser.parse_args(arguments)


def removable(root: Path) -> Iterator[tuple[str, Path]]:
    """What of a run can be removed alone, by its name relative to the folder."""
    for path in sorted(root.iterdir()):
        if not path.is_dir() or path.is_symlink() or is_temporary(path.name):
            continue
        if stage_of(path.name):
            yield path.name, path
            parts = [*path.glob("checkpoints/step-*"), *path.glob("best.before-*")]
            parts += [*path.glob(".*.part"), *path.glob("*/.*.part")]
            yield from ((part.relative_to(root).as_posix(), part) for part in sorted(parts))
        elif path.name == "sweeps":
            jobs = sorted(job for job in path.glob("*/*") if bears_mark(job, RUN))
            for job in jobs:
                for name, part in removable(job):
                    yield f"{job.relative_to(root).as_posix()}/{name}", part


def stage_of(name: str) -> str:
    """The stage whose folder has this name, now or set aside; empty if none has."""
    aside = ASIDE.fullmatch(name)
    stage = aside[1] if aside else name
    return stage if stage in (*STAGES, "plan") else ""


def show(parts: dict[str, Path], console: Console) -> None:
    table = Table(title="mtp-train clean RUN NAME ... removes", title_justify="left")
    table.add_column("name")
    table.add_column("what")
    table.add_column("bytes", justify="right")
    for name, path in parts.items():
        table.add_row(name, described(path), readable(size(path)))
    console.print(table)


def described(path: Path) -> str:
    if is_temporary(path.name):
        return "left by a process that was killed"
    if ASIDE.fullmatch(path.name):
        return "set aside"
    if path.parent.name == "checkpoints":
        return "checkpoint"
    return "done" if (path / "stage.json").is_file() else "half done"


def size(path: Path) -> int:
    """Bytes of the files below, links not followed."""
    found = [Path(folder) / name for folder, _, names in os.walk(path) for name in names]
    return sum(file.lstat().st_size for file in found or [path])


def remove(root: Path, name: str) -> None:
    path = root / name
    if is_temporary(path.name):
        remove_abandoned(path)
        return
    before = size(path)
    left: list[str] = []
    if path.parent.name == "checkpoints" or path.name.startswith("best.before-"):
        left = remove_own(path, Kind("head's folder", {}, HEAD))
    else:
        stage = stage_of(path.name)
        if stage == "export":
            for layout in sorted(item for item in path.iterdir() if item.is_dir()):
                remove_own(layout, EXPORT)
        left = remove_own(path, Kind("stage's folder", {}, (*OWN, *WRITTEN[stage])))
    kept = (
        f"; {len(left)} files that are not mtp-train's stay ({', '.join(left[:4])})" if left else ""
    )
    say(f"clean: {name} removed, {readable(before)}{kept}")
