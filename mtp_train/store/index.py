"""What a store knows per sequence and per shard, in one memory-mapped file: opening a store reads none of it.

`lengths` and `loss_tokens` int32 [sequences]; `starts` int64 [shards + 1], the first sequence of each shard; `bytes`
int64 and `sha256` uint8 [shards, 32] of the shard files; `token_counts` and `trained_token_counts` int64 [vocabulary].
Knows no states.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from mtp_train.store.layout import TensorFile, pack
from mtp_train.store.manifest import ShardEntry
from mtp_train.store.places import Place

NAME = "index.safetensors"


@dataclass(frozen=True)
class ShardTokens:
    """A shard's text: int32 tokens [T], uint8 mask [T], int64 offsets [B + 1]."""

    tokens: Tensor
    loss_mask: Tensor
    offsets: Tensor

    def lengths(self) -> Tensor:
        return self.offsets.diff().int()

    def loss_tokens(self) -> Tensor:
        """Tokens with mask 1 per sequence, int32 [B]."""
        running = torch.nn.functional.pad(self.loss_mask.long().cumsum(0), (1, 0))
        return running[self.offsets].diff().int()


class IndexBuilder:
    """Takes shards in order, then writes the index."""

    def __init__(self, vocab_size: int) -> None:
        self._vocabulary = vocab_size
        self._lengths: list[Tensor] = []
        self._loss_tokens: list[Tensor] = []
        self._entries: list[ShardEntry] = []
        self._counts = torch.zeros(vocab_size, dtype=torch.int64)
        self._trained = torch.zeros(vocab_size, dtype=torch.int64)

    def add(self, entry: ShardEntry, text: ShardTokens) -> None:
        assert entry.file == shard_name(len(self._entries)), "shards come in order"
        self._entries.append(entry)
        self._lengths.append(text.lengths())
        self._loss_tokens.append(text.loss_tokens())
        self._counts += torch.bincount(text.tokens, minlength=self._vocabulary)
        trained = text.tokens[text.loss_mask > 0]
        self._trained += torch.bincount(trained, minlength=self._vocabulary)

    def write(self, place: Place) -> ShardEntry:
        """Write the index; its entry carries the store's totals."""
        entries = self._entries
        starts = np.cumsum([0, *(entry.sequences for entry in entries)], dtype=np.int64)
        hashes = b"".join(bytes.fromhex(entry.sha256) for entry in entries)
        data = pack(
            {
                "lengths": torch.cat(self._lengths),
                "loss_tokens": torch.cat(self._loss_tokens),
                "starts": torch.from_numpy(starts),
                "bytes": torch.tensor([entry.bytes for entry in entries], dtype=torch.int64),
                "sha256": torch.frombuffer(bytearray(hashes), dtype=torch.uint8).view(-1, 32),
                "token_counts": self._counts,
                "trained_token_counts": self._trained,
            },
            None,
        )
        place.write(NAME, data)
        return ShardEntry(
            NAME,
            hashlib.sha256(data).hexdigest(),
            len(data),
            int(starts[-1]),
            sum(entry.tokens for entry in entries),
            sum(entry.loss_tokens for entry in entries),
        )


class StoreIndex:
    """An opened index. Arrays are views of the map (a remote index is fetched, each array when first asked for)."""

    def __init__(self, file: TensorFile) -> None:
        self._file = file

    @cached_property
    def starts(self) -> np.ndarray:
        return self._array("starts")

    @cached_property
    def lengths(self) -> np.ndarray:
        return self._array("lengths")

    @cached_property
    def loss_tokens(self) -> np.ndarray:
        return self._array("loss_tokens")

    def token_counts(self, trained: bool) -> Tensor:
        return self._file.whole("trained_token_counts" if trained else "token_counts")

    def locate(self, sequence: int) -> tuple[int, int]:
        """The shard of a sequence, and its place there."""
        shard = int(np.searchsorted(self.starts, sequence, side="right")) - 1
        return shard, sequence - int(self.starts[shard])

    @property
    def shards(self) -> int:
        return self._file.rows("bytes")

    def entry(self, number: int) -> ShardEntry:
        """What the store knows of one shard."""
        size, digest = self._file.cut(
            [("bytes", number, number + 1), ("sha256", number, number + 1)]
        )
        members = slice(int(self.starts[number]), int(self.starts[number + 1]))
        return ShardEntry(
            shard_name(number),
            digest.numpy().tobytes().hex(),
            int(size),
            members.stop - members.start,
            int(self.lengths[members].sum()),
            int(self.loss_tokens[members].sum()),
        )

    def _array(self, name: str) -> np.ndarray:
        found: np.ndarray = self._file.whole(name).numpy()
        return found


def shard_name(number: int) -> str:
    return f"shard-{number:06d}.safetensors"


def read_entries(index: StoreIndex) -> Sequence[ShardEntry]:
    """Every shard's entry, in order."""
    return [index.entry(number) for number in range(index.shards)]
