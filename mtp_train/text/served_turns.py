"""A trained reply in rendered text: whether the whole message stands in it, and where it stands in a longer text.

Knows no template and no token ids.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from mtp_train.text.refusal import Refusal
from mtp_train.text.rendering import Message
from mtp_train.text.replies import call_stands, split_reasoning, stands, without_reasoning

NO_REASONING = "the template renders no reasoning: left out"
NO_TEXT = "the template renders no text beside tool calls: left out"
NO_REPLY = "the template renders no reply"
NO_CALLS_RENDERED = "the template renders no tool calls"
MARK = "\N{DOUBLE DAGGER}"


@dataclass(frozen=True)
class Turn:
    """A trained reply in rendered text: what serving sends before it, and both with the reply."""

    text: str
    start: int  # of the reply: the prompt ends there
    end: int  # behind the end-of-turn token, where the template has one
    veiled: bool  # whether control tokens that are text are veiled in it
    rules: tuple[str, ...] = ()  # by which the reply was repaired

    @property
    def prompt(self) -> str:
        return self.text[: self.start]

    @property
    def whole(self) -> str:
        return self.text[: self.end]

    @property
    def reply(self) -> str:
        return self.text[self.start : self.end]

    def follows(self, before: Turn) -> bool:
        """Whether the prompt goes on where the turn before ended."""
        if self.text is before.text:
            return before.end <= self.start
        return self.prompt.startswith(before.whole)


def checked(
    turn: Turn,
    message: Message,
    thought: str,
    rules: Sequence[str],
    changes_nothing: Callable[[Message], bool],
    ends: Sequence[str],
) -> Turn | Refusal:
    """The reply, if what the message holds stands in it, or changes the rendering when taken away."""
    reply, behind = turn.reply, turn.text[turn.end :]
    rules = list(rules)
    answer = split_reasoning(message)[1]
    if not stands(thought, reply) and changes_nothing(without_reasoning(message)):
        rules.append(NO_REASONING)
    calls = message.get("tool_calls", [])
    for call in calls:
        found = call_stands(call, reply)
        if not found and call_stands(call, behind):
            return Refusal(NO_CALLS_RENDERED)  # serving stops before it
        others = [other for other in calls if other is not call]
        doubtful = len(calls) > 1 or not found
        if doubtful and changes_nothing(message | {"tool_calls": others}):
            return Refusal(NO_CALLS_RENDERED)
    without = message | {"content": ""}
    if not stands(answer, reply) and (stands(answer, behind) or changes_nothing(without)):
        if not calls:
            return Refusal(NO_REPLY)
        rules.append(NO_TEXT)
    if not _without_end(reply, ends).strip():
        return Refusal(NO_REPLY)
    return replace(turn, rules=tuple(rules))


def _without_end(reply: str, ends: Sequence[str]) -> str:
    return (
        reply[: -max(len(end) for end in ends if reply.endswith(end))]
        if reply.endswith(tuple(ends))
        else reply
    )


def marked(message: Message) -> Message:
    """A reply whose parts all begin otherwise."""
    other = dict(message)
    for key in ("content", "reasoning_content"):
        if other.get(key):
            other[key] = MARK + other[key]
    if other.get("tool_calls"):
        other["tool_calls"] = [
            call | {"function": call["function"] | {"name": MARK + call["function"]["name"]}}
            for call in other["tool_calls"]
        ]
    return other


def placed(
    turn: Turn, anchor: Turn | Refusal | None, before: Turn | Refusal | None, text: str
) -> Turn | None:
    """A window's reply in the text of the whole chat; None if it does not stand there.

    Args:
        anchor: an earlier reply of the window, None for the chat's own beginning.
        before: the same reply in the text.
    """
    edge, at = 0, 0
    if anchor is not None:
        if not isinstance(anchor, Turn) or not isinstance(before, Turn):
            return None
        if not turn.follows(anchor):
            return None
        edge, at = anchor.end, before.end
    if not text.startswith(turn.text[edge : turn.end], at):
        return None
    return replace(turn, text=text, start=at + turn.start - edge, end=at + turn.end - edge)


def same_turn(one: Turn | Refusal, other: Turn | Refusal) -> bool:
    if isinstance(one, Refusal) or isinstance(other, Refusal):
        return one == other
    return (one.start, one.whole) == (other.start, other.whole)
