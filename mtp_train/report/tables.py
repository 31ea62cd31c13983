"""The evaluation as tables of text, one set for every output, so that page and Markdown can't disagree.

Knows no markup: a cell is text, and whoever writes it escapes it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from mtp_train.page.figures import (
    MISSING,
    anything,
    count,
    figure,
    interval,
    scientific,
    signed,
)
from mtp_train.page.table import Row, Table
from mtp_train.report.measures import (
    SET_NAMES,
    Measure,
    comparisons,
    counts_all_steps,
    measures,
    parts,
    runs,
    timed,
)
from mtp_train.report.slices import slice_tables
from mtp_train.report.speed_model import model_tables

LABELS = ("set", "decoding", "category")
CURVE_ROWS = 20  # a long training curve is thinned to about as many rows


COUNTS = ("prompts", "conversations", "tokens", "drafts")
FIGURES = ("tau", "tau_macro", "acceptance_rate")
PER_STEP = "tokens_per_step"
FIGURE_NAMES = {
    "tau_macro": "macro tau",
    "acceptance_rate": "acceptance rate",
    PER_STEP: "tokens per step, all steps",
}


def acceptance(evaluation: Mapping[str, Any]) -> Table:
    found = measures(evaluation)
    counts = [name for name in COUNTS if any(name in m.values for m in found)]
    figures: tuple[str, ...] = FIGURES
    note = "tau counts the bonus token; macro tau is the mean over prompts."
    if counts_all_steps(evaluation):
        figures = (FIGURES[0], PER_STEP, *FIGURES[1:])
        note += " tau is over the steps that had drafts, tokens per step over all."
    header = [*LABELS, *counts]
    for name in figures:
        header += [FIGURE_NAMES.get(name, name), "95 %"]
    rows = [acceptance_row(measure, counts, figures) for measure in found]
    return Table("Acceptance length", tuple(header), rows, 3, note)


def labels(measure: Measure) -> Row:
    return measure.set_name, measure.mode_name, measure.category or "all"


def acceptance_row(measure: Measure, counts: Sequence[str], figures: Sequence[str]) -> Row:
    values = measure.values
    cells = [count(values.get(name)) for name in counts]
    for name in figures:
        cells += [figure(values.get(name)), interval(values.get(f"{name}_ci"))]
    return *labels(measure), *cells


def positions(evaluation: Mapping[str, Any]) -> Table:
    found = measures(evaluation)
    depth = max(len(measure.values["per_position"]) for measure in found)
    names = [
        name for i in range(1, depth + 1) for name in (f"{i}", "95 %", f"{i} given earlier", "95 %")
    ]
    rows = [position_row(measure, depth) for measure in found]
    note = (
        "Acceptance at a draft position is over all steps (unconditional, as vLLM counts); "
        "'given earlier' is over the steps whose earlier drafts were accepted."
    )
    return Table("Acceptance per position", (*LABELS, *names), rows, 3, note)


def position_row(measure: Measure, depth: int) -> Row:
    values = measure.values
    cells: list[str] = []
    for i in range(depth):
        cells.append(figure(item(values["per_position"], i)))
        cells.append(interval(item(values.get("per_position_ci"), i)))
        cells.append(figure(item(values.get("conditional"), i)))
        cells.append(interval(item(values.get("conditional_ci"), i)))
    return *labels(measure), *cells


def item(values: Sequence[Any] | None, index: int) -> Any:
    return values[index] if values and index < len(values) else None


def validation(evaluation: Mapping[str, Any]) -> Table:
    """The same quantity through both forwards, and what lies between them."""
    trained, served = (evaluation["validation"][name] for name in ("training", "engine"))
    rows, gaps = [], evaluation["validation"].get("difference", {})
    for name in dict.fromkeys([*trained, *served]):
        ours, theirs = trained.get(name), served.get(name)
        gap = MISSING if ours is None or theirs is None else signed(theirs - ours, 5)
        gap = signed(gaps[name], 5) if name in gaps else gap
        rows.append((name, figure(ours, 5), figure(theirs, 5), gap))
    return Table("Training and engine", ("validation", "training", "engine", "difference"), rows)


def lossless(evaluation: Mapping[str, Any]) -> Table:
    header = ("greedy outputs", "prompts", "tokens", "equal", "ties", "different")
    rows = []
    for name, found in comparisons(evaluation["lossless"]):
        listed = (count(len(found.get(kind, ()))) for kind in ("ties", "different"))
        counts = (count(found.get(key)) for key in ("prompts", "tokens", "equal"))
        rows.append((name, *counts, *listed))
    note = f"Compared token by token, in {evaluation['lossless']['dtype']}."
    return Table("Losslessness", header, rows, note=note)


def exceptions(evaluation: Mapping[str, Any]) -> Table:
    """Each prompt whose outputs part: within rounding (a tie, with the gap) or not."""
    rows = []
    for name, found in comparisons(evaluation["lossless"]):
        for kind, word in (("ties", "tie"), ("different", "different")):
            rows += [(name, word, *exception(entry)) for entry in found.get(kind, ())]
    header = ("greedy outputs", "kind", "prompt", "position", "what parts them")
    return Table("Where outputs part", header, rows, 3)


def exception(entry: Mapping[str, Any]) -> Row:
    rest = {name: value for name, value in entry.items() if name not in ("key", "position")}
    told = ", ".join(f"{name} {anything(value)}" for name, value in rest.items())
    return str(entry["key"]), count(entry["position"]), told


def speed(evaluation: Mapping[str, Any]) -> Table:
    ratios = ("ratio", "95 %", "by processor time", "tau", "tokens per step")
    header = ("decoding", "tokens/s", *ratios, "tokens", "steps", "wall s", "processor s")
    rows = []
    for name, run in runs(evaluation["speed"]):
        ratio = (
            figure(run.get("ratio")),
            interval(run.get("ratio_ci")),
            figure(run.get("cpu_ratio")),
        )
        per_step = figure(run.get("tau")), figure(run.get(PER_STEP))
        counts = count(run["tokens"]), count(run.get("steps"))
        times = figure(run["wall"], 2), figure(run.get("cpu"), 2)
        rows.append((name, figure(run["tokens_per_s"], 2), *ratio, *per_step, *counts, *times))
    return Table("Speed", header, rows, note=f"{timed(evaluation['speed'])}.")


def speed_rounds(evaluation: Mapping[str, Any]) -> Table:
    """The ratio of each round, and what speaks against it."""
    rows = [
        (name, " ".join(figure(one, 2) for one in run["rounds"]), "; ".join(run["warnings"]))
        for name, run in runs(evaluation["speed"])
        if "rounds" in run
    ]
    note = "A ratio with a warning is not measured."
    return Table("Speed by round", ("decoding", "ratio by round", "warnings"), rows, 3, note)


def time_parts(evaluation: Mapping[str, Any]) -> Table:
    found = [(name, parts(run)) for name, run in runs(evaluation["speed"])]
    columns = list(dict.fromkeys(part for _, seconds in found[::-1] for part in seconds))
    rows = [
        (name, *(figure(seconds.get(column), 2) for column in columns)) for name, seconds in found
    ]
    return Table("Where the time goes", ("decoding, seconds", *columns), rows)


def validation_curve(curves: Iterable[Mapping[str, Any]]) -> Table:
    found = [row for row in curves if "validation" in row]
    names = list(dict.fromkeys(name for row in found for name in row["validation"]))
    rows = [
        (count(row["step"]), *(figure(row["validation"].get(name), 4) for name in names))
        for row in found
    ]
    return Table("Validation during training", ("step", *names), rows, 0)


def training_curve(curves: Iterable[Mapping[str, Any]]) -> Table:
    found = [row for row in curves if "loss" in row]
    stride = max(1, len(found) // CURVE_ROWS)
    shown = [row for i, row in enumerate(found) if i % stride == 0 or i == len(found) - 1]
    header = ("step", "loss", "gradient norm", "learning rate", "seconds")
    rows = [
        (
            count(row["step"]),
            figure(row["loss"], 4),
            figure(row.get("gradient_norm")),
            scientific(row.get("learning_rate")),
            figure(row.get("seconds"), 2),
        )
        for row in shown
    ]
    note = f"Every {stride}th of {count(len(found))} rows; report.json has all." * (stride > 1)
    return Table("Training", header, rows, 0, note)


def stage_times(stages: Mapping[str, float]) -> Table:
    rows = [(name, figure(seconds, 1)) for name, seconds in stages.items()]
    rows.append(("sum", figure(sum(stages.values()), 1)))
    return Table("Stage times", ("stage", "seconds"), rows)


def provenance(evaluation: Mapping[str, Any]) -> Table:
    rows = []
    for name in ("target", "head", "machine", "versions"):
        rows += [(f"{name}: {key}", anything(told)) for key, told in flat(evaluation.get(name, {}))]
    for name in ("data_digest", "dtype", "k", "max_new_tokens", "command"):
        if name in evaluation:
            rows.append((name.replace("_", " "), anything(evaluation[name])))
    return Table("Provenance", ("what", "value"), rows, 2)


def accounting(evaluation: Mapping[str, Any]) -> Table:
    """What became of every prompt of every set; a refused one has its reason."""
    rows = []
    for name, told in evaluation.get("accounting", {}).items():
        for key, value in flat(told):
            rows.append((SET_NAMES.get(name, name), key.replace("_", " "), anything(value)))
    return Table("What became of the prompts", ("set", "what", "rows"), rows, 2)


def flat(told: Mapping[str, Any], before: str = "") -> Iterable[tuple[str, Any]]:
    """A record's values, those of records within it by dotted names."""
    for key, value in told.items():
        if isinstance(value, Mapping):
            yield from flat(value, f"{before}{key}.")
        else:
            yield f"{before}{key}", value


def all_tables(
    evaluation: Mapping[str, Any], curves: Sequence[Mapping[str, Any]], stages: Mapping[str, float]
) -> dict[str, Table]:
    """Every table that has rows, by name, in the order of reading."""
    makers = {"acceptance": acceptance, "positions": positions}
    if "validation" in evaluation:
        makers |= {"validation": validation}
    if "speed" in evaluation:
        makers |= {"speed": speed, "speed_rounds": speed_rounds, "time_parts": time_parts}
    if "lossless" in evaluation:
        makers |= {"lossless": lossless, "exceptions": exceptions}
    found = {name: make(evaluation) for name, make in makers.items()}
    found |= slice_tables(evaluation) | model_tables(evaluation)
    found |= {
        "validation_curve": validation_curve(curves),
        "training_curve": training_curve(curves),
    }
    if stages:
        found["stages"] = stage_times(stages)
    found["accounting"] = accounting(evaluation)
    found["provenance"] = provenance(evaluation)
    return {name: table for name, table in found.items() if table.rows}
