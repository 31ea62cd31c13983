"""An inspection as one HTML file that needs no network. Knows what goes where; page/ knows how it looks."""

from __future__ import annotations

from collections import Counter
from typing import Any

from markupsafe import Markup, escape

from mtp_train.core.records import TokenizedConversation
from mtp_train.inspection.bins import Bin, binned
from mtp_train.inspection.collect import Inspection
from mtp_train.inspection.pieces import Piece, Vocabulary, pieces, shortened, visible
from mtp_train.inspection.tables import (
    advice,
    begins_table,
    checks,
    checks_table,
    duplicates_table,
    ends_table,
    headline,
    histogram_table,
    lengths_table,
    longest_table,
    plural,
    rows_table,
    share,
    tokens_table,
)
from mtp_train.page.figures import count
from mtp_train.page.scale import Scale, fit
from mtp_train.page.shell import render
from mtp_train.page.svg import drawing, element, percent, upward_axis

LONGEST_PIECE = 8_000  # characters; a longer run shows both ends
BREAK = Markup(
    '<i class="nl"></i>'
)  # the style sheet draws a sign there; it is no text, so it isn't copied
LABELLED_EDGES = 6  # with more, they would touch on a telephone

View = dict[str, Any]


def page(told: Inspection, vocabulary: Vocabulary, title: str) -> str:
    """The whole page.

    Args:
        title: what was inspected, in a few words.
    """
    tables = {
        "rows": rows_table(told),
        "tokens": tokens_table(told),
        "begins": begins_table(told, vocabulary),
        "ends": ends_table(told, vocabulary),
        "checks": checks_table(told),
        "lengths": lengths_table(told),
        "longest": longest_table(told),
        "duplicates": duplicates_table(told),
    }
    panels = [
        panel(name, counts)
        for name, counts in (("Sequences", told.lengths), ("Replies", told.replies))
        if counts
    ]
    return render(
        "mtp_train.inspection",
        "inspection",
        "inspection",
        title=visible(title),
        headline=headline(told),
        advice=advice(told),
        tiles=tiles(told),
        sequences=told.sequences,
        panels=panels,
        tables=tables | {one["name"]: one["table"] for one in panels},
        conversations=[conversation(one, vocabulary) for one in told.sample],
    )


def tiles(told: Inspection) -> list[View]:
    """What to see first."""
    rows, refused = told.accounting, sum(told.accounting.refused.values())
    flagged = [check.name for check in checks(told) if check.flagged]
    trained = f"{count(told.trained)} of {count(told.tokens)}"
    replies = f"in {plural(told.sequences, 'sequence')}"
    used = f"{count(rows.total - refused)} of {plural(rows.total, 'row')} used"
    return [
        tile("Trained", share(told.trained, told.tokens), "of all tokens", trained),
        tile("Replies", count(told.replies.total()), "trained runs", replies),
        tile("Refused", count(refused), "rows", used, state="" if told.sequences else "bad"),
        tile("Worth a look", count(len(flagged)), "findings", *flagged),
    ]


def tile(name: str, value: str, unit: str, *lines: str, state: str = "") -> View:
    return {"name": name, "value": value, "unit": unit, "lines": lines, "state": state}


def panel(name: str, counts: Counter[int]) -> View:
    bins = binned(counts)
    title = f"{name} by length"
    return {
        "name": name,
        "title": title,
        "legend": [],
        "chart": histogram(title, bins),
        "table": histogram_table(bins),
    }


def histogram(title: str, bins: list[Bin]) -> Markup:
    """A bar per bin, of one width each; edges below, where there is room."""
    scale = fit([one.count for one in bins], zero=True)
    parts = upward_axis(scale)
    every = -(-len(bins) // LABELLED_EDGES)
    for index, one in enumerate(bins):
        parts.append(bar(index, one, len(bins), scale))
        if index % every == 0:
            x = percent(100 * (index + 0.5) / len(bins))
            parts.append(
                element("text", f"{one.low:,}", class_="tick middle", x=x, y="100%", dy="18")
            )
    return drawing(title, parts)


def bar(index: int, one: Bin, bins: int, scale: Scale) -> Markup:
    height = scale.percent(one.count)
    return element(
        "rect",
        class_="bar d1",
        x=percent(100 * (index + 0.04) / bins),
        width=percent(92 / bins),
        y=percent(100 - height),
        height=percent(height),
        data_tip=f"{one.name} tokens: {count(one.count)}",
    )


def conversation(sequence: TokenizedConversation, vocabulary: Vocabulary) -> View:
    tokens, trained = len(sequence.tokens), sum(map(bool, sequence.loss_mask))
    return {
        "key": visible(sequence.key),
        "category": "" if sequence.category == "all" else visible(sequence.category),
        "size": plural(tokens, "token"),
        "share": share(trained, tokens),
        "pieces": [
            {"trained": piece.trained, "kind": piece.kind, "text": signed_breaks(piece)}
            for piece in shortened(pieces(sequence, vocabulary), LONGEST_PIECE)
        ],
    }


def signed_breaks(piece: Piece) -> Markup:
    """Escaped text. A trained line break gets a sign, since a break alone has no colour."""
    text = escape(piece.text)
    return text.replace("\n", BREAK + "\n") if piece.trained else text
