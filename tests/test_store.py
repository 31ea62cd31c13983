"""Features on disk: what goes in comes out, the same bytes every time, and nothing damaged or foreign is read."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from toys import VOCABULARY, conversation, conversations

from mtp_train.core.errors import UserError
from mtp_train.core.records import TokenizedConversation
from mtp_train.store.manifest import NAME, Contract, Manifest, load_manifest, verify_files
from mtp_train.store.shards import FeatureStore, describe_shard, shard_name, write_shard

WIDTH = 6
CHATS = [
    conversation("a", [1, 2, 3], [4, 5]),
    conversation("b", [6], [7, 8, 9, 9]),
    conversation('c: ü "quoted"', [10, 11], []),
    conversation("d", [60, 0], [60, 59, 58]),
    conversation("e", [3, 3, 3, 3], [3]),
]
SHARDS = [[0, 1], [2], [3, 4]]


def states(chats: list[TokenizedConversation], dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """Rows that say which token they belong to."""
    tokens = [token for chat in chats for token in chat.tokens]
    rows = torch.arange(len(tokens), dtype=torch.float32)
    return torch.stack([rows + 100 * column for column in range(WIDTH)], dim=1).to(dtype)


def write_store(folder: Path, dtype: torch.dtype = torch.bfloat16) -> Manifest:
    shards = [[CHATS[index] for index in members] for members in SHARDS]
    entries = tuple(
        write_shard(folder / shard_name(number), shard, states(shard, dtype))
        for number, shard in enumerate(shards)
    )
    contract = Contract(
        "hash", "post_norm", WIDTH, VOCABULARY, str(dtype).removeprefix("torch."), "digest", 10, 10
    )
    manifest = Manifest(contract, entries, {"rows": 3}, {"used": 5})
    manifest.save(folder)
    return manifest


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_store(tmp_path)
    return tmp_path


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16])
def test_what_goes_in_comes_out(tmp_path: Path, dtype: torch.dtype) -> None:
    write_store(tmp_path, dtype)
    store = FeatureStore(tmp_path)
    assert len(store) == 5
    for members in SHARDS:
        hidden = states([CHATS[index] for index in members], dtype)
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


def test_counts(folder: Path) -> None:
    store = FeatureStore(folder)
    assert store.lengths() == [5, 5, 2, 5, 5]
    assert store.loss_tokens() == [2, 4, 0, 3, 1]
    counts = store.token_counts(VOCABULARY)
    assert counts.shape == (VOCABULARY,)
    assert {token: int(counts[token]) for token in (3, 9, 60, 0, 12)} == {
        3: 6,
        9: 2,
        60: 2,
        0: 1,
        12: 0,
    }
    assert int(counts.sum()) == sum(store.lengths()) == store.manifest.tokens == 22
    assert (store.manifest.sequences, store.manifest.loss_tokens) == (5, 10)


def test_the_same_input_gives_the_same_bytes(tmp_path: Path) -> None:
    first, second = tmp_path / "one", tmp_path / "two"
    assert write_store(first) == write_store(second)
    for number in range(len(SHARDS)):
        name = shard_name(number)
        assert (first / name).read_bytes() == (second / name).read_bytes()
    assert (first / NAME).read_bytes() == (second / NAME).read_bytes()
    assert sorted(path.name for path in first.iterdir()) == [NAME, *map(shard_name, range(3))], (
        "nothing is left over"
    )


def test_a_shards_entry_is_what_the_file_says(folder: Path) -> None:
    entry = describe_shard(folder / shard_name(0))
    assert entry == load_manifest(folder).shards[0]
    assert (entry.sequences, entry.tokens, entry.loss_tokens) == (2, 10, 6)
    assert entry.bytes == (folder / shard_name(0)).stat().st_size


def test_a_manifest_comes_back_as_it_was_saved(tmp_path: Path) -> None:
    saved = write_store(tmp_path)
    assert load_manifest(tmp_path) == saved


def test_one_state_too_few_is_our_own_mistake(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="one state per token"):
        write_shard(tmp_path / shard_name(0), CHATS, states(CHATS)[:-1])
    assert list(tmp_path.iterdir()) == []


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
        (edit(lambda value: value.update(format=2)), "must have format 1; received 2"),
        (edit(lambda value: value.pop("format")), "must have format 1; received None"),
        (
            edit(lambda value: value["contract"].pop("state")),
            r"must say what its features are; received no \['state'\]",
        ),
        (edit(lambda value: value["contract"].pop("target_hash")), "target_hash"),
        (edit(lambda value: value.pop("contract")), "must say what its features are"),
    ],
    ids=["missing", "damaged", "other format", "no format", "no state", "no target", "no contract"],
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
        ("state", "pre_norm"),
        ("hidden_size", 7),
        ("vocab_size", 62),
        ("dtype", "float32"),
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
    manifest = load_manifest(folder)
    verify_files(folder, manifest)
    damage(folder / shard_name(1))
    with pytest.raises(UserError, match=shard_name(1)):
        verify_files(folder, manifest)


@pytest.mark.parametrize(
    "damage",
    [lambda path: cut(path, 1), lambda path: path.write_bytes(b""), lambda path: path.unlink()],
    ids=["truncated", "empty", "gone"],
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


def test_a_store_is_as_large_as_its_rows(tmp_path: Path) -> None:
    """Rows are packed: no padding to the longest sequence, whatever the lengths."""
    chats = conversations(20)
    rows = sum(len(chat.tokens) for chat in chats)
    entry = write_shard(
        tmp_path / shard_name(0), chats, torch.zeros(rows, WIDTH, dtype=torch.bfloat16)
    )
    per_row = WIDTH * 2 + 4 + 1
    assert rows * per_row < entry.bytes < rows * per_row + 2000
