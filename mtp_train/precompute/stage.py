"""Text to features: packed prefill, shard by shard, resumable, behind the gate.

A shard is a unit of work fixed by the data's order and the row budget: the same bytes whichever rank makes it, and
however many there are. Beside each finished shard lies a note with its entry and what its gate saw: the note makes the
shard done. The manifest, written last, makes the store whole.

Encoding and writing run in a thread behind the target's forward.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mtp_train.batches.pack import fill
from mtp_train.core.dist import Ranks
from mtp_train.core.errors import UserError
from mtp_train.core.keys import END, NOTHING, key
from mtp_train.core.owned import is_temporary
from mtp_train.core.progress import progress, say
from mtp_train.core.provenance import sealed, unsealed, versions
from mtp_train.core.records import TokenizedConversation
from mtp_train.engine.clock import Clock
from mtp_train.models.identity import Identity, require_same
from mtp_train.precompute.gate import GateResult, Sample, check_rows, check_stored
from mtp_train.precompute.sources import StateSource, VllmConfig
from mtp_train.store.codecs import find_codec
from mtp_train.store.corpus import lengths_of, sequences_digest
from mtp_train.store.index import shard_name
from mtp_train.store.manifest import NAME, Contract, ShardEntry
from mtp_train.store.places import Place, join
from mtp_train.store.shards import encode_shard, finish_store, open_shard, write_shard

NOTE = "contract.json"
SHARD = re.compile(r"shard-\d+\.safetensors")
NAMED = 4  # of foreign names in a message
REFERENCE = "reference.json"  # what rule 4 of the gate compared; with it, it is not compared again
SPEED = "speed.json"  # what the last run measured, for plans
GATE_ROWS = 64  # of a sequence that the gate looks at; in every WHOLE-th shard one sequence up to WHOLE_ROWS
WHOLE = 16
WHOLE_ROWS = 4096


@dataclass(frozen=True)
class PrecomputeConfig:
    """How features are made.

    Attributes:
        states: which states to keep: post_norm, pre_norm, layer_<k>, eagle3 for three auxiliary layers, or
            spread_<n> for n that are spread evenly.
        codec: raw (as the target computes them), lossless, or fp8.
        rows_per_shard: row budget of a shard (one longer sequence makes a shard of its own).
        rows_per_forward: row budget of one packed prefill.
        gate_sequences: sequences per shard whose choices are compared with the engine's.
        tensor_parallel: ranks that hold one target together; groups of ranks work side by side.
        out: folder or fsspec address for the features (s3://...); empty: the run folder.
        live: store no features; training computes those of each pack when it comes to it.
        vllm: an environment with vLLM that captures the states in our engine's place.
    """

    states: list[str] = field(default_factory=lambda: ["post_norm"])
    codec: str = "raw"
    rows_per_shard: int = 16384
    rows_per_forward: int = 2048
    gate_sequences: int = key(2, END)
    tensor_parallel: int = key(1, NOTHING)
    out: str = key("", NOTHING)
    live: bool = False
    vllm: VllmConfig = field(default_factory=VllmConfig)

    def __post_init__(self) -> None:
        find_codec(self.codec)
        if not self.states:
            raise UserError("precompute.states must name a state", self.states, "add post_norm")
        for name in ("rows_per_shard", "rows_per_forward", "gate_sequences", "tensor_parallel"):
            if getattr(self, name) < 1:
                raise UserError(
                    f"precompute.{name} must be 1 or more", getattr(self, name), "raise it"
                )
        if self.live and (self.vllm.python or self.tensor_parallel > 1):
            raise UserError(
                "live features are computed by our engine, a whole target on each training rank",
                f"vllm.python={self.vllm.python!r}, tensor_parallel={self.tensor_parallel}",
                "take precompute.live=false, or leave these at their defaults",
            )


def contract_for(
    source: StateSource, sequences: Sequence[TokenizedConversation], config: PrecomputeConfig
) -> Contract:
    """What the store will say of itself."""
    return Contract(
        target_hash=source.target_hash,
        states=source.states,
        codec=config.codec,
        hidden_size=source.hidden_size,
        vocab_size=source.vocab_size,
        dtype=source.dtype,
        data_digest=sequences_digest(sequences),
        rows_per_shard=config.rows_per_shard,
        rows_per_forward=config.rows_per_forward,
        quantisation=source.quantisation,
        identity=source.identity,
    )


def plan_shards(lengths: Sequence[int] | np.ndarray, budget: int) -> list[range]:
    """Consecutive sequences whose rows fit the budget, as ranges of sequence numbers."""
    groups = fill(list(enumerate(np.asarray(lengths).tolist())), budget)
    return [range(group[0], group[-1] + 1) for group in groups]


@torch.inference_mode()
def precompute(
    source: StateSource,
    sequences: Sequence[TokenizedConversation],
    config: PrecomputeConfig,
    out: str | Path,
    accounting: dict[str, Any],
    ranks: Ranks,
) -> None:
    """Write the store of `sequences` to `out`, a folder or fsspec address; each unit of ranks makes its share."""
    place = Place(out)
    contract = contract_for(source, sequences, config)
    shards = plan_shards(lengths_of(sequences), config.rows_per_shard)
    if ranks.main:
        contract = _prepare(place, contract)
        _check_reference(source, sequences, place)
    ranks.wait()
    todo = _missing(place, len(shards))
    ranks.wait()  # all have looked before anyone adds to it
    if todo and ranks.main:
        place.remove(NAME)
    worker = _Worker(source, sequences, config, place, ranks)
    worker.run([(index, shards[index]) for index in ranks.mine(todo)], _name(out))
    ranks.wait()
    if ranks.main:
        _finish(place, contract, len(shards), accounting)
    ranks.wait()


class _Worker:
    """One unit's share of the shards: the target's forward here, encoding and writing one shard behind."""

    def __init__(
        self,
        source: StateSource,
        sequences: Sequence[TokenizedConversation],
        config: PrecomputeConfig,
        place: Place,
        ranks: Ranks,
    ) -> None:
        self.source, self.sequences, self.config = source, sequences, config
        self.place, self.ranks = place, ranks
        self.clock = Clock()

    def run(self, share: list[tuple[int, range]], name: str) -> None:
        """Make the shards, gate each one when it lies on disk, and note it."""
        lengths = lengths_of(self.sequences)
        total = int(sum(lengths[members.start : members.stop].sum() for _, members in share))
        title = f"precompute {name}"
        if self.ranks.units > 1:
            title += f" ({self.ranks.unit + 1} of {self.ranks.units})"
        shown, begin = self.ranks.main, time.perf_counter()
        with ThreadPoolExecutor(1) as writer, progress(total, title, "token", shown=shown) as bar:
            behind: _Made | None = None
            for index, members in share:
                made = self._make(index, members, bar)
                if self.ranks.leader:
                    made.entry = writer.submit(self._write, made)
                if behind:
                    self._gate(behind)
                behind = made
            if behind:
                self._gate(behind)
        if share:
            seconds = time.perf_counter() - begin
            speed = total / seconds
            say(f"{title}: {total} tokens, {speed:.0f} tokens/s; {_spent(self.clock)}")
            if shown:
                note = {"tokens_per_second": speed, "tokens": total, "source": self.source.name}
                self.place.write(SPEED, json.dumps(note).encode())

    def _make(self, index: int, members: range, bar: Any) -> _Made:
        found: list[dict[str, Tensor]] = []
        with self.clock("read"):
            chats = [self.sequences[member] for member in members]
        for pack in fill(
            [(chat, len(chat.tokens)) for chat in chats], self.config.rows_per_forward
        ):
            with self.clock("target"):
                found.append(self.source.capture(pack))
            bar.update(len(next(iter(found[-1].values()))))
        states = {name: torch.cat([pack[name] for pack in found]) for name in self.source.states}
        return _Made(index, chats, states)

    def _write(self, made: _Made) -> ShardEntry:
        """In the writer's thread."""
        with self.clock("encode"):
            check_rows(made.states, [chat.key for chat in made.chats], made.offsets)
            encoded = encode_shard(made.chats, made.states, self.config.codec)
        with self.clock("write"):
            return write_shard(join(self.place.address, shard_name(made.index)), encoded)

    def _gate(self, made: _Made) -> None:
        """Hold a written shard against the source's own choices; its note makes it done."""
        entry = made.entry.result() if made.entry else None
        result = GateResult()
        with self.clock("gate"):
            samples = []
            for member, rows in _sample(made, self.config.gate_sequences):
                chat, captured = made.chats[member], made.states_of(member)
                if entry:
                    shard = open_shard(join(self.place.address, entry.file))
                    check_stored(chat.key, captured, shard[member].states, self.config.codec)
                head = {name: state_LD[:rows] for name, state_LD in captured.items()}
                samples.append(Sample(chat.key, chat.tokens[:rows], head))
            self.source.check(samples, result)
        if entry:
            note = {"entry": asdict(entry), "gate": asdict(result)}
            _write_json(self.place, _note(made.index), note)


@dataclass
class _Made:
    """A shard's states in memory, and its file on the way."""

    index: int
    chats: list[TokenizedConversation]
    states: dict[str, Tensor]  # [T, D] each
    entry: Future[ShardEntry] | None = None

    @property
    def offsets(self) -> list[int]:
        return [0, *accumulate(len(chat.tokens) for chat in self.chats)]

    def states_of(self, member: int) -> dict[str, Tensor]:
        """One sequence's rows [L, D] of each state."""
        rows = slice(*self.offsets[member : member + 2])
        return {name: state_TD[rows] for name, state_TD in self.states.items()}


def _sample(made: _Made, count: int) -> list[tuple[int, int]]:
    """Members of a shard that the gate looks at, and how many rows of each: the same whoever makes the shard."""
    chosen = np.random.default_rng(made.index).permutation(len(made.chats))[:count].tolist()
    limits = [GATE_ROWS if made.index % WHOLE else WHOLE_ROWS, *[GATE_ROWS] * count]
    return [
        (member, min(len(made.chats[member].tokens), limit))
        for member, limit in zip(chosen, limits, strict=False)
    ]


def require_own_shards(place: Place, target_hash: str, identity: Identity) -> None:
    """Raise if shards of the same weights lie there that were made under another config.

    The data's digest proves the text, so what the text was made with may have changed.
    """
    earlier = _read_json(place, NOTE) if place.exists(NOTE) else {}
    if earlier.get("target_hash") == target_hash:
        remedy = "restore the target's files, or name another run folder or precompute.out"
        require_same(
            earlier.get("identity", {}), identity, f"shards in {place}", remedy, ("config",)
        )


def require_own_store(place: Place, **expected: Any) -> None:
    """Raise unless the place is new, empty, or a feature store whose contract says `expected`.

    Another run may have made it: its features are used where they are the same, and never replaced.
    """
    names = [name for name in place.names() if not is_temporary(name)]
    found = _read_json(place, NOTE) if NOTE in names else None
    if names and not (isinstance(found, dict) and {"target_hash", "data_digest"} <= set(found)):
        raise UserError(
            "features go to a place that is new, empty or a feature store",
            f"{place} with {', '.join(names[:NAMED])}",
            "name another precompute.out or another run folder",
        )
    differ = [
        f"{name} {found[name]}, not {value}"
        for name, value in expected.items()
        if found and name in found and found[name] != value
    ]
    if differ:
        raise UserError(
            "a place that holds other features is left as it is",
            f"{place}: {'; '.join(differ)}",
            "name another precompute.out or another run folder, or move that store away",
        )


def _prepare(place: Place, contract: Contract) -> Contract:
    """Make the place ready: it is new, or a store of the same contract, whose shards are kept.

    Returns:
        The contract to finish with: it says no more of the target than was recorded when its first shards were made.

    """
    place.require_writable()
    names = place.names()
    wanted = contract.as_dict()
    require_own_shards(place, contract.target_hash, contract.identity)
    require_own_store(place, **{key: value for key, value in wanted.items() if key != "identity"})
    if NOTE not in names:
        _write_json(place, NOTE, wanted)
        return contract
    earlier = _read_json(place, NOTE)
    recorded = earlier.get("identity")
    contract = replace(contract, identity=contract.identity if recorded else {})
    _write_json(place, NOTE, contract.as_dict())
    for name in names:  # an unfinished shard, or a killed writer's half
        orphan = SHARD.fullmatch(name) and _note_of(name) not in names
        if orphan or is_temporary(name):
            place.remove(name)
    return contract


def _check_reference(
    source: StateSource, sequences: Sequence[TokenizedConversation], place: Place
) -> None:
    """Rule 4 of the gate, unless it was passed for these shards with this version of transformers."""
    version = versions()["transformers"]
    known = _read_json(place, REFERENCE) if place.exists(REFERENCE) else {}
    if known.get("transformers") != version and len(sequences):
        compared = source.check_reference(sequences[0].tokens)
        _write_json(place, REFERENCE, {"transformers": version, **compared})


def _missing(place: Place, shards: int) -> list[int]:
    """Numbers of the shards that aren't done."""
    names = set(place.names())
    return [index for index in range(shards) if not {shard_name(index), _note(index)} <= names]


def _finish(place: Place, contract: Contract, shards: int, accounting: dict[str, Any]) -> None:
    entries, gate = [], GateResult()
    for index in range(shards):
        note = _read_json(place, _note(index))
        entries.append(ShardEntry(**note["entry"]))
        for name, value in note["gate"].items():
            setattr(gate, name, getattr(gate, name) + value)
    reference = _read_json(place, REFERENCE) if place.exists(REFERENCE) else {}
    told = asdict(gate) | {"reference": reference}
    manifest = finish_store(place.address, contract, entries, told, accounting)
    say(
        f"precompute {_name(place.address)}: {manifest.tokens} tokens in {shards} shards; "
        f"gate: {gate.rows} rows of {gate.sequences} sequences, {gate.ties} ties"
    )


def _write_json(place: Place, name: str, value: dict[str, Any]) -> None:
    place.write(name, json.dumps(sealed(value), indent=2).encode())


def _read_json(place: Place, name: str) -> Any:
    """A note of ours; a damaged one is no reason to make what it is about again unasked."""
    path, remedy = f"{place}/{name}", "delete it and run precompute again"
    try:
        return unsealed(json.loads(place.read(name)), path, remedy)
    except ValueError as error:
        if isinstance(error, UserError):
            raise
        raise UserError("a JSON file must be well-formed", f"{path}: {error}", remedy) from error


def _note(index: int) -> str:
    return _note_of(shard_name(index))


def _note_of(shard: str) -> str:
    return shard.removesuffix(".safetensors") + ".json"


def _name(address: str | Path) -> str:
    return str(address).rstrip("/").rsplit("/", 1)[-1]


def _spent(clock: Clock) -> str:
    """The parts by seconds, the longest one named first."""
    parts = sorted(clock.seconds.items(), key=lambda item: -item[1])
    longest = parts[0][0] if parts else "none"
    return f"longest: {longest} (" + ", ".join(f"{name} {s:.1f} s" for name, s in parts) + ")"
