"""Single values of a row: texts, names, weights. A value of another type is repaired by a named rule, or the row is
refused; what it may have meant is never guessed.

Knows no form of row.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from mtp_train.core.records import printable
from mtp_train.text.refusal import RowRefused

NUMBER = "a number read as text"
NOT_A_NUMBER = "NaN read as no value"
PARTS = "text parts joined by a line break, as serving joins them"
STRINGS = "strings in a list of parts read as text parts"
WEIGHTS = "fractional weight read as 1"
WEIGHT_TEXT = "a weight as text read as a number"
LABEL = "an id or category that is no text left out"
LABEL_LETTERS = "half a surrogate pair in an id or category written as its number"

WEIGHT_KEYS = ("weight", "loss_weight", "train")
DEEPEST = 64  # levels of a tool call or schema

Repair = Callable[[str], None]


def is_nan(value: Any) -> bool:
    return isinstance(value, float) and math.isnan(value)


def without_nan(row: Mapping[str, Any], repair: Repair) -> dict[str, Any]:
    """The row without the values that an export of a table writes where there is none."""
    if any(map(is_nan, row.values())):
        repair(NOT_A_NUMBER)
    return {key: None if is_nan(value) else value for key, value in row.items()}


def one_of(row: Mapping[str, Any], keys: Sequence[str], what: str) -> Any:
    """What stands under one of several names, None if nothing does.

    Raises:
        RowRefused: two of them hold different values.
    """
    found = {key: row[key] for key in keys if row.get(key) is not None}
    values = list(found.values())
    if values != values[:1] * len(values):  # lists hold a NaN equal to itself
        raise RowRefused(f"two values of {what}", ", ".join(found))
    return values[0] if values else None


def read_text(value: Any, repair: Repair) -> str | None:
    """The text of a turn: a string, a whole number, or a list of text parts."""
    if is_nan(value):
        repair(NOT_A_NUMBER)
        return None
    if isinstance(value, list):
        if any(isinstance(part, str) for part in value):
            repair(STRINGS)
        if len(value) > 1:
            repair(PARTS)
        value = "\n".join(map(_part, value))
    if type(value) is int:
        repair(NUMBER)
        value = str(value)
    if type(value) is float:
        raise RowRefused("a content that is a number with a point: how it was written is not known")
    if value is not None and not isinstance(value, str):
        raise RowRefused("a content that is no text")
    return None if value is None else sound_text(value)


def _part(part: Any) -> str:
    """One part of a content list."""
    if isinstance(part, str):
        return part
    kind = part.get("type", "text") if isinstance(part, dict) else type(part).__name__
    if kind != "text":
        named = kind if isinstance(kind, str) else type(kind).__name__
        raise RowRefused(f"content that is not text ({named[:40]})")
    text = one_of(part, ("text", "value"), "a text part")
    if not isinstance(text, str):
        raise RowRefused("a text part without text")
    return text


def sound_text(text: str) -> str:
    """The text, if UTF-8 can write it."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise RowRefused("a message with half a surrogate pair") from None
    return text


def require_sound(value: Any, what: str) -> None:
    """Raise unless `value` (a tool call, a schema) is plain JSON that every later stage can write and read."""
    waiting = [(value, 0)]
    while waiting:
        item, depth = waiting.pop()
        if depth > DEEPEST:
            raise RowRefused(f"{what} that is nested too deeply")
        if isinstance(item, dict):
            waiting += [(part, depth + 1) for pair in item.items() for part in pair]
        elif isinstance(item, list):
            waiting += [(part, depth + 1) for part in item]
        elif isinstance(item, str):
            if printable(item) != item:
                raise RowRefused(f"{what} with half a surrogate pair")
        elif isinstance(item, float) and not math.isfinite(item):
            raise RowRefused(f"{what} with NaN or an infinite number")
        elif not isinstance(item, bool | int | float | None):
            raise RowRefused(f"{what} with a value that JSON lacks ({type(item).__name__})")


def read_name(value: Any, what: str, repair: Repair) -> str:
    """A name within a chat: of a speaker, a tool, a call."""
    if type(value) is int:
        repair(NUMBER)
        return str(value)
    if not isinstance(value, str):
        raise RowRefused(f"{what} that is no text")
    require_sound(value, what)
    return value


def read_label(value: Any, repair: Repair) -> str:
    """An id or a category, "" where there is none: what is no text is left out, since nothing is trained by it."""
    if value is None or value == "":
        return ""
    if type(value) is int:
        return str(value)
    if not isinstance(value, str):
        repair(LABEL)
        return ""
    if printable(value) != value:
        repair(LABEL_LETTERS)
    return printable(value)


def read_weight(turn: Mapping[str, Any], repair: Repair) -> float:
    """Whether a turn is trained: 0 or 1."""
    weights = {_weight(turn[key], repair) for key in WEIGHT_KEYS if turn.get(key) is not None} or {
        1.0
    }
    if len(weights) > 1:
        raise RowRefused("two weights in one turn")
    (weight,) = weights
    if weight not in (0.0, 1.0):
        repair(WEIGHTS)
    return float(weight > 0)


def _weight(value: Any, repair: Repair) -> float:
    if isinstance(value, str):
        try:
            value = float(value)
        except ValueError:
            raise RowRefused("a weight that is no number") from None
        repair(WEIGHT_TEXT)
    if not isinstance(value, bool | int | float) or not 0 <= value < math.inf:
        raise RowRefused("a weight that is no number of 0 or more")
    return float(value)
