"""Runs compared on the same prompts: made-up counts with known answers, and two toy heads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from evaluations import CONFIG, measure

from mtp_train.core.errors import UserError
from mtp_train.evaluate.compare import TOO_FEW, UNDECIDED, compare_runs, paired
from mtp_train.report.comparison import findings


def evaluated(folder: Path, size: float, **changes: Any) -> Path:
    """A run folder with an evaluation of the toy head."""
    found = measure(folder / "evaluate", size=size)
    evaluation = {
        "format": 2,
        "target": {"path": "toy", "hash": "0"},
        "head": {"family": "mtp"},
        "k": CONFIG.drafts,
        "dtype": "float32",
        "max_new_tokens": CONFIG.max_new_tokens,
        "sets": found.sets,
    }
    (folder / "evaluate" / "evaluation.json").write_text(json.dumps(evaluation | changes))
    return folder


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """A head, and one whose weights are half noise."""
    folder = tmp_path_factory.mktemp("runs")
    return [evaluated(folder / name, size) for name, size in (("good", 0.0), ("bad", 0.5))]


def test_two_heads(runs: list[Path]) -> None:
    found = json.loads(json.dumps(compare_runs(runs)))
    assert [run["name"] for run in found["runs"]] == ["good", "bad"]
    kinds = {(row["set"], row["mode"], row["metric"]) for row in found["pairs"]}
    metrics = {"tau", "tokens", "per_position/1", "per_position/2"}
    assert kinds >= {("talks", "greedy", metric) for metric in metrics}
    tau = next(
        row
        for row in found["pairs"]
        if (row["set"], row["mode"], row["metric"]) == ("talks", "greedy", "tau")
    )
    evaluations = [json.loads((run / "evaluate" / "evaluation.json").read_text()) for run in runs]
    values = [item["sets"]["talks"]["greedy"]["tau"] for item in evaluations]
    assert [tau["a_value"], tau["b_value"]] == pytest.approx(values)
    assert tau["difference"] == pytest.approx(values[1] - values[0])
    assert (tau["prompts"], tau["conversations"]) == (9, 6)
    assert tau["difference"] < 0 and tau["verdict"] == "good is better"
    assert tau["ci"][0] <= tau["difference"] <= tau["ci"][1] < 0
    small = [row["verdict"] for row in found["pairs"] if row["set"] == "heldout"]
    assert set(small) == {TOO_FEW}, "five prompts"
    assert found["left_out"]["sets"] == []


def test_prompts_of_one_run_alone_are_counted(runs: list[Path], tmp_path: Path) -> None:
    """One conversation less, and another question under a known key."""
    other = evaluated(tmp_path / "other", 0.0)
    path = other / "evaluate" / "completions" / "talks.t0.k2.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    kept = [row for row in rows if not row["id"].startswith("80")]
    kept[0]["prompt_ids"][0] += 1
    path.write_text("".join(json.dumps(row) + "\n" for row in kept))
    found = compare_runs([runs[0], other])
    (left,) = [row for row in found["left_out"]["prompts"] if row["mode"] == "greedy"]
    assert (left["set"], left["only_a"], left["only_b"]) == ("talks", 2, 1)
    tau = next(row for row in found["pairs"] if row["set"] == "talks" and row["metric"] == "tau")
    assert tau["conversations"] == 4


def test_a_difference_needs_its_interval_and_enough_prompts() -> None:
    """Columns: completions, tokens, all steps, those with drafts, accepted, accepted more than 0."""
    rng = np.random.default_rng(3)
    steps = rng.integers(20, 40, size=200)
    ones, tokens = np.ones(200), np.full(200, 64)

    def counts(rate: float) -> np.ndarray:
        accepted = rng.binomial(steps, rate)
        return np.column_stack([ones, tokens, steps, steps, accepted, accepted])

    better, same = counts(0.6), counts(0.5)
    rows = {row["metric"]: row for row in paired(counts(0.5), better, ("A", "B"))}
    assert rows["tau"]["verdict"] == "B is better"
    assert rows["tokens"]["verdict"] == UNDECIDED
    assert rows["tau"]["ci"][0] < 0.1 < rows["tau"]["ci"][1]
    assert paired(better, same, ("A", "B"))[0]["verdict"] == "A is better"
    assert paired(better[:5], same[:5], ("A", "B"))[0]["verdict"] == TOO_FEW


def test_runs_with_steps_without_drafts_are_compared_by_tokens_per_step_of_all_steps() -> None:
    """A's tau is higher, over the few steps in which it drafted; B says more tokens a step."""
    ones, every = np.ones(40), np.full(40, 30)
    few, accepted = np.full(40, 3), np.full(40, 3)
    lookup = np.column_stack([ones, every + accepted, every, few, accepted, accepted])
    half = np.full(40, 15)
    head = np.column_stack([ones, every + half, every, every, half, half])
    rows = {row["metric"]: row for row in paired(lookup, head, ("A", "B"))}
    assert (rows["tau"]["a_value"], rows["tau"]["b_value"]) == (2.0, 1.5)
    per_step = rows["tokens_per_step"]
    assert (per_step["a_value"], per_step["b_value"]) == (1.1, 1.5)
    assert per_step["verdict"] == "B is better"
    pairs = [{"a": "A", "b": "B", "set": "x", "mode": "greedy"} | row for row in rows.values()]
    (said,) = findings({"runs": [{"name": "A"}, {"name": "B"}], "pairs": pairs})
    assert "B is better than A" in said and "tokens per step higher by 0.40" in said
    assert "tokens_per_step" not in {row["metric"] for row in paired(head, head, ("A", "B"))}


def test_equal_heads_are_seldom_told_apart() -> None:
    """The negative control: of 200 comparisons of a head with itself about one in 20 goes wrong."""
    rng = np.random.default_rng(5)
    wrong = 0
    for _ in range(200):
        hard = rng.beta(4, 4, size=60)
        runs = []
        for _ in range(2):
            steps = np.full(60, 30)
            accepted = rng.binomial(steps, hard)
            runs.append(np.column_stack([np.ones(60), steps * 2, steps, steps, accepted, accepted]))
        wrong += paired(runs[0], runs[1], ("A", "B"))[0]["verdict"] != UNDECIDED
    assert 1 <= wrong <= 24


def test_what_can_not_be_compared(runs: list[Path], tmp_path: Path) -> None:
    with pytest.raises(UserError, match="two runs or more"):
        compare_runs(runs[:1])
    with pytest.raises(UserError, match="must be different ones"):
        compare_runs([runs[0], runs[0] / "evaluate"])
    with pytest.raises(UserError, match="must exist"):
        compare_runs([runs[0], tmp_path])
    (tmp_path / "evaluation.json").write_text('{"format": 1}')
    with pytest.raises(UserError, match="format 2"):
        compare_runs([runs[0], tmp_path])
    (tmp_path / "evaluation.json").write_text(
        (runs[0] / "evaluate" / "evaluation.json").read_text()
    )
    with pytest.raises(UserError, match="must keep its completions"):
        compare_runs([runs[0], tmp_path])
