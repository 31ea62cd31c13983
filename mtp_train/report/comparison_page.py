"""A comparison of runs as one HTML file that needs no network. Knows what goes where; page/ knows how it looks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mtp_train.page.figures import count, figure, interval, signed
from mtp_train.page.scale import Scale, fit
from mtp_train.page.shell import render
from mtp_train.report import comparison as told
from mtp_train.report.charts import Bars, bar_chart
from mtp_train.report.comparison import Compared, Comparison, Pair
from mtp_train.report.measures import Measure, overall_all
from mtp_train.report.sections import sample_size, tops
from mtp_train.report.strips import Mark, axis_strip, interval_strip

View = dict[str, Any]


def comparison_page(comparison: Comparison, evaluations: Sequence[Mapping[str, Any]]) -> str:
    """The page; `evaluations` are those of the runs, in the same order."""
    return render(
        "mtp_train.report",
        "comparison",
        "comparison",
        title=told.title(comparison),
        findings=told.findings(comparison),
        warnings=told.warnings(comparison),
        named_runs=[(run.style, f"{run.letter} {run.name}") for run in told.compared(comparison)],
        forest=forest(told.deciding(comparison)),
        positions=position_panels(told.compared(comparison), evaluations),
        tables=told.all_tables(comparison, evaluations),
    )


def forest(found: Sequence[Pair]) -> View:
    """A row per pair of runs: the difference in the deciding metric with its interval, all on one scale around 0."""
    scale = fit([0.0, *(bound for pair in found for bound in pair.values["ci"])], parts=5)
    blocks = [
        {"name": where, "rows": [forest_row(pair, scale) for pair in group]}
        for where, group in told.by_place(found).items()
    ]
    return {"blocks": blocks, "axis": axis_strip(scale)} if blocks else {}


def forest_row(pair: Pair, scale: Scale) -> View:
    values, winner = pair.values, pair.winner
    style = f"{winner.style if winner else 'neutral'} solid"
    mark = Mark("difference", style, values["difference"], values["ci"], pair.tip)
    return {
        "b": pair.b,
        "a": pair.a,
        "n": count(values["prompts"]),
        "metric": told.metric_name(values["metric"]),
        "sides": f"{figure(values['b_value'], 2)} against {figure(values['a_value'], 2)}",
        "strip": interval_strip([mark], scale, level=0.0),
        "difference": signed(values["difference"], 2),
        "interval": interval(values["ci"], 2),
        "verdict": pair.verdict,
        "winner": winner,
    }


def position_panels(
    runs: Sequence[Compared], evaluations: Sequence[Mapping[str, Any]]
) -> list[View]:
    """A panel per prompt set and temperature, the runs side by side at each position, all on one scale."""
    found = [
        (run, measure)
        for run, evaluation in zip(runs, evaluations, strict=True)
        for measure in overall_all(evaluation)
    ]
    scale = fit([top for run, m in found for top in tops(run_bars(run, m))], zero=True)
    places = dict.fromkeys((m.set_name, m.mode_name) for _, m in found)
    return [
        position_panel(
            f"{name}, {mode}",
            [(r, m) for r, m in found if (m.set_name, m.mode_name) == (name, mode)],
            scale,
        )
        for name, mode in places
    ]


def position_panel(name: str, group: Sequence[tuple[Compared, Measure]], scale: Scale) -> View:
    return {
        "title": name,
        "legend": [(run.style, f"{run.letter} {run.name}", sample_size(m)) for run, m in group],
        "chart": bar_chart(
            f"Acceptance per position, {name}", [run_bars(run, m) for run, m in group], scale
        ),
    }


def run_bars(run: Compared, measure: Measure) -> Bars:
    values = measure.values
    intervals = values.get("per_position_ci") or ()
    return Bars(run.name, run.style, values["per_position"], intervals, run.letter)
