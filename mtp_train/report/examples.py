"""Examples as runs of marked text. Knows no tokenizer: a segment is what the evaluation says it is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from markupsafe import Markup, escape

KINDS = ("target", "accepted", "rejected")
TAGS = {
    "target": "span",
    "accepted": "ins",
    "rejected": "del",
}  # what a screen reader can tell apart
BREAK = Markup(
    '<i class="nl"></i>'
)  # the style sheet draws a sign there; it is no text, so it isn't copied


def readable(examples: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    return [
        {
            "key": example["key"],
            "category": example.get("category", "").replace("_", " "),
            "prompt": example["prompt"],
            "segments": [marked(segment) for segment in example["segments"]],
            "share": accepted_share(example["segments"]),
        }
        for example in examples
    ]


def marked(segment: Mapping[str, str]) -> tuple[str, Markup]:
    """(kind, escaped text). A drafted line break gets a sign, since a break alone can't show its colour.

    A rejected break is not in the output, so there the sign stands in its place.
    """
    kind, text = segment["kind"], escape(segment["text"])
    assert kind in KINDS, kind
    if kind == "accepted":
        text = text.replace("\n", BREAK + "\n")
    elif kind == "rejected":
        text = text.replace("\n", BREAK)
    return kind, text


def accepted_share(segments: Sequence[Mapping[str, str]]) -> str:
    """How much of the output's text came from accepted drafts, in characters."""
    said = [segment for segment in segments if segment["kind"] != "rejected"]
    total = sum(len(segment["text"]) for segment in said)
    drafted = sum(len(segment["text"]) for segment in said if segment["kind"] == "accepted")
    return f"{drafted / total:.0%}" if total else "0%"
