"""A comparison of runs: what it says in words and in tables. Measures nothing: differences and intervals are given.

Knows no markup: a cell is text, and whoever writes it escapes it. Runs are called A, B, C in tables; their names stand
beside those letters once, and in every verdict.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mtp_train.page.figures import MISSING, anything, count, figure, interval, signed
from mtp_train.page.table import Row, Table
from mtp_train.report.measures import SET_NAMES, counts_all_steps, overall_all
from mtp_train.report.slices import figures_of, position_names
from mtp_train.report.tables import flat

Comparison = Mapping[str, Any]
LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
RUN_STYLES = ("held", "ood", "d2", "p5", "p0", "p3")
MAIN = ("tokens_per_step", "tau")  # the metrics that decide, the first that is there
UNDECIDED = "no difference shown"


@dataclass(frozen=True)
class Compared:
    """One run of a comparison, as it is called."""

    letter: str
    name: str
    style: str


@dataclass(frozen=True)
class Pair:
    """The difference of two runs in one metric, on the same prompts."""

    a: Compared
    b: Compared
    values: Comparison

    @property
    def winner(self) -> Compared | None:
        """Whom the verdict names, if the whole interval is on that side too."""
        low, high = self.values["ci"]
        higher = self.b if low > 0 else self.a if high < 0 else None
        return higher if higher and names(self.values["verdict"], higher) else None

    @property
    def verdict(self) -> str:
        """The comparison's words; never a winner that the interval doesn't show."""
        said = str(self.values["verdict"])
        wrong = not self.winner and (names(said, self.a) or names(said, self.b))
        return UNDECIDED if wrong else said

    @property
    def set_name(self) -> str:
        return SET_NAMES.get(self.values["set"], str(self.values["set"]))

    @property
    def where(self) -> str:
        return f"{self.set_name}, {self.values['mode']}"

    @property
    def tip(self) -> str:
        told = self.values
        sides = [f"{run.letter} {run.name}: " for run in (self.b, self.a)]
        return (
            f"{sides[0]}{figure(told['b_value'])}\n{sides[1]}{figure(told['a_value'])}\n"
            f"difference {signed(told['difference'])} {interval(told['ci'])}\n"
            f"{count(told['prompts'])} prompts"
        )


def names(verdict: str, run: Compared) -> bool:
    """Whether a verdict such as `B is better` is for this run."""
    return verdict.startswith(f"{run.name} is ")


def compared(comparison: Comparison) -> list[Compared]:
    return [
        Compared(LETTERS[i % 26], str(run["name"]), RUN_STYLES[i % len(RUN_STYLES)])
        for i, run in enumerate(comparison["runs"])
    ]


def pairs(comparison: Comparison, metric: str | None = None) -> list[Pair]:
    """Every pair of runs in every set and mode; of one metric, or of all."""
    runs = {run.name: run for run in compared(comparison)}
    return [
        Pair(runs[told["a"]], runs[told["b"]], told)
        for told in comparison["pairs"]
        if metric in (None, told["metric"])
    ]


def deciding(comparison: Comparison) -> list[Pair]:
    """Every pair of runs in every set and mode, in the metric that decides there."""
    found: dict[tuple[str, str, str], Pair] = {}
    for metric in MAIN:
        for pair in pairs(comparison, metric):
            found.setdefault((pair.a.letter, pair.b.letter, pair.where), pair)
    told = pairs(comparison)
    return sorted(found.values(), key=lambda pair: [one.values for one in told].index(pair.values))


def title(comparison: Comparison) -> str:
    return f"{len(comparison['runs'])} runs compared"


def findings(comparison: Comparison) -> list[str]:
    """A sentence per pair of runs, on the first set they share; greedy where that was measured."""
    found = deciding(comparison)
    first: dict[tuple[str, str], Pair] = {}
    for pair in found:
        first.setdefault((pair.a.letter, pair.b.letter), pair)
    return [finding(pair) for pair in first.values()] or ["The runs share no prompts."]


def finding(pair: Pair) -> str:
    told, winner = pair.values, pair.winner
    low, high = (signed(bound, 2) for bound in told["ci"])
    size = f"n = {count(told['prompts'])} prompts"
    where = f"on {pair.set_name} prompts, {told['mode']}"
    metric = metric_name(told["metric"])
    if winner is None:
        said = pair.verdict[:1].upper() + pair.verdict[1:]
        return (
            f"{said}: {pair.b.name} against {pair.a.name} {where}, "
            f"{metric} {signed(told['difference'], 2)}, 95 % {low} to {high}, {size}."
        )
    loser = pair.a if winner is pair.b else pair.b
    gap, ends = abs(told["difference"]), sorted(abs(bound) for bound in told["ci"])
    return (
        f"{winner.name} is better than {loser.name} {where}: {metric} higher by {figure(gap, 2)}, "
        f"95 % {figure(ends[0], 2)} to {figure(ends[1], 2)}, {size}."
    )


def runs_table(comparison: Comparison) -> Table:
    """A row per fact in which the runs differ, a column per run; what they have in common is below."""
    rows = [row for row in facts(comparison) if len(set(row[1:])) > 1]
    return Table("What differs", columns(comparison), rows, len(comparison["runs"]) + 1)


def common_table(comparison: Comparison) -> Table:
    rows = [row[:2] for row in facts(comparison) if len(set(row[1:])) == 1]
    return Table("What they have in common", ("fact", "all runs"), rows, 2)


def columns(comparison: Comparison) -> Row:
    return ("fact", *(run.letter for run in compared(comparison)))


def facts(comparison: Comparison) -> list[Row]:
    found = [dict(flat(run)) for run in comparison["runs"]]
    names = dict.fromkeys(name for told in found for name in told)
    return [
        (name, *(anything(told[name]) if name in told else MISSING for told in found))
        for name in names
    ]


def metric_name(metric: str) -> str:
    name, _, position = metric.partition("/")
    if name == "per_position":
        return f"acceptance at position {position}"
    return name.replace("_", " ")


def pairs_table(comparison: Comparison) -> Table:
    rows = [
        (
            pair.set_name,
            str(pair.values["mode"]),
            metric_name(pair.values["metric"]),
            f"{pair.b.letter} against {pair.a.letter}",
            pair.verdict,
            count(pair.values["prompts"]),
            count(pair.values.get("conversations")),
            figure(pair.values["b_value"]),
            figure(pair.values["a_value"]),
            signed(pair.values["difference"]),
            interval(pair.values["ci"]),
        )
        for pair in pairs(comparison)
    ]
    named = ("set", "decoding", "metric", "runs", "verdict", "prompts", "conversations")
    note = (
        "Over the conversations that both runs answered, resampled together. A run is better only where "
        "the whole 95 % interval of the difference lies on one side of 0."
    )
    header = (*named, "first named", "second named", "difference", "95 %")
    return Table("Paired differences", header, rows, 5, note)


def left_out_table(comparison: Comparison) -> Table:
    """What could not be compared, and why."""
    letters = {run.name: run.letter for run in compared(comparison)}
    told = comparison.get("left_out") or {}
    rows: list[Row] = [
        (
            SET_NAMES.get(one["set"], str(one["set"])),
            f"the whole set: {letters.get(one['only'], one['only'])} has it, "
            f"{letters.get(one['not_in'], one['not_in'])} has not",
        )
        for one in told.get("sets") or ()
    ]
    return Table("Left out", ("set", "what"), [*rows, *left_prompts(told, letters)], 2)


def left_prompts(told: Comparison, letters: Mapping[str, str]) -> list[Row]:
    rows: list[Row] = []
    for one in told.get("prompts") or ():
        a, b = (letters.get(one[side], str(one[side])) for side in ("a", "b"))
        counts = [
            f"{count(one[f'only_{side}'])} of {letter}"
            for side, letter in (("a", a), ("b", b))
            if one.get(f"only_{side}")
        ]
        name = SET_NAMES.get(one["set"], str(one["set"]))
        what = " and ".join(counts) or "everything"
        rows.append((f"{name}, {one['mode']}", f"{b} against {a}: {what}: {one['reason']}"))
    return rows


def warnings(comparison: Comparison) -> list[str]:
    """What a reader must know before believing a difference."""
    checks = {
        "target": [run["target"]["hash"] for run in comparison["runs"] if "target" in run],
        "number of drafts k": [run.get("k") for run in comparison["runs"]],
        "dtype": [run.get("dtype") for run in comparison["runs"]],
    }
    return [
        f"The runs differ in their {name}: {', '.join(map(str, values))}."
        for name, values in checks.items()
        if len(set(map(str, values))) > 1
    ]


def acceptance_table(comparison: Comparison, evaluations: Sequence[Comparison]) -> Table:
    """Each run over all of its own prompts."""
    found = [
        (run, measure)
        for run, evaluation in zip(compared(comparison), evaluations, strict=True)
        for measure in overall_all(evaluation)
    ]
    depth = max((len(m.values["per_position"]) for _, m in found), default=0)
    order = list(dict.fromkeys((m.set, m.mode) for _, m in found))
    found.sort(key=lambda item: order.index((item[1].set, item[1].mode)))
    told = any(counts_all_steps(evaluation) for evaluation in evaluations)
    rows = [
        (
            *(m.set_name, m.mode_name, f"{run.letter} {run.name}"),
            *([figure(m.values.get("tokens_per_step"))] if told else []),
            *figures_of(m.values, depth),
        )
        for run, m in found
    ]
    per_step = ("tokens per step, all steps",) if told else ()
    names = (*per_step, "prompts", "tokens", "drafts", "tau", "95 %", *position_names(depth))
    header = ("set", "decoding", "run", *names)
    return Table("Acceptance of each run", header, rows, 3)


def all_tables(comparison: Comparison, evaluations: Sequence[Comparison]) -> dict[str, Table]:
    found = {
        "pairs": pairs_table(comparison),
        "left_out": left_out_table(comparison),
        "acceptance": acceptance_table(comparison, evaluations),
        "runs": runs_table(comparison),
        "common": common_table(comparison),
    }
    return {name: table for name, table in found.items() if table.rows}


def by_place(found: Sequence[Pair]) -> dict[str, list[Pair]]:
    """Pairs by set and mode, in the order given."""
    return {
        where: [pair for pair in found if pair.where == where]
        for where in dict.fromkeys(pair.where for pair in found)
    }
