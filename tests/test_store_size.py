"""Opening a store costs the same with 10 and with 100,000 sequences: counted in objects opened and bytes read."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from stores import WIDTH, contract_of, write_store
from toys import VOCABULARY, conversation

from mtp_train.store import places
from mtp_train.store.index import IndexBuilder, ShardTokens, shard_name
from mtp_train.store.manifest import NAME, Manifest, ShardEntry
from mtp_train.store.places import Place
from mtp_train.store.shards import OPEN_SHARDS, FeatureStore, encode_shard, write_shard

PER_SHARD = 10


class Meter:
    """What was opened, and the bytes asked for."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.opened: list[str] = []
        self.bytes = 0
        meter, mapped, cat = self, places.Mapped, Place.read

        class Counted(mapped):  # type: ignore[misc, valid-type]
            def __init__(self, path: str) -> None:
                super().__init__(path)
                meter.opened.append(Path(path).name)

            def read(self, ranges: Sequence[tuple[int, int]]) -> list[np.ndarray]:
                meter.bytes += sum(stop - start for start, stop in ranges)
                return super().read(ranges)

        def read(place: Place, name: str) -> bytes:
            data = cat(place, name)
            meter.opened.append(name)
            meter.bytes += len(data)
            return data

        monkeypatch.setattr(places, "Mapped", Counted)
        monkeypatch.setattr(Place, "read", read)


def large_store(folder: Path, sequences: int, real: Sequence[int] = (0,)) -> None:
    """A store of shards alike: ten sequences of four tokens. Only the `real` shards are written."""
    chats = [conversation(str(index), [1, 2], [3, 4]) for index in range(PER_SHARD)]
    states = {"post_norm": torch.ones(4 * PER_SHARD, WIDTH, dtype=torch.bfloat16)}
    encoded = encode_shard(chats, states, "raw")
    for number in real:
        write_shard(folder / shard_name(number), encoded)
    tokens = torch.tensor([1, 2, 3, 4] * PER_SHARD, dtype=torch.int32)
    mask = torch.tensor([0, 0, 1, 1] * PER_SHARD, dtype=torch.uint8)
    text = ShardTokens(tokens, mask, torch.arange(0, 4 * PER_SHARD + 1, 4))
    builder = IndexBuilder(VOCABULARY)
    for number in range(sequences // PER_SHARD):
        entry = ShardEntry(shard_name(number), encoded.sha256, len(encoded.data), PER_SHARD, 40, 20)
        builder.add(entry, text)
    place = Place(folder)
    shards = sequences // PER_SHARD
    Manifest(contract_of(), builder.write(place), shards, {"rows": 1}, {}).save(place)


def test_opening_reads_as_much_of_100000_sequences_as_of_10(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    large_store(tmp_path / "small", 10)
    large_store(tmp_path / "large", 100_000, real=(0, 5_000))
    meter = Meter(monkeypatch)
    read = {}
    for name in ("small", "large"):
        meter.opened.clear()
        meter.bytes = 0
        store = FeatureStore(tmp_path / name)
        assert meter.opened == [NAME, "index.safetensors"], "no shard is opened"
        read[name] = meter.bytes
    assert len(store) == 100_000
    assert read["large"] < read["small"] + 100, "but for longer numbers in two headers"
    assert (tmp_path / "large" / NAME).stat().st_size < 2_000
    meter.opened.clear()
    assert store[50_003].key == "3"
    assert meter.opened == [shard_name(5_000)], "and then one"


def test_arrays_of_the_index_are_views_of_its_file(tmp_path: Path) -> None:
    large_store(tmp_path, 100_000)
    store = FeatureStore(tmp_path)
    mapped = store.index._file._data._map  # type: ignore[attr-defined]
    for array in (store.lengths(), store.loss_tokens(), store.index.starts):
        assert np.shares_memory(array, mapped), "a copy in memory"
    assert int(store.lengths().sum()) == store.manifest.tokens == 400_000
    assert int(store.loss_tokens().sum()) == store.manifest.loss_tokens == 200_000
    assert store.token_counts().tolist()[:6] == [0, 100_000, 100_000, 100_000, 100_000, 0]
    assert store.token_counts(trained=True).tolist()[:6] == [0, 0, 0, 100_000, 100_000, 0]


def test_few_shards_are_open_at_a_time(tmp_path: Path) -> None:
    count = 2 * OPEN_SHARDS
    large_store(tmp_path, PER_SHARD * count, real=range(count))
    store = FeatureStore(tmp_path)
    for index in range(len(store)):
        assert store[index].key == str(index % PER_SHARD)
    assert store.shard.cache_info().currsize == OPEN_SHARDS


def test_reading_a_sequence_asks_for_its_rows_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_store(tmp_path)
    store = FeatureStore(tmp_path)
    store[0]
    meter = Meter(monkeypatch)
    store.shard.cache_clear()
    store.shard(0)
    meter.bytes = 0
    store[1]
    assert meter.bytes == 5 * (WIDTH * 2 + 4 + 1)
