"""The prompts that a head is measured on: regenerated answers' own, and conversations of any text source.

Knows no engine: who answers them is `runs.py`'s.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from mtp_train.core.errors import UserError
from mtp_train.core.progress import say
from mtp_train.core.records import Accounting
from mtp_train.dialogue.plans import Plan, read_plans
from mtp_train.dialogue.talks import render, renderable
from mtp_train.engine.sequences import Request
from mtp_train.text.sources import Answer, read_answers, read_sources
from mtp_train.text.template import ChatTemplate

T = TypeVar("T")
NAME = r"[A-Za-z0-9_][A-Za-z0-9_+-]*"


@dataclass(frozen=True)
class Chats:
    """Conversations whose every turn the target answers, on its own earlier answers."""

    plans: tuple[Plan, ...]
    template: ChatTemplate
    max_new_tokens: int
    stop: frozenset[int]


@dataclass(frozen=True)
class PromptSet:
    """Prompts of one kind, with the target's own answers where there are any.

    Attributes:
        requests: each answered once; of `chats`, the first turns alone.
        categories: key -> category, of every turn.
        chats: what is asked in place of `requests` where turns follow one another.
        accounting: what became of the input's rows. Rows that are prompts are counted when they are answered.
    """

    name: str
    requests: tuple[Request, ...]
    categories: dict[str, str]
    answers: tuple[Answer, ...] = ()
    chats: Chats | None = None
    accounting: Accounting = field(default_factory=Accounting, compare=False)

    @cached_property
    def units(self) -> list[tuple[str, ...]]:
        """Keys that are answered one after the other: the turns of each conversation."""
        if self.chats is None:
            return [(request.key,) for request in self.requests]
        return [
            tuple(plan.key(turn) for turn in range(len(plan.turns))) for plan in self.chats.plans
        ]

    @cached_property
    def said(self) -> dict[str, dict[str, Any]]:
        """What a row of a single prompt holds beside the completion."""
        messages = {answer.key: list(answer.messages) for answer in self.answers}
        return {
            request.key: {
                "category": self.categories[request.key],
                "messages": messages.get(request.key, []),
            }
            for request in self.requests
        }

    def drawn(self, count: int) -> PromptSet:
        """`count` of its conversations or prompts; a smaller draw is part of every larger one."""
        chats = self.chats
        if chats is not None:
            chats = replace(chats, plans=tuple(spread(chats.plans, count)))
        return replace(self, requests=tuple(spread(self.requests, count)), chats=chats)


def prompt_set(
    name: str, answers: Sequence[Answer], stop: frozenset[int], max_new_tokens: int
) -> PromptSet:
    """A set whose prompts are those of regenerated answers."""
    requests = tuple(
        Request(answer.key, answer.prompt_ids, max_new_tokens, stop) for answer in answers
    )
    return PromptSet(
        name, requests, {answer.key: answer.category for answer in answers}, tuple(answers)
    )


def answered_set(name: str, path: Path, stop: frozenset[int], max_new_tokens: int) -> PromptSet:
    """The set of a file that `regenerate` wrote. Its rows are counted when their prompts are answered."""
    accounting = Accounting()
    answers = read_answers(path, accounting)
    accounting.used = 0
    return replace(prompt_set(name, answers, stop, max_new_tokens), accounting=accounting)


def chat_set(
    name: str,
    value: Any,
    template: ChatTemplate,
    stop: frozenset[int],
    max_new_tokens: int,
    trained: Mapping[bytes, str] | None = None,
) -> PromptSet:
    """A set of a text source's conversations and prompts: their users' turns, given replies dropped.

    Args:
        value: a source or a list of them, as `text.sources.read_sources` takes it.
        trained: what the training data offers: a conversation that overlaps is refused (see text.overlap).

    Raises:
        UserError: the source is not there, or has no usable row.
    """
    accounting = Accounting()
    sources = read_sources(value)
    plans = renderable(template, read_plans(sources, 0, "", accounting, trained))
    categories = {
        plan.key(turn): plan.conversation.category
        for plan in plans
        for turn in range(len(plan.turns))
    }
    first = tuple(
        Request(plan.key(0), prompt, max_new_tokens, stop)
        for plan in plans
        if (prompt := _first_prompt(template, plan))
    )
    chats = Chats(tuple(plans), template, max_new_tokens, stop)
    return PromptSet(name, first, categories, chats=chats, accounting=accounting)


def within(prompts: PromptSet, positions: int) -> PromptSet:
    """What of a set fits, answer included, into the positions of a head that has fewer than its target; 0: any head.

    The rest is refused. Later turns of conversations are judged when they are asked.
    """
    if not positions:
        return prompts
    fits = [r for r in prompts.requests if len(r.prompt) + r.max_new_tokens <= positions]
    keys = {request.key for request in fits}
    if prompts.chats is None:
        reason = f"longer with its answer than the head's {positions} positions"
        for request in prompts.requests:
            if request.key not in keys:
                prompts.accounting.refuse(reason, request.key)
    answers = tuple(
        answer
        for answer in prompts.answers
        if answer.key in keys and len(answer.prompt_ids) + len(answer.output_ids) <= positions
    )
    return replace(prompts, requests=tuple(fits), answers=answers)


def require_names(names: Sequence[str], taken: Sequence[str]) -> None:
    """Raise unless the sets' names can be file names, and are their own."""
    for name in names:
        if not re.fullmatch(NAME, name):
            raise UserError(
                "a name of evaluate.sets must be of letters, digits and _ + -", name, "rename it"
            )
        if name in taken:
            raise UserError(
                f"a name of evaluate.sets must not be one of {', '.join(taken)}",
                name,
                "those are the run's regenerated answers: rename it",
            )


def tell(prompts: PromptSet) -> None:
    """One line of counts, and one per reason."""
    counts = prompts.accounting
    repaired, refused = sum(counts.repaired.values()), sum(counts.refused.values())
    sums = f"{counts.used} used + {repaired} repaired + {refused} refused = {counts.total}"
    say(f"evaluate {prompts.name}: {sums} {'conversations' if prompts.chats else 'prompts'}")
    for rule, rows in counts.repaired.items():
        say(f"  repaired {rows}: {rule}")
    for reason, rows in counts.refused.items():
        say(f"  refused {rows}: {reason} (first: {counts.examples[reason]})")


def spread(items: Sequence[T], count: int) -> list[T]:
    """`count` items of a sequence, in order, drawn with a fixed seed: a regular stride would meet only one of two
    categories that take turns.
    """
    chosen = np.random.default_rng(0).permutation(len(items))[:count]
    return [items[index] for index in sorted(chosen.tolist())]


def _first_prompt(template: ChatTemplate, plan: Plan) -> tuple[int, ...]:
    """Empty where the template fails, which is told when the conversation is held."""
    try:
        return render(template, plan, plan.turns[0])
    except UserError:
        return ()
