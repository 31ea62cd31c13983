"""What each part of the page shows: charts, rows with strips, legends. Knows no HTML but the drawings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mtp_train.page.figures import count, duration, figure, interval, signed, times
from mtp_train.page.scale import Scale, fit
from mtp_train.report import curves as curve
from mtp_train.report.charts import Bars, Line, bar_chart, line_chart
from mtp_train.report.measures import (
    MODE_STYLES,
    MODES,
    Measure,
    measures,
    overall,
    overall_all,
    part_style,
    parts,
    runs,
)
from mtp_train.report.strips import Mark, axis_strip, bar_strip, interval_strip, stack_strip

View = dict[str, Any]
SETS_SIDE_BY_SIDE = 2  # more bars at a position would be slivers
GAUGED = 3  # prompt sets on a headline scale


def position_panels(evaluation: Mapping[str, Any]) -> list[View]:
    """Acceptance per position on one scale: a panel per temperature, or per prompt set where there are many."""
    found = overall_all(evaluation)
    if len({m.set for m in found}) <= SETS_SIDE_BY_SIDE:
        panels = [group for mode in MODES if (group := [m for m in found if m.mode == mode])]
        return bar_panels(
            [(p[0].mode_title, [(bars(m), m.set_name, m) for m in p]) for p in panels]
        )
    groups = [[m for m in found if m.set == name] for name in dict.fromkeys(m.set for m in found)]
    return bar_panels(
        [(g[0].set_name, [(bars(m, by_mode=True), m.mode_name, m) for m in g]) for g in groups]
    )


def bar_panels(panels: Sequence[tuple[str, list[tuple[Bars, str, Measure]]]]) -> list[View]:
    """(title, groups of bars with their names and sizes) as panels."""
    scale = fit([top for _, group in panels for one, _, _ in group for top in tops(one)], zero=True)
    return [
        {
            "title": title,
            "legend": [(one.style, name, sample_size(m)) for one, name, m in group],
            "chart": bar_chart(
                f"Acceptance per position, {title}", [one for one, _, _ in group], scale
            ),
        }
        for title, group in panels
    ]


def bars(measure: Measure, by_mode: bool = False) -> Bars:
    """`by_mode`: the temperatures stand side by side and must differ by more than the set's colour."""
    values, style = measure.values, measure.style
    if by_mode and measure.mode == "sampled":
        style += " hollow"
    name = f"{measure.set_name}, {measure.mode_name}"
    return Bars(name, style, values["per_position"], values.get("per_position_ci") or ())


def tops(group: Bars) -> list[float]:
    return [*group.values, *(bounds[1] for bounds in group.intervals)]


def sample_size(measure: Measure) -> str:
    values = measure.values
    return f"n = {count(values['prompts'])} prompts, {count(values['drafts'])} steps"


def tau_scale(evaluation: Mapping[str, Any]) -> Scale:
    """From 1 (no draft was accepted) to what the best interval reaches."""
    found = [m.values for m in measures(evaluation)]
    return fit(
        [1.0, *(top for v in found for top in (v["tau"], *(v.get("tau_ci") or ())))], parts=5
    )


def category_blocks(evaluation: Mapping[str, Any]) -> View:
    """Tau per category: a block per set, a row per category, a dot per temperature."""
    scale = tau_scale(evaluation)
    found = measures(evaluation)
    blocks = []
    for name in dict.fromkeys(m.set for m in found):
        here = [m for m in found if m.set == name]
        categories = list(dict.fromkeys(m.category for m in here))
        rows = [category_row([m for m in here if m.category == c], scale) for c in categories]
        blocks.append({"name": here[0].set_name, "style": here[0].style, "rows": rows})
    modes = list(dict.fromkeys((m.mode, m.mode_name) for m in found))
    legend = [(MODE_STYLES[mode], name) for mode, name in modes]
    return {"blocks": blocks, "modes": modes, "legend": legend, "axis": axis_strip(scale)}


def category_row(found: Sequence[Measure], scale: Scale) -> View:
    marks = [tau_mark(measure) for measure in found]
    category = found[0].category
    cells = {
        m.mode: (figure(m.values["tau"], 2), interval(m.values.get("tau_ci"), 2)) for m in found
    }
    return {
        "name": category.replace("_", " ") if category else "all",
        "whole": category is None,
        "n": count(found[0].values["prompts"]),
        "strip": interval_strip(marks, scale),
        "cells": cells,
    }


def tau_mark(measure: Measure) -> Mark:
    style = f"{measure.style} {MODE_STYLES[measure.mode]}"
    return Mark(
        f"tau, {measure.mode_name}", style, measure.values["tau"], measure.values.get("tau_ci")
    )


def gauges(evaluation: Mapping[str, Any]) -> dict[str, View]:
    """The headline figures on their scales: each set's dot and interval."""
    greedy = overall(evaluation, "greedy")[:GAUGED]
    tau = fit([1.0, evaluation["k"] + 1.0], parts=evaluation["k"])
    share = fit([0.0, 1.0], parts=2)
    firsts = [Mark(m.set_name, f"{m.style} solid", m.first, m.first_interval) for m in greedy]
    taus = [
        Mark(m.set_name, f"{m.style} solid", m.values["tau"], m.values.get("tau_ci"))
        for m in greedy
    ]
    return {
        "tau": {"strip": interval_strip(taus, tau), "axis": axis_strip(tau)},
        "first": {"strip": interval_strip(firsts, share), "axis": axis_strip(share)},
    }


def speed_rows(speed: Mapping[str, Any]) -> View:
    """Tokens per second, with plain decoding's as a line through every bar."""
    found, plain = runs(speed), speed["plain"]["tokens_per_s"]
    scale = fit([run["tokens_per_s"] for _, run in found], zero=True)
    rows = []
    for name, run in found:
        rate, style = run["tokens_per_s"], "held" if "ratio" in run else "neutral"
        tip = f"{name}: {figure(rate, 1)} tokens/s"
        strip = bar_strip(rate, scale, style, tip, plain)
        tau = figure(run["tau"], 2) if "tau" in run else ""
        ratio = times(run["ratio"]) if "ratio" in run else ""
        ratio += "?" if run.get("warnings") else ""
        rows.append(
            {"name": name, "strip": strip, "rate": figure(rate, 1), "ratio": ratio, "tau": tau}
            | {"warnings": run.get("warnings", ())}
        )
    return {"rows": rows, "axis": axis_strip(scale)}


def time_rows(speed: Mapping[str, Any]) -> View:
    """Milliseconds per token by part: runs of different length compare."""
    found = [(name, per_token(run)) for name, run in runs(speed)]
    scale = fit([sum(part.values()) for _, part in found], zero=True)
    rows = []
    for name, spent in found:
        stack = [(part, part_style(part), value) for part, value in spent.items()]
        total = figure(sum(spent.values()), 1)
        rows.append({"name": name, "strip": stack_strip(stack, scale, "ms"), "total": total})
    names = dict.fromkeys(part for _, spent in found[::-1] for part in spent)
    legend = [(part_style(name), name) for name in names]
    return {"rows": rows, "legend": legend, "axis": axis_strip(scale)}


def per_token(run: Mapping[str, Any]) -> dict[str, float]:
    tokens = max(run["tokens"], 1)
    return {name: 1000 * seconds / tokens for name, seconds in parts(run).items()}


def promise(validation: Mapping[str, Mapping[str, float]]) -> list[View]:
    """Each validation figure through training's code and through the engine's forward."""
    trained, served = validation["training"], validation["engine"]
    gaps = validation.get("difference", {})
    return [
        {
            "name": PROMISED.get(name.split("/")[0], name),
            "draft": name.partition("/")[2],
            "training": figure(trained[name], 4),
            "engine": figure(served[name], 4),
            "difference": signed(gaps.get(name, served[name] - trained[name]), 4),
        }
        for name in trained
        if name in served
    ]


PROMISED = {
    "agree": "agreement with the target's choice",
    "alpha": "alpha, expected acceptance",
    "kl": "KL divergence, nats",
    "prefix": "all drafts up to here agree",
    "tau_teacher_forced": "tau, teacher-forced",
}


def curve_panels(evaluation: Mapping[str, Any], curves: Sequence[Mapping[str, Any]]) -> list[View]:
    """Loss, held-out agreement and tau over steps, as far as they were recorded."""
    tau = overall(evaluation, "greedy")[0].values["tau"]
    told = [
        ("Training loss", "loss", curve.loss_lines(curves), None),
        ("Held-out agreement per draft", "share of rows", curve.step_lines(curves, "agree"), None),
        (
            "Held-out tau, teacher-forced",
            "tokens per step",
            curve.tau_lines(curves),
            ("engine, greedy", tau),
        ),
    ]
    return [panel(*each) for each in told if each[2]]


def panel(title: str, unit: str, lines: list[Line], level: tuple[str, float] | None) -> View:
    legend = [(line.style, line.name, curve.last(line)) for line in lines]
    if level:
        legend.append(("level", level[0], figure(level[1])))
    return {
        "title": title,
        "unit": unit,
        "legend": legend,
        "chart": line_chart(title, lines, level),
    }


def stage_rows(stages: Mapping[str, float]) -> View:
    longest = max(stages.values()) or 1.0
    scale = Scale(0.0, longest, longest)
    rows = [
        {
            "name": name,
            "strip": bar_strip(value, scale, "neutral", f"{name}: {duration(value)}"),
            "time": duration(value),
        }
        for name, value in stages.items()
    ]
    return {"rows": rows, "total": duration(sum(stages.values()))}
