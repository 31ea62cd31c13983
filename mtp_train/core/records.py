"""Frozen records that cross stages. Knows no tensor library and no file format."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Conversation:
    """A chat as a source holds it."""

    key: str  # unique within its source
    messages: tuple[dict[str, str], ...]  # {"role": ..., "content": ...}
    category: str = "all"

    @property
    def messages_text(self) -> tuple[tuple[str, str], ...]:
        """Roles and contents, to compare conversations by."""
        return tuple((message["role"], message["content"]) for message in self.messages)


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

    A repaired row is used too, after a named repair; it is counted once, as repaired.
    """

    used: int = 0
    repaired: dict[str, int] = field(default_factory=dict)  # rule -> rows
    refused: dict[str, int] = field(default_factory=dict)  # reason -> rows
    examples: dict[str, str] = field(default_factory=dict)  # reason -> first row that shows it

    def repair(self, rule: str) -> None:
        self.repaired[rule] = self.repaired.get(rule, 0) + 1

    def refuse(self, reason: str, example: str) -> None:
        self.refused[reason] = self.refused.get(reason, 0) + 1
        self.examples.setdefault(reason, example)

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
        }
