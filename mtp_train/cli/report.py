"""`mtp-train report`: the evaluation as a page, as Markdown and as JSON; `report compare` does so for several runs."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mtp_train.checkpoint.heads import read_card
from mtp_train.cli.features import tell_other_text
from mtp_train.cli.job import Job
from mtp_train.cli.run_folder import RunFolder, run_stage
from mtp_train.core.errors import UserError
from mtp_train.core.keys import END, inputs
from mtp_train.core.owned import MARK, Kind, claim, require_own
from mtp_train.core.progress import say
from mtp_train.core.provenance import file_digest, read_json
from mtp_train.evaluate.compare import compare_runs
from mtp_train.report.comparison import findings
from mtp_train.report.stage import write_comparison, write_report
from mtp_train.train.loop import CURVES

COMPARISON = Kind("comparison's folder", {MARK: (), "comparison.json": ("format", "runs", "pairs")})


def tool(arguments: Sequence[str]) -> None:
    """Compare the evaluations of run folders."""
    asked = parse(arguments)
    out = asked.out or Path("runs") / "comparison"
    for folder in map(RunFolder, asked.runs):
        kept = (folder.stage("evaluate") / "completions").glob("*.jsonl")
        folder.require_same("evaluate", folder.evaluation, *sorted(kept))
    require_own(out, COMPARISON, "name another folder with --out, or move these files away")
    comparison = compare_runs(asked.runs)
    folders = [RunFolder(Path(run["path"])) for run in comparison["runs"]]
    claim(out, COMPARISON, "name another folder with --out")
    write_comparison(comparison, [read_json(folder.evaluation) for folder in folders], out)
    for finding in findings(comparison):
        say(f"compare: {finding}")
    say(f"compare: open {out / 'index.html'}")


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="mtp-train report compare",
        description="Compares evaluated runs on the prompts that they share: paired differences with intervals, "
        "as a page, Markdown and JSON.",
    )
    parser.add_argument(
        "runs", nargs="+", type=Path, metavar="RUN", help="run folders, two or more"
    )
    parser.add_argument(
        "--out", type=Path, metavar="FOLDER", help="where to write (default runs/comparison)"
    )
    return parser.parse_args(arguments)


def stage(job: Job) -> None:
    before = {
        f"{name}.outputs": job.folder.require(name)["outputs"] for name in ("evaluate", "train")
    }
    tell_other_text(job, "report")
    found = inputs(before) | inputs({"seconds": job.folder.seconds("report")}, END)
    run_stage(job.folder, "report", found, lambda: _work(job), job.process.ranks, alone=True)


def _work(job: Job) -> Any:
    path = job.folder.stage("train") / CURVES
    job.folder.require_same("train", path)
    job.folder.require_same("evaluate", job.folder.evaluation)
    curves = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    evaluation, card = read_json(job.folder.evaluation), read_card(job.folder.head)
    if evaluation["head"]["sha256"] != card.sha256:
        raise UserError(
            "a report shows the head that was evaluated",
            "an evaluation of an earlier head",
            "run mtp-train evaluate first",
        )
    evaluation["head"] |= {"config": card.head, "training": card.config}
    out = job.folder.stage("report")
    write_report(evaluation, curves, job.folder.seconds("report"), out)
    say(f"report: open {out / 'index.html'}")
    return file_digest(out / "report.json")
