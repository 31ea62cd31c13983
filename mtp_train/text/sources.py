"""Rows of prompts and chats from files, each one accounted for. Knows no tokenizer.

Forms, told apart by their keys:
    {"messages": [{"role", "content"}, ...]}     a chat, or a prompt to answer
    {"prompt_ids": [...], "output_ids": [...]}   a target's answer, token by token (what `regenerate` writes)
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mtp_train.core.errors import UserError
from mtp_train.core.records import Accounting, Conversation

ANSWER_KEYS = {"id", "category", "messages", "prompt_ids", "output_ids", "finish"}
ROLES = ("system", "user", "assistant", "tool")


@dataclass(frozen=True)
class Answer:
    """A prompt and the target's own answer, as token ids."""

    key: str
    category: str
    messages: tuple[dict[str, str], ...]
    prompt_ids: tuple[int, ...]
    output_ids: tuple[int, ...]
    finish: str


def read_rows(path: str | Path) -> Iterator[tuple[int, Any]]:
    """(line number, value) of each line of a JSON-lines file; a damaged line yields its `ValueError`."""
    source = Path(path)
    if not source.is_file():
        raise UserError("a data file must exist", source, "check data paths")
    with open(source, "rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                yield number, json.loads(line.decode("utf-8-sig"))
            except (
                ValueError,
                RecursionError,
            ) as error:  # also numbers and nesting beyond Python's limits
                yield number, ValueError(str(error))


def read_conversations(path: str | Path, accounting: Accounting) -> list[Conversation]:
    """The chats of a JSON-lines file. Rows that can't be used are counted in `accounting` with reason and line."""
    found: list[Conversation] = []
    for number, row in read_rows(path):
        reason = _fault(row)
        if reason:
            accounting.refuse(reason, f"{path}:{number}")
            continue
        messages = tuple(
            {"role": message["role"], "content": message["content"]} for message in row["messages"]
        )
        key = number if row.get("id") is None else row["id"]
        found.append(Conversation(str(key), messages, str(row.get("category", "all"))))
        accounting.used += 1
    _require_any(found, path, accounting)
    return found


def read_answers(path: str | Path, accounting: Accounting) -> list[Answer]:
    """The target's answers that `regenerate` wrote."""
    found: list[Answer] = []
    for number, row in read_rows(path):
        if not isinstance(row, dict) or not set(row) >= ANSWER_KEYS:
            accounting.refuse("not a regenerated answer", f"{path}:{number}")
            continue
        if not row["output_ids"]:
            accounting.refuse("empty answer", f"{path}:{number}")
            continue
        ids = tuple(row["prompt_ids"]), tuple(row["output_ids"])
        found.append(
            Answer(row["id"], row["category"], tuple(row["messages"]), *ids, row["finish"])
        )
        accounting.used += 1
    _require_any(found, path, accounting)
    return found


def _fault(row: Any) -> str:
    """Why a row is not a chat; empty if it is one."""
    if isinstance(row, Exception):
        return "not valid JSON in UTF-8"
    if not isinstance(row, dict):
        return "not a JSON object"
    if row.get("tools"):
        return "tools are not rendered"
    messages = row.get("messages")
    if not isinstance(messages, list) or not messages:
        return "no `messages`; known forms: messages, prompt_ids + output_ids"
    for message in messages:
        if not isinstance(message, dict) or message.get("role") not in ROLES:
            return "a message without a role of " + ", ".join(ROLES)
        if not isinstance(message.get("content"), str) or not message["content"].strip():
            return "a message without text"
        if message.get("tool_calls") or message.get("reasoning_content"):
            return "tool calls and reasoning are not rendered"
        if any(0xD800 <= ord(letter) <= 0xDFFF for letter in message["content"]):
            return "a message with half a surrogate pair"
    return ""


def _require_any(found: list[Any], path: str | Path, accounting: Accounting) -> None:
    if not found:
        raise UserError(
            "a data file must hold at least one usable row",
            f"{path}: {accounting.as_dict()}",
            "see the reasons for the refused rows",
        )
