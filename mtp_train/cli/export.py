"""`mtp-train export`: the run's head as a folder that serving engines load."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from mtp_train.checkpoint.heads import load_head
from mtp_train.cli.job import Job
from mtp_train.cli.run_folder import run_stage
from mtp_train.core.progress import say
from mtp_train.core.provenance import folder_digest, read_json
from mtp_train.export.stage import TENSORS, ExportConfig, export_head


def stage(job: Job) -> None:
    config: ExportConfig = job.section("export", ExportConfig)
    before = [
        job.folder.require("train")["outputs"],
        job.folder.evaluation.is_file() and job.folder.require("evaluate")["outputs"],
    ]
    run_stage(
        job.folder,
        "export",
        [asdict(config), before, job.target_inputs],
        lambda: _work(job, config),
        whole=(job.folder.export(config.format) / TENSORS).is_file,
    )


def _work(job: Job, config: ExportConfig) -> Any:
    target = job.target(ends=True)  # the check's forwards are the head's
    head, card = load_head(job.folder.head, target)
    figures: dict[str, Any] = {}
    if job.folder.evaluation.is_file():
        evaluation = read_json(job.folder.evaluation)
        if evaluation["head"]["sha256"] == card.sha256:  # never an earlier head's figures
            figures = evaluation["sets"].get("heldout", {})
    out = job.folder.export(config.format)
    check = export_head(head, target, config, out, figures)
    say(f"export: {out}; loaded back, logits equal at {len(check)} points")
    return folder_digest(out)
