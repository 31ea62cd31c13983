"""Whether a store is what it says, what it holds, and what one of its sequences looks like.

Knows no model and no tokenizer: the text of a sequence comes from the caller's `decode`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mtp_train.core.errors import UserError
from mtp_train.store.index import read_entries
from mtp_train.store.manifest import NAME, ShardEntry
from mtp_train.store.shards import REMAKE, FeatureStore, Shard, read_header

NAMED = 8  # damaged files in one error
QUANTILES = {"shortest": 0.0, "10 %": 0.1, "median": 0.5, "90 %": 0.9, "99 %": 0.99, "longest": 1.0}


@dataclass(frozen=True)
class Damage:
    """What is wrong with one file of a store."""

    file: str
    what: str

    def __str__(self) -> str:
        return f"{self.file} {self.what}"


@dataclass
class Norms:
    """Euclidean norms of a state's rows."""

    rows: int = 0
    total: float = 0.0
    least: float = math.inf
    most: float = 0.0

    @property
    def mean(self) -> float:
        return self.total / max(self.rows, 1)

    def add(self, norm_T: Tensor) -> None:
        self.rows += len(norm_T)
        self.total += float(norm_T.sum(dtype=torch.float64))
        self.least = min(self.least, float(norm_T.min()))
        self.most = max(self.most, float(norm_T.max()))


@dataclass(frozen=True)
class Report:
    """What `verify` found; sequences and tokens are those of whole shards."""

    shards: int
    sequences: int
    tokens: int
    loss_tokens: int
    gate: dict[str, Any]
    norms: dict[str, Norms]
    damages: tuple[Damage, ...]

    def require_whole(self, address: str, remedy: str = REMAKE) -> None:
        """Raise `UserError` that names the damaged files."""
        if self.damages:
            named = ", ".join(map(str, self.damages[:NAMED]))
            more = len(self.damages) - NAMED
            raise UserError(
                "a store must be what its manifest says",
                f"{address}: {named}" + (f" and {more} more" if more > 0 else ""),
                remedy,
            )


@dataclass(frozen=True)
class Stats:
    """What a store holds. `raw_bytes` is what one state would take as it is read."""

    shards: int
    sequences: int
    tokens: int
    loss_tokens: int
    bytes: int
    state_bytes: dict[str, int]
    raw_bytes: int
    length_quantiles: dict[str, int]


def verify_files(store: FeatureStore) -> None:
    """Compare every shard's size and hash with the index; `UserError` names the first that differs."""
    for damage in _file_damages(store, read_entries(store.index)):
        if damage:
            raise UserError(
                "a shard must be the file its manifest names", f"{store.place}/{damage}", REMAKE
            )


def verify(store: FeatureStore, seen: Callable[[], object] = lambda: None) -> Report:
    """Check all of a store: hashes, sizes, counts against the index, rows finite and not zero, the gate's result.

    Args:
        seen: called after each shard, for a progress bar.
    """
    norms = {state: Norms() for state in store.states}
    damages = list(_manifest_damages(store))
    # A damaged index says nothing of the shards, and none of them may be deleted on its word.
    trusted = all(damage.file != store.manifest.index.file for damage in damages)
    entries = read_entries(store.index) if trusted else []
    whole = []
    for number, found in enumerate(_file_damages(store, entries)):
        damage = found or _content_damage(store, number, norms)
        if damage:
            damages.append(damage)
        else:
            whole.append(entries[number])
        seen()
    return Report(
        len(whole),
        sum(entry.sequences for entry in whole),
        sum(entry.tokens for entry in whole),
        sum(entry.loss_tokens for entry in whole),
        store.manifest.gate,
        norms,
        tuple(damages),
    )


def delete_damaged(store: FeatureStore, report: Report) -> None:
    """Remove what is damaged, and the manifest: the next precompute makes just that again."""
    if report.damages:
        for damage in report.damages:
            store.place.remove(damage.file)
        store.place.remove(NAME)


def stat(store: FeatureStore) -> Stats:
    """Count; reads the shards' headers, not their rows."""
    manifest = store.manifest
    headers = [read_header(store.place, entry.file) for entry in read_entries(store.index)]
    itemsize = getattr(torch, manifest.contract.dtype).itemsize
    at = np.quantile(store.lengths(), list(QUANTILES.values()), method="nearest")
    return Stats(
        manifest.shards,
        manifest.sequences,
        manifest.tokens,
        manifest.loss_tokens,
        sum(entry.bytes for entry in read_entries(store.index)),
        {state: sum(header.bytes_of(state) for header in headers) for state in store.states},
        manifest.tokens * manifest.contract.hidden_size * itemsize,
        {name: int(value) for name, value in zip(QUANTILES, at, strict=True)},
    )


def sample(
    store: FeatureStore, index: int, decode: Callable[[list[int]], str]
) -> list[tuple[bool, str]]:
    """A sequence's text in runs of one mask: (whether it is trained, its text)."""
    sequence = store[index]
    pairs = zip(sequence.loss_mask.tolist(), sequence.tokens.tolist(), strict=True)
    return [
        (bool(trained), decode([token for _, token in run]))
        for trained, run in groupby(pairs, key=lambda pair: pair[0])
    ]


def _manifest_damages(store: FeatureStore) -> Iterator[Damage]:
    index = store.manifest.index
    if store.place.digest(index.file) != index.sha256:
        yield Damage(index.file, "changed")
    if not store.manifest.gate.get("rows"):
        yield Damage(NAME, "has no result of the gate")


def _file_damages(store: FeatureStore, entries: Sequence[ShardEntry]) -> Iterator[Damage | None]:
    """By size and hash, for each shard in order. A shard in another's place is recognised."""
    sizes = store.place.sizes()
    names = {entry.sha256: entry.file for entry in entries}
    for entry in entries:
        if entry.file not in sizes:
            yield Damage(entry.file, "missing")
            continue
        digest = store.place.digest(entry.file)
        if digest == entry.sha256:
            yield None
        elif digest in names:
            yield Damage(entry.file, f"is {names[digest]}: files were swapped")
        elif sizes[entry.file] != entry.bytes:
            yield Damage(entry.file, f"has {sizes[entry.file]} of {entry.bytes} bytes")
        else:
            yield Damage(entry.file, "changed")


def _content_damage(store: FeatureStore, number: int, norms: dict[str, Norms]) -> Damage | None:
    """By what a shard with the right hash holds; adds its rows' norms."""
    members = slice(*store.index.starts[number : number + 2].tolist())
    name = store.index.entry(number).file
    try:
        shard = store.shard(number)
        text = shard.text()
        if (
            text.lengths().tolist() != store.lengths()[members].tolist()
            or text.loss_tokens().tolist() != store.loss_tokens()[members].tolist()
        ):
            return Damage(name, "counts other tokens than the index")
        bad = _bad_row(shard, norms)
    except UserError as error:
        return Damage(name, f"can't be read ({error.received})")
    return Damage(name, bad) if bad else None


def _bad_row(shard: Shard, norms: dict[str, Norms]) -> str | None:
    for index in range(len(shard)):
        for state, state_LD in shard[index].states.items():
            norm_L = state_LD.float().norm(dim=1)
            wrong = ~(norm_L.isfinite() & (norm_L > 0))
            if bool(wrong.any()):
                row = int(wrong.nonzero()[0])
                return f"has a zero or infinite row: {state} {row} of {shard.keys[index]!r}"
            if len(norm_L):
                norms[state].add(norm_L)
    return None
