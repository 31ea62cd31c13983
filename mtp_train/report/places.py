"""The chart over a few ordered places (bins, turns, k): points with intervals, joined, named where they stand.

Knows neither what the places are nor the page around the chart.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from markupsafe import Markup

from mtp_train.page.figures import figure
from mtp_train.page.scale import Scale
from mtp_train.page.svg import drawing, element, percent, upward_axis

DODGE = 0.12  # of a place's width: what two series stand apart, so that their whiskers don't hide each other
NAME_GAP = 7.0  # percent of the plot's height that a line of text takes
LABELLED_PLACES = 6  # with more, the figures over the points would touch on a telephone


@dataclass(frozen=True)
class Place:
    """A position on the x axis; `below` is a second line, such as a number of prompts."""

    label: str
    below: str = ""


@dataclass(frozen=True)
class Point:
    """A value at one place, with its interval if it has one. `style` is added to that of its series."""

    place: int
    value: float
    bounds: Sequence[float] | None = None
    tip: str = ""
    style: str = ""


@dataclass(frozen=True)
class Series:
    """One quantity over the places. `joined` draws a line through its points."""

    name: str
    style: str
    points: Sequence[Point]
    joined: bool = True


def place_chart(
    title: str,
    places: Sequence[Place],
    series: Sequence[Series],
    scale: Scale,
    *,
    figures: Mapping[tuple[int, int], str] | None = None,
    ends: bool = False,
    level: float | None = None,
) -> Markup:
    """A chart of `series` over `places`.

    Args:
        figures: (series, place) -> text written at that point; by default each place's highest and lowest value.
        ends: name each series at its last point, in place of a legend.
        level: a value drawn across as dashes, such as plain decoding's.
    """
    if figures is None:
        figures = extremes(series) if len(places) <= LABELLED_PLACES else {}
    spot = Spots(len(places), len(series), scale)
    parts = upward_axis(scale) + place_axis(places)
    if level is not None:
        y = percent(100 - scale.percent(level))
        parts.append(element("line", class_="level", x1="0", x2="100%", y1=y, y2=y))
    for index, one in enumerate(series):
        parts += joints(one, index, spot) if one.joined else []
    for index, one in enumerate(series):
        for point in one.points:
            parts += marked(one, point, spot.x(index, point.place), scale)
    parts += written(series, figures, spot)
    if ends:
        parts += names(series, spot)
    return drawing(title, parts)


@dataclass(frozen=True)
class Spots:
    """Where things stand, in percent of the plot."""

    places: int
    series: int
    scale: Scale

    def x(self, series: int, place: int) -> float:
        aside = DODGE * (series - (self.series - 1) / 2) if self.series > 1 else 0.0
        return 100 * (place + 0.5 + aside) / self.places

    def y(self, value: float) -> float:
        return 100 - self.scale.percent(value)


def place_axis(places: Sequence[Place]) -> list[Markup]:
    parts = []
    for index, place in enumerate(places):
        x = percent(100 * (index + 0.5) / len(places))
        parts.append(element("text", place.label, class_="tick middle", x=x, y="100%", dy="18"))
        if place.below:
            below = element("text", place.below, class_="tick middle", x=x, y="100%", dy="34")
            parts.append(below)
    return parts


def joints(one: Series, index: int, spot: Spots) -> list[Markup]:
    """Straight lines between neighbours; one that leads to an uncertain point is as that point's style says."""
    return [
        element(
            "line",
            class_=f"joint {one.style} {after.style}".rstrip(),
            x1=percent(spot.x(index, before.place)),
            y1=percent(spot.y(before.value)),
            x2=percent(spot.x(index, after.place)),
            y2=percent(spot.y(after.value)),
        )
        for before, after in pairwise(one.points)
    ]


def marked(one: Series, point: Point, x: float, scale: Scale) -> list[Markup]:
    """A dot over its interval."""
    style = f"{one.style} {point.style}".rstrip()
    tip = point.tip or f"{one.name}: {figure(point.value)}"
    at = percent(x)
    y = percent(100 - scale.percent(point.value))
    dot = element("circle", class_=f"dot {style}", cx=at, cy=y, r="4", data_tip=tip)
    if not point.bounds:
        return [dot]
    low, high = (percent(100 - scale.percent(bound)) for bound in point.bounds)
    stem = element("line", class_=f"range {style}", x1=at, x2=at, y1=low, y2=high, data_tip=tip)
    return [stem, dot]


def extremes(series: Sequence[Series]) -> dict[tuple[int, int], str]:
    """The highest and the lowest value of each place: written above and below, they never touch."""
    chosen: dict[tuple[int, int], str] = {}
    for place in {point.place for one in series for point in one.points}:
        found = ((value_at(one, place), index) for index, one in enumerate(series))
        there = sorted((value, index) for value, index in found if value is not None)
        for value, index in (there[0], there[-1]):
            chosen[index, place] = figure(value, 2)
    return chosen


def value_at(one: Series, place: int) -> float | None:
    return next((point.value for point in one.points if point.place == place), None)


def written(
    series: Sequence[Series], figures: Mapping[tuple[int, int], str], spot: Spots
) -> list[Markup]:
    """Figures beyond the whisker's end: above it, or below where another series stands higher at that place."""
    parts = []
    for index, one in enumerate(series):
        for point in one.points:
            text = figures.get((index, point.place))
            if text is None:
                continue
            others = [value_at(other, point.place) for i, other in enumerate(series) if i != index]
            below = any(value is not None and value > point.value for value in others)
            edge = (min if below else max)([point.value, *(point.bounds or ())])
            parts.append(
                element(
                    "text",
                    text,
                    class_="value",
                    x=percent(spot.x(index, point.place)),
                    y=percent(spot.y(edge)),
                    dy="17" if below else "-8",
                )
            )
    return parts


def names(series: Sequence[Series], spot: Spots) -> list[Markup]:
    """Each series' name right of the plot at the height of its last point, pushed apart where they would touch."""
    wanted = [(spot.y(one.points[-1].value), one) for one in series if one.points]
    wanted.sort(key=lambda item: item[0])
    heights = spaced([y for y, _ in wanted])
    return [
        element(
            "text",
            one.name,
            class_=f"name {one.style}",
            x="100%",
            dx="4",
            y=percent(y),
            dy="0.35em",
        )
        for y, (_, one) in zip(heights, wanted, strict=True)
    ]


def spaced(heights: Sequence[float]) -> list[float]:
    """Rising heights moved down until NAME_GAP lies between neighbours, then up from the foot if they overrun it."""
    moved: list[float] = []
    for y in heights:
        moved.append(max(y, moved[-1] + NAME_GAP) if moved else y)
    limit = 100.0
    for index in reversed(range(len(moved))):
        moved[index] = min(moved[index], limit)
        limit = moved[index] - NAME_GAP
    return moved
