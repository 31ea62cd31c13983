"""`mtp-train report compare`: two evaluated toy heads, from the command line to the page."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from test_compare import evaluated

from mtp_train.cli.main import USAGE, dispatch, guarded


def test_runs_are_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = [evaluated(tmp_path / name, size) for name, size in (("good", 0.0), ("bad", 0.5))]
    out = tmp_path / "out"
    arguments = ["compare", *map(str, runs), "--out", str(out)]
    assert guarded(lambda: dispatch("report", arguments)) == 0
    said = capsys.readouterr()
    assert "Too few prompts to say: bad against good on held-out prompts, greedy" in said.err
    found = json.loads((out / "comparison.json").read_text())
    assert [run["name"] for run in found["runs"]] == ["good", "bad"]
    assert "good is better" in (out / "comparison.md").read_text()
    html = (out / "index.html").read_text()
    assert "talks, greedy" in html and "too few prompts to say" in html


def test_a_comparison_needs_two_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert guarded(lambda: dispatch("report", ["compare", str(tmp_path)])) == 2
    assert "two runs or more" in capsys.readouterr().err
    assert "report compare RUN RUN" in USAGE
