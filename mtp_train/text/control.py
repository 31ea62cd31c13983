"""Control tokens that stand in a message as text stay text: only the template opens and ends turns.

Before the template renders, their characters are veiled: moved one by one into a plane of Unicode that is kept for
private use. The template's own control tokens are then the only ones in what it renders, the length of the text and
all positions stay, and what was veiled is encoded as the letters that it is.

Knows a tokenizer's tokens; no template.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

from tokenizers import AddedToken, Tokenizer
from transformers import PreTrainedTokenizerBase

from mtp_train.core.errors import UserError

PLANE = 0x100000  # plane 16, private use
MARK = "\U0010fffd"  # the plane's last: stands for an added token before letters


class Veil:
    """Veils and lifts the control tokens of one tokenizer.

    Control tokens are the special ones, and of the other added tokens those that frame turns. The rest (`<think>`,
    `<tool_call>` in many tokenizers) are marks that a text may hold: they stay the tokens that serving makes of them.

    Args:
        frame: what the chat template writes around plain turns.
        stops: tokens at which serving ends a reply.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, frame: str, stops: Sequence[str] = ()
    ) -> None:
        self.tokenizer = tokenizer
        added = tokenizer.added_tokens_decoder.values()
        control = {
            token.content
            for token in added
            if token.special or token.content in frame or token.content in stops
        }
        # Longest first: a token goes before those within it. White space (Gemma has such tokens) frames nothing.
        self._control = sorted(filter(str.strip, control), key=lambda token: (-len(token), token))
        self._plain: Tokenizer | None = None
        self._added = set(tokenizer.added_tokens_decoder)

    def holds(self, messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]]) -> bool:
        """Whether control tokens stand in the text of messages or tools."""
        texts = _texts([list(messages), list(tools)])
        return any(token in text for text in texts for token in self._control)

    def cover(
        self, messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]]
    ) -> tuple[list[dict[str, Any]], list[dict[str, Any]], bool]:
        """Messages and tools with their control tokens veiled, and whether there were any.

        Raises:
            UserError: the text has characters of the private plane of its own.
        """
        if not self.holds(messages, tools):
            return list(messages), list(tools), False
        if any(map(_private, _texts([list(messages), list(tools)]))):
            raise UserError(
                "control tokens in text can't be told from private-use characters beside them",
                "text with both",
                "remove either",
            )
        return [self._cover(m) for m in messages], [self._cover(t) for t in tools], True

    def encode_lifted(
        self, text: str, ids: Sequence[int], spans: Sequence[tuple[int, int]]
    ) -> tuple[list[int], list[tuple[int, int]]]:
        """Encode anew, as letters, what stands between control tokens and is veiled in part.

        Args:
            text: with veiled parts.
            ids, spans: its encoding as it is, and the characters of each token.
        """
        found_ids: list[int] = []
        found_spans: list[tuple[int, int]] = []
        added = (i for i, token in enumerate(ids) if self._is_added(token, text, spans[i]))
        edges = [-1, *added, len(ids)]
        for left, right in pairwise(edges):
            if left >= 0:
                found_ids.append(ids[left])
                found_spans.append(spans[left])
            start = spans[left][1] if left >= 0 else 0
            end = spans[right][0] if right < len(ids) else len(text)
            if _private(text[start:end]):
                # Some tokenizers open a text otherwise than they go on after a token.
                mark = MARK if left >= 0 else ""
                plain = self._letters().encode(
                    mark + lift(text[start:end]), add_special_tokens=False
                )
                found_ids += plain.ids[len(mark) :]
                moved = start - len(mark)
                found_spans += [(a + moved, b + moved) for a, b in plain.offsets[len(mark) :]]
            else:
                found_ids += ids[left + 1 : right]
                found_spans += spans[left + 1 : right]
        return found_ids, found_spans

    def _is_added(self, token: int, text: str, span: tuple[int, int]) -> bool:
        """Whether an added token was written there; the one for unknown letters may stand for any."""
        if token not in self._added:
            return False
        unknown = self.tokenizer.unk_token
        return token != self.tokenizer.unk_token_id or text[slice(*span)].strip() == unknown

    def _letters(self) -> Tokenizer:
        """The tokenizer without its added tokens, but with one that stands for any of them."""
        if self._plain is None:
            whole = json.loads(self.tokenizer.backend_tokenizer.to_str())
            whole |= {
                "added_tokens": [],
                "post_processor": None,
                "truncation": None,
                "padding": None,
            }
            self._plain = Tokenizer.from_str(json.dumps(whole))
            self._plain.add_special_tokens([AddedToken(MARK, normalized=False)])
        return self._plain

    def _cover(self, value: Any) -> Any:
        if isinstance(value, str):
            for token in self._control:
                if token in value:
                    value = value.replace(token, "".join(chr(PLANE + ord(c)) for c in token))
            return value
        if isinstance(value, dict):
            return {self._cover(str(key)): self._cover(part) for key, part in value.items()}
        return [self._cover(part) for part in value] if isinstance(value, list) else value


def lift(text: str) -> str:
    """The letters that a veiled text stands for."""
    return "".join(chr(ord(c) - PLANE) if ord(c) >= PLANE else c for c in text)


def _private(text: str) -> bool:
    return not text.isascii() and ord(max(text)) >= PLANE


def _texts(value: Any) -> Iterator[str]:
    """Every string in a JSON value."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        yield from (text for part in value.values() for text in _texts(part))
        yield from map(str, value)
    elif isinstance(value, list):
        yield from (text for part in value for text in _texts(part))
