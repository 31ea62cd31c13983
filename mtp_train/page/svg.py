"""SVG as escaped markup: elements, axes and grid lines. Knows no chart.

Everything is placed in percent of its box, never in pixels, so one drawing serves a telephone and a wide screen and
its letters keep their size. Lines of data go into a nested box of 100 by 100 that stretches.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from markupsafe import Markup, escape

from mtp_train.page.scale import Scale


def element(tag: str, *children: str, **attributes: str | float | None) -> Markup:
    """`<tag ...>children</tag>`, text and attributes escaped; `class_` and `data_tip` are written as HTML has them."""
    written = Markup("").join(
        Markup(' {}="{}"').format(name.rstrip("_").replace("_", "-"), value)
        for name, value in attributes.items()
        if value is not None
    )
    inside = Markup("").join(escape(child) for child in children)
    return Markup("<{0}{1}>{2}</{0}>").format(tag, written, inside)


def percent(value: float) -> str:
    return f"{value:.2f}%"


def drawing(label: str, parts: Iterable[str], height: str = "100%", class_: str = "") -> Markup:
    """An image with a name for those who can't see it."""
    return element(
        "svg", *parts, role="img", aria_label=label, width="100%", height=height, class_=class_
    )


def upward_axis(scale: Scale) -> list[Markup]:
    """Grid lines across the plot and their labels left of it."""
    parts = []
    for value, text in scale.ticks():
        y = percent(100 - scale.percent(value))
        parts.append(element("line", class_="grid", x1="0", x2="100%", y1=y, y2=y))
        parts.append(element("text", text, class_="tick end", x="0", dx="-8", y=y, dy="0.35em"))
    return parts


def step_axis(scale: Scale) -> list[Markup]:
    """Ticks below a plot whose x axis counts whole steps."""
    parts = []
    for value in whole_ticks(scale):
        x = percent(scale.percent(value))
        parts.append(element("line", class_="notch", x1=x, x2=x, y1="100%", y2="100%"))
        parts.append(element("text", f"{value:,}", class_="tick middle", x=x, y="100%", dy="18"))
    return parts


def whole_ticks(scale: Scale) -> list[int]:
    """Multiples of the axis's step that lie on it."""
    step = round(scale.step)
    first = -(-round(scale.low) // step) * step
    return list(range(first, round(scale.high) + 1, step))


def upright_grid(scale: Scale) -> list[Markup]:
    """Grid lines of a strip, from its top to its foot."""
    places = [percent(scale.percent(value)) for value, _ in scale.ticks()]
    return [element("line", class_="grid", x1=x, x2=x, y1="0", y2="100%") for x in places]


def path(points: Sequence[tuple[float, float]], class_: str) -> Markup:
    """A line through (x, y) in percent, y counted from the foot."""
    text = " ".join(f"{x:.2f},{100 - y:.2f}" for x, y in points)
    return element("polyline", points=text, class_=f"line {class_}")


def stretched(parts: Iterable[str]) -> Markup:
    """A box of 100 by 100 that takes the size of the plot."""
    return element(
        "svg",
        *parts,
        viewBox="0 0 100 100",
        preserveAspectRatio="none",
        width="100%",
        height="100%",
    )
