"""Token ids as text, cut where the mask or the kind of token changes. Knows no tokenizer: it is handed a decoder."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from mtp_train.core.records import TokenizedConversation

# Letters that a terminal or a browser would obey rather than show: control codes and changes of writing direction.
OBEYED = {
    code: chr(0x2400 + code) if code < 0x20 else f"\\x{code:02x}"
    for code in (*range(0x20), *range(0x7F, 0xA0))
    if code not in (ord("\n"), ord("\t"))
} | {
    code: f"\\u{code:04x}"
    for code in (0x200E, 0x200F, *range(0x202A, 0x202F), *range(0x2066, 0x206A))
}


@dataclass(frozen=True)
class Vocabulary:
    """What of a tokenizer is needed to read ids.

    `decode` gives the text of ids, special tokens included and spaces left alone.
    """

    size: int
    special: frozenset[int]
    ends: frozenset[int]  # those that end a turn
    decode: Callable[[Sequence[int]], str]


@dataclass(frozen=True)
class Piece:
    """A run of tokens of one mask value; `kind` is text, special (control tokens) or cut (a remark in their place)."""

    text: str
    trained: bool
    kind: str = "text"


def pieces(sequence: TokenizedConversation, vocabulary: Vocabulary) -> list[Piece]:
    """The whole sequence. Runs are decoded together, since one byte-level token need not be a whole character."""
    found: list[Piece] = []
    start = 0
    kinds = zip(
        map(bool, sequence.loss_mask),
        (token in vocabulary.special for token in sequence.tokens),
        strict=True,
    )
    for (trained, special), run in groupby(kinds):
        stop = start + sum(1 for _ in run)
        text = decoded(sequence.tokens, start, stop, vocabulary)
        found.append(Piece(visible(text), trained, "special" if special else "text"))
        start = stop
    return found


def decoded(tokens: Sequence[int], start: int, stop: int, vocabulary: Vocabulary) -> str:
    """Text of tokens[start:stop].

    Decoders drop the space that opens a text, so the run is decoded behind the token before it, and that one's text
    taken off.
    """
    if start:
        opening = vocabulary.decode(tokens[start - 1 : start])
        whole = vocabulary.decode(tokens[start - 1 : stop])
        if whole.startswith(opening):
            return whole[len(opening) :]
    return vocabulary.decode(tokens[start:stop])


def token_text(tokens: Sequence[int], vocabulary: Vocabulary) -> str:
    """A few tokens on one line, in quotes that show spaces."""
    text = visible(vocabulary.decode(tokens)).replace("\n", "\u21b5").replace("\t", "\u21e5")
    return f"\N{LEFT DOUBLE QUOTATION MARK}{text}\N{RIGHT DOUBLE QUOTATION MARK}"


def visible(text: str) -> str:
    return text.translate(OBEYED)


def shortened(found: Sequence[Piece], limit: int) -> Iterator[Piece]:
    """Pieces of at most about `limit` characters: a longer one keeps both ends, where the mask changes."""
    for piece in found:
        left_out = len(piece.text) - limit
        if left_out <= limit // 10:
            yield piece
            continue
        half = limit // 2
        yield Piece(piece.text[:half], piece.trained, piece.kind)
        remark = f"[\N{HORIZONTAL ELLIPSIS} {left_out:,} characters \N{HORIZONTAL ELLIPSIS}]"
        yield Piece(remark, piece.trained, "cut")
        yield Piece(piece.text[-(limit - half) :], piece.trained, piece.kind)
