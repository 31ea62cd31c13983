"""A store at any fsspec address: the same bytes as in a folder, read by ranges. In memory, and on S3 if it can be."""

from __future__ import annotations

import contextlib
import importlib.util
import uuid
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from stores import CHATS, write_store

from mtp_train.core.errors import UserError
from mtp_train.store import places
from mtp_train.store.checks import delete_damaged, verify
from mtp_train.store.codecs import CODECS
from mtp_train.store.index import NAME as INDEX
from mtp_train.store.index import shard_name
from mtp_train.store.manifest import NAME
from mtp_train.store.places import Place, join, split
from mtp_train.store.shards import FeatureStore, describe_shard

S3_PACKAGES = ("s3fs", "moto", "flask")
needs_s3 = pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in S3_PACKAGES),
    reason="needs pip install s3fs 'moto[server]'",
)


@pytest.fixture
def memory() -> Iterator[str]:
    address = f"memory://{uuid.uuid4().hex}/features"
    yield address
    files = fsspec.filesystem("memory")
    files.rm(address.removeprefix("memory:/").rsplit("/", 1)[0], recursive=True)


@pytest.fixture
def s3(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A bucket on a server of this process."""
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    for name, value in {
        "AWS_ENDPOINT_URL": f"http://{host}:{port}",
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_DEFAULT_REGION": "us-east-1",
    }.items():
        monkeypatch.setenv(name, value)
    files = fsspec.filesystem("s3")
    files.mkdir("bucket")
    yield "s3://bucket/team/features"
    with contextlib.suppress(FileNotFoundError):
        files.rm("bucket", recursive=True)
    server.stop()
    type(files).clear_instance_cache()


def round_trip(address: str, folder: Path, codec: str) -> None:
    """Written there and to a folder: equal bytes, equal sequences, and damage is found."""
    states = ("post_norm", "layer_1")
    there = write_store(address, codec=codec, states=states)
    here = write_store(folder, codec=codec, states=states)
    assert there == here
    place = Place(address)
    assert place.names() == sorted([NAME, INDEX, *map(shard_name, range(3))])
    assert place.sizes() == Place(folder).sizes()
    for name in place.names():
        assert place.read(name) == (folder / name).read_bytes()
    store, local = FeatureStore(address), FeatureStore(folder)
    for index in (4, 0, 2, 1, 3):
        assert store[index].key == CHATS[index].key
        assert torch.equal(store[index].tokens, local[index].tokens)
        for state in states:
            assert torch.equal(store[index].states[state], local[index].states[state])
    assert store.lengths().tolist() == local.lengths().tolist()
    assert describe_shard(join(address, shard_name(1))).bytes == place.sizes()[shard_name(1)]
    verify(store).require_whole(address)
    place.write(shard_name(1), place.read(shard_name(1))[:-1])
    report = verify(FeatureStore(address))
    assert [damage.file for damage in report.damages] == [shard_name(1)]
    delete_damaged(store, report)
    assert place.names() == [INDEX, shard_name(0), shard_name(2)]
    with pytest.raises(UserError, match="must be complete"):
        FeatureStore(address)


@pytest.mark.parametrize("codec", sorted(CODECS))
def test_a_store_in_memory(memory: str, tmp_path: Path, codec: str) -> None:
    round_trip(memory, tmp_path, codec)


@needs_s3
@pytest.mark.parametrize("codec", sorted(CODECS))
@pytest.mark.filterwarnings("default")  # the server's and the client's own
def test_a_store_on_s3(s3: str, tmp_path: Path, codec: str) -> None:
    round_trip(s3, tmp_path, codec)


def test_a_remote_sequence_is_read_by_ranges(memory: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Past the object's first bytes, one joint request per sequence, of its rows alone."""
    monkeypatch.setattr(places, "FIRST", 16)
    write_store(memory)
    store = FeatureStore(memory)
    files = fsspec.filesystem("memory")
    asked: list[int] = []
    ranges = type(files).cat_ranges

    def counted(
        self: Any, paths: list[str], starts: Sequence[int], ends: Sequence[int], **more: Any
    ) -> Any:
        asked.append(sum(end - start for start, end in zip(starts, ends, strict=True)))
        return ranges(self, paths, starts, ends, **more)

    store[0]
    monkeypatch.setattr(type(files), "open", lambda *_a, **_k: pytest.fail("another request"))
    monkeypatch.setattr(type(files), "cat_ranges", counted)
    store[1]
    assert asked == [5 * (6 * 2 + 4 + 1)]


def test_writing_into_what_was_read_changes_no_file(tmp_path: Path) -> None:
    write_store(tmp_path)
    before = (tmp_path / shard_name(0)).read_bytes()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        FeatureStore(tmp_path)[0].hidden.zero_()
    assert (tmp_path / shard_name(0)).read_bytes() == before


def test_addresses() -> None:
    assert str(split("memory://a/b/shard")[0]) == "memory://a/b"
    assert split("folder/shard")[1] == "shard"
    assert (str(split("shard")[0]), join("s3://b/x/", "y")) == (".", "s3://b/x/y")
    assert Place("memory://a").local is False
    assert Place("folder").local is True


def test_a_place_that_can_not_be_written_is_an_error(tmp_path: Path) -> None:
    Place(tmp_path / "new" / "folder").require_writable()
    assert Place("memory://probe/x").names() == []
    Place("memory://probe/x").require_writable()
    assert Place("memory://probe/x").names() == []
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(UserError, match="must be writable"):
        Place(tmp_path / "file" / "features").require_writable()


def test_an_unknown_protocol_is_named() -> None:
    with pytest.raises(UserError, match=r"fsspec knows.*nowhere"):
        Place("nowhere://bucket")
