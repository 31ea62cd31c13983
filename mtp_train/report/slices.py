"""Acceptance cut in other ways than by set: along the output, by prompt length, by turn, by temperature and k.

Knows no markup but the drawings. A cut that the evaluation doesn't hold is left out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mtp_train.page.figures import count, figure, interval, known, rounded, signed
from mtp_train.page.scale import Scale, fit
from mtp_train.page.table import Row, Table
from mtp_train.report.measures import MODE_STYLES, SET_NAMES, Measure, overall_all
from mtp_train.report.places import Place, Point, Series, place_chart

Record = Mapping[str, Any]
CUTS = {
    "by_output_position": ("Position in the output", "tokens of the output before the step"),
    "by_prompt_length": ("Length of the prompt", "tokens of the prompt"),
    "by_turn": ("Turn of the conversation", "turn"),
}
TEMPERATURE_STYLES = ("held", "d2", "ood", "p5", "p0", "neutral")
COUNTS = ("prompts", "tokens", "drafts")


def cut_views(evaluation: Record) -> list[dict[str, Any]]:
    """Per cut, a panel for each prompt set, all on one scale of tau."""
    found = {name: cut_measures(evaluation, name) for name in CUTS}
    records = [row for name in found for m in found[name] for row in rows_of(m, name)]
    scale = tau_scale(records)
    return [
        {
            "table": name,
            "title": CUTS[name][0],
            "below": CUTS[name][1],
            "panels": [cut_panel(name, group, scale) for group in by_set(measures)],
        }
        for name, measures in found.items()
        if measures
    ]


def cut_measures(evaluation: Record, name: str) -> list[Measure]:
    """The sets that the cut divides: a single bin is the whole set again."""
    found = overall_all(evaluation)
    divided = {m.set for m in found if len(rows_of(m, name)) > 1}
    return [m for m in found if m.set in divided and rows_of(m, name)]


def rows_of(measure: Measure, name: str) -> list[Record]:
    """The cut's records that hold a measurement: an empty bin tells nothing."""
    found = measure.values.get(name) or ()
    return [row for row in found if row.get("prompts") and known(row.get("tau"))]


def by_set(found: Sequence[Measure]) -> list[list[Measure]]:
    return [[m for m in found if m.set == name] for name in dict.fromkeys(m.set for m in found)]


def tau_scale(records: Sequence[Record]) -> Scale:
    tops = (top for row in records for top in (row["tau"], *(row.get("tau_ci") or ())))
    return fit([1.0, *tops], parts=4)


def cut_panel(name: str, group: Sequence[Measure], scale: Scale) -> dict[str, Any]:
    """One prompt set: a series per temperature over the bins that either has."""
    keys = sorted({key_of(row) for m in group for row in rows_of(m, name)})
    prompts = {key: prompts_at(name, group, key) for key in keys}
    places = [Place(short_extent(key), f"n = {prompts[key]}") for key in keys]
    series = [
        Series(
            m.mode_name,
            f"{m.style} {MODE_STYLES[m.mode]}",
            [
                Point(keys.index(key_of(row)), row["tau"], row.get("tau_ci"), tip_of(m, row))
                for row in sorted(rows_of(m, name), key=key_of)
            ],
        )
        for m in group
    ]
    title = f"tau of {group[0].set_name} prompts: {CUTS[name][0].lower()}"
    return {
        "title": group[0].set_name,
        "legend": [(f"{m.style} {MODE_STYLES[m.mode]} round", m.mode_name) for m in group],
        "chart": place_chart(title, places, series, scale),
    }


def key_of(row: Record) -> tuple[float, float]:
    """A bin's ends, for sorting; an open end is infinite, a turn is its own two ends."""
    if "turn" in row:
        return row["turn"], row["turn"]
    end = row["to"]
    return row["from"], float("inf") if end is None else end


def short_extent(key: tuple[float, float]) -> str:
    """`256` to `1k` with a dash, for an axis; `4k+` where the end is open."""
    begin, end = key
    if begin == end:
        return str(int(begin))
    if end == float("inf"):
        return f"{rounded(int(begin))}+"
    return f"{rounded(int(begin))}\N{EN DASH}{rounded(int(end))}"


def extent(row: Record) -> str:
    """`256 to 1,023` for a table: the last token that the bin holds is named."""
    begin, end = key_of(row)
    if "turn" in row:
        return count(row["turn"])
    return (
        f"{count(int(begin))} and more"
        if end == float("inf")
        else (f"{count(int(begin))} to below {count(int(end))}")
    )


def prompts_at(name: str, group: Sequence[Measure], key: tuple[float, float]) -> str:
    """Prompts behind a place; both numbers where the temperatures differ."""
    found = [count(row["prompts"]) for m in group for row in rows_of(m, name) if key_of(row) == key]
    return ", ".join(dict.fromkeys(found))


def tip_of(measure: Measure, row: Record) -> str:
    told = f"{measure.set_name}, {measure.mode_name}, {extent(row)}"
    sizes = f"{count(row['prompts'])} prompts, {count(row.get('drafts'))} steps"
    return f"{told}\ntau {figure(row['tau'])} {interval(row.get('tau_ci'))}\n{sizes}"


def cut_table(evaluation: Record, name: str) -> Table:
    found = cut_measures(evaluation, name)
    depth = max((len(row["per_position"]) for m in found for row in rows_of(m, name)), default=0)
    positions = position_names(depth)
    header = ("set", "decoding", CUTS[name][1], *COUNTS, "tau", "95 %", *positions)
    rows = [
        (m.set_name, m.mode_name, extent(row), *figures_of(row, depth))
        for m in found
        for row in rows_of(m, name)
    ]
    return Table(f"Acceptance by {CUTS[name][0].lower()}", header, rows, 3)


def position_names(depth: int) -> Row:
    return tuple(name for i in range(1, depth + 1) for name in (f"position {i}", "95 %"))


def figures_of(row: Record, depth: int) -> Row:
    counts = (count(row.get(name)) for name in COUNTS)
    shares = [*row.get("per_position", ()), *[None] * depth][:depth]
    bounds = [*row.get("per_position_ci", ()), *[None] * depth][:depth]
    pairs = zip(map(figure, shares), map(interval, bounds), strict=True)
    told = [cell for pair in pairs for cell in pair]
    return *counts, figure(row["tau"]), interval(row.get("tau_ci")), *told


def expected_table(evaluation: Record) -> Table:
    """Accepted drafts as counted, beside what the two distributions promise: their means are the same."""
    rows = [row for m in overall_all(evaluation) for row in expected_rows(m)]
    header = ("set", "decoding", "position", "steps", "accepted, given earlier", "95 %")
    note = (
        "Alpha expected is the mean of the sum of min(p, q) over the steps that got to the position: "
        "1 minus the total variation between target and head."
    )
    return Table(
        "Counted against expected", (*header, "alpha expected", "95 %", "difference"), rows, 3, note
    )


def expected_rows(measure: Measure) -> list[Row]:
    told = measure.values.get("alpha_expected") or {}
    columns = (
        told.get("steps"),
        measure.values.get("conditional"),
        measure.values.get("conditional_ci"),
        told.get("per_position"),
        told.get("per_position_ci"),
    )
    rows: list[Row] = []
    for i in range(len(told.get("per_position", ()))):
        steps, share, bounds, alpha, around = (column[i] if column else None for column in columns)
        gap = figure(None) if share is None else signed(share - alpha)
        cells = count(steps), figure(share), interval(bounds), figure(alpha), interval(around), gap
        rows.append((measure.set_name, measure.mode_name, str(i + 1), *cells))
    return rows


def grid_table(evaluation: Record) -> Table:
    grid = evaluation.get("grid") or ()
    depth = max((len(row["per_position"]) for row in grid), default=0)
    positions = position_names(depth)
    header = ("set", "temperature", "k", *COUNTS, "tau", "95 %", *positions)
    rows = [
        (set_name(row), f"{row['temperature']:g}", count(row["k"]), *figures_of(row, depth))
        for row in grid
    ]
    return Table("Acceptance by temperature and k", header, rows, 3)


def set_name(row: Record) -> str:
    return SET_NAMES.get(row["set"], str(row["set"]))


def grid_panels(evaluation: Record) -> list[dict[str, Any]]:
    """Per prompt set, tau over k with a line per temperature."""
    grid = [row for row in evaluation.get("grid") or () if known(row.get("tau"))]
    scale = tau_scale(grid)
    sets = dict.fromkeys(row["set"] for row in grid)
    return [grid_panel([row for row in grid if row["set"] == name], scale) for name in sets]


def grid_panel(rows: Sequence[Record], scale: Scale) -> dict[str, Any]:
    ks = sorted({row["k"] for row in rows})
    temperatures = sorted({row["temperature"] for row in rows})
    series = [
        Series(
            f"T = {temperature:g}",
            TEMPERATURE_STYLES[index % len(TEMPERATURE_STYLES)],
            [grid_point(row, ks) for row in rows if row["temperature"] == temperature],
        )
        for index, temperature in enumerate(temperatures)
    ]
    places = [Place(f"k = {k}") for k in ks]
    sizes = sorted({row["prompts"] for row in rows})
    prompts = " to ".join(dict.fromkeys(count(size) for size in (sizes[0], sizes[-1])))
    name = set_name(rows[0])
    return {
        "title": name,
        "size": f"n = {prompts} prompts a point",
        "chart": place_chart(
            f"tau of {name} prompts over k, by temperature", places, series, scale, ends=True
        ),
    }


def grid_point(row: Record, ks: Sequence[int]) -> Point:
    tip = (
        f"{set_name(row)}, temperature {row['temperature']:g}, k = {row['k']}\n"
        f"tau {figure(row['tau'])} {interval(row.get('tau_ci'))}\n{count(row['prompts'])} prompts"
    )
    return Point(ks.index(row["k"]), row["tau"], row.get("tau_ci"), tip)


def slice_tables(evaluation: Record) -> dict[str, Table]:
    """Every table of this module; those without rows are for the caller to leave out."""
    found = {"expected": expected_table(evaluation)}
    found |= {name: cut_table(evaluation, name) for name in CUTS}
    return found | {"grid": grid_table(evaluation)}
