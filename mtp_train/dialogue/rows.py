"""A completion as a row of a journal, and back. Knows no conversation.

A verification step is a list of its fields in the order of `DraftStep`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from mtp_train.engine.sequences import Completion, DraftStep

STEP = tuple(item.name for item in fields(DraftStep))


def completion_row(completion: Completion) -> dict[str, Any]:
    """What the journal keeps of a completion beside its key; steps only where there was speculation."""
    row: dict[str, Any] = {
        "prompt_ids": list(completion.prompt),
        "output_ids": list(completion.tokens),
        "finish": completion.finish,
    }
    if completion.steps:
        row["steps"] = [[_short(getattr(step, name)) for name in STEP] for step in completion.steps]
    if completion.undrafted:
        row["undrafted"] = completion.undrafted
    return row


def row_completion(row: Mapping[str, Any]) -> Completion:
    """The completion that a row keeps."""
    return Completion(
        row["id"],
        tuple(row["prompt_ids"]),
        tuple(row["output_ids"]),
        row["finish"],
        tuple(DraftStep(*map(_frozen, step)) for step in row.get("steps", ())),
        undrafted=row.get("undrafted", 0),
    )


def _short(value: Any) -> Any:
    """Five places of a measured number are more than it is worth, and files are a third of the size."""
    if isinstance(value, tuple):
        return [round(item, 5) if isinstance(item, float) else item for item in value]
    return value


def _frozen(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value
