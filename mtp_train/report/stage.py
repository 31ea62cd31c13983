"""Writes the report: JSON for programs, Markdown for diffs, HTML for people. Knows no way to measure anything."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mtp_train.core.errors import UserError
from mtp_train.core.provenance import write_json, write_text
from mtp_train.report.comparison_page import comparison_page
from mtp_train.report.markdown import comparison_markdown, markdown
from mtp_train.report.page import page

FORMAT = 1  # of report.json and of comparison.json
EVALUATION_FORMATS = (1, 2)  # what this code reads; 1 lacks what 2 added


def write_report(
    evaluation: Mapping[str, Any],
    curves: Sequence[Mapping[str, Any]],
    stages: Mapping[str, float],
    out: Path,
) -> None:
    """Write `report.json`, `report.md` and `index.html` into `out`, each whole or not at all.

    Args:
        evaluation: the evaluate stage's JSON.
        curves: training and validation rows by step.
        stages: seconds per stage; may be empty.

    Raises:
        UserError: the evaluation is of another format.
    """
    found = evaluation.get("format")
    if found not in EVALUATION_FORMATS:
        raise UserError(
            f"an evaluation must be of format {' or '.join(map(str, EVALUATION_FORMATS))}",
            found,
            "run the evaluate stage again",
        )
    told = {"format": FORMAT, "evaluation": evaluation, "curves": curves, "stages": stages}
    write_text(out / "index.html", page(evaluation, curves, stages))
    write_text(out / "report.md", markdown(evaluation, curves, stages))
    write_json(out / "report.json", told)


def write_comparison(
    comparison: Mapping[str, Any], evaluations: Sequence[Mapping[str, Any]], out: Path
) -> None:
    """Write `comparison.json`, `comparison.md` and `index.html` into `out`, each whole or not at all.

    Args:
        comparison: `runs`, `pairs` and `left_out`, as the evaluation compares runs.
        evaluations: the evaluate stage's JSON of each run, in the order of `runs`.
    """
    write_text(out / "index.html", comparison_page(comparison, evaluations))
    write_text(out / "comparison.md", comparison_markdown(comparison, evaluations))
    write_json(out / "comparison.json", {"format": FORMAT, **comparison})
