"""The two charts with axes: bars per draft position, and lines over training steps.

Knows neither the evaluation's layout nor the page around it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from markupsafe import Markup

from mtp_train.page.figures import figure, interval
from mtp_train.page.scale import Scale, fit, whole_steps
from mtp_train.page.svg import (
    drawing,
    element,
    path,
    percent,
    step_axis,
    stretched,
    upward_axis,
)

LABELLED_BARS = 12  # with more, the figures over the bars would touch; the table has them
CROWDED_BARS = 6  # likewise on a telephone
MARKED_POINTS = 40  # with more, dots hide the line


@dataclass(frozen=True)
class Bars:
    """One prompt set's acceptance by draft position, with an interval where there is one.

    `letter` stands under each of its bars, over the position's number.
    """

    name: str
    style: str
    values: Sequence[float]
    intervals: Sequence[Sequence[float]]
    letter: str = ""


@dataclass(frozen=True)
class Line:
    """One quantity over training steps."""

    name: str
    style: str
    points: Sequence[tuple[int, float]]
    marks: bool = True


def bar_chart(title: str, groups: Sequence[Bars], scale: Scale) -> Markup:
    """Groups side by side at each position, whiskers over them; all panels of a page share `scale`."""
    positions = max(len(group.values) for group in groups)
    parts = upward_axis(scale)
    below = "34" if any(group.letter for group in groups) else "18"
    for position in range(positions):
        middle = 100 * (position + 0.5) / positions
        parts.append(tick(str(position + 1), middle, below))
    for index, group in enumerate(groups):
        for position, value in enumerate(group.values):
            width = 80 / positions / max(len(groups), 2)
            left = 100 * (position + 0.5) / positions + width * (index - len(groups) / 2)
            bounds = group.intervals[position] if position < len(group.intervals) else None
            parts += whiskered_bar(group, position, value, bounds, left, width, scale)
            if group.letter:
                parts.append(tick(group.letter, left + width / 2, "16"))
            bars = positions * len(groups)
            if bars <= LABELLED_BARS:
                crowded = " crowded" if bars > CROWDED_BARS else ""
                parts.append(bar_figure(value, bounds, left + width / 2, scale, crowded))
    return drawing(title, parts)


def tick(text: str, x: float, below: str) -> Markup:
    """A label under the plot, `below` pixels down."""
    return element("text", text, class_="tick middle", x=percent(x), y="100%", dy=below)


def whiskered_bar(
    group: Bars,
    position: int,
    value: float,
    bounds: Sequence[float] | None,
    left: float,
    width: float,
    scale: Scale,
) -> list[Markup]:
    """A bar from the foot to `value`, and its interval as a whisker with feet."""
    height = scale.percent(value)
    tip = f"{group.name}, position {position + 1}: {figure(value)} {interval(bounds)}"
    bar = element(
        "rect",
        class_=f"bar {group.style}",
        x=percent(left + width * 0.05),
        width=percent(width * 0.9),
        y=percent(100 - height),
        height=percent(height),
        data_tip=tip,
    )
    if not bounds:
        return [bar]
    low, high = (percent(100 - scale.percent(bound)) for bound in bounds)
    middle = left + width / 2
    feet = percent(middle - width * 0.12), percent(middle + width * 0.12)
    stem = element(
        "line", class_="whisker", x1=percent(middle), x2=percent(middle), y1=low, y2=high
    )
    caps = [
        element("line", class_="whisker", x1=feet[0], x2=feet[1], y1=y, y2=y) for y in (low, high)
    ]
    return [bar, stem, *caps]


def bar_figure(
    value: float, bounds: Sequence[float] | None, middle: float, scale: Scale, style: str
) -> Markup:
    """The bar's value, written over its whisker."""
    top = percent(100 - scale.percent(max(value, bounds[1] if bounds else value)))
    return element(
        "text", figure(value, 2), class_=f"value{style}", x=percent(middle), y=top, dy="-6"
    )


def line_chart(title: str, lines: Sequence[Line], level: tuple[str, float] | None = None) -> Markup:
    """Lines over steps; `level` is a named value of another origin, drawn across as dashes."""
    steps = sorted({step for line in lines for step, _ in line.points})
    across = whole_steps(steps[0], steps[-1])
    values: list[float | None] = [value for line in lines for _, value in line.points]
    upward = fit([*values, level[1] if level else None])
    parts = upward_axis(upward) + step_axis(across)
    if level:
        y = percent(100 - upward.percent(level[1]))
        parts.append(element("line", class_="level", x1="0", x2="100%", y1=y, y2=y))
    parts.append(stretched(path(placed(line, across, upward), line.style) for line in lines))
    parts += [mark for line in lines for mark in dots(line, across, upward)]
    parts += hover_bands(lines, steps, across)
    return drawing(title, parts)


def placed(line: Line, across: Scale, upward: Scale) -> list[tuple[float, float]]:
    return [(across.percent(step), upward.percent(value)) for step, value in line.points]


def dots(line: Line, across: Scale, upward: Scale) -> list[Markup]:
    """A dot per measurement, where there are few enough to tell apart."""
    if not line.marks or len(line.points) > MARKED_POINTS:
        return []
    return [
        element("circle", class_=f"dot {line.style}", cx=percent(x), cy=percent(100 - y), r="2.5")
        for x, y in placed(line, across, upward)
    ]


def hover_bands(lines: Sequence[Line], steps: Sequence[int], across: Scale) -> list[Markup]:
    """An unseen band around each step that tells every line's value there."""
    found = [dict(line.points) for line in lines]
    edges = [across.percent((a + b) / 2) for a, b in pairwise(steps)]
    bands = []
    for step, left, right in zip(steps, [0.0, *edges], [*edges, 100.0], strict=True):
        shown = [
            f"{line.name} {figure(values[step])}"
            for line, values in zip(lines, found, strict=True)
            if step in values
        ]
        tip = "\n".join([f"step {step:,}", *shown])
        bands.append(
            element(
                "rect",
                class_="band",
                x=percent(left),
                width=percent(right - left),
                y="0",
                height="100%",
                data_tip=tip,
            )
        )
    return bands
