"""Conversations that ask the same thing: what a head is measured on must not be what it was trained on.

Two conversations overlap if one of these holds, after their texts are reduced to `plain`:

    whole     all user turns are the same, and the system prompt is
    opening   the first user turn of one is a turn of the other, with OPENING bytes or more
    later     they share a user turn of LATER bytes or more

A first turn stands for itself, so few letters tell it apart; a later one often says no more than "thanks" or "go on".
Of 7,648 different user turns in 5,811 public chats and prompts (ShareGPT, OpenAssistant, tool use), 169 stood in
several chats: the 55 below 32 bytes were mostly courtesies ("thank you for your help"), the 114 above mostly questions
that were asked twice. What COMMON different conversations of the measured set ask alike tells none of them apart.

Knows no file and no form of row.
"""

from __future__ import annotations

import hashlib
import unicodedata
from collections.abc import Callable, Collection, Iterable, Mapping

from mtp_train.core.errors import UserError
from mtp_train.core.records import Accounting, Conversation, TokenizedConversation

OPENING = 12
LATER = 32
COMMON = 3
REASON = "the conversation, or a user turn of it, stands in "

Item = Conversation | TokenizedConversation


def plain(text: str) -> str:
    """A text without what copies differ in: case, width, white space, marks at its ends."""
    words = " ".join(unicodedata.normalize("NFKC", text).casefold().split())
    return words.strip(" .,;:!?\"'`*#-\u2026\u3002\uff01\uff1f")


def offers(item: Item) -> set[bytes]:
    """Digests of what a conversation asks: two overlap if one offers what the other seeks."""
    turns, whole = _asked(item)
    found = {_mark("whole", whole)}
    found |= {_mark("later", turn) for turn in turns if _size(turn) >= LATER}
    found |= {_mark("turn", turn) for turn in turns if _size(turn) >= OPENING}
    found |= {_mark("opening", turn) for turn in turns[:1] if _size(turn) >= OPENING}
    return found


def seeks(item: Item) -> set[bytes]:
    """Digests that a conversation which overlaps with this one offers."""
    turns, whole = _asked(item)
    found = {_mark("whole", whole)}
    found |= {_mark("later", turn) for turn in turns if _size(turn) >= LATER}
    found |= {_mark("opening", turn) for turn in turns if _size(turn) >= OPENING}
    found |= {_mark("turn", turn) for turn in turns[:1] if _size(turn) >= OPENING}
    return found


def distinctive(items: Iterable[Item], marks: Callable[[Item], set[bytes]]) -> set[bytes]:
    """The marks of the conversations, without those that COMMON different ones share: a fixed opening, a courtesy."""
    wholes: dict[bytes, set[str]] = {}
    for item in items:
        whole = _asked(item)[1]
        for mark in marks(item):
            wholes.setdefault(mark, set()).add(whole)
    return {mark for mark, found in wholes.items() if len(found) < COMMON}


def offered(items: Iterable[Item], name: str) -> dict[bytes, str]:
    """What the conversations of set `name` offer."""
    return dict.fromkeys(distinctive(items, offers), name)


def offered_among(items: Iterable[Item], sought: Collection[bytes], name: str) -> dict[bytes, str]:
    """The same, as far as it is sought: small however many conversations there are."""
    return {mark: name for item in items for mark in offers(item) if mark in sought}


def overlap(item: Item, others: Mapping[bytes, str]) -> str:
    """Why a conversation is left out beside sets that offer `others`; empty if it is not."""
    if not others:
        return ""
    found = sorted({others[mark] for mark in seeks(item) if mark in others})
    return REASON + ", ".join(found) if found else ""


def require_few(accounting: Accounting, name: str) -> None:
    """Raise if more than half of a set's rows overlap: then the split is wrong, not a row."""
    reasons = [reason for reason in accounting.refused if reason.startswith(REASON)]
    rows = sum(accounting.refused[reason] for reason in reasons)
    if 2 * rows > accounting.total:
        raise UserError(
            f"at most half of the rows of {name} may ask what another set asks",
            f"{rows} of {accounting.total}: {reasons[0]} (first: {accounting.examples[reasons[0]]})",
            "hold out whole conversations",
        )


def _asked(item: Item) -> tuple[list[str], str]:
    """The user turns, plain, and everything that is asked as one text."""
    if isinstance(item, TokenizedConversation):
        first = item.loss_mask.index(1) if 1 in item.loss_mask else len(item.tokens)
        return [], f"ids {item.tokens[:first]}"
    said = [(m["role"], plain(m["content"])) for m in item.messages]
    turns = [text for role, text in said if role == "user"]
    system = [text for role, text in said if role == "system" and text]
    return turns, repr((system, turns))


def _size(text: str) -> int:
    return len(text.encode("utf-8", "replace"))


def _mark(kind: str, text: str) -> bytes:
    return hashlib.sha256(f"{kind} {text}".encode("utf-8", "replace")).digest()[:12]
