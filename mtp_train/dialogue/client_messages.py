"""What a client has of an answer, and sends back before its next question.

A server's parsers give reasoning and text apart, and control tokens are no part of either. Where they lie is told by
how the template renders a reply of its own, so that a reply which is sent back is rendered as in serving.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from mtp_train.text.refusal import Refusal
from mtp_train.text.rendering import ReplyShape
from mtp_train.text.template import ChatTemplate

UNFINISHED = "a reply ends within its reasoning: a client has no text of it to send back"
CALLS = "a reply calls a tool: a client goes on with the tool's result, which is not at hand"


def client_message(
    template: ChatTemplate, prompt: Sequence[int], output: Sequence[int], with_tools: bool
) -> dict[str, Any] | Refusal:
    """The assistant message of an answer, or why no question can follow it.

    Args:
        output: the answer's tokens without the one that ended it.
        with_tools: the request offers tools, so that a server looks for calls.
    """
    tokenizer, shape = template.tokenizer, template.rendering.reply_shape
    raw = _decoded(tokenizer, prompt, output, special=True)
    if with_tools and _calls(raw, shape):
        return Refusal(CALLS)
    mark, opening, start = (
        text.strip() for text in (shape.between, shape.before_reasoning, shape.before_text)
    )
    if mark and mark in raw:
        thought, _, text = raw.partition(mark)
        text = text.removeprefix(_gap(shape.between))
        message = {"role": "assistant", "content": _without_special(tokenizer, text)}
        thought = _without_special(tokenizer, thought.strip().removeprefix(opening)).strip()
        return message | ({"reasoning_content": thought} if thought else {})
    if start and raw.lstrip().startswith(start):
        text = raw.lstrip().removeprefix(start).removeprefix(_gap(shape.before_text))
        return {"role": "assistant", "content": _without_special(tokenizer, text)}
    if mark and raw.lstrip().startswith(opening):
        return Refusal(UNFINISHED)
    return {"role": "assistant", "content": reply_text(tokenizer, prompt, output)}


def reply_text(
    tokenizer: PreTrainedTokenizerBase, prompt: Sequence[int], output: Sequence[int]
) -> str:
    """The text that serving returns for `output`: decoded after its prompt (some decoders strip a leading space),
    without special tokens, and without a last letter of which only some bytes were generated.
    """
    return _decoded(tokenizer, prompt, output, special=False)


def _decoded(
    tokenizer: PreTrainedTokenizerBase, prompt: Sequence[int], output: Sequence[int], special: bool
) -> str:
    before, whole = (
        str(
            tokenizer.decode(
                ids, skip_special_tokens=not special, clean_up_tokenization_spaces=False
            )
        )
        for ids in (list(prompt), [*prompt, *output])
    )
    return whole[len(before) :].rstrip("\ufffd")


def _calls(raw: str, shape: ReplyShape) -> bool:
    """Whether a reply holds what the template writes before a function's name. JSON alone is a call from its start."""
    mark, said = (re.sub(r"\s+", "", text) for text in (shape.before_call, raw))
    if not mark:
        return False
    return said.startswith(mark) if mark[0] in "{[" else mark in said


def _gap(text: str) -> str:
    """The white space at a text's end."""
    return text[len(text.rstrip()) :]


def _without_special(tokenizer: PreTrainedTokenizerBase, text: str) -> str:
    for token in tokenizer.added_tokens_decoder.values():
        if token.special:
            text = text.replace(token.content, "")
    return text
