"""Write and read shards: packed rows in safetensors, random access by sequence, memory-mapped.

A shard holds `hidden` [rows, D], `tokens` int32 [rows], `loss_mask` uint8 [rows], `offsets` int64 [sequences + 1];
its metadata names the sequences. Knows no model and no order of training.
"""

from __future__ import annotations

import bisect
import json
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from mtp_train.core.errors import UserError
from mtp_train.core.provenance import atomic_path, file_digest
from mtp_train.core.records import TokenizedConversation
from mtp_train.store.manifest import Manifest, ShardEntry, load_manifest


@dataclass(frozen=True)
class FeatureSequence:
    """One conversation's rows."""

    key: str
    tokens: Tensor  # [L] int64
    loss_mask: Tensor  # [L] int64
    hidden: Tensor  # [L, D] in the store's dtype


def shard_name(index: int) -> str:
    return f"shard-{index:06d}.safetensors"


def write_shard(
    path: Path, sequences: list[TokenizedConversation], hidden_TD: Tensor
) -> ShardEntry:
    """Write one shard atomically. The same input gives the same bytes.

    hidden_TD holds the sequences' rows end to end.
    """
    tokens = torch.tensor(
        [token for sequence in sequences for token in sequence.tokens], dtype=torch.int32
    )
    mask = torch.tensor(
        [flag for sequence in sequences for flag in sequence.loss_mask], dtype=torch.uint8
    )
    assert len(tokens) == len(hidden_TD), "one state per token"
    offsets = torch.tensor(
        [0, *accumulate(len(sequence.tokens) for sequence in sequences)], dtype=torch.int64
    )
    keys = json.dumps([sequence.key for sequence in sequences], ensure_ascii=False)
    with atomic_path(path) as temporary:
        save_file(
            {
                "hidden": hidden_TD.contiguous(),
                "tokens": tokens,
                "loss_mask": mask,
                "offsets": offsets,
            },
            temporary,
            metadata={"keys": keys},
        )
    return describe_shard(path)


def describe_shard(path: Path) -> ShardEntry:
    """The manifest's entry of a finished shard file."""
    with open_shard(path) as shard:
        mask = shard.get_tensor("loss_mask")
        sequences = shard.get_slice("offsets").get_shape()[0] - 1
    return ShardEntry(
        path.name, file_digest(path), path.stat().st_size, sequences, len(mask), int(mask.sum())
    )


def open_shard(path: Path) -> safe_open:
    """Memory-map a shard; a damaged file is an error that names it."""
    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, FileNotFoundError) as error:
        raise UserError(
            "a shard must be a whole safetensors file",
            f"{path}: {error}",
            "delete it and run precompute again",
        ) from error


class FeatureStore:
    """Random access to a finished store by sequence index.

    Opening reads the manifest alone; a shard is mapped when one of its sequences is first asked for.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self.manifest: Manifest = load_manifest(self.folder)
        self._starts = [0, *accumulate(shard.sequences for shard in self.manifest.shards)]
        self._shard = lru_cache(maxsize=32)(self._open)

    def __len__(self) -> int:
        return self._starts[-1]

    def __getitem__(self, index: int) -> FeatureSequence:
        shard, keys, offsets, row = self._locate(index)
        part = slice(int(offsets[row]), int(offsets[row + 1]))
        return FeatureSequence(
            key=keys[row],
            tokens=shard.get_slice("tokens")[part].long(),
            loss_mask=shard.get_slice("loss_mask")[part].long(),
            hidden=shard.get_slice("hidden")[part],
        )

    def lengths(self) -> list[int]:
        """Tokens of every sequence, in order."""
        return [
            int(length)
            for number in range(len(self.manifest.shards))
            for length in self._shard(number)[2].diff()
        ]

    def loss_tokens(self) -> list[int]:
        """Tokens with mask 1 of every sequence, in order."""
        counts: list[int] = []
        for number in range(len(self.manifest.shards)):
            shard, _, offsets = self._shard(number)
            running = torch.cat(
                [torch.zeros(1, dtype=torch.int64), shard.get_tensor("loss_mask").long().cumsum(0)]
            )
            counts += running[offsets].diff().tolist()
        return counts

    def token_counts(self, vocabulary: int) -> Tensor:
        """How often each token stands in the store [vocabulary]."""
        shards = (self._shard(number)[0] for number in range(len(self.manifest.shards)))
        return sum(
            (torch.bincount(shard.get_tensor("tokens"), minlength=vocabulary) for shard in shards),
            torch.zeros(vocabulary, dtype=torch.int64),
        )

    def _locate(self, index: int) -> tuple[safe_open, list[str], Tensor, int]:
        if not 0 <= index < len(self):
            raise IndexError(f"sequence {index} of {len(self)}")
        number = bisect.bisect_right(self._starts, index) - 1
        shard, keys, offsets = self._shard(number)
        return shard, keys, offsets, index - self._starts[number]

    def _open(self, number: int) -> tuple[safe_open, list[str], Tensor]:
        shard = open_shard(self.folder / self.manifest.shards[number].file)
        return shard, json.loads(shard.metadata()["keys"]), shard.get_tensor("offsets")
