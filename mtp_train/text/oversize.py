"""Chats that are far longer than they may be, told from a beginning of one message.

Encoding costs about 250 bytes for each character of a text: a pasted log of 20 MB would take 5 GB to be refused.
"""

from __future__ import annotations

from transformers import PreTrainedTokenizerBase

from mtp_train.core.records import Conversation
from mtp_train.text.lengths import LengthPolicy
from mtp_train.text.refusal import Refusal

CHARACTERS = 64  # per token, of the beginning that is encoded: hardly a token is as long


def oversize(
    chat: Conversation, tokenizer: PreTrainedTokenizerBase, policy: LengthPolicy
) -> Refusal | None:
    """The refusal of a chat with a message before its first trained reply that alone is too long, if it has one.

    A message counts if its first 64 * max_tokens characters are 2 * max_tokens tokens or more: where they end, a
    tokenizer may cut otherwise than in the whole text, but not by as much. Others are told once they are encoded.
    """
    if policy.rule == "split":
        return None
    size = CHARACTERS * policy.max_tokens
    for index, message in enumerate(chat.messages):
        if message["role"] == "assistant" and index not in chat.untrained:
            return None
        text = message["content"]
        if len(text) > size and _tokens(tokenizer, text[:size]) >= 2 * policy.max_tokens:
            return policy.refusal()
    return None


def _tokens(tokenizer: PreTrainedTokenizerBase, text: str) -> int:
    return len(tokenizer(text, add_special_tokens=False, return_attention_mask=False)["input_ids"])
