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
    """The refusal of a chat with a message that alone is too long, up to its first trained reply, if it has one.

    All its sequences begin with these messages. A message counts if its first 64 * max_tokens characters are
    2 * max_tokens tokens or more: where they end, a tokenizer may cut otherwise than in the whole text, but not by as
    much. Others are told once they are encoded.
    """
    if policy.rule == "split":
        return None
    size = CHARACTERS * policy.max_tokens
    for index, message in enumerate(chat.messages):
        trained = message["role"] == "assistant" and index not in chat.untrained
        text = message["content"]
        may_be_cut = trained and (policy.rule == "truncate" or "</think>" in text)
        far_longer = len(text) > size and not may_be_cut
        if far_longer and _tokens(tokenizer, text[:size]) >= 2 * policy.max_tokens:
            return policy.refusal()
        if trained:
            return None
    return None


def _tokens(tokenizer: PreTrainedTokenizerBase, text: str) -> int:
    return len(tokenizer(text, add_special_tokens=False, return_attention_mask=False)["input_ids"])
