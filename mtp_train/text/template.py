"""Conversations to tokens and loss mask, through the tokenizer's own chat template.

A reply is trained exactly as serving would produce it: the prompt is what the template renders for the turns before
it with the generation prompt, the reply is what the template adds when the turn is there. Spans come from token ids,
never from searching the text.

Knows no model and no file format.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from mtp_train.core.errors import UserError
from mtp_train.core.records import Conversation, TokenizedConversation


@dataclass(frozen=True)
class Refusal:
    """Why a conversation can't be used."""

    reason: str


class ChatTemplate:
    """Renders conversations for one tokenizer.

    Args:
        tokenizer: with a chat template of its own.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        if not tokenizer.chat_template:
            raise UserError(
                "the target's tokenizer must have a chat template",
                "none",
                "add chat_template.jinja to the target's folder",
            )
        self.tokenizer = tokenizer

    def prompt(self, messages: Sequence[dict[str, str]]) -> list[int]:
        """Token ids that serving sends for `messages`: the turns and the header of the reply to come."""
        return self._render(messages, generate=True)

    def tokenize(self, conversation: Conversation) -> list[TokenizedConversation] | Refusal:
        """One record per way serving would see it.

        Replies share a record while the template renders earlier turns alike; where it renders them otherwise
        (reasoning dropped from older turns), a later reply starts a record of its own.
        """
        records: list[TokenizedConversation] = []
        tokens: list[int] = []
        mask: list[int] = []
        for turn, message in enumerate(conversation.messages):
            if message["role"] != "assistant":
                continue
            prompt = self.prompt(conversation.messages[:turn])
            whole = self._render(conversation.messages[: turn + 1], generate=False)
            if whole[: len(prompt)] != prompt:
                return Refusal(
                    "the template does not render the reply after its own generation prompt"
                )
            if prompt[: len(tokens)] != tokens:
                records.append(self._record(conversation, tokens, mask, len(records)))
                tokens, mask = [], []
            reply = len(whole) - len(prompt) - self._trailer(whole)
            mask += [0] * (len(prompt) - len(tokens)) + [1] * reply
            tokens = whole[: len(prompt) + reply]
        if not any(mask):
            return Refusal("no assistant turn")
        return [*records, self._record(conversation, tokens, mask, len(records))]

    def _record(
        self, conversation: Conversation, tokens: list[int], mask: list[int], index: int
    ) -> TokenizedConversation:
        key = conversation.key if index == 0 else f"{conversation.key}#{index}"
        return TokenizedConversation(key, tuple(tokens), tuple(mask), conversation.category)

    def _trailer(self, ids: list[int]) -> int:
        """Tokens that the template puts after the end-of-turn token (a newline, often): the target never says them."""
        stop = self.tokenizer.eos_token_id
        for count, token in enumerate(reversed(ids)):
            if token == stop:
                return count
            if str(self.tokenizer.decode([token])).strip():
                return 0
        return 0

    def _render(self, messages: Sequence[dict[str, str]], generate: bool) -> list[int]:
        try:
            encoded: Any = self.tokenizer.apply_chat_template(
                list(messages), add_generation_prompt=generate, tokenize=True, return_dict=True
            )
        except (TemplateError, TypeError, KeyError, ValueError, AttributeError) as error:
            raise UserError(
                "the chat template must render the messages",
                f"{type(error).__name__}: {error}",
                "check the roles and contents",
            ) from error
        return list(encoded["input_ids"])
