"""Conversations turn by turn: which prompt comes next, and what an answer leads to. Knows neither engine nor server.

Every prompt is what serving would send: the template over the messages so far, the target's own replies among them as
the text that a client would have received. The answer's token ids are kept as they were generated.
"""

from __future__ import annotations

import hashlib
import time
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from tqdm import tqdm

from mtp_train.core.errors import UserError
from mtp_train.core.records import Conversation
from mtp_train.dialogue.client_messages import client_message
from mtp_train.dialogue.plans import Plan
from mtp_train.dialogue.rows import completion_row
from mtp_train.engine.sequences import Completion, Request
from mtp_train.text.alternation import served_otherwise
from mtp_train.text.refusal import Refusal
from mtp_train.text.template import ChatTemplate

UNANSWERED = ("refused", "failed", "error")  # how completions begin to say why there is no answer


class Answers(Protocol):
    """Where answers are kept, by key: a journal, or one that ranks share."""

    def __contains__(self, key: str) -> bool: ...

    def row(self, key: str) -> dict[str, Any]: ...

    def append(self, row: dict[str, Any]) -> None: ...


@dataclass
class _Talk:
    """A conversation that is going on."""

    plan: Plan
    messages: list[dict[str, Any]] = field(default_factory=list)  # so far, for the next prompt
    turn: int = 0
    over: str = ""  # why nothing can follow the last reply


class Dialogue:
    """The set's conversations; `next` and `finish` are what an engine or a server asks for and reports to.

    Later turns go before new conversations, so that few conversations are open at once.

    Args:
        seed: each answer's random draws depend on it, on the conversation's key and on the turn, and on nothing else.
        keep_refusals: note in the journal, under the turn's key, why a conversation ended before that turn. It is
            then not tried again.
    """

    def __init__(
        self,
        template: ChatTemplate,
        plans: Iterable[Plan],
        journal: Answers,
        bar: tqdm[Any],
        *,
        max_new_tokens: int,
        stop: frozenset[int],
        seed: int,
        keep_refusals: bool = False,
    ) -> None:
        self.template = template
        self.journal = journal
        self.bar = bar
        self.max_new_tokens = max_new_tokens
        self.stop = stop
        self.seed = seed
        self.keep_refusals = keep_refusals
        self.failed: dict[str, str] = {}  # conversation -> why it ended before its last turn
        self._fresh = iter(plans)
        self._ready: deque[Request] = deque()
        self._open: dict[str, _Talk] = {}  # by the key of the turn that is being answered
        self._tokens = 0
        self._begin = time.perf_counter()

    def next(self) -> Request | None:
        """The next prompt, if there is one now."""
        while not self._ready:
            plan = next(self._fresh, None)
            if plan is None:
                return None
            self._ask(self._onward(_Talk(plan)))
        return self._ready.popleft()

    def finish(self, completion: Completion) -> None:
        """Keep an answer, and ask the conversation's next question."""
        talk = self._open.pop(completion.key)
        if completion.finish.startswith(UNANSWERED):
            self._end(talk, completion.finish)
            return
        self.journal.append(self._row(talk, completion))
        self._reply(talk, completion.prompt, completion.tokens, completion.finish)
        self._tokens += len(completion.tokens)
        rate = self._tokens / (time.perf_counter() - self._begin)
        self.bar.set_postfix_str(f"{rate:.0f} tokens/s", refresh=False)
        self.bar.update()
        self._ask(self._onward(talk))

    def _onward(self, talk: _Talk) -> _Talk:
        """The conversation after the next turns that the journal holds; where it holds all, they are not read."""
        plan = talk.plan
        if all(plan.key(turn) in self.journal for turn in range(talk.turn, len(plan.turns))):
            talk.turn = len(plan.turns)
            return talk
        while (key := plan.key(talk.turn)) in self.journal:
            row = self.journal.row(key)
            if "output_ids" not in row:  # a refusal
                self._end(talk, row["finish"])
                talk.turn = len(plan.turns)
                break
            talk.messages += plan.turns[talk.turn]
            self._reply(talk, row["prompt_ids"], row["output_ids"], row["finish"])
        return talk

    def _ask(self, talk: _Talk) -> None:
        """Put the conversation's next prompt in line, unless it is over."""
        plan = talk.plan
        if talk.turn == len(plan.turns):
            return
        if talk.over:
            self._end(talk, f"refused: {talk.over}")
            return
        talk.messages += plan.turns[talk.turn]
        key = plan.key(talk.turn)
        try:
            prompt = render(self.template, plan, talk.messages)
        except UserError as error:
            self._end(talk, f"refused: the chat template fails: {error.received}")
            return
        self._open[key] = talk
        seed = request_seed(self.seed, key)
        self._ready.append(Request(key, prompt, self.max_new_tokens, self.stop, seed=seed))

    def _reply(
        self, talk: _Talk, prompt: Sequence[int], output: Sequence[int], finish: str
    ) -> None:
        said = output[:-1] if finish == "stop" else output  # no client sees the end-of-turn token
        tools = bool(talk.plan.conversation.tools)
        message = client_message(self.template, prompt, said, tools)
        if isinstance(message, Refusal):
            talk.over = message.reason
        else:
            talk.messages.append(message)
        talk.turn += 1

    def _end(self, talk: _Talk, why: str) -> None:
        self.failed[talk.plan.conversation.key] = why
        key = talk.plan.key(talk.turn)
        if self.keep_refusals and key not in self.journal:
            self.journal.append({"id": key, "finish": why})
        self.bar.total -= len(talk.plan.turns) - talk.turn

    def _row(self, talk: _Talk, completion: Completion) -> dict[str, Any]:
        return {
            "id": completion.key,
            "category": talk.plan.conversation.category,
            "messages": list(talk.messages),
            **completion_row(completion),
        }


def renderable(template: ChatTemplate, plans: Iterable[Plan]) -> list[Plan]:
    """The plans, those with a system prompt that the template does not take as a client would send them instead.

    Raises:
        UserError: the template fails on every first prompt: then nothing is worth beginning.
    """
    found: list[Plan] = []
    reason: object = "no prompts"
    rendered = False
    for plan in plans:
        has_system = plan.turns[0][0]["role"] == "system"
        if has_system or not rendered:
            plan, why = _fitted(template, plan)
            reason, rendered = why or reason, rendered or not why
        found.append(plan)
    if not rendered:
        raise UserError(
            "the chat template must render at least one prompt",
            reason,
            "check the target's chat template and the prompts",
        )
    return found


def _fitted(template: ChatTemplate, plan: Plan) -> tuple[Plan, object]:
    """The plan in a form whose first prompt the template renders, or as it is and why it fails."""
    first = Conversation(plan.conversation.key, plan.turns[0])
    reason: object = ""
    for chat, rules in [(first, list[str]()), *served_otherwise(first)]:
        try:
            render(template, plan, chat.messages)
        except UserError as error:
            reason = reason or error.received
            continue
        repair = "; ".join(filter(None, [plan.repair, *rules]))
        return replace(plan, turns=(chat.messages, *plan.turns[1:]), repair=repair), ""
    return plan, reason


def render(
    template: ChatTemplate, plan: Plan, messages: Sequence[dict[str, Any]]
) -> tuple[int, ...]:
    """Token ids of a conversation's prompt, as serving sends them."""
    return tuple(template.prompt(messages, plan.conversation.tools))


def request_seed(seed: int, key: str) -> int:
    """A seed of 63 bits for one answer."""
    return int.from_bytes(hashlib.sha256(f"{seed} {key}".encode()).digest()[:8]) >> 1
