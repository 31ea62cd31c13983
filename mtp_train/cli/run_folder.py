"""The run folder: where stages leave and find things, and whether a stage is already done.

A stage's stamp records a digest of its inputs (its own configuration and what the stages before it wrote); the stage
runs again only when that digest changes. It also records the bytes of files that later stages read and that carry no
digest of their own: `require_same` verifies them before they are read.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mtp_train.core.dist import Ranks
from mtp_train.core.errors import UserError
from mtp_train.core.owned import require_writable
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
BEGUN = "inputs.json"  # digest of the inputs that the folder's content belongs to, done or not
STAGES = ("regenerate", "precompute", "train", "evaluate", "report", "export")


@dataclass(frozen=True)
class RunFolder:
    """Paths of one run."""

    root: Path

    def stage(self, name: str) -> Path:
        return self.root / name

    def answers(self, name: str) -> Path:
        return self.root / "regenerate" / f"{name}.jsonl"

    def features(self, name: str) -> Path:
        return self.root / "precompute" / name

    def corpus(self, name: str) -> Path:
        return self.root / "precompute" / f"{name}.text"

    @property
    def head(self) -> Path:
        return self.root / "train" / "head"

    @property
    def evaluation(self) -> Path:
        return self.root / "evaluate" / "evaluation.json"

    def export(self, layout: str) -> Path:
        return self.root / "export" / layout

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
    inputs: Any,
    work: Callable[[], Any],
    ranks: Ranks | None = None,
    *,
    keeps: bool = False,
    whole: Callable[[], bool] = lambda: True,
    files: Sequence[Path] = (),
    kept: str = "",
    half: Any = None,
) -> None:
    """Run `work` unless the stage is done with these inputs; `work` returns what its outputs are (a digest's input).

    What other inputs left in the stage's folder is not mixed in: a finished stage is set aside as `<stage>.before`
    (in the place of an older one), a half-done one is removed, unless the stage knows what of it may stay (`keeps`).
    A stage whose outputs are gone (not `whole`, or one of `files`) is not done. `files`: those that the stamp records,
    and that must be there when `work` ends; `kept`: a pattern of others in its place that it records. `half`: the
    inputs that half-done work belongs to, where it can be gone on from with some others changed.
    """
    place, ranks = folder.stage(name), ranks or Ranks()
    require_writable(place)
    wanted = digest(inputs)
    wanted_half = wanted if half is None else digest(half)
    stamp, begun = place / STAMP, place / BEGUN
    done = _inputs(stamp) == wanted and whole() and all(path.is_file() for path in files)
    ranks.wait()
    if done:
        say(f"{name}: done before, inputs unchanged")
        return
    if ranks.main:
        finished = _inputs(stamp) not in (None, wanted)
        if not keeps and (finished or _inputs(begun) != wanted_half):
            _set_aside(place, stamp.is_file())
            require_writable(place)
        stamp.unlink(missing_ok=True)
        write_json(begun, {"inputs": wanted_half})
    ranks.wait()
    begin = time.perf_counter()
    outputs = work()
    seconds = time.perf_counter() - begin
    if ranks.main:
        write_json(
            stamp,
            {
                "inputs": wanted,
                "outputs": digest(outputs),
                "files": {
                    path.relative_to(folder.root).as_posix(): file_digest(path)
                    for path in [*files, *(sorted(place.glob(kept)) if kept else ())]
                },
                "seconds": seconds,
                "versions": versions(),
            },
        )
        say(f"{name}: done in {seconds:.0f} s -> {place}")


def _set_aside(place: Path, finished: bool) -> None:
    if not finished:
        shutil.rmtree(place)
        return
    before = place.with_name(f"{place.name}.before")
    shutil.rmtree(before, ignore_errors=True)
    place.rename(before)
    say(f"{place.name}: inputs changed; what was there is kept as {before}")


def _inputs(path: Path) -> str | None:
    return str(read_json(path)["inputs"]) if path.is_file() else None
