"""Two or more evaluations compared on the prompts that both answered. Knows no engine and no page.

A difference is that of the two runs' figures over the same conversations, and its interval is of that difference: both
runs are resampled together, conversation by conversation, so that what is easy for both counts for neither.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np

from mtp_train.core.errors import UserError
from mtp_train.core.provenance import digest, read_json
from mtp_train.engine.schemes import SchemeConfig
from mtp_train.evaluate.acceptance import Table, weights
from mtp_train.evaluate.grid import Cell
from mtp_train.evaluate.runs import Run, read_run
from mtp_train.models.identity import FORWARD, require_same

MODES = ("greedy", "sampled")
EVALUATION = "evaluation.json"
UNDECIDED = "no difference shown"
TOO_FEW = "too few prompts to say"
FEWEST = 6  # conversations: a coin agrees five times out of five in one of 16 tries, six out of six in one of 32


def compare_runs(folders: Sequence[Path | str]) -> dict[str, Any]:
    """Compare the evaluations of run folders, each with each.

    Args:
        folders: run folders, or their `evaluate` folders.

    Returns:
        Plain JSON values: `runs`, `pairs` (one per pair of runs, set, mode and metric) and `left_out`.

    Raises:
        UserError: fewer than two folders, or one without an evaluation that keeps its completions.
    """
    if len(folders) < 2:
        raise UserError("a comparison needs two runs or more", len(folders), "name another one")
    found = [_read(Path(folder)) for folder in folders]
    found = [one.named(name) for one, name in zip(found, _names(found), strict=True)]
    pairs: list[dict[str, Any]] = []
    left: list[dict[str, Any]] = []
    sets: list[dict[str, Any]] = []
    for a, b in combinations(found, 2):
        _require_same_target(a, b)
        sets += [
            {"set": name, "only": one.name, "not_in": other.name}
            for one, other in ((a, b), (b, a))
            for name in one.evaluation["sets"]
            if name not in other.evaluation["sets"]
        ]
        for name in a.evaluation["sets"]:
            if name in b.evaluation["sets"]:
                for mode in MODES:
                    _compare(a, b, name, mode, pairs, left)
    return {
        "runs": [one.described() for one in found],
        "pairs": pairs,
        "left_out": {"sets": sets, "prompts": left},
    }


@dataclass(frozen=True)
class Evaluated:
    """A run's evaluation and where it lies."""

    name: str
    folder: Path  # the stage's
    evaluation: Mapping[str, Any]

    def named(self, name: str) -> Evaluated:
        return Evaluated(name, self.folder, self.evaluation)

    @property
    def root(self) -> Path:
        return self.folder.parent

    def described(self) -> dict[str, Any]:
        values = self.evaluation
        target = {name: values["target"][name] for name in ("path", "hash")}
        same = {name: values[name] for name in ("head", "k", "dtype", "max_new_tokens")}
        return {"name": self.name, "path": str(self.root), **same, "target": target}

    def temperature(self, name: str, mode: str) -> float:
        return float(self.evaluation["sets"][name][mode]["temperature"])

    def run(self, name: str, mode: str) -> Run:
        scheme = SchemeConfig(drafts=self.evaluation["k"])  # its kind is not in a file's name
        cell = Cell(self.temperature(name, mode), scheme)
        path = self.folder / "completions" / f"{cell.file(name)}.jsonl"
        if not path.is_file():
            raise UserError(
                "an evaluation to compare must keep its completions", path, "evaluate it again"
            )
        return read_run(path)


def _read(folder: Path) -> Evaluated:
    place = folder if (folder / EVALUATION).is_file() else folder / "evaluate"
    evaluation = read_json(place / EVALUATION)
    if evaluation.get("format") != 2:
        raise UserError(
            "an evaluation to compare must be of format 2",
            f"{evaluation.get('format')} in {place}",
            "run the evaluate stage again",
        )
    return Evaluated("", place.resolve(), evaluation)


def _require_same_target(a: Evaluated, b: Evaluated) -> None:
    """Raise where the same weights ran under two configs. Runs of other weights are compared, and the page says so."""
    then, now = (one.evaluation.get("identity", {}) for one in (a, b))
    if then and now and a.evaluation["target"]["hash"] == b.evaluation["target"]["hash"]:
        what = f"the evaluations {a.name} and {b.name}"
        require_same(then, now, what, "evaluate both with one config.json", FORWARD)


def _names(found: Sequence[Evaluated]) -> list[str]:
    """The folders' names, as much of their paths as tells them apart."""
    parts = [one.root.parts for one in found]
    if len(set(parts)) < len(parts):
        raise UserError(
            "runs to compare must be different ones", [str(one.root) for one in found], "drop one"
        )
    for depth in range(1, max(map(len, parts)) + 1):
        names = ["/".join(part[-depth:]) for part in parts]
        if len(set(names)) == len(names):
            return names
    raise AssertionError("different paths differ somewhere")


def _compare(
    a: Evaluated,
    b: Evaluated,
    name: str,
    mode: str,
    pairs: list[dict[str, Any]],
    left: list[dict[str, Any]],
) -> None:
    """Add what one set says of two runs in one mode."""
    about = {"a": a.name, "b": b.name, "set": name, "mode": mode}
    modes = [one.evaluation["sets"][name] for one in (a, b)]
    if not all(mode in measured for measured in modes):
        if any(mode in measured for measured in modes):
            left.append(about | {"reason": "not measured in the other run"})
        return
    if a.temperature(name, mode) != b.temperature(name, mode):
        left.append(about | {"reason": "measured at other temperatures"})
        return
    drafts = min(a.evaluation["k"], b.evaluation["k"])
    ours, theirs = (_units(one.run(name, mode), drafts) for one in (a, b))
    both = [key for key in ours if key in theirs]
    counts = {
        "only_a": len(ours) - len(both),
        "only_b": len(theirs) - len(both),
        "reason": "not the same prompt in the other run",
    }
    if counts["only_a"] or counts["only_b"]:
        left.append(about | counts)
    if both:
        a_nC, b_nC = (np.array([units[key] for key in both]) for units in (ours, theirs))
        pairs += [about | row for row in paired(a_nC, b_nC, (a.name, b.name))]


def paired(a_nC: np.ndarray, b_nC: np.ndarray, names: tuple[str, str]) -> list[dict[str, Any]]:
    """A row per metric of two runs' counts over the same n conversations.

    Columns: completions, tokens, all steps, steps that had drafts, accepted drafts, then steps that accepted more than
    i drafts. Tokens per step are a metric of their own where a run has steps without drafts: tau leaves them out.
    """
    draws = weights(len(a_nC))
    value_a, value_b = (_metrics(counts.sum(0, keepdims=True))[0] for counts in (a_nC, b_nC))
    difference = _metrics(draws @ b_nC) - _metrics(draws @ a_nC)
    low, high = np.percentile(difference, [2.5, 97.5], axis=0)
    metrics = [
        "tokens_per_step",
        "tau",
        "tokens",
        *(f"per_position/{i + 1}" for i in range(a_nC.shape[1] - 5)),
    ]
    told = int(all((counts[:, 2] == counts[:, 3]).all() for counts in (a_nC, b_nC)))
    return [
        {
            "prompts": int(a_nC[:, 0].sum()),
            "conversations": len(a_nC),
            "metric": metric,
            "a_value": float(value_a[at]),
            "b_value": float(value_b[at]),
            "difference": float(value_b[at] - value_a[at]),
            "ci": [float(low[at]), float(high[at])],
            "verdict": TOO_FEW
            if len(a_nC) < FEWEST
            else _verdict(metric, float(low[at]), float(high[at]), names),
        }
        for at, metric in enumerate(metrics)
        if at >= told
    ]


def _verdict(metric: str, low: float, high: float, names: tuple[str, str]) -> str:
    """Better only where the whole interval says so. More tokens are neither better nor worse."""
    if low <= 0 <= high:
        return UNDECIDED
    name = names[1] if low > 0 else names[0]
    return f"{name} is longer" if metric == "tokens" else f"{name} is better"


def _units(run: Run, drafts: int) -> dict[tuple[str, str, int], np.ndarray]:
    """Counts of each conversation, by its key, its first prompt and how many turns were answered."""
    places = [run.turns[item.key] for item in run.completions]
    table = Table.of(run.completions, places, drafts)
    accepted = [sum(step.accepted for step in item.steps) for item in run.completions]
    step_nC = table.step_nC
    columns = np.column_stack(
        [
            np.ones(len(accepted)),
            table.token_n,
            table.every_n,
            step_nC[:, 0],
            accepted,
            step_nC[:, 1:],
        ]
    )
    rows: dict[str, list[int]] = {}
    for index, place in enumerate(places):
        rows.setdefault(place.conversation, []).append(index)
    return {
        (name, digest(list(run.completions[where[0]].prompt)), len(where)): columns[where].sum(0)
        for name, where in rows.items()
    }


def _metrics(sum_nC: np.ndarray) -> np.ndarray:
    """Tokens per step, tau, tokens per completion, per-position acceptance of sums [rows, 5 + K] -> [rows, 3 + K]."""
    prompts, tokens, every, steps, accepted = (sum_nC[:, at : at + 1] for at in range(5))
    some = np.maximum(steps, 1)
    return np.concatenate(
        [
            1 + accepted / np.maximum(every, 1),
            1 + accepted / some,
            tokens / np.maximum(prompts, 1),
            sum_nC[:, 5:] / some,
        ],
        axis=1,
    )
