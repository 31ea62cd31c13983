"""The model of speed: what k to serve at which batch. Shows what `evaluate` predicted and measured; computes no cost.

Knows no markup but the drawings.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

from mtp_train.page.figures import count, figure, interval, signed, small, times
from mtp_train.page.scale import Scale, fit
from mtp_train.page.table import Table
from mtp_train.report.places import Place, Point, Series, place_chart

Model = Mapping[str, Any]


def model_view(model: Model) -> dict[str, Any]:
    """A panel per batch size, all on one scale, and the recommendation in a sentence."""
    scale = fit([1.0, *(row["speedup"] for row in (*model["predicted"], *measured(model)))])
    batches = sorted({row["batch"] for row in model["predicted"]})
    return {
        "advice": advice(model),
        "panels": [batch_panel(model, batch, scale) for batch in batches],
    }


def measured(model: Model) -> Sequence[Model]:
    return model.get("measured") or ()


def batch_panel(model: Model, batch: int, scale: Scale) -> dict[str, Any]:
    """Expected speed-up over k, the measured points on it, the recommended k marked and written out."""
    predicted = sorted(at_batch(model["predicted"], batch), key=k_of)
    real = sorted(at_batch(measured(model), batch), key=k_of)
    ks = sorted({row["k"] for row in (*predicted, *real)})
    best = model["recommended"].get(str(batch))
    expected = Series("expected", "held", [expected_point(row, ks, best) for row in predicted])
    points = [measured_point(row, ks) for row in real]
    series = [expected, Series("measured", "ood", points, joined=False)]
    here = next((row for row in predicted if row["k"] == best), None)
    return {
        "title": f"batch {count(batch)}",
        "best": recommendation(best, here),
        "chart": place_chart(
            f"Expected speed-up over k at batch {batch}",
            [Place(str(k)) for k in ks],
            series,
            scale,
            figures={},
            level=1.0,
        ),
    }


def at_batch(rows: Sequence[Model], batch: int) -> list[Model]:
    return [row for row in rows if row["batch"] == batch]


def k_of(row: Model) -> int:
    return int(row["k"])


def expected_point(row: Model, ks: Sequence[int], best: int | None) -> Point:
    how = "extrapolated" if row.get("extrapolated") else "from measured costs"
    tip = f"batch {row['batch']}, k = {row['k']}\nexpected {times(row['speedup'])}, {how}"
    style = "unsure" if row.get("extrapolated") else ""
    style += " best" if row["k"] == best else ""
    return Point(ks.index(row["k"]), row["speedup"], None, tip, style.strip())


def measured_point(row: Model, ks: Sequence[int]) -> Point:
    tip = f"batch {row['batch']}, k = {row['k']}\nmeasured {times(row['speedup'])}"
    if row.get("predicted") is not None:
        tip += f", expected {times(row['predicted'])}"
    if row.get("warnings"):
        tip += f"\nnot measurable here: {'; '.join(row['warnings'])}"
    if row.get("tau") is not None:
        tip += f"\ntau {figure(row['tau'])}"
    return Point(ks.index(row["k"]), row["speedup"], row.get("speedup_ci"), tip)


def recommendation(best: int | None, row: Model | None) -> str:
    if best is None:
        return ""
    if not best or row is None:
        return "plain decoding is faster"
    return f"k = {best}, {times(row['speedup'])} expected"


def advice(model: Model) -> str:
    """`k = 3 up to batch 4, k = 1 up to batch 16, plain decoding above`: the whole recommendation."""
    chosen = sorted((int(batch), int(k)) for batch, k in model["recommended"].items())
    runs = [
        (k, [batch for batch, _ in group]) for k, group in groupby(chosen, lambda item: item[1])
    ]
    said = [f"{named(k)} {span(batches)}" for k, batches in runs]
    return "Serve " + ", ".join(said) + "." if said else ""


def named(k: int) -> str:
    return f"k = {k}" if k else "plain decoding"


def span(batches: Sequence[int]) -> str:
    first, last = batches[0], batches[-1]
    return f"at batch {first}" if first == last else f"at batch {first} to {last}"


def predicted_table(model: Model) -> Table:
    """A row per batch, a column per k; what is extrapolated says so."""
    rows_of = model["predicted"]
    ks = sorted({row["k"] for row in rows_of})
    rows = []
    for batch in sorted({row["batch"] for row in rows_of}):
        cells = {row["k"]: row for row in at_batch(rows_of, batch)}
        best = model["recommended"].get(str(batch))
        told = "" if best is None else named(best)
        rows.append((count(batch), told, *(expected_cell(cells.get(k)) for k in ks)))
    header = ("batch", "recommended", *(f"k = {k}" for k in ks))
    note = "Times plain decoding at the same batch. * is extrapolated: past what was measured."
    return Table("Expected speed-up", header, rows, 2, note)


def expected_cell(row: Model | None) -> str:
    if row is None:
        return figure(None)
    return figure(row["speedup"]) + ("*" if row.get("extrapolated") else "")


def measured_table(model: Model) -> Table:
    rows = []
    for row in measured(model):
        expected, own = row.get("predicted"), row.get("predicted_own_tau")
        gap = figure(None) if expected is None else signed(row["speedup"] - expected)
        told = figure(row["speedup"]), interval(row.get("speedup_ci")), figure(expected), gap
        there = figure(row.get("tau")), figure(own), figure(row.get("running"), 2)
        rows.append((count(row["batch"]), count(row["k"]), *told, *there))
    named = ("batch", "k", "measured", "95 %", "expected", "difference")
    note = (
        "Expected is by the whole set's tau; with the timed prompts' own tau only the costs can be at fault. "
        "Running is the mean number of sequences at once."
    )
    header = (*named, "tau of these prompts", "expected by that tau", "running")
    return Table("Measured against expected speed-up", header, rows, 0, note)


def costs_table(model: Model) -> Table:
    """Milliseconds of a step's parts by batch, for each k."""
    costs = model.get("costs") or {}
    rows = []
    for one in costs.get("batches") or ():
        target, observe = one["target"], one.get("observe") or ()
        for k in range(len(target)):
            told = ms(item(target, k)), ms(item(observe, k) if k else None)
            drafting = k > 1 or (k and one.get("at_once"))
            draft = ms(one.get("draft") if drafting else None)
            row = figure(item(one.get("verified_row") or (), k - 1) if k else None)
            rows.append((count(one["batch"]), count(k), *told, draft, row))
    header = ("batch", "k", "target, k + 1 rows", "head over them", "a further draft")
    note = "; ".join([*cost_setting(costs), *noise(costs)])
    return Table(
        "Cost of a step, ms", (*header, "verified row / decoded row"), rows, 0, note and f"{note}."
    )


def item(values: Sequence[float], index: int) -> float | None:
    return values[index] if 0 <= index < len(values) else None


def ms(seconds: float | None) -> str:
    return figure(None if seconds is None else 1000 * seconds, 2)


def cost_setting(costs: Model) -> list[str]:
    """What the curve was measured with: every plain value beside it."""
    return [
        f"{name.replace('_', ' ')} {small(value) if isinstance(value, float) else value}"
        for name, value in costs.items()
        if isinstance(value, int | float | str)
    ]


def noise(costs: Model) -> list[str]:
    return [
        f"batch {one['batch']}: "
        + ", ".join(f"{part} ± {100 * share:.2f} %" for part, share in one["noise"].items())
        for one in costs.get("batches") or ()
        if one.get("noise")
    ]


def model_tables(evaluation: Mapping[str, Any]) -> dict[str, Table]:
    model = evaluation.get("speed_model")
    if not model:
        return {}
    return {
        "predicted": predicted_table(model),
        "measured": measured_table(model),
        "costs": costs_table(model),
    }
