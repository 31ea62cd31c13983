"""Features on disk: what goes in comes out, the same bytes every time, and nothing damaged or foreign is read."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from stores import CHATS, SHARDS, WIDTH, contract_of, rows_of, write_store
from toys import VOCABULARY, conversations

from mtp_train.core.errors import UserError
from mtp_train.store.checks import verify_files
from mtp_train.store.codecs import CODECS
from mtp_train.store.index import NAME as INDEX
from mtp_train.store.index import read_entries, shard_name
from mtp_train.store.manifest import NAME, load_manifest
from mtp_train.store.shards import (
    FeatureStore,
    describe_shard,
    encode_shard,
    open_shard,
    write_shard,
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_store(tmp_path)
    return tmp_path


@pytest.mark.parametrize("codec", ["raw", "lossless"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16])
def test_what_goes_in_comes_out(tmp_path: Path, dtype: torch.dtype, codec: str) -> None:
    write_store(tmp_path, dtype, codec)
    store = FeatureStore(tmp_path)
    assert len(store) == 5
    for members in SHARDS:
        hidden = rows_of([CHATS[index] for index in members], dtype)
        row = 0
        for index in members:
            chat, found = CHATS[index], store[index]
            assert found.key == chat.key
            assert tuple(found.tokens.tolist()) == chat.tokens
            assert tuple(found.loss_mask.tolist()) == chat.loss_mask
            assert found.tokens.dtype == found.loss_mask.dtype == torch.int64
            assert found.hidden.dtype == dtype
            assert torch.equal(found.hidden, hidden[row : row + len(chat.tokens)])
            row += len(chat.tokens)


def test_sequences_are_read_in_any_order_and_again(folder: Path) -> None:
    store = FeatureStore(folder)
    assert [store[index].key for index in (4, 0, 2, 4, 1, 3)] == [
        CHATS[i].key for i in (4, 0, 2, 4, 1, 3)
    ]


@pytest.mark.parametrize("index", [-1, 5])
def test_a_sequence_that_is_not_there_is_an_index_error(folder: Path, index: int) -> None:
    with pytest.raises(IndexError, match=f"sequence {index} of 5"):
        FeatureStore(folder)[index]


def test_arrays_and_tuples_of_tokens_give_the_same_shard() -> None:
    @dataclass(frozen=True)
    class Row:
        key: str
        tokens: np.ndarray
        loss_mask: np.ndarray

    arrays = [Row(chat.key, np.array(chat.tokens), np.array(chat.loss_mask)) for chat in CHATS]
    states = {"post_norm": rows_of(CHATS)}
    assert encode_shard(arrays, states, "raw") == encode_shard(CHATS, states, "raw")


def test_counts(folder: Path) -> None:
    store = FeatureStore(folder)
    assert store.lengths().tolist() == [5, 5, 2, 5, 5]
    assert store.loss_tokens().tolist() == [2, 4, 0, 3, 1]
    counts = store.token_counts()
    assert counts.shape == (VOCABULARY,)
    assert {token: int(counts[token]) for token in (3, 9, 60, 0, 12)} == {
        3: 6,
        9: 2,
        60: 2,
        0: 1,
        12: 0,
    }
    trained = store.token_counts(trained=True)
    assert {token: int(trained[token]) for token in (3, 9, 60, 0)} == {3: 1, 9: 2, 60: 1, 0: 0}
    assert int(trained.sum()) == store.manifest.loss_tokens == 10
    assert int(counts.sum()) == sum(store.lengths()) == store.manifest.tokens == 22
    assert (store.manifest.sequences, store.manifest.shards) == (5, 3)


@pytest.mark.parametrize("codec", sorted(CODECS))
def test_the_same_input_gives_the_same_bytes(tmp_path: Path, codec: str) -> None:
    first, second = tmp_path / "one", tmp_path / "two"
    states = ("post_norm", "pre_norm", "layer_3")
    assert write_store(first, codec=codec, states=states) == write_store(
        second, codec=codec, states=states
    )
    names = [INDEX, NAME, *map(shard_name, range(3))]
    assert sorted(path.name for path in first.iterdir()) == names, "nothing is left over"
    for name in names:
        assert (first / name).read_bytes() == (second / name).read_bytes()


def test_a_shards_entry_is_what_the_file_says(folder: Path) -> None:
    entry = describe_shard(folder / shard_name(0))
    assert entry == read_entries(FeatureStore(folder).index)[0]
    assert (entry.sequences, entry.tokens, entry.loss_tokens) == (2, 10, 6)
    assert entry.bytes == (folder / shard_name(0)).stat().st_size


def test_a_manifest_comes_back_as_it_was_saved(tmp_path: Path) -> None:
    saved = write_store(tmp_path, states=("layer_1", "post_norm"))
    assert load_manifest(tmp_path) == saved
    assert json.loads(json.dumps(saved.contract.as_dict())) == saved.contract.as_dict()


@pytest.mark.parametrize("name", ["identity", "quantisation"])
def test_a_store_of_an_earlier_version_is_read(tmp_path: Path, name: str) -> None:
    saved = write_store(tmp_path)
    raw = json.loads((tmp_path / "manifest.json").read_text())
    del raw["contract"][name]
    (tmp_path / "manifest.json").write_text(json.dumps(raw))
    assert load_manifest(tmp_path).contract == saved.contract
    assert len(FeatureStore(tmp_path)) == len(CHATS)


def test_one_state_too_few_is_our_own_mistake() -> None:
    with pytest.raises(AssertionError, match="one state per token"):
        encode_shard(CHATS, {"post_norm": rows_of(CHATS)[:-1]}, "raw")


# --- several states -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("codec", ["raw", "lossless"])
def test_a_store_of_several_states_is_read_whole_or_in_part(tmp_path: Path, codec: str) -> None:
    """Layer k's rows hold k thousands more: a swap would show."""
    write_store(tmp_path, torch.float32, codec, states=("layer_0", "layer_2", "post_norm"))
    whole = FeatureStore(tmp_path)[1]
    assert list(whole.states) == ["layer_0", "layer_2", "post_norm"]
    assert torch.equal(whole.states["layer_2"], whole.states["layer_0"] + 1000)
    part = FeatureStore(tmp_path, states=["post_norm"])[1]
    assert list(part.states) == ["post_norm"]
    assert torch.equal(part.hidden, whole.states["post_norm"])


def test_a_state_that_a_store_lacks_is_named(folder: Path) -> None:
    with pytest.raises(UserError, match=r"must hold the states layer_7.*received post_norm"):
        FeatureStore(folder, states=["layer_7"])


@pytest.mark.parametrize("states", [(), ("post_norm", "post_norm"), ("hidden",), ("layer_01",)])
def test_a_store_must_name_its_states(states: tuple[str, ...]) -> None:
    with pytest.raises(UserError, match="state"):
        contract_of(states=states)


# --- refusals -------------------------------------------------------------------------------------------------


def edit(change: Callable[[dict], object]) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        value = json.loads((folder / NAME).read_text())
        change(value)
        (folder / NAME).write_text(json.dumps(value))

    return apply


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda folder: (folder / NAME).unlink(), "must be complete"),
        (lambda folder: (folder / NAME).write_text("{"), "well-formed"),
        (edit(lambda value: value.update(format=1)), "must have format 2; received 1"),
        (edit(lambda value: value.pop("format")), "must have format 2; received None"),
        (
            edit(lambda value: value["contract"].pop("states")),
            r"must say what its features are; received no \['states'\]",
        ),
        (edit(lambda value: value["contract"].pop("target_hash")), "target_hash"),
        (edit(lambda value: value.pop("contract")), "must say what its features are"),
        (edit(lambda value: value.pop("gate")), "gate"),
        (edit(lambda value: value["contract"].update(codec="zip")), "raw, lossless, fp8"),
        (lambda folder: (folder / INDEX).unlink(), "index must be the one"),
        (lambda folder: cut(folder / INDEX, 1), "index must be the one"),
    ],
    ids=[
        "missing",
        "damaged",
        "other format",
        "no format",
        "no states",
        "no target",
        "no contract",
        "no gate",
        "unknown codec",
        "no index",
        "cut index",
    ],
)
def test_a_manifest_that_does_not_say_what_it_must_is_refused(
    folder: Path, damage: Callable[[Path], None], message: str
) -> None:
    damage(folder)
    with pytest.raises(UserError, match=message):
        FeatureStore(folder)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("target_hash", "another"),
        ("hidden_size", 7),
        ("vocab_size", 62),
        ("dtype", "float32"),
        ("codec", "fp8"),
    ],
)
def test_features_of_something_else_are_refused_by_name(
    folder: Path, field: str, value: object
) -> None:
    contract = load_manifest(folder).contract
    contract.require(**{field: getattr(contract, field)})
    with pytest.raises(
        UserError, match=f"features must have {field} {value}; received {getattr(contract, field)}"
    ):
        contract.require(**{field: value})


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(bytes(data))


def cut(path: Path, by: int) -> None:
    path.write_bytes(path.read_bytes()[:-by])


@pytest.mark.parametrize(
    "damage",
    [
        lambda path: flip(path, -1),
        lambda path: flip(path, -40),
        lambda path: cut(path, 1),
        lambda path: path.unlink(),
    ],
    ids=["last byte", "a byte", "truncated", "gone"],
)
def test_a_changed_shard_is_named(folder: Path, damage: Callable[[Path], None]) -> None:
    store = FeatureStore(folder)
    verify_files(store)
    damage(folder / shard_name(1))
    with pytest.raises(UserError, match=shard_name(1)):
        verify_files(store)


@pytest.mark.parametrize(
    "damage",
    [
        lambda path: cut(path, 1),
        lambda path: cut(path, path.stat().st_size - 4),
        lambda path: path.write_bytes(b""),
        lambda path: path.write_bytes(b"\xff" * 64),
        lambda path: path.write_bytes((2).to_bytes(8, "little") + b"{}"),
        lambda path: path.unlink(),
    ],
    ids=["truncated", "no header", "empty", "noise", "no tensors", "gone"],
)
def test_a_shard_that_can_not_be_opened_is_named_and_the_others_are_read(
    folder: Path, damage: Callable[[Path], None]
) -> None:
    damage(folder / shard_name(1))
    store = FeatureStore(folder)
    assert store[0].key == "a"
    assert store[3].key == "d"
    with pytest.raises(UserError, match=shard_name(1)):
        store[2]


def test_a_damaged_block_of_the_lossless_codec_is_found_on_reading_and_named(
    tmp_path: Path,
) -> None:
    """Without any hashing: the frames carry checksums."""
    long = replace(CHATS[0], tokens=(1,) * 50, loss_mask=(1,) * 50)
    states = {"post_norm": torch.randn(50, WIDTH, generator=torch.Generator().manual_seed(0))}
    write_shard(tmp_path / shard_name(0), encode_shard([long], states, "lossless"))
    assert torch.equal(open_shard(tmp_path / shard_name(0))[0].hidden, states["post_norm"])
    data = (tmp_path / shard_name(0)).read_bytes()
    flip(tmp_path / shard_name(0), data.index(b"\x28\xb5\x2f\xfd") + 200)
    with pytest.raises(UserError, match=rf"{shard_name(0)}, sequence 'a'"):
        open_shard(tmp_path / shard_name(0))[0]


def test_a_store_is_as_large_as_its_rows(tmp_path: Path) -> None:
    """Rows are packed: no padding to the longest sequence, whatever the lengths."""
    chats = conversations(20)
    rows = sum(len(chat.tokens) for chat in chats)
    states = {"post_norm": torch.zeros(rows, WIDTH, dtype=torch.bfloat16)}
    entry = write_shard(tmp_path / shard_name(0), encode_shard(chats, states, "raw"))
    per_row = WIDTH * 2 + 4 + 1
    assert rows * per_row < entry.bytes < rows * per_row + 2000
