"""Conversations to tokens and loss mask, through the tokenizer's own chat template.

A reply is trained exactly as serving would produce it: the prompt is what the template renders for the turns before
it with the generation prompt, the reply is what the template adds when the turn is there, up to and with its
end-of-turn token. Spans come from what the template renders for each prefix of the chat, never from searching the
text.

Knows no model and no file format.
"""

from __future__ import annotations

import json
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from transformers import PreTrainedTokenizerBase

from mtp_train.core.errors import UserError
from mtp_train.core.records import Conversation, TokenizedConversation
from mtp_train.text.control import Veil
from mtp_train.text.refusal import Refusal
from mtp_train.text.rendering import Message, Rendering
from mtp_train.text.replies import (
    OPENED,
    closing,
    composed,
    reply_end,
    split_reasoning,
    without_reasoning,
)
from mtp_train.text.served_turns import (
    NO_CALLS_RENDERED,
    Turn,
    checked,
    marked,
    placed,
    same_turn,
)

__all__ = ["ChatTemplate", "Refusal"]

TAIL = "turns after the last reply left out"
AS_TEXT = "control tokens in the text kept as text"
CLOSED_REASONING = "the generation prompt closes the reasoning: left out"
NO_ROLE = "the template renders no {} turn: left out"
NO_TOOLS = "the template renders no tools: left out"

# Of one reply, which is context only then; of a row where all its replies have one.
OTHER_HEADER = "the template does not render the reply after its own generation prompt"
NO_CALLS = f"{NO_CALLS_RENDERED}: turns with calls are context only"
UNREASONED = "the generation prompt opens reasoning and the reply has none: give reasoning_content, or regenerate it"
CONTEXT_ONLY = "context only: "
LONG = 64  # replies of a chat that are still rendered by the definition
WINDOW = 8  # replies of a longer one that are rendered together
DOUBTS = 8  # turns of other roles that are looked at more closely, of one conversation
SWITCHES = ("enable_thinking", "thinking")  # options by which templates leave reasoning out


@dataclass(frozen=True)
class _Chat:
    """Messages and tools as the template is given them."""

    messages: list[Message]
    tools: list[dict[str, Any]]
    veiled: bool


@dataclass(frozen=True)
class _Reading:
    """A conversation as far as the template shows it."""

    conversation: Conversation
    turns: list[Turn]
    rules: list[str]


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
        stop: ids of the tokens at which serving ends a reply; the tokenizer's own end token is always one.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        options: dict[str, Any] | None = None,
        stop: Iterable[int] = (),
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
        stops = [token.content for index, token in added if index in set(stop)]
        stops = sorted({*stops, *filter(None, [tokenizer.eos_token])})
        self.rendering = Rendering(tokenizer, self.options, self._ends, stops)
        self.veil = Veil(tokenizer, self._frame(), stops)
        self._tail = lru_cache(maxsize=256)(self._ids)
        self._switch = lru_cache(self._reasoning_switch)
        self._last: tuple[Conversation, _Reading | Refusal] | None = None

    def prompt(
        self, messages: Sequence[Message], tools: Sequence[dict[str, Any]] = ()
    ) -> list[int]:
        """Token ids that serving sends for `messages`: the turns and the header of the reply to come."""
        chat = self._chat(messages, tools)
        (text,) = self.rendering.texts([chat.messages], chat.tools, generate=True)
        return list(self._ids(text, chat.veiled))

    def fit(self, conversation: Conversation) -> tuple[Conversation, list[str]]:
        """The conversation as far as this template can show it, and the rules by which `tokenize` changes it."""
        reading = self._read(conversation)
        if isinstance(reading, Refusal):
            return conversation, []
        return reading.conversation, reading.rules

    def tokenize(
        self, conversation: Conversation, longest: int = 0
    ) -> list[TokenizedConversation] | Refusal:
        """One record per way serving would see it.

        Replies share a record while the template renders earlier turns alike; where it renders them otherwise
        (reasoning dropped from older turns), a later reply starts a record of its own.

        Args:
            longest: no more than a few records are longer than so many tokens (0: any number may be): a template that
                shows older turns otherwise gives a long chat as many records as it has replies, each with all before.
        """
        reading = self._read(conversation, longest)
        if isinstance(reading, Refusal):
            return reading
        found = self._join_by_text(reading.turns)
        return _records(
            conversation, found if found is not None else self._join_by_ids(reading.turns)
        )

    def tokenize_by_prefixes(
        self, conversation: Conversation
    ) -> list[TokenizedConversation] | Refusal:
        """`tokenize` by its definition: every prompt and every reply encoded by itself, quadratic in the turns."""
        reading = self._read(conversation)
        if isinstance(reading, Refusal):
            return reading
        return _records(conversation, self._join_by_ids(reading.turns))

    def _frame(self) -> str:
        """What the template writes around the turns of a plain chat."""
        turns = [{"role": role, "content": "a"} for role in ("user", "assistant", "user")]
        return self.rendering.tried(turns) or ""

    # --- text -------------------------------------------------------------------------------------------------

    def _chat(self, messages: Sequence[Message], tools: Sequence[dict[str, Any]]) -> _Chat:
        return _Chat(*self.veil.cover(self.rendering.formed(messages), tools))

    def _read(self, conversation: Conversation, longest: int = 0) -> _Reading | Refusal:
        """The trained replies, rendered. The last conversation is kept: its rules are asked for as well."""
        if self._last is None or self._last[0] is not conversation:
            self._last = conversation, self._reading(conversation, longest)
        return self._last[1]

    def _reading(self, conversation: Conversation, longest: int) -> _Reading | Refusal:
        said = [i for i, m in enumerate(conversation.messages) if m["role"] == "assistant"]
        trained = [index for index in said if index not in conversation.untrained]
        if not trained:
            return Refusal("no assistant turn to train")
        if trained[0] == 0:
            return Refusal("the assistant speaks first: nothing that it answers")
        messages = conversation.messages[: said[-1] + 1]
        rules = [TAIL] if len(messages) < len(conversation.messages) else []
        try:
            chat = self._chat(messages, conversation.tools)
            turns = self._turns(chat, trained, longest)
        except UserError as error:
            return Refusal(f"the chat template fails: {error.received}")
        faults = {i: turn.reason for i, turn in turns.items() if isinstance(turn, Refusal)}
        if len(faults) == len(turns):
            return Refusal(faults[trained[0]])
        if any(faults[i] == OTHER_HEADER and i - 1 in said for i in faults):
            return Refusal(
                OTHER_HEADER
            )  # two replies in a row: who reads the row knows other forms of it
        found = [turn for turn in turns.values() if isinstance(turn, Turn)]
        rules += _once(
            NO_CALLS if fault == NO_CALLS_RENDERED else CONTEXT_ONLY + fault
            for fault in faults.values()
        )
        rules += _once(rule for turn in found for rule in turn.rules)
        rules += [AS_TEXT] if chat.veiled else []
        last = max(i for i, turn in turns.items() if isinstance(turn, Turn))
        rules += self._lost(chat, last, found[-1].prompt)
        kept = replace(
            conversation, messages=messages, untrained=conversation.untrained | set(faults)
        )
        return _Reading(kept, found, rules)

    def _turns(
        self, chat: _Chat, trained: Sequence[int], longest: int
    ) -> dict[int, Turn | Refusal]:
        """Each trained reply as serving would see it, or why it can't be."""
        if len(trained) <= LONG:
            return self._by_prefixes(chat, trained)
        try:
            found = self._by_windows(chat, trained)
        except UserError:
            found = None
        if found is not None:
            return found
        turns: dict[int, Turn | Refusal] = {}
        for at in range(0, len(trained), LONG):
            some = self._by_prefixes(chat, trained[at : at + LONG])
            turns |= some
            first = next((turn for turn in some.values() if isinstance(turn, Turn)), None)
            if longest and first and len(self._ids(first.prompt, chat.veiled)) > longest:
                break  # later prompts hold this one's turns and more
        return turns

    def _by_prefixes(self, chat: _Chat, trained: Sequence[int]) -> dict[int, Turn | Refusal]:
        """The definition: two renderings of all that was said before, for each reply."""
        texts = self.rendering.texts
        prompts = texts([chat.messages[:i] for i in trained], chat.tools, generate=True)
        wholes = texts([chat.messages[: i + 1] for i in trained], chat.tools, generate=False)
        return {
            index: self._turn(chat, index, prompt, whole)
            for index, prompt, whole in zip(trained, prompts, wholes, strict=True)
        }

    def _by_windows(self, chat: _Chat, trained: Sequence[int]) -> dict[int, Turn | Refusal] | None:
        """The same in linear time: each reply rendered behind the opening and the few turns before it.

            opening  u0 | a0 u1 a1 u2 a2 u3 a3 u4 a4
            window   u0 |             a2 u3 a3 u4 a4     goes on where a2 ended in the text of the whole chat

        What the windows write must be the text of the whole chat, piece by piece, and some replies are compared with
        the definition. None where the template does not show earlier turns alike.
        """
        last = trained[-1]
        final = self._by_prefixes(chat, [last])[last]
        if isinstance(final, Refusal):
            return None
        opening = 1 + next(i for i, m in enumerate(chat.messages) if m["role"] == "user")
        turns: dict[int, Turn | Refusal] = {}
        known = -1  # the last reply that is placed in the text
        for at in range(0, len(trained), WINDOW):
            block = trained[at : at + WINDOW]
            messages, left_out, before = chat.messages[: block[-1] + 1], 0, block
            if known >= 0:
                messages = messages[:opening] + messages[known:]
                left_out, before = known - opening, [known, *block]
            window = _Chat(messages, chat.tools, chat.veiled)
            found = self._by_prefixes(window, [index - left_out for index in before])
            anchor = found[known - left_out] if known >= 0 else None
            for index in block:
                turn = found[index - left_out]
                if isinstance(turn, Turn):
                    there = placed(turn, anchor, turns.get(known), final.text)
                    if there is None:
                        return None
                    anchor, known = turn, index
                    turn = there
                turns[index] = turn
        sampled = [last, *(trained[len(trained) >> n] for n in range(1, len(trained).bit_length()))]
        same = self._by_prefixes(chat, sorted(set(sampled)))
        return turns if all(same_turn(turns[index], turn) for index, turn in same.items()) else None

    def _turn(self, chat: _Chat, index: int, prompt: str, whole: str) -> Turn | Refusal:
        """One reply of a chat, from what the template writes before it and with it."""
        message = chat.messages[index]
        thought, _ = split_reasoning(message)
        opened = OPENED.search(prompt)
        rules: list[str] = []
        served = whole  # as if the target had said it: begins with the prompt
        if not served.startswith(prompt) and opened and thought:
            served = composed(prompt, whole, opened, thought) or whole
        if not served.startswith(prompt) and thought:
            bare = self._rendered_as(chat, index, without_reasoning(message))
            if bare is not None and bare.startswith(prompt):
                whole, served, thought, rules = bare, bare, "", [CLOSED_REASONING]
        if not served.startswith(prompt) and chat.messages[index - 1]["role"] != "assistant":
            served = self._behind_header(chat, index, prompt, whole) or whole
        if not served.startswith(prompt):
            unreasoned = opened and not thought and whole.startswith(prompt[: opened.start()])
            return Refusal(self._unreasoned() if unreasoned else OTHER_HEADER)
        turn = self._ended(chat, message, prompt, served)
        if opened and closing(opened) not in turn.reply:
            return Refusal(self._unreasoned())
        header = self.rendering.header
        if header and turn.reply.strip().startswith(header):
            return Refusal(OTHER_HEADER)  # a header is sent, never said

        def changes_nothing(other: Message) -> bool:
            return self._rendered_as(chat, index, other) == whole

        return checked(turn, message, thought, rules, changes_nothing, self._ends)

    def _behind_header(self, chat: _Chat, index: int, prompt: str, whole: str) -> str | None:
        """The prompt as served and the reply, where the template shows earlier turns otherwise beside this reply.

        gpt-oss leaves out the reasoning before a call once a final reply follows. None if there is no header, or if
        the reply is not found behind it.
        """
        before = self.rendering.texts([chat.messages[:index]], chat.tools, generate=False)[0]
        header = prompt[len(before) :] if prompt.startswith(before) else ""
        other = self._rendered_as(chat, index, marked(chat.messages[index]))
        if not header.strip() or other is None:
            return None
        at = whole.rfind(header, 0, _common_length(whole, other))
        return prompt + whole[at + len(header) :] if at >= 0 else None

    def _rendered_as(self, chat: _Chat, index: int, message: Message) -> str | None:
        """The chat up to a reply that is another one, None where the template fails."""
        if not message.get("tool_calls"):
            message = {key: value for key, value in message.items() if key != "tool_calls"}
        try:
            chats = [[*chat.messages[:index], message]]
            return self.rendering.texts(chats, chat.tools, generate=False)[0]
        except UserError:
            return None

    def _ended(self, chat: _Chat, message: Message, prompt: str, whole: str) -> Turn:
        """The reply without what the template puts after its end-of-turn token (a line break, often).

        The target never says that. Where it ends its turns with the token that opens the next one, that one is added.
        """
        stops, turn_end = self.rendering.stops, self.rendering.turn_end
        end = reply_end(prompt, whole, message, stops, turn_end)
        if end < 0:
            whole += self.rendering.next_turn(bool(message.get("tool_calls")))
            stripped = whole.rstrip()
            end = len(stripped) if stripped.endswith(self._ends) else len(whole)
        return Turn(whole, len(prompt), max(end, len(prompt)), chat.veiled)

    def _unreasoned(self) -> str:
        switch = self._switch()
        return UNREASONED + (
            f", or set target.chat_template_kwargs.{switch}=false" if switch else ""
        )

    def _reasoning_switch(self) -> str:
        """The option that lets plain replies follow the generation prompt; empty if there is none."""
        asked, answered = {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}
        for name in SWITCHES:
            prompt = self.rendering.tried([asked], generate=True, **{name: False})
            whole = self.rendering.tried([asked, answered], **{name: False})
            if prompt and whole and whole.startswith(prompt) and not OPENED.search(prompt):
                return name
        return ""

    def _lost(self, chat: _Chat, index: int, prompt: str) -> list[str]:
        """Rules for what the prompt of a reply does not show: turns of other roles, and tools."""
        missing, at = [], 0
        for place, message in enumerate(chat.messages[:index]):
            part = (message["content"] or "").strip()
            found = prompt.find(part, at)
            at = found + len(part) if found >= 0 else at
            if message["role"] != "assistant" and found < 0 and not _written(part, prompt):
                missing.append(place)
        roles = []
        for place in missing[:DOUBTS]:
            messages = chat.messages[:index]
            messages[place] = messages[place] | {"content": "a"}
            try:
                if self.rendering.texts([messages], chat.tools, generate=True)[0] == prompt:
                    roles.append(messages[place]["role"])
            except UserError:
                continue
        lost = [NO_ROLE.format(role) for role in _once(roles)]
        return lost + ([NO_TOOLS] if chat.tools and not self.rendering.shows_tools else [])

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

    def _join_by_ids(self, turns: Sequence[Turn]) -> list[tuple[list[int], list[int]]]:
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

    def _join_by_text(self, turns: Sequence[Turn]) -> list[tuple[list[int], list[int]]] | None:
        """The same from one encoding per record; None where a boundary can't be shown to be exact."""
        if not all(turn.text.endswith(self._ends, 0, turn.end) for turn in turns):
            return None
        groups: list[list[Turn]] = []
        for turn in turns:
            if groups and turn.follows(groups[-1][-1]):
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

    def _mask(self, group: Sequence[Turn], encoded: _Encoded) -> list[int] | None:
        """Find each reply of a record by the characters that its tokens came from."""
        ids, spans = encoded.ids, encoded.spans
        starts = [start for start, _ in spans]
        mask = [0] * len(ids)
        for turn in group:
            first = self._boundary(encoded, starts, turn)
            end = bisect_left(starts, turn.end)
            ends = ids[end - 1] in self._cuts and spans[end - 1][1] >= turn.end
            if first is None or not ends:
                return None
            mask[first:end] = [1] * (end - first)
        return mask

    def _boundary(self, encoded: _Encoded, starts: Sequence[int], turn: Turn) -> int | None:
        """The first token after the prompt, if the tokens before it are those of the prompt alone."""
        ids, spans, at = encoded.ids, encoded.spans, turn.start
        first = bisect_left(starts, at)
        cut = first - 1
        while cut >= 0 and ids[cut] not in self._cuts:
            cut -= 1
        if cut < 0 or spans[first - 1][1] > at:
            return None
        alone = self._tail(encoded.text[spans[cut][0] : at], turn.veiled)
        return first if alone == tuple(ids[cut:first]) else None


def _once(rules: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(rules))


def _written(part: str, prompt: str) -> bool:
    """Whether a text stands in a prompt, as it is or as JSON."""
    return part in prompt or any(
        json.dumps(part, ensure_ascii=ascii)[1:-1] in prompt for ascii in (True, False)
    )


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
