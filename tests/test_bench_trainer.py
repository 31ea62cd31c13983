"""The trainers' benchmark drives both sides on one batch, and its ratios are those of what they answer.

The peer is a stand-in that speaks the protocol: its own environment is not needed here.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from toys import make_target

sys.path.insert(0, str(Path(__file__).parents[1] / "tools"))

import bench_trainer

TOOL = Path(__file__).parents[1] / "tools" / "bench_trainer.py"
STAND_IN = """
import json, sys
if sys.argv[1] == "-c":
    print(json.dumps({"speculators": "0"}))
    sys.exit()
spec = json.load(open(sys.argv[2]))
print("a line of some library")
print(json.dumps({"ready": True}), flush=True)
for _ in sys.stdin:
    print(json.dumps({"seconds": 50.0, "loss": 1.0}), flush=True)
print(json.dumps({"peak_mb": 1e5, "held_mb": 4e4, "trained": sum(spec["documents"])}), flush=True)
"""


@pytest.fixture
def peer_python(tmp_path: Path) -> Path:
    (tmp_path / "stand_in.py").write_text(STAND_IN)
    script = tmp_path / "python"
    script.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{tmp_path}/stand_in.py" "$@"\n')
    script.chmod(0o755)
    return script


@pytest.mark.parametrize("name", ["--llama-pairs", "--llama-rows"])
def test_a_shape_without_steps_is_left_out(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(sys, "argv", ["bench", "--out", "x.json", name, "0"])
    assert bench_trainer.cases(bench_trainer.parse()) == []


def test_no_counted_steps_are_refused_in_a_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["bench", "--out", "x.json", "--pairs", "0"])
    with pytest.raises(SystemExit):
        bench_trainer.parse()
    assert "--pairs: must be 1 or more, not 0" in capsys.readouterr().err


def test_both_sides_step_in_turns_and_are_compared(tmp_path: Path, peer_python: Path) -> None:
    folder = tmp_path / "target"
    make_target().model.save_pretrained(folder)  # type: ignore[operator]
    out = tmp_path / "out.json"
    options = "--rows 40 --steps 2 --pairs 2 --threads 1 --documents several --llama-rows 0"
    done = subprocess.run(
        [
            *(sys.executable, str(TOOL), "--target", str(folder), "--out", str(out)),
            *("--peer-python", str(peer_python), *options.split()),
        ],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    (case,) = json.loads(out.read_text())["cases"]
    assert case["documents"] == [12, 2, 10, 6, 10]
    peer = case["sides"]["peer"]
    assert (peer["seconds"], peer["tokens_per_second"]) == ([50.0, 50.0], 0.8)
    for name in ("kl", "hard_ce"):
        ours, ratio = case["sides"][name], case["ours_to_peer"][name]
        # the two first rows of a document have no chain of a first step, the three first none of a second
        assert ours["trained"] == (10 + 8 + 4 + 8) + (9 + 7 + 3 + 7)
        assert len(ours["losses"]) == 3
        assert ours["losses"][2] < ours["losses"][0], "nothing was trained"
        assert 0 < ours["held_mb"] <= ours["peak_mb"]
        assert ratio["times_tokens_per_second"] == round(ours["tokens_per_second"] / 0.8, 2)
        assert ratio["share_of_peak_memory"] == round(ours["peak_mb"] / 1e5, 3)
        assert ratio["share_of_trained_predictions"] == round(ours["trained"] / 40, 4)
