"""The run folder: where stages leave and find things, and whether a stage is already done.

A stage's stamp records its inputs by key (its own configuration and what the stages before it wrote), and the bytes of
files that later stages read and that carry no digest of their own: `require_same` verifies them before they are read.
Of inputs that changed, `core.keys` says what they change: work goes on, is set aside, or is refused. None is removed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mtp_train.core.dist import Ranks
from mtp_train.core.errors import UserError
from mtp_train.core.keys import END, RESULT, SPREAD, STEPS, Difference, Inputs, differences, plain
from mtp_train.core.owned import MARK, Kind, claim, held, remove_file, require_own, set_aside
from mtp_train.core.progress import say
from mtp_train.core.provenance import (
    digest,
    file_digest,
    read_json,
    require_files,
    versions,
    write_json,
)

STAMP = "stage.json"
BEGUN = "inputs.json"  # the inputs that the folder's content belongs to, done or not
STAGES = ("regenerate", "precompute", "train", "evaluate", "report", "export")
# Earlier versions left no mark of their own.
STAMPS: dict[str, tuple[str, ...]] = {STAMP: ("inputs", "outputs"), BEGUN: ("inputs",)}
TEXTS = {f"{name}.text/corpus.json": ("inputs", "digest") for name in ("train", "heldout")}
STAGE = Kind("stage's folder", {MARK: (), **STAMPS, **TEXTS})
RUN = Kind(
    "run folder",
    {MARK: ()}
    | {f"{stage}/{name}": keys for stage in STAGES for name, keys in STAMPS.items()}
    | {f"precompute/{name}": keys for name, keys in TEXTS.items()}
    | {"train/head/head.json": ("family", "target_hash")},  # brought from elsewhere
)
# What of a stage's folder is work that a restart would do again.
HALF_DONE = {
    "regenerate": ("*.journal", "*.jsonl"),
    "precompute": ("*/shard-*.json",),
    "train": ("checkpoints/step-*/head.json", "best/head.json"),
    "evaluate": ("completions/*.jsonl", "completions/*.journal"),
}
NAMED = 4  # of changed inputs in a message
OTHER_FOLDER = "name another run folder, or move these files away"


@dataclass(frozen=True)
class RunFolder:
    """Paths of one run.

    Attributes:
        restart: half-done work is set aside, and begun anew.
        go_on: half-done work goes on with values that hold from now on.
    """

    root: Path
    restart: bool = False
    go_on: bool = False

    def stage(self, name: str) -> Path:
        return self.root / name

    def answers(self, name: str) -> Path:
        return self.root / "regenerate" / f"{name}.jsonl"

    def features(self, name: str) -> Path:
        return self.root / "precompute" / name

    def corpus(self, name: str) -> Path:
        return self.root / "precompute" / f"{name}.text"

    def planned_corpus(self, name: str) -> Path:
        return self.root / "plan" / f"{name}.text"

    @property
    def head(self) -> Path:
        return self.root / "train" / "head"

    @property
    def evaluation(self) -> Path:
        return self.root / "evaluate" / "evaluation.json"

    def export(self, layout: str) -> Path:
        return self.root / "export" / layout

    @contextmanager
    def held(self, *stages: str) -> Iterator[None]:
        """Make the folder and these stages' ours, which they must be or be new, and keep other processes out."""
        for name in stages:  # all, before one is made
            require_own(self.stage(name), STAGE, OTHER_FOLDER)
        require_own(self.root, RUN, OTHER_FOLDER)
        with held(self.root):
            claim(self.root, RUN, OTHER_FOLDER)
            for name in stages:
                claim(self.stage(name), STAGE, OTHER_FOLDER)
            yield

    def noted_inputs(self, stage: str) -> dict[str, Any]:
        """The inputs that a stage was done with, by key; none where an earlier version did not note them."""
        path = self.stage(stage) / STAMP
        return dict(read_json(path).get("values", {})) if path.is_file() else {}

    def begun(self, stage: str) -> bool:
        """Whether the stage is done or half done."""
        return any((self.stage(stage) / name).is_file() for name in (STAMP, BEGUN))

    def done(self, stage: str) -> bool:
        """Whether the stage has left its stamp."""
        return (self.stage(stage) / STAMP).is_file()

    def require(self, stage: str, instead: str = "") -> dict[str, Any]:
        """The stamp of a stage that must be done by now.

        Args:
            instead: what else the user can do, for the message.
        """
        path = self.stage(stage) / STAMP
        if not path.is_file():
            raise UserError(
                f"stage {stage} must be done first",
                self.root,
                f"run `mtp-train {stage}` with the same run folder"
                + (instead and f", or {instead}"),
            )
        return dict(read_json(path))

    def require_same(self, stage: str, *paths: Path) -> None:
        """Raise unless files of a stage have the bytes that its stamp records, where it records them."""
        stamp = self.stage(stage) / STAMP
        noted = read_json(stamp).get("files", {}) if stamp.is_file() else {}
        names = [path.relative_to(self.root).as_posix() for path in paths]
        require_files(
            self.root,
            {name: noted[name] for name in names if name in noted},
            f"delete it and run `mtp-train {stage}` again",
        )

    def outputs(self, stage: str) -> str:
        """Digest of a stage's outputs; empty where it was not done here, as before an imported head."""
        path = self.stage(stage) / STAMP
        return str(read_json(path)["outputs"]) if path.is_file() else ""

    def seconds(self, before: str) -> dict[str, float]:
        """Wall seconds of the stages before `before`, as measured when they ran."""
        names = STAGES[: STAGES.index(before)]
        stamps = {name: self.stage(name) / STAMP for name in names}
        return {name: read_json(path)["seconds"] for name, path in stamps.items() if path.is_file()}


def run_stage(
    folder: RunFolder,
    name: str,
    inputs: Inputs,
    work: Callable[[], Any],
    ranks: Ranks | None = None,
    *,
    alone: bool = False,
    whole: Callable[[], bool] = lambda: True,
    files: Sequence[Path] = (),
    kept: str = "",
    earlier: Callable[[], Mapping[str, Any] | None] = lambda: None,
) -> None:
    """Run `work` unless the stage is done with these inputs; `work` returns what its outputs are (a digest's input).

    What other inputs left in the stage's folder is not mixed in: a finished stage is set aside as `<stage>.before-<n>`,
    half-done work is refused, or set aside where the folder says `restart`. A stage whose outputs are gone (not
    `whole`, or one of `files`) is not done.

    Args:
        ranks: all of them call this.
        alone: the main rank works, the others wait for it.
        files: those that the stamp records, and that must be there when `work` ends.
        kept: a pattern of others in the stage's folder that it records.
        earlier: what work of an earlier version, whose stamp is a digest alone, says itself of its inputs.
    """
    place, ranks = folder.stage(name), ranks or Ranks()
    with ExitStack() as stack:
        if ranks.main:
            stack.enter_context(folder.held(name))
        ranks.wait()
        found = _find(place, name, inputs, earlier)
        done = found.finished and not found.changed
        done = done and whole() and all(path.is_file() for path in files)
        changed = found.require_usable(folder, name) if not done else []
        ranks.wait()  # all have looked before one writes
        if done:
            say(f"{name}: done before, inputs unchanged")
            return
        if ranks.main:
            if found.unusable or (folder.restart and found.refused(folder)):
                _set_aside(place, found)
            claim(place, STAGE, OTHER_FOLDER)
            for difference in changed:
                say(f"{name}: goes on with {difference}")
            remove_file(place / STAMP)
            write_json(place / BEGUN, {"inputs": digest(plain(inputs)), "values": plain(inputs)})
        ranks.wait()
        begin = time.perf_counter()
        outputs = work() if ranks.main or not alone else None
        seconds = time.perf_counter() - begin
        if ranks.main:
            recorded = [*files, *(sorted(place.glob(kept)) if kept else ())]
            stamp = {
                "inputs": digest(plain(inputs)),
                "values": plain(inputs),
                "outputs": digest(outputs),
                "files": {
                    path.relative_to(folder.root).as_posix(): file_digest(path) for path in recorded
                },
                "seconds": seconds,
                "versions": versions(),
            }
            write_json(place / STAMP, stamp)
            say(f"{name}: done in {seconds:.0f} s -> {place}")
        if alone:
            ranks.wait()


def outlook(
    folder: RunFolder,
    name: str,
    inputs: Inputs,
    earlier: Callable[[], Mapping[str, Any] | None] = lambda: None,
) -> str:
    """What a stage would do with what lies in its folder; changes nothing."""
    found = _find(folder.stage(name), name, inputs, earlier)
    changed = ", ".join(map(str, found.changed[:NAMED]))
    if found.unusable:
        return f"done with other values ({changed}): it would be set aside and done again"
    if found.refused(folder) and folder.restart:
        return f"half done with other values ({changed}): it would be set aside and begun anew"
    if found.refused(folder):
        return f"half done with other values ({changed}): refused, or begun anew with restart=true"
    if found.half_done:
        return "half done: it would go on"
    return "done" if found.finished else "not begun"


@dataclass(frozen=True)
class _Found:
    """What lies in a stage's folder: finished or half-done work, and how its inputs differ."""

    finished: bool
    half_done: bool
    changed: list[Difference]

    @property
    def unusable(self) -> bool:
        """Whether it is a finished result of other inputs."""
        return self.finished and any(item.changes != END for item in self.changed)

    def refused(self, folder: RunFolder) -> list[Difference]:
        """What half-done work can't go on with; nothing where none is half done."""
        taken = (END, SPREAD, STEPS) if folder.go_on else (END, SPREAD)
        changed = self.changed if self.half_done else []
        return [item for item in changed if item.changes not in taken]

    def require_usable(self, folder: RunFolder, name: str) -> list[Difference]:
        """Raise if half-done work is of other inputs; returns those that it goes on with."""
        refused = self.refused(folder)
        if self.unusable or not self.half_done or (folder.restart and refused):
            return []
        if refused:
            steps = all(item.changes == STEPS for item in refused)
            raise UserError(
                f"half-done work of {name} goes on with the values that it was begun with",
                "; ".join(map(str, refused)),
                "restore them, "
                + ("add go_on=true to go on with the new ones from here, " if steps else "")
                + f"or add restart=true to set it aside as {folder.stage(name)}.before-N and begin anew",
            )
        return self.changed


def _find(
    place: Path, name: str, inputs: Inputs, earlier: Callable[[], Mapping[str, Any] | None]
) -> _Found:
    stamp, begun = place / STAMP, place / BEGUN
    note = stamp if stamp.is_file() else begun
    half = not stamp.is_file() and any(
        True for pattern in HALF_DONE.get(name, ()) for _ in place.glob(pattern)
    )
    if not note.is_file():
        return _Found(False, half, [_unknown()] if half else [])
    told = read_json(note)
    noted = told["values"] if "values" in told else earlier()
    changed = [_unknown()] if noted is None else differences(noted, inputs)
    proven = "values" in told or bool(changed)  # else the work itself looks at what it goes on from
    return _Found(stamp.is_file() and proven, half, changed)


def _unknown() -> Difference:
    """Earlier versions noted a digest alone."""
    return Difference("inputs", "of an earlier version", "noted by key", RESULT)


def _set_aside(place: Path, found: _Found) -> None:
    why = ", ".join(map(str, found.changed[:NAMED])) or "restart=true"
    more = len(found.changed) - NAMED
    why += f" and {more} more" if more > 0 else ""
    what = "inputs changed" if found.unusable else "begun anew"
    say(f"{place.name}: {what} ({why}); what was there is kept as {set_aside(place)}")
