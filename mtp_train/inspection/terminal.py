"""An inspection in the terminal. Knows no statistics of its own: tables.py says what there is to tell.

Trained text is coloured; without colour (no terminal, NO_COLOR) it stands in double brackets instead.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from rich.console import Console
from rich.rule import Rule
from rich.style import Style
from rich.table import Table as Grid
from rich.text import Text

from mtp_train.core.records import TokenizedConversation
from mtp_train.inspection.bins import binned
from mtp_train.inspection.collect import Inspection
from mtp_train.inspection.pieces import Piece, Vocabulary, pieces, shortened, visible
from mtp_train.inspection.tables import advice, all_tables, headline, plural, share
from mtp_train.page.figures import count
from mtp_train.page.table import Table

LONGEST_PIECE = 600  # characters; a longer run shows both ends
BAR = 40  # columns of the longest bar
TRAINED, SPECIAL, CUT = "color(194) on color(22)", "bold", "italic"
UNTRAINED_SPECIAL = "cyan"
OPEN, CLOSE = (
    "\N{MATHEMATICAL LEFT WHITE SQUARE BRACKET}",
    "\N{MATHEMATICAL RIGHT WHITE SQUARE BRACKET}",
)
MARKS = {"look": "bold yellow", "ok": "green"}


def write(told: Inspection, vocabulary: Vocabulary, console: Console) -> None:
    """Headline, tables, histograms, then the sampled sequences."""
    plain = console.color_system is None or console.no_color
    console.print(Text(headline(told), style="bold"))
    if advice(told):
        console.print(Text(advice(told)))
    for table in all_tables(told, vocabulary):
        console.print(Text(f"\n{table.title}", style="bold"))
        console.print(grid(table))
        if table.note:
            console.print(Text(table.note, style="dim"))
    for title, counts in (("Sequences", told.lengths), ("Replies", told.replies)):
        if counts:
            console.print(histogram(f"{title} by length in tokens", counts))
    if told.sample:
        console.print(legend(plain))
    for sequence in told.sample:
        console.print(Rule(Text(visible(caption(sequence))), align="left"))
        console.print(marked(pieces(sequence, vocabulary), plain), soft_wrap=plain)
        console.print()


def grid(table: Table) -> Grid:
    found = Grid(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for index, name in enumerate(table.header):
        worded = index < table.labels or not any(is_figure(row[index]) for row in table.rows)
        found.add_column(name, justify="left" if worded else "right", overflow="fold")
    for row in table.rows:
        found.add_row(*(Text(cell, style=MARKS.get(cell, "")) for cell in row))
    return found


def is_figure(cell: str) -> bool:
    return cell[:1].isdigit()


def histogram(title: str, counts: Counter[int]) -> Text:
    """A bar per bin, with its number and share."""
    bins, total = binned(counts), counts.total()
    wide, most = max(len(one.name) for one in bins), max(one.count for one in bins)
    lines = [
        f"{one.name:>{wide}} {bar(one.count / most)} {count(one.count)} ({share(one.count, total)})"
        for one in bins
    ]
    return Text.assemble((f"\n{title}\n", "bold"), "\n".join(lines))


def bar(part: float) -> str:
    """Blocks, the last one in eighths; what is there at all shows."""
    eighths = round(part * BAR * 8)
    if part and not eighths:
        eighths = 1
    rest = chr(0x2590 - eighths % 8) if eighths % 8 else ""  # U+2589 is seven eighths, U+258F one
    return "\N{FULL BLOCK}" * (eighths // 8) + rest


def legend(plain: bool) -> Text:
    shown = [Piece("trained tokens", True), Piece(" ", False), Piece("all others", False)]
    return Text.assemble(("\nConversations drawn at random: ", "bold"), marked(shown, plain))


def caption(sequence: TokenizedConversation) -> str:
    tokens, trained = len(sequence.tokens), sum(map(bool, sequence.loss_mask))
    told = f"{sequence.key}: {plural(tokens, 'token')}, {share(trained, tokens)} trained"
    return told if sequence.category == "all" else f"{told}, category {sequence.category}"


def marked(found: Sequence[Piece], plain: bool) -> Text:
    """The pieces in colour, or with brackets around what is trained."""
    text, inside = Text(), False
    for piece in shortened(found, LONGEST_PIECE):
        if plain and piece.trained != inside:
            text.append(OPEN if piece.trained else CLOSE)
        inside = piece.trained
        text.append(signed_breaks(piece), style=style(piece))
    if plain and inside:
        text.append(CLOSE)
    return text


def signed_breaks(piece: Piece) -> str:
    """A trained line break gets a sign, since a break alone has no colour."""
    return piece.text.replace("\n", "\u21b5\n") if piece.trained else piece.text


def style(piece: Piece) -> Style:
    trained = Style.parse(TRAINED) if piece.trained else Style()
    if piece.kind == "special":
        return trained + Style.parse(SPECIAL if piece.trained else UNTRAINED_SPECIAL)
    return trained + Style.parse(CUT) if piece.kind == "cut" else trained
