"""The run folder: where stages leave and find things, and whether a stage is already done.

A stage's stamp records a digest of its inputs (its own configuration and what the stages before it wrote); the stage
runs again only when that digest changes.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mtp_train.core.errors import UserError
from mtp_train.core.progress import say
from mtp_train.core.provenance import digest, read_json, require_writable, versions, write_json

STAMP = "stage.json"
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

    @property
    def head(self) -> Path:
        return self.root / "train" / "head"

    @property
    def evaluation(self) -> Path:
        return self.root / "evaluate" / "evaluation.json"

    def export(self, layout: str) -> Path:
        return self.root / "export" / layout

    def require(self, stage: str) -> dict[str, Any]:
        """The stamp of a stage that must be done by now."""
        path = self.stage(stage) / STAMP
        if not path.is_file():
            raise UserError(
                f"stage {stage} must be done first",
                self.root,
                f"run `mtp-train {stage}` with the same run folder",
            )
        return dict(read_json(path))

    def seconds(self) -> dict[str, float]:
        """Wall seconds of the stages done so far, as measured when they ran."""
        stamps = {name: self.stage(name) / STAMP for name in STAGES}
        return {name: read_json(path)["seconds"] for name, path in stamps.items() if path.is_file()}


def run_stage(folder: RunFolder, name: str, inputs: Any, work: Callable[[], Any]) -> None:
    """Run `work` unless the stage is done with these inputs; `work` returns what its outputs are (a digest's input)."""
    place = folder.stage(name)
    require_writable(place)
    wanted = digest(inputs)
    stamp = place / STAMP
    if stamp.is_file() and read_json(stamp)["inputs"] == wanted:
        say(f"{name}: done before, inputs unchanged")
        return
    stamp.unlink(missing_ok=True)
    begin = time.perf_counter()
    outputs = work()
    seconds = time.perf_counter() - begin
    write_json(
        stamp,
        {"inputs": wanted, "outputs": digest(outputs), "seconds": seconds, "versions": versions()},
    )
    say(f"{name}: done in {seconds:.0f} s -> {place}")
