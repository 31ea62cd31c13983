"""Stop strings: where an output's text is complete, and that text. Knows no engine: it reads token ids.

Text is decoded without special tokens (those stop by id), and as a continuation: behind an anchor token, so that a
tokenizer that takes the first space off a text takes it off the anchor.
"""

from __future__ import annotations

from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

from mtp_train.core.errors import UserError

UNDECODED = "\N{REPLACEMENT CHARACTER}"  # stands for bytes that are no character, or none yet


class StopStrings:
    """How many tokens of an output stand once a stop string occurs in its text.

    One per request. It remembers the last output that it found without any, and decodes only a window of a longer one
    of the same beginning: the new tokens and as many before them as a stop string can reach back. Any other output is
    read from its start, so that a request may run again.

    Raises:
        UserError: no strings, or an empty one.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, strings: Sequence[str]) -> None:
        if not strings or not all(strings):
            raise UserError(
                "stop strings must not be empty", list(strings), "leave them out to use none"
            )
        self.tokenizer = tokenizer
        self.strings = tuple(strings)
        self.anchor = tuple(tokenizer.encode("a", add_special_tokens=False)[-1:])
        self.skipped = len(self._plain(self.anchor))
        # characters before a string's last one; with one at least, no character is cut by the window
        self.reach = max(2, *map(len, strings)) - 1
        self.clear: tuple[int, ...] = ()

    def __call__(self, output: tuple[int, ...]) -> int | None:
        """The fewest first tokens whose text has a stop string; None if even all have none.

        That the last of them may bring more text than the string is as in engines: a token stands or falls whole.
        """
        known = len(self.clear) if output[: len(self.clear)] == self.clear else 0
        start = self._window(output, known)
        text = self._text(output[start:])
        if UNDECODED in text or self._inside(text):
            for count in range(known + 1, len(output) + 1):
                if self._inside(self._text(output[start:count])):
                    return count
        self.clear = output
        return None

    def text(self, output: Sequence[int]) -> str:
        """The output's text up to the stop string that is complete first (of several at once, the first listed)."""
        text = self._text(output)
        found = [(text.find(string), string) for string in self.strings if string in text]
        if not found:
            return text
        return text[: min(found, key=lambda pair: pair[0] + len(pair[1]))[0]]

    def _window(self, output: Sequence[int], known: int) -> int:
        """Where to begin so that the text before token `known` holds all that a stop string can have there.

        Undecoded bytes don't count: they may be the rest of a character that began earlier, or one not complete.
        """
        back = self.reach + 1
        while (start := max(0, known - back)) > 0:
            if len(self._text(output[start:known]).replace(UNDECODED, "")) >= self.reach:
                break
            back *= 2
        return start

    def _inside(self, text: str) -> bool:
        return any(string in text for string in self.strings)

    def _text(self, tokens: Sequence[int]) -> str:
        return self._plain((*self.anchor, *tokens))[self.skipped :]

    def _plain(self, tokens: Sequence[int]) -> str:
        text = self.tokenizer.decode(
            list(tokens), skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        assert isinstance(text, str)
        return text
