"""Toy targets, data and stores: random weights for exact arithmetic, made by the production code alone."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, PreTrainedTokenizerFast

from mtp_train.core.dist import Ranks
from mtp_train.core.records import Accounting, TokenizedConversation
from mtp_train.models.target import Target
from mtp_train.precompute.sources import EngineStates
from mtp_train.precompute.stage import PrecomputeConfig, precompute
from mtp_train.store.shards import FeatureStore

VOCABULARY = 61
LETTERS = "abcdefghijklmnopqrstuvwxyz0123456789 .,?!'\n-+:"
CHATML = (
    "{% for m in messages %}{{ '<s>' + m.role + '\n' + m.content + '</s>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<s>assistant\n' }}{% endif %}"
)


def toy_config(**changes: object) -> LlamaConfig:
    sizes = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
    }
    return LlamaConfig(**(sizes | changes))


def make_target(seed: int = 0, **changes: object) -> Target:
    return Target.from_config(toy_config(**changes), seed=seed)


def make_tokenizer() -> PreTrainedTokenizerFast:
    """A token per character, and the two of the template. Some of the toy targets' ids have no text."""
    vocabulary = {token: index for index, token in enumerate(["<unk>", "<s>", "</s>", *LETTERS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        unk_token="<unk>",
        bos_token="<s>",
        eos_token="</s>",
        pad_token="</s>",
    )
    fast.chat_template = CHATML
    return fast


def make_lively_target(**changes: object) -> Target:
    """A toy target whose answers differ, some ended by the end-of-turn token."""
    return make_target(**({"initializer_range": 0.3} | changes))


def conversation(key: str, prompt: Sequence[int], answer: Sequence[int]) -> TokenizedConversation:
    """A chat whose answer is trained and whose prompt is not."""
    mask = (0,) * len(prompt) + (1,) * len(answer)
    return TokenizedConversation(key, (*prompt, *answer), mask)


def conversations(count: int, seed: int = 0, longest: int = 20) -> list[TokenizedConversation]:
    """Random chats of 4 to `longest` tokens."""
    rng = random.Random(seed)
    chats = []
    for index in range(count):
        tokens = [rng.randrange(VOCABULARY) for _ in range(rng.randint(4, longest))]
        cut = rng.randint(1, len(tokens) - 2)
        chats.append(conversation(f"chat-{index}", tokens[:cut], tokens[cut:]))
    return chats


def make_store(
    folder: Path,
    target: Target,
    chats: Sequence[TokenizedConversation],
    rows_per_shard: int = 64,
    states: Sequence[str] = ("post_norm",),
) -> FeatureStore:
    """The chats' features, by the precompute stage."""
    config = PrecomputeConfig(
        rows_per_shard=rows_per_shard, rows_per_forward=32, states=list(states)
    )
    accounting = Accounting(used=len(chats)).as_dict()
    precompute(EngineStates(target, states), chats, config, folder, accounting, Ranks())
    return FeatureStore(folder)


def index_states(rows: int, width: int) -> torch.Tensor:
    """States [rows, width] whose every entry is the row's own number."""
    return torch.arange(rows, dtype=torch.float32).unsqueeze(1).repeat(1, width)


@dataclass(frozen=True)
class TwoRanks:
    """What two processes under torchrun left behind (see two_ranks.py)."""

    folder: Path
    errors: str

    def records(self, what: str) -> list[dict[str, Any]]:
        """Each rank's record of a step that it came through."""
        found = sorted(self.folder.glob(f"{what}-*.json"))
        assert len(found) == 2, (
            f"{len(found)} of 2 ranks came through {what!r}:\n{self.errors[-3000:]}"
        )
        return [json.loads(path.read_text()) for path in found]
