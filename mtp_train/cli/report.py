"""`mtp-train report`: the evaluation as a page, as Markdown and as JSON."""

from __future__ import annotations

import json
from typing import Any

from mtp_train.checkpoint.heads import read_card
from mtp_train.cli.job import Job
from mtp_train.cli.run_folder import run_stage
from mtp_train.core.errors import UserError
from mtp_train.core.progress import say
from mtp_train.core.provenance import file_digest, read_json
from mtp_train.report.stage import write_report
from mtp_train.train.loop import CURVES


def stage(job: Job) -> None:
    before = [job.folder.require(name)["outputs"] for name in ("evaluate", "train")]
    run_stage(job.folder, "report", [before, job.folder.seconds("report")], lambda: _work(job))


def _work(job: Job) -> Any:
    path = job.folder.stage("train") / CURVES
    job.folder.require_same("train", path)
    job.folder.require_same("evaluate", job.folder.evaluation)
    curves = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    evaluation = read_json(job.folder.evaluation)
    if evaluation["head"]["sha256"] != read_card(job.folder.head).sha256:
        raise UserError(
            "a report shows the head that was evaluated",
            "an evaluation of an earlier head",
            "run mtp-train evaluate first",
        )
    out = job.folder.stage("report")
    write_report(evaluation, curves, job.folder.seconds("report"), out)
    say(f"report: open {out / 'index.html'}")
    return file_digest(out / "report.json")
