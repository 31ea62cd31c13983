"""Write and read shards: packed rows in safetensors, random access by sequence, memory-mapped where they are local.

A shard holds each state's tensors (named `<state>` and `<state>.<part>`, see codecs), `tokens` int32 [rows],
`loss_mask` uint8 [rows] and `offsets` int64 [sequences + 1]; its note names sequences, states and codec. Knows no model
and no order of training.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from mtp_train.core.errors import UserError
from mtp_train.store import index as indexing
from mtp_train.store.codecs import find_codec
from mtp_train.store.index import IndexBuilder, ShardTokens, StoreIndex, shard_name
from mtp_train.store.layout import TensorFile, pack
from mtp_train.store.manifest import Contract, Manifest, ShardEntry, load_manifest
from mtp_train.store.places import Place, split

OPEN_SHARDS = 32  # mapped at a time
DAMAGE = (
    ValueError,
    KeyError,
    IndexError,
    TypeError,
    RuntimeError,
)  # what parsing damaged bytes ends in
REMAKE = "run `mtp-train store verify --delete-damaged` on its store, then precompute again"


class TokenSequence(Protocol):
    """What a shard takes of a conversation: tuples or integer arrays, as long as each other."""

    @property
    def key(self) -> str: ...
    @property
    def tokens(self) -> Sequence[int] | np.ndarray: ...
    @property
    def loss_mask(self) -> Sequence[int] | np.ndarray: ...


@dataclass(frozen=True)
class FeatureSequence:
    """One conversation's rows."""

    key: str
    tokens: Tensor  # [L] int64
    loss_mask: Tensor  # [L] int64
    states: dict[str, Tensor]  # [L, D] each, in the store's dtype

    @property
    def hidden(self) -> Tensor:
        """The first state that the store was opened with; of most stores, the only one."""
        return next(iter(self.states.values()))


@dataclass(frozen=True)
class EncodedShard:
    """A shard's bytes, ready to be written."""

    data: bytes
    sha256: str
    sequences: int
    tokens: int
    loss_tokens: int


def encode_shard(
    sequences: Sequence[TokenSequence], states: dict[str, Tensor], codec: str
) -> EncodedShard:
    """Lay out one shard in memory. The same input gives the same bytes.

    Args:
        states: by name, the sequences' rows end to end [T, D], on the CPU, all of one shape and dtype.
        codec: a name of `codecs.CODECS`.
    """
    lengths = [len(sequence.tokens) for sequence in sequences]
    offsets = np.cumsum([0, *lengths], dtype=np.int64)
    mask = _join([sequence.loss_mask for sequence in sequences], np.uint8)
    first = next(iter(states.values()))
    for state_TD in states.values():
        assert len(state_TD) == offsets[-1] == len(mask), "one state per token"
        assert (state_TD.shape, state_TD.dtype) == (first.shape, first.dtype), "states are alike"
    tensors = {
        "tokens": _join([sequence.tokens for sequence in sequences], np.int32),
        "loss_mask": mask,
        "offsets": torch.from_numpy(offsets),
    }
    for name, state_TD in states.items():
        parts = find_codec(codec).encode(state_TD, offsets.tolist())
        tensors |= {_part(name, suffix): tensor for suffix, tensor in parts.items()}
    note = {
        "codec": codec,
        "states": list(states),
        "dtype": str(first.dtype).removeprefix("torch."),
        "width": first.shape[1],
        "keys": [sequence.key for sequence in sequences],
    }
    data = pack(tensors, note)
    return EncodedShard(
        data, hashlib.sha256(data).hexdigest(), len(lengths), len(mask), int(mask.sum())
    )


def write_shard(address: str | Path, encoded: EncodedShard) -> ShardEntry:
    """Write a whole shard at once, to a path or an fsspec address."""
    place, name = split(address)
    place.write(name, encoded.data)
    return ShardEntry(
        name,
        encoded.sha256,
        len(encoded.data),
        encoded.sequences,
        encoded.tokens,
        encoded.loss_tokens,
    )


def describe_shard(address: str | Path) -> ShardEntry:
    """The entry of a finished shard; reads all of it for the hash."""
    place, name = split(address)
    shard = open_shard(address)
    text = shard.text()
    return ShardEntry(
        name,
        place.digest(name),
        shard.bytes,
        len(shard),
        len(text.tokens),
        int(text.loss_mask.sum()),
    )


def finish_store(
    address: str | Path,
    contract: Contract,
    entries: Sequence[ShardEntry],
    gate: dict[str, Any],
    accounting: dict[str, Any],
) -> Manifest:
    """Write index and manifest over finished shards, in the order of `entries`; reads their tokens and masks."""
    place = Place(address)
    builder = IndexBuilder(contract.vocab_size)
    for entry in entries:
        builder.add(entry, _open(place, entry.file).text())
    manifest = Manifest(contract, builder.write(place), len(entries), gate, accounting)
    with suppress(UserError):  # a damaged one, or none
        earlier = load_manifest(address)
        if (earlier.contract, earlier.index) == (manifest.contract, manifest.index):
            return earlier  # another run may go by its bytes
    manifest.save(place)
    return manifest


class Shard:
    """One opened shard: random access to its sequences. Damaged bytes are a `UserError` that names it."""

    def __init__(self, file: TensorFile, name: str, states: Sequence[str] | None) -> None:
        self._file, self.name, self.bytes = file, name, file.bytes
        note = file.note
        self.keys: list[str] = note["keys"]
        self.states: tuple[str, ...] = tuple(states or note["states"])
        self._codec = find_codec(note["codec"])
        dtype: torch.dtype = getattr(torch, note["dtype"])
        whole = self._read_whole()
        self._offsets: list[int] = whole["offsets"].tolist()
        self._edges: dict[str, list[int]] = {
            name: whole[f"{name}.blocks"].tolist() if self._codec.blocks else self._offsets
            for name in self.states
        }
        self._decoders = {
            state: self._codec.decoder(
                {part: whole[_part(state, part)] for part in self._codec.common},
                note["width"],
                dtype,
            )
            for state in self.states
        }

    def __len__(self) -> int:
        return len(self.keys)

    def __getitem__(self, index: int) -> FeatureSequence:
        start, stop = self._offsets[index : index + 2]
        wanted = [("tokens", start, stop), ("loss_mask", start, stop)]
        for state in self.states:
            edges = self._edges[state]
            wanted.append((state, edges[index], edges[index + 1]))
            wanted += [(_part(state, part), start, stop) for part in self._codec.parts if part]
        try:
            tokens, mask, *stored = self._file.cut(wanted)
            states = self._decode(stored)
        except DAMAGE as error:
            raise _damaged(f"{self.name}, sequence {self.keys[index]!r}: {error}") from error
        return FeatureSequence(self.keys[index], tokens.long(), mask.long(), states)

    def text(self) -> ShardTokens:
        """Tokens and masks of the whole shard."""
        names = ("tokens", "loss_mask", "offsets")
        return ShardTokens(*self._file.cut([(name, 0, self._file.rows(name)) for name in names]))

    def _read_whole(self) -> dict[str, Tensor]:
        """What is needed of every sequence, by one read."""
        shared = ("blocks", *self._codec.common) if self._codec.blocks else self._codec.common
        names = ["offsets", *(_part(state, part) for state in self.states for part in shared)]
        found = self._file.cut([(name, 0, self._file.rows(name)) for name in names])
        return dict(zip(names, found, strict=True))

    def _decode(self, stored: list[Tensor]) -> dict[str, Tensor]:
        """States of the tensors read for them, some per state, in order."""
        parts = self._codec.parts
        groups = [stored[at : at + len(parts)] for at in range(0, len(stored), len(parts))]
        return {
            state: self._decoders[state](dict(zip(parts, group, strict=True)))
            for state, group in zip(self.states, groups, strict=True)
        }


def open_shard(address: str | Path, states: Sequence[str] | None = None) -> Shard:
    """Open a shard by its own address; all its states, or those named."""
    return _open(*split(address), states)


class FeatureStore:
    """Random access to a finished store by sequence index.

    Opening reads the manifest and maps the index; a shard is opened when one of its sequences is first asked for.

    Args:
        address: a folder or an fsspec address.
        states: those to read, in this order; all of them by default.
        checked: compare each file with the hash that the index names, once, before anything of it is used (of a remote
            file the size, since its hash would fetch all of it): starting stays quick however large the store is.
    """

    def __init__(
        self, address: str | Path, states: Sequence[str] | None = None, *, checked: bool = False
    ) -> None:
        self.place = Place(address)
        self.manifest: Manifest = load_manifest(address)
        contract = self.manifest.contract
        find_codec(contract.codec)
        contract.require_states(*(states or ()))
        self.states: tuple[str, ...] = tuple(states or contract.states)
        if checked:
            _require_bytes(self.place, self.manifest.index)
        self.index = _open_index(self.place, self.manifest)
        self._unchecked = set(range(self.manifest.shards)) if checked else set()
        self.shard = lru_cache(maxsize=OPEN_SHARDS)(self._shard)

    def __len__(self) -> int:
        return self.manifest.sequences

    def __getitem__(self, index: int) -> FeatureSequence:
        if not 0 <= index < len(self):
            raise IndexError(f"sequence {index} of {len(self)}")
        number, member = self.index.locate(index)
        return self.shard(number)[member]

    def read(self, indices: Sequence[int]) -> list[FeatureSequence]:
        """These sequences, in this order."""
        return [self[index] for index in indices]

    def lengths(self) -> np.ndarray:
        """Tokens of every sequence, in order: int32 [sequences], a view of the index."""
        return self.index.lengths

    def loss_tokens(self) -> np.ndarray:
        """Tokens with mask 1 of every sequence, in order: int32 [sequences], a view of the index."""
        return self.index.loss_tokens

    def token_counts(self, *, trained: bool = False) -> Tensor:
        """How often each token stands in the store, or is trained: int64 [vocabulary]."""
        return self.index.token_counts(trained)

    def _shard(self, number: int) -> Shard:
        if number in self._unchecked:
            _require_bytes(self.place, self.index.entry(number))
            self._unchecked.remove(number)
        return _open(self.place, shard_name(number), self.states)


def _open_index(place: Place, manifest: Manifest) -> StoreIndex:
    try:
        file = TensorFile(place.open(manifest.index.file))
        if file.rows("lengths") != manifest.sequences or file.rows("bytes") != manifest.shards:
            raise ValueError(f"{file.rows('lengths')} sequences in {file.rows('bytes')} shards")
    except (ValueError, KeyError, FileNotFoundError) as error:
        raise UserError(
            "a store's index must be the one its manifest names",
            f"{place}/{indexing.NAME}: {error}",
            "run precompute again: it keeps the shards and writes the index anew",
        ) from error
    return StoreIndex(file)


def read_header(place: Place, name: str) -> TensorFile:
    """Open a shard no further than its header."""
    try:
        return TensorFile(place.open(name))
    except (ValueError, FileNotFoundError) as error:
        raise _damaged(f"{place}/{name}: {error}") from error


def _open(place: Place, name: str, states: Sequence[str] | None = None) -> Shard:
    file = read_header(place, name)
    try:
        return Shard(file, f"{place}/{name}", states)
    except DAMAGE as error:
        raise _damaged(f"{place}/{name}: {error}") from error


def _require_bytes(place: Place, entry: ShardEntry) -> None:
    """Raise unless a file has the bytes that the store was written with."""
    same = place.exists(entry.file) and place.open(entry.file).size == entry.bytes
    if not same or (place.local and place.digest(entry.file) != entry.sha256):
        raise UserError(
            "a shard must be the file its manifest names",
            f"{place}/{entry.file} {'has other bytes' if same else 'is gone or has another size'}",
            REMAKE,
        )


def _damaged(what: str) -> UserError:
    return UserError("a shard must be a whole safetensors file of this format", what, REMAKE)


def _part(state: str, suffix: str) -> str:
    return f"{state}.{suffix}" if suffix else state


def _join(values: Sequence[Any], dtype: type) -> Tensor:
    return torch.from_numpy(np.concatenate([np.asarray(value, dtype=dtype) for value in values]))
