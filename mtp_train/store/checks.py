"""Whether a store is what it says: hashes, counts, states. Knows no model and no tokenizer."""

from __future__ import annotations

from mtp_train.core.errors import UserError
from mtp_train.store.index import read_entries
from mtp_train.store.shards import REMAKE, FeatureStore


def verify_files(store: FeatureStore) -> None:
    """Compare every shard's size and hash with the index; `UserError` names the first that differs."""
    sizes = store.place.sizes()
    for entry in read_entries(store.index):
        if sizes.get(entry.file) != entry.bytes or store.place.digest(entry.file) != entry.sha256:
            raise UserError(
                "a shard must be the file its manifest names",
                f"{store.place}/{entry.file} missing or changed",
                REMAKE,
            )
