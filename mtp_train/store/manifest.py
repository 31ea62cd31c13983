"""What a feature store says of itself. Readers refuse a store that doesn't say it, or says something else.

It holds nothing per sequence and nothing per shard: that is the index's. Knows no tensors.
"""

from __future__ import annotations

import json
import re
from dataclasses import MISSING, asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from mtp_train.core.errors import UserError
from mtp_train.core.provenance import versions
from mtp_train.store.places import Place

NAME = "manifest.json"
FORMAT = 2
STATE = re.compile(r"post_norm|pre_norm|layer_(0|[1-9]\d*)")


@dataclass(frozen=True)
class ShardEntry:
    """One object of the store. `loss_tokens` counts tokens with mask 1."""

    file: str
    sha256: str
    bytes: int
    sequences: int
    tokens: int
    loss_tokens: int


@dataclass(frozen=True)
class Contract:
    """What the features are: fixed before the first shard, the same for all.

    Attributes:
        states: which hidden states each row holds: `post_norm` (what lm_head reads), `pre_norm` (before the final
            norm), `layer_<k>` (the residual stream after k decoder layers; 0 is the embeddings).
        dtype: of the states as they are read.
        codec: how they are written (`codecs.CODECS`); features that are not stored say `live`.
        data_digest: of the token sequences and masks, in order.
        rows_per_forward: another packing rounds differently, so the shards of one store share it.
        quantisation: of the target; a manifest that doesn't say it describes an unquantised one.
        identity: of the target and its text, by field (models.identity); a manifest of an earlier version has none.
    """

    target_hash: str
    states: tuple[str, ...]
    hidden_size: int
    vocab_size: int
    dtype: str
    codec: str
    data_digest: str
    rows_per_shard: int
    rows_per_forward: int
    quantisation: str = "none"
    identity: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.states or len(set(self.states)) < len(self.states):
            raise UserError(
                "a store must name its states, each once", self.states, "name at least one"
            )
        for state in self.states:
            if not STATE.fullmatch(state):
                raise UserError(
                    "a state must be post_norm, pre_norm or layer_<number of layers>",
                    state,
                    "correct its name",
                )

    def require(self, **expected: object) -> None:
        """Raise unless the named fields have the expected values."""
        for name, value in expected.items():
            found = getattr(self, name)
            if found != value:
                raise UserError(
                    f"features must have {name} {value}",
                    found,
                    "run precompute again for this target",
                )

    def require_states(self, *states: str) -> None:
        """Raise unless the store holds these states."""
        missing = [state for state in states if state not in self.states]
        if missing:
            raise UserError(
                f"features must hold the states {', '.join(states)}",
                ", ".join(self.states),
                "run precompute again with them in precompute.states",
            )

    def as_dict(self) -> dict[str, Any]:
        """As JSON gives it back: to compare with a note that was read."""
        return asdict(self) | {"states": list(self.states)}


@dataclass(frozen=True)
class Manifest:
    """Written last: it makes the store whole."""

    contract: Contract
    index: ShardEntry  # the index file, with the store's totals
    shards: int
    gate: dict[str, Any]
    accounting: dict[str, Any]
    versions: dict[str, str] = field(default_factory=versions)
    format: int = FORMAT

    @property
    def sequences(self) -> int:
        return self.index.sequences

    @property
    def tokens(self) -> int:
        return self.index.tokens

    @property
    def loss_tokens(self) -> int:
        return self.index.loss_tokens

    def save(self, place: Place) -> None:
        text = json.dumps(asdict(self), indent=2, ensure_ascii=False) + "\n"
        place.write(NAME, text.encode())


def load_manifest(address: str | Path) -> Manifest:
    """Read a store's manifest; a store without one is unfinished."""
    place = Place(address)
    if not place.exists(NAME):
        raise UserError(
            "a feature store must be complete",
            f"{place} without {NAME}",
            "run precompute until it ends",
        )
    raw = _parse(place)
    if raw.get("format") != FORMAT:
        raise UserError(
            f"a store must have format {FORMAT}", raw.get("format"), "run precompute again"
        )
    needed = {
        item.name for item in fields(Contract) if item.default is item.default_factory is MISSING
    }
    missing = needed - set(raw.get("contract", ()))
    missing |= {item.name for item in fields(Manifest)} - set(raw)
    if missing:
        raise UserError(
            "a manifest must say what its features are",
            f"no {sorted(missing)} in {place}/{NAME}",
            "run precompute again",
        )
    contract = raw["contract"] | {"states": tuple(raw["contract"]["states"])}
    known = {item.name: raw[item.name] for item in fields(Manifest)}
    return Manifest(
        **known | {"contract": Contract(**contract), "index": ShardEntry(**raw["index"])}
    )


def _parse(place: Place) -> dict[str, Any]:
    try:
        raw: dict[str, Any] = json.loads(place.read(NAME))
    except ValueError as error:
        raise UserError(
            "a JSON file must be well-formed",
            f"{place}/{NAME}: {error}",
            "delete it and run precompute again",
        ) from error
    return raw
