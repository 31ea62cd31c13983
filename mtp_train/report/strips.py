"""Drawings that fit a table cell: dots with intervals, bars, stacks.

Knows no table. A strip is as wide as its cell, and strips of one column share a scale, so rows compare by eye.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from markupsafe import Markup

from mtp_train.page.figures import figure, interval
from mtp_train.page.scale import Scale
from mtp_train.page.svg import drawing, element, percent, upright_grid

LABELLED_SHARE = 0.09  # of the whole strip: a narrower segment has no room for its label


@dataclass(frozen=True)
class Mark:
    """A measured value with its interval, if it has one."""

    name: str
    style: str
    value: float
    bounds: Sequence[float] | None
    told: str = ""  # in place of the usual tip

    @property
    def tip(self) -> str:
        return self.told or f"{self.name}: {figure(self.value)} {interval(self.bounds)}"


def interval_strip(marks: Sequence[Mark], scale: Scale, level: float | None = None) -> Markup:
    """One dot per mark, each on a line of its own, over its interval; `level` is what all are compared with."""
    parts = upright_grid(scale)
    if level is not None:
        x = percent(scale.percent(level))
        parts.append(element("line", class_="level", x1=x, x2=x, y1="0", y2="100%"))
    for index, mark in enumerate(marks):
        y = percent(100 * (index + 1) / (len(marks) + 1))
        parts += dot_with_interval(mark, y, scale)
    return drawing("; ".join(mark.tip for mark in marks), parts, class_="strip")


def dot_with_interval(mark: Mark, y: str, scale: Scale) -> list[Markup]:
    dot = element(
        "circle",
        class_=f"dot {mark.style}",
        cx=percent(scale.percent(mark.value)),
        cy=y,
        r="4",
        data_tip=mark.tip,
    )
    if not mark.bounds:
        return [dot]
    low, high = (percent(scale.percent(bound)) for bound in mark.bounds)
    line = element(
        "line",
        class_=f"range {mark.style}",
        x1=low,
        x2=high,
        y1=y,
        y2=y,
        data_tip=mark.tip,
    )
    return [line, dot]


def axis_strip(scale: Scale) -> Markup:
    """The scale's labels, for the foot of a column of strips."""
    parts = [
        element("text", text, class_="tick middle", x=percent(scale.percent(value)), y="14")
        for value, text in scale.ticks()
    ]
    return drawing("axis", parts, class_="strip axis")


def bar_strip(
    value: float, scale: Scale, style: str, tip: str, level: float | None = None
) -> Markup:
    """One bar; `level` draws the value that all rows are compared with."""
    bar = element(
        "rect",
        class_=f"bar {style}",
        x="0",
        y="15%",
        height="70%",
        width=percent(scale.percent(value)),
        data_tip=tip,
    )
    if level is None:
        return drawing(tip, [bar], class_="strip")
    x = percent(scale.percent(level))
    line = element("line", class_="level", x1=x, x2=x, y1="-6%", y2="106%")
    return drawing(tip, [bar, line], class_="strip")


def stack_strip(parts: Sequence[tuple[str, str, float]], scale: Scale, unit: str) -> Markup:
    """(name, style, value) one after the other; the length of all is their sum."""
    total = sum(value for _, _, value in parts) or 1.0
    drawn, left = [], 0.0
    for name, style, value in parts:
        tip = f"{name}: {figure(value, 1)} {unit}, {value / total:.0%}"
        start, end = scale.percent(left), scale.percent(left + value)
        drawn.append(segment(style, start, end, tip))
        if end - start >= 100 * LABELLED_SHARE:
            middle = percent((start + end) / 2)
            share = f"{value / total:.0%}"
            drawn.append(element("text", share, class_="inside", x=middle, y="50%", dy="0.35em"))
        left += value
    label = "; ".join(f"{name} {figure(value, 1)} {unit}" for name, _, value in parts)
    return drawing(label, drawn, class_="strip")


def segment(style: str, start: float, end: float, tip: str) -> Markup:
    return element(
        "rect",
        class_=f"bar {style}",
        x=percent(start),
        width=percent(end - start),
        y="8%",
        height="84%",
        data_tip=tip,
    )
