"""Packs of whole documents for training: which sequences form which micro-batch, in which order, from where on.

The order is a value: (seed, epoch) give it, a step number places a run in it. Knows no head and no loss.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor

from mtp_train.store.manifest import Contract
from mtp_train.store.shards import FeatureSequence

T = TypeVar("T")


class FeatureNote(Protocol):
    """What a data set's features say of themselves."""

    @property
    def contract(self) -> Contract: ...

    @property
    def loss_tokens(self) -> int: ...


class Features(Protocol):
    """A data set's sequences with their states, in a fixed order: read from a store, or computed when asked for."""

    @property
    def manifest(self) -> FeatureNote: ...

    def __len__(self) -> int: ...

    def lengths(self) -> np.ndarray:
        """Tokens of every sequence: integers [sequences]."""
        ...

    def loss_tokens(self) -> np.ndarray:
        """Tokens with mask 1 of every sequence: integers [sequences]."""
        ...

    def token_counts(self, *, trained: bool = False) -> Tensor:
        """How often each token stands in the text, or is trained: int64 [vocabulary]."""
        ...

    def read(self, indices: Sequence[int]) -> list[FeatureSequence]:
        """These sequences, together: a pack's."""
        ...


@dataclass(frozen=True)
class Pack:
    """Documents end to end."""

    keys: tuple[str, ...]
    offsets: tuple[int, ...]  # [documents + 1]
    token_T: Tensor  # int64
    loss_mask_T: Tensor  # int64
    states: dict[str, Tensor]  # [T, D] each, the target's, in the features' dtype


def epoch_packs(lengths: np.ndarray, rows: int, seed: int, epoch: int) -> list[list[int]]:
    """Sequence indices of each pack of one epoch: shuffled, each put where it leaves the least room, packs shuffled.

    `lengths` are integers [sequences]. Every sequence is in exactly one pack; one longer than `rows` is alone in its
    pack.
    """
    rng = np.random.default_rng([seed, epoch])
    order = rng.permutation(len(lengths))
    shortest = int(lengths.min()) if len(lengths) else 0
    packs: list[list[int]] = []
    rooms: list[tuple[int, int]] = []  # (room, pack), ascending: packs that can still take one
    for index, length in zip(order.tolist(), lengths[order].tolist(), strict=True):
        place = bisect_left(rooms, (length, 0))
        if place == len(rooms):
            room, number = rows, len(packs)
            packs.append([])
        else:
            room, number = rooms.pop(place)
        packs[number].append(index)
        if room - length >= shortest:
            insort(rooms, (room - length, number))
    return [packs[number] for number in rng.permutation(len(packs)).tolist()]


def ordered_packs(lengths: np.ndarray, rows: int) -> Iterator[list[int]]:
    """Sequence indices of each pack in the store's own order: for validation."""
    return fill(list(enumerate(lengths.tolist())), rows)


def fill(sized: Sequence[tuple[T, int]], budget: int) -> Iterator[list[T]]:
    """Group consecutive (item, size) pairs by a budget; an item above it stands alone."""
    group: list[T] = []
    used = 0
    for item, size in sized:
        if group and used + size > budget:
            yield group
            group, used = [], 0
        group.append(item)
        used += size
    if group:
        yield group


def load_pack(features: Features, indices: Sequence[int], device: torch.device) -> Pack:
    """Read a pack's sequences."""
    return make_pack(features.read(indices), device)


def make_pack(sequences: Sequence[FeatureSequence], device: torch.device) -> Pack:
    """Lay sequences end to end on `device`."""
    return Pack(
        keys=tuple(sequence.key for sequence in sequences),
        offsets=(0, *accumulate(len(sequence.tokens) for sequence in sequences)),
        token_T=torch.cat([sequence.tokens for sequence in sequences]).to(device),
        loss_mask_T=torch.cat([sequence.loss_mask for sequence in sequences]).to(device),
        states={
            name: torch.cat([sequence.states[name] for sequence in sequences]).to(device)
            for name in sequences[0].states
        },
    )
