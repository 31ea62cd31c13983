"""Small stores, by the production code: five chats in three shards, rows that say which token they belong to."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from toys import VOCABULARY, conversation

from mtp_train.core.records import TokenizedConversation
from mtp_train.store.index import shard_name
from mtp_train.store.manifest import Contract, Manifest
from mtp_train.store.shards import encode_shard, finish_store, write_shard

WIDTH = 6
CHATS = [
    conversation("a", [1, 2, 3], [4, 5]),
    conversation("b", [6], [7, 8, 9, 9]),
    conversation('c: ü "quoted"', [10, 11], []),
    conversation("d", [60, 0], [60, 59, 58]),
    conversation("e", [3, 3, 3, 3], [3]),
]
SHARDS = [[0, 1], [2], [3, 4]]


def rows_of(
    chats: Sequence[TokenizedConversation], dtype: torch.dtype = torch.bfloat16
) -> torch.Tensor:
    """Entry (row, column) is row + 100 * column + 1."""
    count = sum(len(chat.tokens) for chat in chats)
    rows = torch.arange(1, count + 1, dtype=torch.float32)
    return torch.stack([rows + 100 * column for column in range(WIDTH)], dim=1).to(dtype)


def contract_of(
    dtype: torch.dtype = torch.bfloat16,
    codec: str = "raw",
    states: tuple[str, ...] = ("post_norm",),
) -> Contract:
    name = str(dtype).removeprefix("torch.")
    return Contract("hash", states, WIDTH, VOCABULARY, name, codec, "digest", 10, 10)


def write_store(
    address: str | Path,
    dtype: torch.dtype = torch.bfloat16,
    codec: str = "raw",
    states: tuple[str, ...] = ("post_norm",),
) -> Manifest:
    """Each further state holds a thousand more."""
    entries = []
    for number, members in enumerate(SHARDS):
        chats = [CHATS[index] for index in members]
        rows = {
            state: (rows_of(chats, torch.float32) + 1000 * place).to(dtype)
            for place, state in enumerate(states)
        }
        entries.append(
            write_shard(f"{address}/{shard_name(number)}", encode_shard(chats, rows, codec))
        )
    return finish_store(
        address, contract_of(dtype, codec, states), entries, {"rows": 3}, {"used": 5}
    )
