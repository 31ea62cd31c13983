"""What becomes of sequences that are longer than wanted: refused, cut, or split into windows. Never in silence.

Knows token ids and masks; no tokenizer, no source.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from mtp_train.core.errors import UserError
from mtp_train.core.records import TokenizedConversation
from mtp_train.text.refusal import Refusal

RULES = ("refuse", "truncate", "split")


@dataclass(frozen=True)
class Bound:
    """The longest sequence that a model has positions for, and what they are called: "the target's positions"."""

    positions: int
    whose: str


@dataclass(frozen=True)
class LengthPolicy:
    """How long a sequence may be, and what becomes of longer ones.

    Attributes:
        rule: `refuse`, `truncate` (the first max_tokens stay) or `split` (windows of at most max_tokens).
        max_tokens: longest sequence, in tokens.
        context: tokens before a window's own that it repeats as context, never trained there again; a window brings
            up to max_tokens - context new ones.
        whose: what bounds max_tokens, where a model does.
    """

    rule: str = "refuse"
    max_tokens: int = 4096
    context: int = 512
    whose: str = ""

    def __post_init__(self) -> None:
        if self.rule not in RULES:
            raise UserError("a length rule must be known", self.rule, f"use one of {RULES}")
        if self.max_tokens < 3:
            raise UserError("max_tokens must be 3 or more", self.max_tokens, "raise it")
        # A token is predicted from the state two before it: two tokens of context are the least.
        if self.rule == "split" and not 2 <= self.context < self.max_tokens:
            rule = f"context must be 2 or more, and less than the {self.longest}"
            raise UserError(rule, self.context, "correct data.context")

    @property
    def longest(self) -> str:
        """The longest length as a row's refusal names it."""
        return f"{self.max_tokens} tokens" + (f", {self.whose}" if self.whose else "")

    def refusal(self) -> Refusal:
        """Of a sequence with nothing to train in its first max_tokens, or of any that is longer and may not be."""
        if self.rule == "refuse":
            return Refusal(f"longer than {self.longest}")
        return Refusal(f"no trained token within {self.longest}")

    def within(self, bound: Bound | None) -> LengthPolicy:
        """The policy for a model with so many positions."""
        if bound is None or not 0 < bound.positions < self.max_tokens:
            return self
        return replace(self, max_tokens=bound.positions, whose=bound.whose)


def apply_length(
    record: TokenizedConversation, policy: LengthPolicy
) -> list[TokenizedConversation] | Refusal:
    """The record as the policy lets it pass: itself, its cut form, or its windows with something to train."""
    limit = policy.max_tokens
    if len(record.tokens) <= limit:
        return [record]
    if policy.rule == "refuse":
        return policy.refusal()
    if policy.rule == "split":
        return _windows(record, policy)
    if not any(record.loss_mask[:limit]):
        return policy.refusal()
    return [replace(record, tokens=record.tokens[:limit], loss_mask=record.loss_mask[:limit])]


def count_windows(tokens: int, policy: LengthPolicy) -> int:
    """Windows that a sequence of this many tokens is split into, those with nothing to train included."""
    new = policy.max_tokens - policy.context
    return 1 + max(0, -(-(tokens - policy.max_tokens) // new))


def _windows(record: TokenizedConversation, policy: LengthPolicy) -> list[TokenizedConversation]:
    """Windows over the sequence: [context, mask 0 | new tokens, their own mask]; the first is all new.

    tokens   a b c d e f g h     max_tokens 4, context 2
    window 0 a b c d
    window 1     c d e f         c and d are context
    window 2         e f g h
    """
    windows = []
    for index in range(count_windows(len(record.tokens), policy)):
        start = index * (policy.max_tokens - policy.context)
        tokens = record.tokens[start : start + policy.max_tokens]
        mask = record.loss_mask[start : start + policy.max_tokens]
        if index:
            mask = (0,) * policy.context + mask[policy.context :]
        if any(mask):
            key = record.key if index == 0 else f"{record.key}@{index}"
            windows.append(replace(record, key=key, tokens=tokens, loss_mask=mask))
    return windows
