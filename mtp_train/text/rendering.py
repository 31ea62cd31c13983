"""What a chat template writes, and in which form it takes the parts of a message.

A template is a program: what it makes of a message is found by rendering it, never by searching its source.

Knows no token ids and no loss mask.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from mtp_train.core.errors import UserError

Message = dict[str, Any]

FAILURES = (TemplateError, TypeError, KeyError, ValueError, AttributeError, IndexError)

# A chat whose parts no template writes by itself.
QUESTION, ANSWER, THOUGHT = "probe question", "probe answer", "probe thought"
NAME, VALUE = "probe_tool", "probe value"
ASKED: Message = {"role": "user", "content": QUESTION}
ANSWERED: Message = {"role": "assistant", "content": ANSWER}
CALLED: Message = {
    "role": "assistant",
    "content": "",
    "tool_calls": [
        {
            "id": "probe0001",  # Mistral's templates want nine letters
            "type": "function",
            "function": {"name": NAME, "arguments": {"key": VALUE}},
        }
    ],
}
RESULT: Message = {"role": "tool", "content": VALUE, "name": NAME, "tool_call_id": "probe0001"}


@dataclass(frozen=True)
class ReplyShape:
    """What the template writes around the parts of a reply, from the generation prompt on."""

    before_text: str  # where there is no reasoning
    before_reasoning: str
    between: str  # reasoning and text; empty if the template renders no reasoning
    before_call: str  # up to the function's name; empty if the template renders no calls


class Rendering:
    """One tokenizer's chat template.

    Args:
        options: what serving passes to the template beside the messages.
        control: tokens that the template may frame turns with.
        stops: tokens among them at which serving ends a reply.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        options: dict[str, Any],
        control: Sequence[str],
        stops: Sequence[str],
    ) -> None:
        self.tokenizer = tokenizer
        self.options = options
        self.control = tuple(token for token in control if token.strip())
        self.stops = tuple(stops)
        self.next_turn = lru_cache(self._next_turn)

    def texts(
        self,
        chats: Sequence[Sequence[Message]],
        tools: Sequence[dict[str, Any]] = (),
        *,
        generate: bool,
        **options: Any,
    ) -> list[str]:
        """Chats as the template writes them.

        Args:
            generate: end with the header of the reply to come.
            options: instead of those that serving passes.

        Raises:
            UserError: the template fails.
        """
        try:
            rendered: Any = self.tokenizer.apply_chat_template(
                [list(chat) for chat in chats],
                tools=list(tools) or None,
                add_generation_prompt=generate,
                tokenize=False,
                **self.options | options,
            )
        except FAILURES as error:
            raise UserError(
                "the chat template must render the messages",
                f"{type(error).__name__}: {error}",
                "check the roles and contents",
            ) from error
        return list(rendered)

    def tried(self, chat: Sequence[Message], generate: bool = False, **options: Any) -> str | None:
        """A chat without tools as the template writes it, None where it fails."""
        try:
            return self.texts([chat], generate=generate, **options)[0]
        except UserError:
            return None

    def formed(self, messages: Sequence[Message]) -> list[Message]:
        """Messages with the arguments of tool calls as this template takes them: an object, or JSON text."""
        if not any(m.get("tool_calls") for m in messages) or not self._arguments_as_text:
            return list(messages)
        return [_with_text_arguments(m) if m.get("tool_calls") else m for m in messages]

    @cached_property
    def _arguments_as_text(self) -> bool:
        """Whether a call stands in what is rendered with its arguments as text, and does not with an object."""
        forms = (CALLED, _with_text_arguments(CALLED))
        as_object, as_text = (self.tried([ASKED, message]) or "" for message in forms)
        return VALUE not in as_object and VALUE in as_text

    @cached_property
    def shows_tools(self) -> bool:
        """Whether tools that are given change a prompt."""
        schema = {"type": "object", "properties": {"key": {"type": "string", "description": VALUE}}}
        function = {
            "name": NAME,
            "description": VALUE,
            "parameters": schema | {"required": ["key"]},
        }
        try:
            tools = [{"type": "function", "function": function}]
            return NAME in self.texts([[ASKED]], tools, generate=True)[0]
        except UserError:
            return True

    @cached_property
    def header(self) -> str:
        """What a generation prompt ends with; empty if that is not told apart from the turns before."""
        before, prompt = self.tried([ASKED]), self.tried([ASKED], generate=True)
        if before is None or prompt is None or not prompt.startswith(before):
            return ""
        return prompt[len(before) :].strip()

    @cached_property
    def turn_end(self) -> str:
        """The token that ends a reply in later prompts, where no stop token does; empty if there is none."""
        text = self.tried([ASKED, ANSWERED, ASKED]) or ""
        after = text[text.rfind(ANSWER) + len(ANSWER) : text.rfind(QUESTION)]
        if any(stop in after for stop in self.stops):
            return ""
        found = [(after.find(token), -len(token), token) for token in self.control]
        return min((item for item in found if item[0] >= 0), default=(0, 0, ""))[2]

    def _next_turn(self, calls: bool) -> str:
        """The stop token that opens the turn after a reply, where it does: such a model ends its turns with it."""
        replied, follows = (CALLED, RESULT) if calls else (ANSWERED, ASKED)
        chat = self.formed([ASKED, replied])
        whole = self.tried(chat)
        longer = self.tried([*chat, follows])
        if whole is None or longer is None or not longer.startswith(whole):
            return ""
        opening = [stop for stop in self.stops if longer.startswith(stop, len(whole))]
        return max(opening, key=len, default="")

    @cached_property
    def reply_shape(self) -> ReplyShape:
        plain = self._said(ANSWERED)
        reasoned = self._said(ANSWERED | {"reasoning_content": THOUGHT})
        called = self._said(CALLED)
        before, thought, rest = reasoned.partition(THOUGHT)
        start = plain[: max(plain.find(ANSWER), 0)]
        call = called[: max(called.find(NAME), 0)]
        return ReplyShape(
            start,
            before if thought else "",
            rest[: max(rest.find(ANSWER), 0)],
            call.removeprefix(start),
        )

    def _said(self, message: Message) -> str:
        """What the template writes of a reply, behind the generation prompt."""
        prompt = self.tried([ASKED], generate=True)
        whole = self.tried(self.formed([ASKED, message]))
        if prompt is None or whole is None or not whole.startswith(prompt):
            return ""
        return whole[len(prompt) :]


def _with_text_arguments(message: Message) -> Message:
    return message | {"tool_calls": [_with_text(call) for call in message["tool_calls"]]}


def _with_text(call: dict[str, Any]) -> dict[str, Any]:
    function = call["function"]
    text = json.dumps(function["arguments"], ensure_ascii=False)
    return {**call, "function": {**function, "arguments": text}}
