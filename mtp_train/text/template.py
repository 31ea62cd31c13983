"""Conversations to tokens and loss mask, through the tokenizer's own chat template.

A reply is trained exactly as serving would produce it: the prompt is what the template renders for the turns before
it with the generation prompt, the reply is what the template adds when the turn is there, up to and with its
end-of-turn token. Spans come from what the template renders for each prefix of the chat, never from searching the
text.

Knows no model and no file format.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from mtp_train.core.errors import UserError
from mtp_train.core.records import Conversation, TokenizedConversation
from mtp_train.text.control import Veil
from mtp_train.text.refusal import Refusal

__all__ = ["ChatTemplate", "Refusal"]

OTHER_HEADER = "the template does not render the reply after its own generation prompt"
TAIL = "turns after the last reply left out"
AS_TEXT = "control tokens in the text kept as text"
NO_CALLS = "the template renders no tool calls: turns with calls are context only"
NO_REASONING = "the template renders no reasoning: left out"
REASONING = ("reasoning_content", "thinking", "reasoning")  # names by which templates ask for it


@dataclass(frozen=True)
class _Turn:
    """A trained reply in rendered text: what serving sends before it, and both with the reply."""

    prompt: str
    whole: str  # ends with the end-of-turn token, where the template has one
    veiled: bool  # whether control tokens that are text are veiled in it


@dataclass(frozen=True)
class _Encoded:
    """A text, its token ids, and the characters that each token came from."""

    text: str
    ids: list[int]
    spans: list[tuple[int, int]]


class ChatTemplate:
    """Renders conversations for one tokenizer.

    Args:
        tokenizer: with a chat template of its own.
        options: what serving passes to the template beside the messages (`chat_template_kwargs` in vLLM), for
            instance {"enable_thinking": False}.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, options: dict[str, Any] | None = None
    ) -> None:
        if not tokenizer.chat_template:
            raise UserError(
                "the target's tokenizer must have a chat template",
                "none",
                "add chat_template.jinja to the target's folder",
            )
        if not tokenizer.is_fast:
            raise UserError(
                "the target's tokenizer must be a fast one",
                type(tokenizer).__name__,
                "add tokenizer.json to the target's folder",
            )
        self.tokenizer = tokenizer
        self.options = options or {}
        added = tokenizer.added_tokens_decoder.items()
        # What follows an added token is encoded as if nothing stood before it: the only safe places to cut a text.
        # Those that are matched in normalised text, as single words or within others depend on their neighbours.
        self._cuts = {
            index
            for index, token in added
            if not (token.normalized or token.single_word)
            and not any(token.content in other.content for i, other in added if i != index)
        }
        self._ends = tuple(token.content for index, token in added if index in self._cuts)
        self.veil = Veil(tokenizer, self._frame())
        self._tail = lru_cache(maxsize=256)(self._ids)

    def prompt(
        self, messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]] = ()
    ) -> list[int]:
        """Token ids that serving sends for `messages`: the turns and the header of the reply to come."""
        covered, covered_tools, veiled = self.veil.cover(messages, tools)
        (text,) = self._render([covered], covered_tools, generate=True)
        return list(self._ids(text, veiled))

    def fit(self, conversation: Conversation) -> tuple[Conversation, list[str]]:
        """The conversation as far as this template can show it, and the rules by which `tokenize` changes it."""
        source = self.tokenizer.get_chat_template(None, list(conversation.tools) or None)
        messages, untrained, rules = conversation.messages, conversation.untrained, []
        last = max((i for i, m in enumerate(messages) if m["role"] == "assistant"), default=-1)
        if 0 <= last < len(messages) - 1:
            rules.append(TAIL)
            messages = messages[: last + 1]
        calls = {i for i, m in enumerate(messages) if m.get("tool_calls")}
        if calls and "tool_calls" not in source:
            rules.append(NO_CALLS)
            untrained |= calls
        if any("reasoning_content" in m for m in messages) and not any(
            n in source for n in REASONING
        ):
            rules.append(NO_REASONING)
        if self.veil.holds(messages, conversation.tools):
            rules.append(AS_TEXT)
        return replace(conversation, messages=messages, untrained=untrained), rules

    def tokenize(self, conversation: Conversation) -> list[TokenizedConversation] | Refusal:
        """One record per way serving would see it.

        Replies share a record while the template renders earlier turns alike; where it renders them otherwise
        (reasoning dropped from older turns), a later reply starts a record of its own.
        """
        turns = self._turns(self.fit(conversation)[0])
        if isinstance(turns, Refusal):
            return turns
        found = self._join_by_text(turns)
        return _records(conversation, found if found is not None else self._join_by_ids(turns))

    def tokenize_by_prefixes(
        self, conversation: Conversation
    ) -> list[TokenizedConversation] | Refusal:
        """`tokenize` by its definition: every prompt and every reply encoded by itself, quadratic in the turns."""
        turns = self._turns(self.fit(conversation)[0])
        if isinstance(turns, Refusal):
            return turns
        return _records(conversation, self._join_by_ids(turns))

    def _frame(self) -> str:
        """What the template writes around the turns of a plain chat."""
        turns = [{"role": role, "content": "a"} for role in ("user", "assistant", "user")]
        try:
            return self._render([turns], (), generate=False)[0]
        except UserError:
            return ""

    # --- text -------------------------------------------------------------------------------------------------

    def _turns(self, conversation: Conversation) -> list[_Turn] | Refusal:
        """The trained replies, rendered."""
        trained = [
            index
            for index, message in enumerate(conversation.messages)
            if message["role"] == "assistant" and index not in conversation.untrained
        ]
        if not trained:
            return Refusal("no assistant turn to train")
        if trained[0] == 0:
            return Refusal("the assistant speaks first: nothing that it answers")
        try:
            messages, tools, veiled = self.veil.cover(conversation.messages, conversation.tools)
            prompts = self._render([messages[:index] for index in trained], tools, True)
            wholes = self._render([messages[: index + 1] for index in trained], tools, False)
        except UserError as error:
            return Refusal(f"the chat template fails: {error.received}")
        turns = [_Turn(p, self._cut(p, w), veiled) for p, w in zip(prompts, wholes, strict=True)]
        if not all(turn.whole.startswith(turn.prompt) for turn in turns):
            return Refusal(OTHER_HEADER)
        if all(turn.whole == turn.prompt for turn in turns):
            return Refusal("the template renders no reply")
        return [turn for turn in turns if turn.whole != turn.prompt]

    def _cut(self, prompt: str, whole: str) -> str:
        """Without what the template puts after the end-of-turn token (a newline, often): the target never says it.

        The reply's own text can't hold that token: there it is veiled.
        """
        stop = self.tokenizer.eos_token or ""
        end = whole.find(stop, len(prompt)) if stop else -1
        if end >= 0:
            return whole[: end + len(stop)]
        stripped = whole.rstrip()
        return stripped if stripped.endswith(self._ends) else whole

    def _render(
        self,
        chats: Sequence[Sequence[dict[str, Any]]],
        tools: Sequence[dict[str, Any]],
        generate: bool,
    ) -> list[str]:
        try:
            rendered: Any = self.tokenizer.apply_chat_template(
                [list(chat) for chat in chats],
                tools=list(tools) or None,
                add_generation_prompt=generate,
                tokenize=False,
                **self.options,
            )
        except (
            TemplateError,
            TypeError,
            KeyError,
            ValueError,
            AttributeError,
            IndexError,
        ) as error:
            raise UserError(
                "the chat template must render the messages",
                f"{type(error).__name__}: {error}",
                "check the roles and contents",
            ) from error
        return list(rendered)

    def _ids(self, text: str, veiled: bool) -> tuple[int, ...]:
        """Rendered text to token ids, as serving encodes it: no special tokens are put around it."""
        return tuple(self._encode(text, veiled)[0])

    def _encode(self, text: str, veiled: bool) -> tuple[list[int], list[tuple[int, int]]]:
        """Ids and the characters that each came from."""
        encoded: Any = self.tokenizer(
            text, add_special_tokens=False, return_offsets_mapping=True, return_attention_mask=False
        )
        ids, spans = encoded["input_ids"], encoded["offset_mapping"]
        return self.veil.encode_lifted(text, ids, spans) if veiled else (ids, spans)

    # --- records ----------------------------------------------------------------------------------------------

    def _join_by_ids(self, turns: Sequence[_Turn]) -> list[tuple[list[int], list[int]]]:
        """(tokens, mask) of each record, by the definition."""
        found: list[tuple[list[int], list[int]]] = []
        for turn in turns:
            prompt, whole = (list(self._ids(t, turn.veiled)) for t in (turn.prompt, turn.whole))
            if whole[: len(prompt)] != prompt:
                # The reply's first characters would merge with the header's last: the target, sent the header
                # alone, says them as tokens of their own.
                whole = prompt + list(self._ids(turn.whole[len(turn.prompt) :], turn.veiled))
            if not found or prompt[: len(found[-1][0])] != found[-1][0]:
                found.append(([], []))
            tokens, mask = found[-1]
            mask += [0] * (len(prompt) - len(tokens)) + [1] * (len(whole) - len(prompt))
            tokens[:] = whole
        return found

    def _join_by_text(self, turns: Sequence[_Turn]) -> list[tuple[list[int], list[int]]] | None:
        """The same from one encoding per record; None where a boundary can't be shown to be exact."""
        if not all(turn.whole.endswith(self._ends) for turn in turns):
            return None
        groups: list[list[_Turn]] = []
        for turn in turns:
            if groups and turn.prompt.startswith(groups[-1][-1].whole):
                groups[-1].append(turn)
            else:
                groups.append([turn])
        found = []
        before: _Encoded | None = None
        for group in groups:
            before = self._encode_after(before, group[-1].whole, group[-1].veiled)
            mask = self._mask(group, before)
            if mask is None:
                return None
            found.append((before.ids, mask))
        return found

    def _encode_after(self, before: _Encoded | None, text: str, veiled: bool) -> _Encoded:
        """Encode a text; what it shares with the one before, up to a safe cut, is not encoded again."""
        cut = -1
        if before is not None:
            shared = _common_length(before.text, text)
            cut = bisect_right(before.spans, shared, key=lambda span: span[1]) - 1
            while cut >= 0 and before.ids[cut] not in self._cuts:
                cut -= 1
        if before is None or cut <= 0:
            return _Encoded(text, *self._encode(text, veiled))
        at = before.spans[cut][0]
        ids, spans = self._encode(text[at:], veiled)
        moved = [(start + at, end + at) for start, end in spans]
        return _Encoded(text, before.ids[:cut] + ids, before.spans[:cut] + moved)

    def _mask(self, group: Sequence[_Turn], encoded: _Encoded) -> list[int] | None:
        """Find each reply of a record by the characters that its tokens came from."""
        ids, spans = encoded.ids, encoded.spans
        starts = [start for start, _ in spans]
        mask = [0] * len(ids)
        for turn in group:
            first = self._boundary(encoded, starts, turn)
            end = bisect_left(starts, len(turn.whole))
            ends = ids[end - 1] in self._cuts and spans[end - 1][1] >= len(turn.whole)
            if first is None or not ends:
                return None
            mask[first:end] = [1] * (end - first)
        return mask

    def _boundary(self, encoded: _Encoded, starts: Sequence[int], turn: _Turn) -> int | None:
        """The first token after the prompt, if the tokens before it are those of the prompt alone."""
        ids, spans, at = encoded.ids, encoded.spans, len(turn.prompt)
        first = bisect_left(starts, at)
        cut = first - 1
        while cut >= 0 and ids[cut] not in self._cuts:
            cut -= 1
        if cut < 0 or spans[first - 1][1] > at:
            return None
        alone = self._tail(encoded.text[spans[cut][0] : at], turn.veiled)
        return first if alone == tuple(ids[cut:first]) else None


def _common_length(one: str, other: str) -> int:
    """Length of the beginning that two texts share."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def _records(
    conversation: Conversation, found: Sequence[tuple[list[int], list[int]]]
) -> list[TokenizedConversation]:
    return [
        TokenizedConversation(
            conversation.key if index == 0 else f"{conversation.key}#{index}",
            tuple(tokens),
            tuple(mask),
            conversation.category,
        )
        for index, (tokens, mask) in enumerate(found)
    ]
