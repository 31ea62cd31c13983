"""Every notebook runs, cell by cell, on a run folder."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import test_report

NOTEBOOKS = sorted((Path(__file__).parents[1] / "notebooks").glob("*.ipynb"))


def test_there_are_notebooks() -> None:
    assert len(NOTEBOOKS) == 1


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs_from_top_to_bottom(
    path: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "evaluate").mkdir()
    (tmp_path / "train").mkdir()
    evaluation = json.dumps(test_report.evaluation())
    (tmp_path / "evaluate" / "evaluation.json").write_text(evaluation)
    rows = [json.dumps(row) + "\n" for row in test_report.curves()]
    (tmp_path / "train" / "curves.jsonl").write_text("".join(rows))
    monkeypatch.setenv("RUN", str(tmp_path))
    cells = json.loads(path.read_text())["cells"]
    names: dict[str, object] = {}
    for cell in cells:
        if cell["cell_type"] == "code":
            exec("".join(cell["source"]), names)
    printed = capsys.readouterr().out
    assert "heldout" in printed and "agree/1" in printed
