"""Given conversations to the turns that the target answers. Knows no tokenizer, no engine and no server.

Serving answers each of a user's messages, so the target does too, on its own replies: the given ones are dropped.

    given           system  user  assistant  user  assistant
    turn 0 adds     system  user                                and the target replies
    turn 1 adds                              user               after its own first reply, and it replies again

A tool's result answers a call that the given assistant made. The target's own reply may ask for something else or for
nothing, so a conversation is answered up to its first tool result.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

from mtp_train.core.errors import UserError
from mtp_train.core.records import Accounting, Conversation
from mtp_train.text.sources import SourceConfig, asked

DROPPED = "the given replies are dropped: the target writes its own"
TOOLS = "answered up to the first tool result, which the target's own reply may not ask for"


@dataclass(frozen=True)
class Plan:
    """A conversation as the target will hold it."""

    conversation: Conversation
    turns: tuple[tuple[dict[str, Any], ...], ...]  # messages that precede each of its replies
    repair: str  # rule that changed the given conversation; empty if none did

    def key(self, turn: int) -> str:
        """The answer's key: the conversation's own for the first turn, `<id>#<turn>` for later ones."""
        return f"{self.conversation.key}#{turn}" if turn else self.conversation.key


def read_plans(
    sources: Sequence[SourceConfig],
    limit: int,
    limit_name: str,
    accounting: Accounting,
    others: Mapping[bytes, str] | None = None,
) -> list[Plan]:
    """The first `limit` conversations of the sources (0: all). Those that ask nothing, or what `others` offer (see
    text.overlap), are refused in `accounting`; the rest is not counted yet.
    """
    plans = []
    for number, (conversation, _) in enumerate(asked(sources, accounting, others=others)):
        turns, own = split_turns(conversation.messages)
        if limit and number >= limit:
            accounting.refuse(f"beyond {limit_name}", conversation.key)
        elif not turns:
            accounting.refuse("no user's message to answer", conversation.key)
        else:
            rules = [*conversation.repairs, *filter(None, [own])]
            plans.append(Plan(conversation, turns, "; ".join(rules)))
    _require_unique(plans, sources)
    return plans


def count_plan(plan: Plan, answered: bool, failure: str, accounting: Accounting) -> None:
    """Account for a conversation, once.

    Args:
        answered: whether the target gave its first reply.
        failure: why it ended before its last one; empty if it did not.
    """
    if answered and failure:
        accounting.repair(f"ended early, the turns before are kept: {failure}")
    elif failure:
        accounting.refuse(failure, plan.conversation.key)
    elif plan.repair:
        accounting.repair(plan.repair)
    else:
        accounting.used += 1


def split_turns(
    messages: Sequence[dict[str, Any]],
) -> tuple[tuple[tuple[dict[str, Any], ...], ...], str]:
    """What is said before each reply of the target, and the rule that changed the conversation, if one did."""
    kept = list(takewhile(lambda message: message["role"] != "tool", messages))
    turns: list[tuple[dict[str, Any], ...]] = []
    said: list[dict[str, Any]] = []
    for message in kept:
        if message["role"] == "assistant":
            continue
        said.append(message)
        if message["role"] == "user":
            turns.append(tuple(said))
            said = []
    if said and turns:
        turns[-1] += tuple(said)  # an instruction after the last question comes before its answer
    if len(kept) < len(messages):
        return tuple(turns), TOOLS
    given = any(message["role"] == "assistant" for message in kept)
    return tuple(turns), DROPPED if given else ""


def _require_unique(plans: Sequence[Plan], sources: Sequence[SourceConfig]) -> None:
    """Each answer needs a key of its own."""
    keys = {plan.conversation.key for plan in plans}
    later = {plan.key(turn) for plan in plans for turn in range(1, len(plan.turns))}
    if len(keys) != len(plans) or keys & later:
        paths = ", ".join(source.path for source in sources)
        raise UserError("prompt ids must be unique", paths, "give every row its own id")
