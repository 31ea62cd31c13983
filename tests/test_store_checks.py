"""verify, stat and sample: every kind of damage is found and named, and costs only itself."""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from stores import CHATS, contract_of, rows_of, write_store

from mtp_train.cli.main import main
from mtp_train.core.errors import UserError
from mtp_train.store.checks import Damage, delete_damaged, sample, stat, verify
from mtp_train.store.codecs import CODECS
from mtp_train.store.index import NAME as INDEX
from mtp_train.store.index import shard_name
from mtp_train.store.manifest import NAME
from mtp_train.store.shards import (
    FeatureStore,
    describe_shard,
    encode_shard,
    finish_store,
    write_shard,
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_store(tmp_path / "features", codec="lossless", states=("pre_norm", "post_norm"))
    return tmp_path / "features"


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-3] ^= 4
    path.write_bytes(bytes(data))


def swap(one: Path, other: Path) -> None:
    """Two shards of the same size change places."""
    aside = one.with_suffix(".aside")
    os.rename(one, aside)
    os.rename(other, one)
    os.rename(aside, other)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-7])


def command(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *arguments: str
) -> tuple[int, str, str]:
    monkeypatch.setattr(sys, "argv", ["mtp-train", "store", *arguments])
    status = main()
    captured = capsys.readouterr()
    return status, captured.out, captured.err


# --- verify ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("codec", sorted(CODECS))
def test_a_whole_store_is_whole(tmp_path: Path, codec: str) -> None:
    write_store(tmp_path, codec=codec, states=("pre_norm", "post_norm"))
    calls: list[None] = []
    report = verify(FeatureStore(tmp_path), lambda: calls.append(None))
    report.require_whole("it")
    assert report.damages == ()
    assert (report.shards, report.sequences, report.tokens, report.loss_tokens) == (3, 5, 22, 10)
    assert report.gate == {"rows": 3}
    assert len(calls) == 3
    norm_T = rows_of(CHATS[:2], torch.float32).norm(dim=1)
    close = {"rel": 0.05}
    assert report.norms["pre_norm"].rows == 22
    assert report.norms["pre_norm"].least == pytest.approx(float(norm_T.min()), **close)
    assert report.norms["pre_norm"].most == pytest.approx(float(norm_T.max()), **close)
    assert report.norms["pre_norm"].mean < report.norms["post_norm"].least


@pytest.mark.parametrize(
    ("damage", "named"),
    [
        (lambda folder: flip(folder / shard_name(1)), [f"{shard_name(1)} changed"]),
        (lambda folder: cut(folder / shard_name(2)), [f"{shard_name(2)} has "]),
        (lambda folder: (folder / shard_name(0)).unlink(), [f"{shard_name(0)} missing"]),
        (
            lambda folder: swap(folder / shard_name(0), folder / shard_name(2)),
            [f"{shard_name(0)} is {shard_name(2)}", f"{shard_name(2)} is {shard_name(0)}"],
        ),
        (lambda folder: flip(folder / INDEX), [f"{INDEX} changed"]),
    ],
    ids=["a flipped bit", "truncated", "missing", "swapped", "index"],
)
def test_damage_is_named_and_costs_only_itself(
    folder: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    damage: Callable[[Path], None],
    named: list[str],
) -> None:
    whole = {path.name: path.read_bytes() for path in folder.iterdir()}
    damage(folder)
    found = [str(item) for item in verify(FeatureStore(folder)).damages]
    assert len(found) == len(named)
    for got, expected in zip(found, named, strict=True):
        assert got.startswith(expected)
    status, out, errors = command(capsys, monkeypatch, "verify", str(folder))
    assert status == 2
    assert len(errors.strip().splitlines()[-1:]) == 1
    last = errors.strip().splitlines()[-1]
    assert last.startswith("mtp-train: error:") and "--delete-damaged" in last
    assert all(name in last and name in out for name in named)
    status, _, errors = command(capsys, monkeypatch, "verify", "--delete-damaged", str(folder))
    assert status == 2
    assert "they were removed: run precompute again" in errors
    bad = {name.split()[0] for name in named}
    assert {path.name for path in folder.iterdir()} == whole.keys() - bad - {NAME}
    remake(folder, whole)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == whole


def test_many_damages_are_one_line(folder: Path) -> None:
    report = verify(FeatureStore(folder))
    many = replace(report, damages=tuple(Damage(shard_name(at), "missing") for at in range(20)))
    with pytest.raises(UserError, match=rf"{shard_name(7)} missing and 12 more"):
        many.require_whole("it")


def remake(folder: Path, whole: dict[str, bytes]) -> None:
    """As precompute does: the shards that are not there, then the index and the manifest over all."""
    entries = []
    for number in range(3):
        path = folder / shard_name(number)
        if not path.exists():
            path.write_bytes(whole[path.name])
        entries.append(describe_shard(path))
    contract = contract_of(codec="lossless", states=("pre_norm", "post_norm"))
    finish_store(folder, contract, entries, {"rows": 3}, {"used": 5})


def test_a_whole_store_loses_nothing_to_delete_damaged(folder: Path) -> None:
    before = sorted(path.name for path in folder.iterdir())
    store = FeatureStore(folder)
    delete_damaged(store, verify(store))
    assert sorted(path.name for path in folder.iterdir()) == before


@pytest.mark.parametrize("value", [0.0, float("nan"), float("inf")])
def test_a_row_without_a_direction_is_damage_whatever_its_hash(
    tmp_path: Path, value: float
) -> None:
    rows = rows_of(CHATS)
    rows[7] = value
    entry = write_shard(
        tmp_path / shard_name(0), encode_shard(CHATS, {"post_norm": rows}, "lossless")
    )
    finish_store(tmp_path, contract_of(codec="lossless"), [entry], {"rows": 3}, {})
    (damage,) = verify(FeatureStore(tmp_path)).damages
    assert "zero or infinite row: post_norm 2 of 'b'" in str(damage)


def test_a_store_that_no_gate_passed_is_not_whole(tmp_path: Path) -> None:
    entry = write_shard(
        tmp_path / shard_name(0), encode_shard(CHATS, {"post_norm": rows_of(CHATS)}, "raw")
    )
    finish_store(tmp_path, contract_of(), [entry], {}, {})
    with pytest.raises(UserError, match=r"manifest.json has no result of the gate"):
        verify(FeatureStore(tmp_path)).require_whole("it")


def test_counts_that_differ_from_the_index_are_damage(tmp_path: Path) -> None:
    """An index over other shards than those that lie there, hashes and all."""
    states = {"post_norm": rows_of(CHATS)}
    entry = write_shard(tmp_path / shard_name(0), encode_shard(CHATS, states, "raw"))
    other = encode_shard(CHATS[::-1], states, "raw")
    finish_store(tmp_path, contract_of(), [entry], {"rows": 1}, {})
    index = (tmp_path / INDEX).read_bytes()
    manifest = json.loads((tmp_path / NAME).read_text())
    new = write_shard(tmp_path / shard_name(0), other)
    index = index.replace(bytes.fromhex(entry.sha256), bytes.fromhex(new.sha256))
    (tmp_path / INDEX).write_bytes(index)
    manifest["index"]["sha256"] = hashlib.sha256(index).hexdigest()
    (tmp_path / NAME).write_text(json.dumps(manifest))
    found = [str(damage) for damage in verify(FeatureStore(tmp_path)).damages]
    assert len(found) == 1
    assert f"{shard_name(0)} counts other tokens than the index" in found


# --- stat and sample ------------------------------------------------------------------------------------------


def test_stat_counts(tmp_path: Path) -> None:
    write_store(tmp_path, states=("layer_1", "post_norm"))
    stats = stat(FeatureStore(tmp_path))
    assert (stats.shards, stats.sequences, stats.tokens, stats.loss_tokens) == (3, 5, 22, 10)
    assert stats.state_bytes == {"layer_1": 22 * 12, "post_norm": 22 * 12}
    assert stats.raw_bytes == 22 * 12
    assert stats.bytes == sum(path.stat().st_size for path in tmp_path.glob("shard-*"))
    assert (stats.length_quantiles["shortest"], stats.length_quantiles["median"]) == (2, 5)


def test_stat_counts_every_part_of_a_state(tmp_path: Path) -> None:
    write_store(tmp_path, codec="fp8")
    assert stat(FeatureStore(tmp_path)).state_bytes == {"post_norm": 22 * (6 + 4)}


def test_stat_on_the_command_line(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    status, out, _ = command(capsys, monkeypatch, "stat", str(folder))
    found = json.loads(out)[str(folder)]
    assert status == 0
    assert found["sequences"] == 5
    assert found["contract"]["codec"] == "lossless"
    assert set(found["ratio_to_raw"]) == {"pre_norm", "post_norm"}


def test_a_samples_text_stands_beside_its_mask(folder: Path) -> None:
    def decode(tokens: list[int]) -> str:
        return " ".join(map(str, tokens))

    store = FeatureStore(folder)
    assert sample(store, 1, decode) == [(False, "6"), (True, "7 8 9 9")]
    assert sample(store, 2, decode) == [(False, "10 11")]


def test_an_address_that_is_no_store(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for address, message in (
        (str(tmp_path), "must be complete"),
        ("nowhere://x", "an address that fsspec knows"),
    ):
        status, _, errors = command(capsys, monkeypatch, "stat", address)
        assert (status, len(errors.splitlines())) == (2, 1)
        assert message in errors
