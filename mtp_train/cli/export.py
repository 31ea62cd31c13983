"""`mtp-train export`: the run's head as a folder that serving engines load."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from mtp_train.checkpoint.heads import load_head, read_card
from mtp_train.cli.job import Job
from mtp_train.cli.run_folder import run_stage
from mtp_train.core.progress import say
from mtp_train.core.provenance import folder_digest, read_json
from mtp_train.export.files import CONFIG
from mtp_train.export.stage import ExportConfig, export_head, layout_of


def stage(job: Job) -> None:
    config: ExportConfig = job.section("export", ExportConfig)
    before = [
        job.folder.require("train")["outputs"],
        job.folder.evaluation.is_file() and job.folder.require("evaluate")["outputs"],
    ]
    family = read_card(job.folder.head).family
    out = job.folder.export(layout_of(config, family).name)
    run_stage(
        job.folder,
        "export",
        [asdict(config), before, job.target_inputs],
        lambda: _work(job, config, out),
        whole=(out / CONFIG).is_file,
    )


def _work(job: Job, config: ExportConfig, out: Path) -> Any:
    target = job.target(ends=True)  # the check's forwards are the head's
    head, card = load_head(job.folder.head, target)
    figures: dict[str, Any] = {}
    if job.folder.evaluation.is_file():
        job.folder.require_same("evaluate", job.folder.evaluation)
        evaluation = read_json(job.folder.evaluation)
        if evaluation["head"]["sha256"] == card.sha256:  # never an earlier head's figures
            figures = evaluation["sets"]["heldout"]
    check = export_head(head, target, config, out, figures)
    say(f"export: {out}; loaded back, logits equal at {len(check)} points")
    return folder_digest(out)
