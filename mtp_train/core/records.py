"""Frozen records that cross stages. Knows no tensor library and no file format."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any


def printable(text: str) -> str:
    """A text that UTF-8 can write: half a surrogate pair, as in a broken row or a file's name, as its number."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


@dataclass(frozen=True)
class Conversation:
    """A chat in the OpenAI form, whatever form its source has.

    A message is {"role": system | user | assistant | tool, "content": str} ("" beside tool calls that come without
    text), and where the source has them `tool_calls` ([{"type": "function", "function": {"name": str, "arguments":
    dict}, "id"?}]), `reasoning_content`, `tool_call_id` and `name`.
    """

    key: str  # unique within its set
    messages: tuple[dict[str, Any], ...]
    category: str = "all"
    tools: tuple[dict[str, Any], ...] = ()  # function schemas that the template is given
    untrained: frozenset[int] = frozenset()  # indices of assistant turns that are context only
    repairs: tuple[str, ...] = ()  # rules that its row was repaired by


@dataclass(frozen=True)
class TokenizedConversation:
    """A chat as the target sees it. `loss_mask[t]` is 1 where token t is the target's own output."""

    key: str
    tokens: tuple[int, ...]
    loss_mask: tuple[int, ...]  # as long as tokens
    category: str = "all"

    def __post_init__(self) -> None:
        assert len(self.tokens) == len(self.loss_mask), "one mask entry per token"


@dataclass
class Accounting:
    """What became of every input row: used + repaired + refused = input.

    A repaired row is used too, after a named repair; it is counted once, as repaired, however many repairs it took
    and records it gave.
    """

    used: int = 0
    repaired: dict[str, int] = field(default_factory=dict)  # rule -> rows
    refused: dict[str, int] = field(default_factory=dict)  # reason -> rows
    examples: dict[str, str] = field(default_factory=dict)  # rule or reason -> first row it met
    notes: dict[str, int] = field(default_factory=dict)  # other counts; no rows, no part of the sum

    def count(self, rules: Sequence[str], example: str) -> None:
        """A row that is used, as it is or after repairs."""
        if rules:
            self.repair("; ".join(rules), example)
        else:
            self.used += 1

    def withdraw(self, rules: Sequence[str]) -> None:
        """Take back `count`, to count the row otherwise."""
        if not rules:
            self.used -= 1
            return
        rule = "; ".join(rules)
        self.repaired[rule] -= 1
        if not self.repaired[rule]:
            del self.repaired[rule]

    def repair(self, rule: str, example: str = "") -> None:
        rule = printable(rule)
        self.repaired[rule] = self.repaired.get(rule, 0) + 1
        if example:
            self.examples.setdefault(rule, printable(example))

    def refuse(self, reason: str, example: str, every: bool = False) -> None:
        """A row that is not used.

        Args:
            every: name each example, not the first alone: it stands for the rest of a file.
        """
        reason, example = printable(reason), printable(example)
        self.refused[reason] = self.refused.get(reason, 0) + 1
        if every and reason in self.examples:
            self.examples[reason] += f", {example}"
        self.examples.setdefault(reason, example)

    def note(self, what: str, count: int = 1) -> None:
        self.notes[what] = self.notes.get(what, 0) + count

    @property
    def total(self) -> int:
        """Input rows: the sum of the three outcomes."""
        return self.used + sum(self.repaired.values()) + sum(self.refused.values())

    def as_dict(self) -> dict[str, object]:
        return {
            "input": self.total,
            "used": self.used,
            "repaired": dict(self.repaired),
            "refused": dict(self.refused),
            "examples": dict(self.examples),
            "notes": dict(self.notes),
        }


BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}


@dataclass(frozen=True)
class Sizes:
    """A target's dimensions, from its config."""

    parameters: int
    hidden: int
    intermediate: int
    layers: int
    vocabulary: int
    dtype: str

    @property
    def width(self) -> int:
        """Bytes of one number."""
        return BYTES[self.dtype]

    @property
    def block_parameters(self) -> int:
        """Of one decoder layer, the embeddings counted out: what a one-layer head holds, roughly."""
        return max(self.parameters - 2 * self.vocabulary * self.hidden, 0) // self.layers
