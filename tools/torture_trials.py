"""The faults that a run must survive, each on a run that stands just before the stage that meets it.

Every trial begins with files of one unbroken run, at the same path, so that a stage has the same inputs.
"""

from __future__ import annotations

import os
import random
import shutil
import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path

from torture_judge import (
    FAILED,
    LINE,
    SAME,
    Outcome,
    changed,
    differences,
    failed,
    files,
    names,
    snapshot,
    spoken,
)
from torture_processes import Ended, run

STAGES = ("regenerate", "precompute", "train", "evaluate", "report", "export")
ON_RANKS = ("precompute", "train", "evaluate")  # those with a torchrun form
KINDS = ("kills", "disk", "readonly", "corrupt", "foreign")
PAGE = 4096
ROOMY = "4g"
ATTEMPTS = 4  # of a command until its stage is whole

# Which command reads a kind of file next, and what is gone of the run so that this command has work to do.
READ_BY = (
    ("regenerate/*.jsonl", "precompute", ("precompute",)),
    ("regenerate/ood.jsonl", "evaluate", ("evaluate",)),
    ("regenerate/stage.json", "precompute", ("precompute",)),
    ("precompute/*.text/*", "precompute", ("precompute/stage.json", "precompute/{}")),
    ("precompute/*/contract.json", "precompute", ("precompute/stage.json", "manifest.json")),
    ("precompute/*/reference.json", "precompute", ("precompute/stage.json", "manifest.json")),
    ("precompute/*/shard-*.json", "precompute", ("precompute/stage.json", "manifest.json")),
    ("precompute/*/speed.json", "precompute", ("precompute/stage.json", "manifest.json")),
    ("precompute/*/*", "train", ("train",)),
    ("precompute/*.json", "train", ("train",)),
    ("train/checkpoints/*", "train", ("train/head", "train/stage.json")),
    ("train/curves.jsonl", "report", ("report",)),
    ("train/*", "evaluate", ("evaluate",)),
    ("train/head/*", "export", ("export",)),
    ("evaluate/evaluation.json", "report", ("report",)),
    ("evaluate/evaluation.json", "export", ("export",)),
    ("evaluate/completions/*", "evaluate", ("evaluate/evaluation.json", "evaluate/stage.json")),
    ("evaluate/*.json", "report", ("report",)),
    ("report/*", "report", ("report/stage.json",)),
    ("export/*", "export", ("export/stage.json",)),
    ("mtp_train.json", "train", ("train",)),
)
BOOKKEEPING = ("stage.json", "inputs.json", "mtp_train.json", "speed.json")
OTHER_INPUTS = {  # a key that changes what a stage makes
    "regenerate": "regenerate.max_new_tokens=5",
    "precompute": "precompute.codec=lossless",
    "train": "train.seed=1",
    "evaluate": "evaluate.seed=1",
}
FOREIGN = ("notes.txt", ".own", "model.safetensors.bak", "mine/data.bin")


@dataclass(frozen=True)
class Trial:
    """One fault in one stage. `work` brings it about and judges what became of the run."""

    kind: str
    stage: str
    ranks: int
    name: str
    work: Callable[[random.Random], Outcome]


@dataclass
class Bench:
    """The folder in which trials take place, and the unbroken run that they are held against.

    Attributes:
        cpu: processor seconds of each stage, by stage and number of ranks.
    """

    out: Path
    overrides: list[str]
    cpu: dict[str, float] = field(default_factory=dict)

    @property
    def disk(self) -> Path:
        """Where a small file system is mounted for some trials."""
        return self.out / "disk"

    @property
    def run(self) -> Path:
        return self.disk / "run"

    def reference(self, ranks: int = 1) -> Path:
        return self.out / f"reference-{ranks}"

    def do(self, stage: str, ranks: int = 1, *more: str, **kill: float | int) -> Ended:
        """Run a stage's command on the run folder."""
        command = [*self.overrides, f"run={self.run}", *more]
        return run(stage, command, self.out / "logs", ranks, **kill)  # type: ignore[arg-type]

    def make_reference(self, ranks: Sequence[int]) -> None:
        """The unbroken run, and its stages done by several ranks."""
        self.clear()
        for stage in STAGES:
            self.cpu[f"{stage} 1"] = self._well_done(stage, 1)
        shutil.rmtree(self.reference(), ignore_errors=True)
        shutil.copytree(self.run, self.reference())
        for number in [number for number in ranks if number > 1]:
            shutil.rmtree(self.reference(number), ignore_errors=True)
            for stage in ON_RANKS:
                self.restore(stage)
                self.cpu[f"{stage} {number}"] = self._well_done(stage, number)
                shutil.copytree(self.run / stage, self.reference(number) / stage)

    def _well_done(self, stage: str, ranks: int) -> float:
        ended = self.do(stage, ranks)
        if any(ended.statuses):
            raise SystemExit(f"torture: {stage} fails without a fault:\n{ended.err}")
        return ended.cpu

    def clear(self) -> None:
        shutil.rmtree(self.run, ignore_errors=True)
        self.disk.mkdir(parents=True, exist_ok=True)

    def restore(self, before: str = "") -> None:
        """Make the run what it is before a stage, or whole."""
        self.clear()
        if before == STAGES[0]:
            return
        gone = set(STAGES[STAGES.index(before) :]) if before else set()
        shutil.copytree(
            self.reference(),
            self.run,
            ignore=lambda folder, found: (
                gone & set(found) if Path(folder) == self.reference() else ()
            ),
        )

    def finish(self, stage: str, ranks: int = 1) -> Outcome:
        """The same command until the stage is whole, held against the unbroken run's bytes."""
        said = spoken(self.do(stage, ranks))
        return said or self.compare(stage, ranks)

    def compare(self, stage: str, ranks: int = 1) -> Outcome:
        """Hold a stage's folder, and those of the stages before it, against the unbroken run."""
        wrong = differences(self.reference(ranks), self.run, stage)
        for earlier in STAGES[: STAGES.index(stage)]:
            wrong += differences(self.reference(), self.run, earlier)
        beside = {name for name in os.listdir(self.run) if not name.startswith(".")}
        wrong += [
            f"{name} is left over" for name in sorted(beside - set(os.listdir(self.reference())))
        ]
        return failed(", ".join(wrong[:4])) if wrong else Outcome(SAME)


def trials(bench: Bench, kills: int, ranks: Sequence[int], kinds: Sequence[str]) -> list[Trial]:
    """All trials of these kinds, in the order in which they run."""
    made = {
        "kills": lambda: _kill_trials(bench, kills, ranks),
        "disk": lambda: _disk_trials(bench),
        "readonly": lambda: [
            Trial("readonly", stage, 1, f"readonly {stage}", partial(read_only, bench, stage))
            for stage in STAGES
        ],
        "corrupt": lambda: _corrupt_trials(bench),
        "foreign": lambda: _foreign_trials(bench),
    }
    return [trial for kind in KINDS if kind in kinds for trial in made[kind]()]


# --- kill -9 --------------------------------------------------------------------------------------------------


def _kill_trials(bench: Bench, kills: int, ranks: Sequence[int]) -> list[Trial]:
    """As many kills, stages and numbers of ranks in turns."""
    turns = [
        (stage, number) for number in ranks for stage in STAGES if stage in ON_RANKS or number == 1
    ]
    return [
        Trial(
            "kills",
            stage,
            number,
            f"kill {index + 1} {stage} {number}",
            partial(kill, bench, stage, number),
        )
        for index in range(kills)
        for stage, number in [turns[index % len(turns)]]
    ]


def kill(bench: Bench, stage: str, ranks: int, rng: random.Random) -> Outcome:
    """SIGKILL at a moment of the stage's work, twice at times, then the same command to its end."""
    bench.restore(stage)
    whole = bench.cpu[f"{stage} {ranks}"]
    for _ in range(rng.choice((1, 1, 2))):
        moment = rng.uniform(0.02, 1.0) * whole
        bench.do(stage, ranks, kill_at=moment, first=rng.randrange(ranks))
    return bench.finish(stage, ranks)


# --- a full disk, a read-only one -----------------------------------------------------------------------------


@contextmanager
def mounted(folder: Path) -> Iterator[Callable[[str], None]]:
    """A file system in memory at `folder`; yields what changes its options.

    Raises:
        PermissionError: only root may mount.
    """
    folder.mkdir(parents=True, exist_ok=True)
    _mount("-t", "tmpfs", "-o", f"size={ROOMY}", "torture", str(folder))
    try:
        yield lambda options: _mount("-o", f"remount,{options}", str(folder))
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def _mount(*arguments: str) -> None:
    done = subprocess.run(["mount", *arguments], capture_output=True, text=True)
    if done.returncode:
        raise PermissionError(done.stderr.strip())


def can_mount(folder: Path) -> bool:
    try:
        with mounted(folder):
            return True
    except (PermissionError, FileNotFoundError):
        return False


def _disk_trials(bench: Bench) -> list[Trial]:
    """Each stage with no room at all, and with room for a part of what it writes."""
    return [
        Trial("disk", stage, 1, f"disk {stage} {how}", partial(full_disk, bench, stage, share))
        for stage in STAGES
        for how, share in (("none", 0.0), ("some", None))
    ]


def full_disk(bench: Bench, stage: str, share: float | None, rng: random.Random) -> Outcome:
    """No room for a share of what the stage writes; then there is room, and the same command."""
    share = rng.uniform(0.1, 0.8) if share is None else share
    written = [bench.reference() / name for name in files(bench.reference(), stage)]
    pages = sum(-(-path.stat().st_size // PAGE) for path in written)
    with mounted(bench.disk) as remount:
        bench.restore(stage)
        (bench.disk / "filler").write_bytes(b"x")  # a size of 0 would be no limit
        used = os.statvfs(bench.disk)
        room = (used.f_blocks - used.f_bfree) * used.f_frsize // PAGE + int(share * pages)
        remount(f"size={room * PAGE}")
        said = spoken(bench.do(stage))
        remount(f"size={ROOMY}")
        if said is None:
            return failed(f"it ended well with room for {int(share * pages)} of {pages} pages")
        return said if said.verdict != LINE else _then(said, bench.finish(stage))


def read_only(bench: Bench, stage: str, _rng: random.Random) -> Outcome:
    """A run folder that can't be written to; then it can, and the same command."""
    with mounted(bench.disk) as remount:
        bench.restore(stage)
        remount("ro")
        said = spoken(bench.do(stage))
        remount("rw")
        if said is None:
            return failed("it ended well on a read-only disk")
        return said if said.verdict != LINE else _then(said, bench.finish(stage))


def _then(line: Outcome, after: Outcome) -> Outcome:
    """A line that was said, and what the same command made when its cause was gone: that decides."""
    return line if after.verdict == SAME else failed(f"afterwards {after}")


# --- a flipped byte -------------------------------------------------------------------------------------------


def _corrupt_trials(bench: Bench) -> list[Trial]:
    """A byte of each kind of file of a whole run, and of half-done ones of each stage."""
    found = {}
    for name in sorted(files(bench.reference())):
        for pattern, reader, gone in READ_BY:
            if fnmatchcase(name, pattern):
                found[kind_of_file(name), reader] = (name, reader, gone)
                if pattern not in ("regenerate/*.jsonl", "train/*", "evaluate/evaluation.json"):
                    break
    whole = [
        Trial(
            "corrupt",
            reader,
            1,
            f"corrupt {name} {reader}",
            partial(corrupt, bench, name, reader, gone),
        )
        for name, reader, gone in found.values()
    ]
    half = [
        Trial(
            "corrupt",
            stage,
            1,
            f"corrupt half {index + 1} {stage}",
            partial(corrupt_half, bench, stage),
        )
        for stage in STAGES
        for index in range(2)
    ]
    return whole + half


def kind_of_file(name: str) -> str:
    """A file's name without numbers, and without which set it belongs to."""
    for word in ("train", "heldout", "ood"):
        name = name.replace(f"precompute/{word}", "precompute/SET").replace(f"/{word}.", "/SET.")
    return "".join("#" if letter.isdigit() else letter for letter in name)


def corrupt(
    bench: Bench, name: str, reader: str, gone: Sequence[str], rng: random.Random
) -> Outcome:
    """A wrong byte in a file of a finished run, and the next command that reads it."""
    bench.restore()
    path = bench.run / name
    for item in (*gone, f"{reader}/stage.json"):
        if (place := _place(bench.run, path, item)) != path:
            _remove(place)
    for later in STAGES[STAGES.index(reader) + 1 :]:
        _remove(bench.run / later)
    flip(path, rng)
    said = spoken(bench.do(reader))
    if said is None:
        wrong = differences(bench.reference(), bench.run, reader)
        if path.name in BOOKKEEPING:  # no result; what is wrong in it may stay
            wrong = [item for item in wrong if item != f"{name} differs"]
        return failed(f"in silence: {', '.join(wrong[:4])}") if wrong else Outcome(SAME)
    if said.verdict == LINE and not names(said, path):
        return failed(f"the line does not name {name}: {said.detail}")
    return said


def corrupt_half(bench: Bench, stage: str, rng: random.Random) -> Outcome:
    """A wrong byte in a file that a killed stage left, and the same command."""
    left: list[Path] = []
    for share in (rng.uniform(0.3, 0.9), 0.95, 0.8, 0.6, 0.4):
        bench.restore(stage)
        bench.do(stage, kill_at=share * bench.cpu[f"{stage} 1"])
        if not (bench.run / stage / "stage.json").is_file():  # it was killed before its end
            left = [path for path in half_done(bench.run / stage) if path.stat().st_size]
        if left:
            break
    else:
        return Outcome(SAME, "a killed stage left no file of its results")
    path = rng.choice(left)
    flip(path, rng)
    outcome = bench.finish(stage)
    name = path.relative_to(bench.run)
    if outcome.verdict == LINE and not names(outcome, path):
        return failed(f"the line does not name {name}: {outcome.detail}")
    return outcome if outcome.verdict != FAILED else failed(f"wrong byte in {name}: {outcome}")


def half_done(folder: Path) -> list[Path]:
    """Files in a killed stage's folder that the stage goes on from: of checkpoints, only those of the newest."""
    older = sorted(folder.glob("checkpoints/*"))[:-1]
    return sorted(
        path
        for path in folder.rglob("*")
        if path.is_file() and path.name not in BOOKKEEPING and not set(path.parents) & set(older)
    )


def flip(path: Path, rng: random.Random) -> None:
    """Change one byte of a file."""
    with open(path, "r+b") as file:
        position = rng.randrange(path.stat().st_size)
        file.seek(position)
        byte = file.read(1)[0]
        file.seek(position)
        file.write(bytes([byte ^ rng.randrange(1, 256)]))


def _place(run: Path, damaged: Path, item: str) -> Path:
    """Where something lies that a trial takes away: `{}` is the set of a damaged text, a bare name lies beside."""
    if "{}" in item:
        return run / item.format(damaged.parent.name.removesuffix(".text"))
    return run / item if "/" in item or item in STAGES else damaged.with_name(item)


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


# --- foreign files --------------------------------------------------------------------------------------------


def _foreign_trials(bench: Bench) -> list[Trial]:
    """Each stage beside files of somebody else, and again with other inputs, whole and half done."""
    ways = {"new": new_beside, "done": done_beside, "half": half_beside}
    return [
        Trial("foreign", stage, 1, f"foreign {stage} {how}", partial(work, bench, stage))
        for stage in STAGES
        for how, work in ways.items()
        if how == "new" or stage in OTHER_INPUTS
    ]


def new_beside(bench: Bench, stage: str, _rng: random.Random) -> Outcome:
    """A stage whose folder holds foreign files before it begins."""
    bench.restore(stage)
    (bench.run / stage).mkdir(parents=True, exist_ok=True)
    return _beside(bench, stage)


def done_beside(bench: Bench, stage: str, _rng: random.Random) -> Outcome:
    """A finished stage with foreign files in its folders, done with other inputs."""
    bench.restore()
    return _beside(bench, stage, OTHER_INPUTS[stage])


def half_beside(bench: Bench, stage: str, _rng: random.Random) -> Outcome:
    """A killed stage with foreign files in its folders, done with other inputs."""
    bench.restore(stage)
    bench.do(stage, kill_at=0.7 * bench.cpu[f"{stage} 1"])
    return _beside(bench, stage, OTHER_INPUTS[stage])


def _beside(bench: Bench, stage: str, *more: str) -> Outcome:
    """Lay foreign files into every folder of the run; whatever the command then does, they stay as they are."""
    before = snapshot(bench.run, lay_foreign(bench.run))
    said = spoken(bench.do(stage, 1, *more))
    if not (lost := changed(bench.run, before)):
        return said or Outcome(SAME, "of the foreign files")
    if aside := sorted(bench.run.glob(f"{stage}.before*")):  # named in what the command says
        moved = {name.replace(stage, aside[-1].name, 1): before[name] for name in lost}
        if not changed(bench.run, moved):
            return Outcome(
                SAME, f"of the foreign files, set aside with the rest as {aside[-1].name}"
            )
    return failed(f"{len(lost)} foreign files gone or changed: {', '.join(lost[:3])}")


def lay_foreign(run: Path) -> list[Path]:
    folders = [run, *(path for path in sorted(run.rglob("*")) if path.is_dir())]
    laid = [folder / name for folder in folders for name in FOREIGN]
    for path in laid:
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(f"of somebody else: {path.name}\n".encode() * 20)
    return laid
