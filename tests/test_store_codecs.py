"""Codecs: what is exact is exact for every bit pattern, what rounds says how much, and what repeats is kept once."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from stores import CHATS
from toys import conversation

from mtp_train.core.errors import UserError
from mtp_train.store.codecs import (
    CODECS,
    find_codec,
    join_planes,
    repeated_beginnings,
    split_planes,
)
from mtp_train.store.index import shard_name
from mtp_train.store.shards import encode_shard, open_shard, write_shard


def realistic(rows: int, seed: int = 0) -> torch.Tensor:
    """As a final norm writes them: rounded to bfloat16, times a weight per channel, rounded again."""
    random = torch.Generator().manual_seed(seed)
    normed = torch.randn(rows, 576, generator=random) * torch.rand(576, generator=random)
    return normed.bfloat16() * (1 + torch.rand(576, generator=random)).bfloat16()


def through(codec: str, state: torch.Tensor, offsets: list[int]) -> list[torch.Tensor]:
    """Encoded, then each sequence decoded alone, from the last to the first."""
    found = find_codec(codec)
    stored = found.encode(state, offsets)
    decode = found.decoder(
        {part: stored[part] for part in found.common}, state.shape[1], state.dtype
    )
    edges = stored["blocks"].tolist() if found.blocks else offsets
    cut = {"": edges} | {part: offsets for part in found.parts if part}
    return [
        decode({part: stored[part][cut[part][at] : cut[part][at + 1]] for part in found.parts})
        for at in reversed(range(len(offsets) - 1))
    ][::-1]


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """NaNs and signed zeros too."""
    return one.dtype == other.dtype and torch.equal(one.view(torch.uint8), other.view(torch.uint8))


def test_every_bfloat16_survives_its_planes() -> None:
    every = torch.arange(65536).to(torch.int32).short().view(torch.bfloat16).view(256, 256)
    planes = split_planes(every)
    assert planes.shape == (2, 256, 256)
    assert same_bits(join_planes(planes, torch.bfloat16), every)
    assert planes[0].view(-1)[0x3F80] == 127, "the exponent of 1.0"
    assert planes[1].view(-1)[0xBF80] == 0x80, "the sign of -1.0"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("codec", ["raw", "lossless"])
def test_an_exact_codec_keeps_every_bit(codec: str, dtype: torch.dtype) -> None:
    random = torch.Generator().manual_seed(1)
    bits = torch.randint(0, 256, (40, 24 * dtype.itemsize), generator=random, dtype=torch.uint8)
    state = bits.view(dtype)
    offsets = [0, 1, 1, 17, 40]
    for at, found in enumerate(through(codec, state, offsets)):
        assert same_bits(found, state[offsets[at] : offsets[at + 1]])


def test_rows_that_begin_several_sequences_are_found() -> None:
    """Rows named by letters; a leading run is shared, a repetition further on is not."""
    text = ["abcd", "abx", "abcy", "zab", "z"]
    state = torch.tensor([[ord(letter)] for letter in "".join(text)], dtype=torch.float32)
    offsets = [0, 4, 7, 11, 14, 15]
    shared, refs = repeated_beginnings(state, offsets)
    assert ["".join(text)[row] for row in shared] == ["a", "b", "c", "z"]
    assert [list(ref) for ref in refs] == [[0, 1, 2], [0, 1], [0, 1, 2], [3, 0, 1], [3]]


def test_what_begins_alike_is_kept_once() -> None:
    system, rest = realistic(200, seed=1), realistic(400, seed=2)
    state = torch.cat([system, rest[:100], system, rest[100:300], system[:150], rest[300:]])
    offsets = [0, 300, 700, 950]
    stored = CODECS["lossless"].encode(state, offsets)
    apart = CODECS["lossless"].encode(torch.cat([system, rest]), [0, 300, 600])
    assert sum(map(torch.Tensor.numel, stored.values())) < 1.02 * sum(
        map(torch.Tensor.numel, apart.values())
    )
    for at, found in enumerate(through("lossless", state, offsets)):
        assert same_bits(found, state[offsets[at] : offsets[at + 1]])


def test_two_equal_sequences_and_nothing_else() -> None:
    state = realistic(10).repeat(2, 1)
    one, other = through("lossless", state, [0, 10, 20])
    assert same_bits(one, state[:10]) and same_bits(other, state[:10])


def test_realistic_states_take_at_most_0_68_of_their_bytes_without_any_sharing() -> None:
    state = realistic(600)
    stored = CODECS["lossless"].encode(state, [0, 300, 600])
    size = sum(tensor.nbytes for tensor in stored.values())
    assert size <= 0.68 * state.nbytes


def test_fp8_rounds_each_number_to_four_bits_of_its_own() -> None:
    """e4m3: relative error of at most 1/16 down to 2^-15 of the row's largest number, whatever the row's size."""
    state = realistic(50) * torch.logspace(-6, 6, 50)[:, None].bfloat16()
    state[3, 5] = 3e4  # a massive activation
    state[4] = 0
    (found,) = through("fp8", state, [0, 50])
    assert found.dtype == torch.bfloat16
    assert torch.equal(found[4], state[4])
    exact, got = state.double(), found.double()
    large = exact.abs() > exact.abs().amax(dim=1, keepdim=True) * 2**-14
    error = ((got - exact).abs() / exact.abs())[large]
    assert float(error.max()) <= 1 / 16 + 1 / 256
    assert float(error.max()) > 1 / 64, "and it does round"


def test_an_unknown_codec_is_answered_with_the_known_ones() -> None:
    with pytest.raises(UserError, match="raw, lossless, fp8; received zip"):
        encode_shard(CHATS, {"post_norm": torch.zeros(22, 4)}, "zip")


def test_no_flipped_bit_of_a_lossless_block_is_read_as_something_else(tmp_path: Path) -> None:
    """Every byte of the shared rows and the blocks in turn: an error that names the shard, or the same states."""
    chats = [conversation(name, [1, 2, 3], [4, 5, 6]) for name in "ab"]
    state = realistic(12)[:, :8].contiguous()
    state[6:8] = state[:2]
    path = tmp_path / shard_name(0)
    write_shard(path, encode_shard(chats, {"post_norm": state}, "lossless"))
    whole = bytearray(path.read_bytes())
    places = [at for at in range(len(whole)) if whole[at : at + 4] == b"\x28\xb5\x2f\xfd"]
    refused = 0
    for at in range(places[0] - 4, len(whole)):
        changed = whole.copy()
        changed[at] ^= 1 << (at % 8)
        path.write_bytes(changed)
        try:
            found = [item.hidden for item in map(open_shard(path).__getitem__, range(2))]
        except UserError as error:
            assert shard_name(0) in str(error)
            refused += 1
        else:
            assert same_bits(torch.cat(found), state), f"byte {at} of {len(whole)}"
    assert refused > 0.8 * (len(whole) - places[0])
