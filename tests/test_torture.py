"""The torture tool notices a wrong byte, a traceback and a foreign file that is gone; a short run of it on a toy."""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import pytest
from test_cli import overrides, save_target, write_prompts

sys.path.insert(0, str(Path(__file__).parents[1] / "tools"))

import torture
import torture_trials
from torture_judge import FAILED, LINE, SAME, Outcome, changed, differences, names, snapshot, spoken
from torture_processes import Ended
from torture_trials import STAGES, Bench, Trial, can_mount, trials

LINES = "regenerate: a note\nmtp-train: error: a rule; received /r/train/x.bin; a remedy\n"


# --- its judgement --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ended", "verdict"),
    [
        (Ended((2,), LINES), LINE),
        (Ended((2, -9), LINES), LINE),
        (Ended((2, 2), LINES * 2), LINE),
        (Ended((2,), LINES + LINES.replace("rule", "law")), FAILED),
        (Ended((2,), "something else"), FAILED),
        (Ended((1,), LINES), FAILED),
        (Ended((-9,), ""), FAILED),
        (Ended((0,), "Traceback (most recent call last):\n  ...\nKeyError: 1\n"), FAILED),
        (Ended((2,), LINES + "Traceback (most recent call last):\nOSError\n"), FAILED),
        (Ended((-9,), "", killed=True), FAILED),
    ],
)
def test_only_one_line_without_a_traceback_is_right(ended: Ended, verdict: str) -> None:
    said = spoken(ended)
    assert said and said.verdict == verdict


def test_a_process_that_ended_well_said_nothing() -> None:
    assert spoken(Ended((0, 0), "a note\n")) is None


def test_a_line_must_name_the_file() -> None:
    line = spoken(Ended((2,), LINES))
    assert line and names(line, Path("/r/train/x.bin")) and not names(line, Path("/r/train/y.bin"))


def test_every_difference_of_bytes_is_noticed_but_that_of_timings(tmp_path: Path) -> None:
    one, other = tmp_path / "one", tmp_path / "other"
    for root, seconds in ((one, 1.0), (other, 2.0)):
        (root / "train").mkdir(parents=True)
        (root / "train" / "head.bin").write_bytes(b"abc")
        row = {"step": 1, "loss": 2.5, "seconds": seconds}
        (root / "train" / "curves.jsonl").write_text(json.dumps(row) + "\n")
    (other / "train" / ".lock").write_text("hidden files are no results")
    assert differences(one, other) == []
    (other / "train" / "head.bin").write_bytes(b"abd")
    assert differences(one, other, "train") == ["train/head.bin differs"]
    (other / "train" / "head.bin").rename(other / "train" / "head.old")
    wrong = ["train/head.bin is missing", "train/head.old is left over"]
    assert differences(one, other) == wrong
    (other / "train" / "curves.jsonl").write_text('{"step": 1, "loss": 2.6, "seconds": 1.0}\n')
    assert differences(one, other) == [*wrong, "train/curves.jsonl differs"]


def test_a_foreign_file_that_is_gone_or_changed_is_noticed(tmp_path: Path) -> None:
    paths = [tmp_path / name for name in ("a", "b", "c")]
    for path in paths:
        path.write_text(path.name)
    before = snapshot(tmp_path, paths)
    assert changed(tmp_path, before) == []
    paths[0].unlink()
    paths[1].write_text("other")
    assert changed(tmp_path, before) == ["a", "b"]


@pytest.mark.parametrize(("verdict", "status"), [(SAME, 0), (LINE, 0), (FAILED, 1)])
def test_the_table_and_the_exit_status_tell_of_a_failure(
    verdict: str, status: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- torture -->\nold\n<!-- /torture -->\nafter\n")
    trial = Trial("kills", "train", 2, "kill 1", lambda rng: Outcome(verdict, "/a/disk/run/x"))
    monkeypatch.setattr(torture, "prepare", lambda bench, ranks: {})
    monkeypatch.setattr(torture, "trials", lambda *arguments: [trial])
    monkeypatch.setattr(torture, "can_mount", lambda folder: False)
    (tmp_path / "out").mkdir()
    assert torture.main(["--out", str(tmp_path / "out"), "--table", str(page)]) == status
    text = page.read_text()
    counts = " | ".join(str(int(verdict == name)) for name in (SAME, LINE, FAILED))
    assert f"| kill -9 | train | 2 | 1 | {counts} |" in text
    assert "old" not in text and text.startswith("before") and text.endswith("after\n")
    assert ("disk/run/x" in text) == (verdict == FAILED) and "/a/" not in text


# --- a short run ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    """An unbroken run on a toy target."""
    folder = tmp_path_factory.mktemp("torture")
    save_target(folder / "target")
    write_prompts(folder / "prompts")
    keys = [item for item in overrides(folder, "threads=1") if not item.startswith("run=")]
    made = Bench(folder / "out", [*keys, "precision=float32", "train.checkpoints=3"])
    made.make_reference([1])
    yield made


SHORT = [
    "kill 1 regenerate 1",
    "kill 2 precompute 1",
    "kill 3 train 1",
    "disk train some",
    "readonly export",
    "corrupt precompute/train/speed.json precompute",
    "corrupt precompute/train/manifest.json train",
    "corrupt evaluate/evaluation.json report",
    "foreign train done",
    "foreign export new",
]


@pytest.mark.parametrize("name", SHORT)
def test_a_fault_ends_with_the_same_bytes_or_one_line(name: str, bench: Bench) -> None:
    found = {trial.name: trial for trial in trials(bench, 3, [1], torture_trials.KINDS)}
    if found[name].kind in torture.NEEDS_MOUNT and not can_mount(bench.disk):
        pytest.skip("no right to mount a file system")
    outcome = found[name].work(random.Random(name))
    assert outcome.verdict in (SAME, LINE), str(outcome)


def test_a_trial_fails_where_a_result_is_another(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.restore()
    (bench.run / "train" / "curves.jsonl").write_text("{}\n")
    monkeypatch.setattr(bench, "do", lambda *arguments, **more: Ended((0,)))
    assert "train/curves.jsonl differs" in str(bench.finish("train"))
    monkeypatch.setattr(torture_trials, "mounted", lambda folder: nullcontext(lambda options: None))
    assert "ended well on a read-only disk" in str(
        torture_trials.read_only(bench, "train", random.Random(0))
    )


def test_every_kind_of_fault_has_trials_in_every_stage(bench: Bench) -> None:
    found = trials(bench, 30, [1, 2], torture_trials.KINDS)
    for kind in torture_trials.KINDS:
        assert {trial.stage for trial in found if trial.kind == kind} >= set(STAGES) - {
            "regenerate"
        }
    assert len({trial.name for trial in found}) == len(found)
