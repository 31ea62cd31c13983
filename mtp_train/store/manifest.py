"""What a feature store says of itself. Readers refuse a store that doesn't say it, or says something else.

Knows no tensors.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from mtp_train.core.errors import UserError
from mtp_train.core.provenance import file_digest, read_json, versions, write_json

NAME = "manifest.json"
FORMAT = 1


@dataclass(frozen=True)
class ShardEntry:
    """One shard file. `loss_tokens` counts tokens with mask 1."""

    file: str
    sha256: str
    bytes: int
    sequences: int
    tokens: int
    loss_tokens: int


@dataclass(frozen=True)
class Contract:
    """What the features are: fixed before the first shard, the same for all."""

    target_hash: str
    state: str  # which hidden state the rows hold: "post_norm"
    hidden_size: int
    vocab_size: int
    dtype: str  # of the stored rows
    data_digest: str  # of the token sequences and masks, in order
    rows_per_shard: int
    rows_per_forward: int  # another packing rounds differently: shards of one store share it

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


@dataclass(frozen=True)
class Manifest:
    contract: Contract
    shards: tuple[ShardEntry, ...]
    gate: dict[str, Any]
    accounting: dict[str, Any]
    versions: dict[str, str] = field(default_factory=versions)
    format: int = FORMAT

    @property
    def sequences(self) -> int:
        return sum(shard.sequences for shard in self.shards)

    @property
    def tokens(self) -> int:
        return sum(shard.tokens for shard in self.shards)

    @property
    def loss_tokens(self) -> int:
        return sum(shard.loss_tokens for shard in self.shards)

    def save(self, folder: Path) -> None:
        write_json(folder / NAME, asdict(self))


def load_manifest(folder: Path) -> Manifest:
    """Read a store's manifest; a store without one is unfinished."""
    path = folder / NAME
    if not path.is_file():
        raise UserError(
            "a feature store must be complete",
            f"{folder} without {NAME}",
            "run precompute until it ends",
        )
    raw = read_json(path)
    if raw.get("format") != FORMAT:
        raise UserError(
            f"a store must have format {FORMAT}", raw.get("format"), "run precompute again"
        )
    missing = {item.name for item in fields(Contract)} - set(raw.get("contract", ()))
    if missing:
        raise UserError(
            "a manifest must say what its features are",
            f"no {sorted(missing)} in {path}",
            "run precompute again",
        )
    return Manifest(
        contract=Contract(**raw["contract"]),
        shards=tuple(ShardEntry(**entry) for entry in raw["shards"]),
        gate=raw["gate"],
        accounting=raw["accounting"],
        versions=raw["versions"],
    )


def verify_files(folder: Path, manifest: Manifest) -> None:
    """Compare every shard's size and hash with the manifest."""
    for shard in manifest.shards:
        path = folder / shard.file
        if (
            not path.is_file()
            or path.stat().st_size != shard.bytes
            or file_digest(path) != shard.sha256
        ):
            raise UserError(
                "a shard must be the file its manifest names",
                f"{path} missing or changed",
                f"delete {folder} and run precompute again",
            )
