"""Chats that a template refuses because of the order of their roles, in the forms that a client would send instead.

Some templates take no system prompt, others nothing but a user and an assistant in turn. Serving answers such a chat
with an error, so clients send it in another form, by the conventions of these models: with the system prompt before
the first question, questions in a row as one. A reply is never joined with another: what the target said stays what it
said. Knows no template.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import chain, combinations
from typing import Any

from mtp_train.core.records import Conversation

SECOND_REPLY = "a reply that follows a reply is context only: the template can't show it as served"
USERS_JOINED = "user turns in a row joined by a blank line, as the template wants roles in turn"
SYSTEM_FOLDED = "system prompt put before the first user turn, as the template takes none"
CUT = "left out from a reply that follows a reply: the template wants roles in turn"


def served_otherwise(chat: Conversation) -> Iterator[tuple[Conversation, list[str]]]:
    """The chat's other forms, those with the fewest changes first, each with its rules."""
    changes = [
        change for change in (_only_first_replies, _joined_users, _folded, _cut) if change(chat)
    ]
    sets = chain.from_iterable(combinations(changes, n) for n in range(1, len(changes) + 1))
    for chosen in sets:
        made = chat
        rules: list[str] = []
        for change in chosen:
            changed = change(made)
            if changed is not None:
                made, rules = changed, [*rules, RULES[change]]
        yield made, rules


def _second_replies(chat: Conversation) -> list[int]:
    roles = [message["role"] for message in chat.messages]
    return [i for i in range(1, len(roles)) if roles[i - 1] == roles[i] == "assistant"]


def _only_first_replies(chat: Conversation) -> Conversation | None:
    second = frozenset(_second_replies(chat))
    return replace(chat, untrained=chat.untrained | second) if second - chat.untrained else None


def _cut(chat: Conversation) -> Conversation | None:
    second = _second_replies(chat)
    return replace(chat, messages=chat.messages[: second[0]]) if second else None


def _joined_users(chat: Conversation) -> Conversation | None:
    messages: list[dict[str, Any]] = []
    moved: dict[int, int] = {}
    for index, message in enumerate(chat.messages):
        if messages and messages[-1]["role"] == message["role"] == "user":
            text = f"{messages[-1]['content']}\n\n{message['content']}"
            messages[-1] = {**messages[-1], "content": text}
            continue
        moved[index] = len(messages)
        messages.append(message)
    if len(messages) == len(chat.messages):
        return None
    untrained = frozenset(moved[index] for index in chat.untrained if index in moved)
    return replace(chat, messages=tuple(messages), untrained=untrained)


def _folded(chat: Conversation) -> Conversation | None:
    """Only where it stands first, and the user's turn follows."""
    roles = [message["role"] for message in chat.messages[:2]]
    if roles != ["system", "user"]:
        return None
    system, user = chat.messages[:2]
    text = f"{system['content']}\n\n{user['content']}"
    untrained = frozenset(index - 1 for index in chat.untrained)
    messages = ({**user, "content": text}, *chat.messages[2:])
    return replace(chat, messages=messages, untrained=untrained)


RULES = {
    _only_first_replies: SECOND_REPLY,
    _joined_users: USERS_JOINED,
    _folded: SYSTEM_FOLDED,
    _cut: CUT,
}
