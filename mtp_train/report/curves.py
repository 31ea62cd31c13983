"""Training curves as lines: thinned, smoothed, named. Knows no drawing."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

from mtp_train.page.figures import figure, known
from mtp_train.report.charts import Line

DRAWN_POINTS = 300  # a screen shows no more
WINDOW_SHARE = 20  # the smoothed line is the mean of a twentieth of the run

Points = list[tuple[int, float]]


def training(curves: Sequence[Mapping[str, Any]], name: str) -> Points:
    """One quantity of the training rows; a step that diverged has no point."""
    return [(row["step"], row[name]) for row in curves if known(row.get(name))]


def validation(curves: Sequence[Mapping[str, Any]], name: str) -> Points:
    rows = [row for row in curves if known(row.get("validation", {}).get(name))]
    return [(row["step"], row["validation"][name]) for row in rows]


def trailing_mean(points: Points, window: int) -> Points:
    """At each step the mean of the last `window` values, or of as many as there are."""
    sums = [0.0, *accumulate(value for _, value in points)]
    means = []
    for i, (step, _) in enumerate(points):
        first = max(0, i + 1 - window)
        means.append((step, (sums[i + 1] - sums[first]) / (i + 1 - first)))
    return means


def thin(points: Points) -> Points:
    """Evenly spaced points, the last one always among them."""
    stride = -(-len(points) // DRAWN_POINTS)
    return points[:: stride or 1] + (points[-1:] if (len(points) - 1) % (stride or 1) else [])


def loss_lines(curves: Sequence[Mapping[str, Any]]) -> list[Line]:
    """The loss as it was, pale, and its trailing mean."""
    points = training(curves, "loss")
    if not points:
        return []
    window = max(1, len(points) // WINDOW_SHARE)
    each = Line("each step", "pale", thin(points), marks=False)
    if window == 1:
        return [each]
    name = f"mean of the last {window} rows"
    return [each, Line(name, "held", thin(trailing_mean(points, window)), marks=False)]


def step_lines(curves: Sequence[Mapping[str, Any]], quantity: str) -> list[Line]:
    """A validation quantity that is told per draft step (`agree/1`, `agree/2`, ...)."""
    names = {name for row in curves for name in row.get("validation", {})}
    depths = sorted(
        int(name.split("/")[1]) for name in names if re.fullmatch(f"{quantity}/\\d+", name)
    )
    lines = [(depth, validation(curves, f"{quantity}/{depth}")) for depth in depths]
    return [
        Line(f"draft {depth}", f"d{min(depth, 4)}", thin(points))
        for depth, points in lines
        if points
    ]


def tau_lines(curves: Sequence[Mapping[str, Any]]) -> list[Line]:
    """Teacher-forced, and through the engine on a few prompts where training measured that too."""
    online = [row for row in curves if known(row.get("online", {}).get("tau"))]
    told = [
        ("teacher-forced", "held", validation(curves, "tau_teacher_forced")),
        ("engine, a few prompts", "other", [(row["step"], row["online"]["tau"]) for row in online]),
    ]
    return [Line(name, style, thin(points)) for name, style, points in told if points]


def last(line: Line) -> str:
    return figure(line.points[-1][1])
