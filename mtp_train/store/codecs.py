"""How states are written into a shard: as they are, without loss in fewer bytes, or rounded to eight bits.

Each sequence of a shard can be decoded alone. The same states give the same bytes. Knows no file and no model.

Shapes: T rows of a shard, L rows of one sequence, D hidden width, B sequences.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Protocol

import numpy as np
import torch
import zstandard
from torch import Tensor

from mtp_train.core.errors import UserError

FP8 = torch.float8_e4m3fn
# A hash table of 64 entries finds next to no matches, which are all by chance here and cost more than they save: what
# is left is zstd's entropy coder.
ENTROPY = zstandard.ZstdCompressionParameters.from_level(1, hash_log=6, write_checksum=True)
CENTRE_ROWS = 512  # of a shard, for a channel's usual exponent

Decode = Callable[[dict[str, Tensor]], Tensor]


class Codec(Protocol):
    """Tensors are named by a suffix to the state's name: "" is the state's own.

    A codec with a "blocks" part (int64 [B + 1]) cuts its "" part at those bytes per sequence; all else is cut by rows.
    """

    parts: tuple[str, ...]  # suffixes of what one sequence is decoded from
    common: tuple[str, ...]  # suffixes of what all of them share, read once per shard
    blocks: bool

    def encode(self, state_TD: Tensor, offsets: Sequence[int]) -> dict[str, Tensor]:
        """The stored tensors, by suffix; offsets [B + 1] bound the sequences."""
        ...

    def decoder(self, common: dict[str, Tensor], width: int, dtype: torch.dtype) -> Decode:
        """What makes a sequence's parts its states [L, D]; it raises `ValueError` for damaged bytes."""
        ...


class Raw:
    """The target's own numbers."""

    parts: tuple[str, ...] = ("",)
    common: tuple[str, ...] = ()
    blocks = False

    def encode(self, state_TD: Tensor, offsets: Sequence[int]) -> dict[str, Tensor]:
        return {"": state_TD}

    def decoder(self, common: dict[str, Tensor], width: int, dtype: torch.dtype) -> Decode:
        return lambda parts: parts[""]


class Lossless:
    """Three savings, measured in docs/log.md:

    - Conversations that begin alike (a system prompt) have bit-equal states there: such rows are kept once per shard.
    - bfloat16 is split into exponents, coded in 2.6 bits, and signs with mantissas, which hardly compress; other
      dtypes into bytes.
    - Exponents are taken relative to their channel's usual one.
    """

    parts: tuple[str, ...] = ("",)
    common: tuple[str, ...] = ("shared",)
    blocks = True

    def encode(self, state_TD: Tensor, offsets: Sequence[int]) -> dict[str, Tensor]:
        plane_PTD = split_planes(state_TD)
        sample = plane_PTD[0, :: max(1, len(state_TD) // CENTRE_ROWS)]
        centre_D = sample.median(dim=0).values
        plane_PTD[0] -= centre_D  # modulo 256, as is its undoing
        shared_S, refs = repeated_beginnings(state_TD, offsets)
        compress = zstandard.ZstdCompressor(compression_params=ENTROPY).compress
        blocks = [
            _frames(compress, ref, plane_PTD[:, start + len(ref) : stop])
            for ref, (start, stop) in zip(refs, pairwise(offsets), strict=True)
        ]
        edges = np.cumsum([0, *map(len, blocks)], dtype=np.int64)
        return {
            "": _bytes(b"".join(blocks)),
            "blocks": torch.from_numpy(edges),
            "shared": _bytes(_frames(compress, centre_D.numpy(), plane_PTD[:, shared_S])),
        }

    def decoder(self, common: dict[str, Tensor], width: int, dtype: torch.dtype) -> Decode:
        centre_D, *planes = _unframe(common["shared"])

        def join(planes: list[Tensor]) -> Tensor:
            plane_PLD = torch.stack(planes).view(len(planes), -1, width)
            plane_PLD[0] += centre_D
            return join_planes(plane_PLD, dtype)

        shared_SD = join(planes)

        def decode(parts: dict[str, Tensor]) -> Tensor:
            ref_R, *planes = _unframe(parts[""])
            own_LD = join(planes)
            return torch.cat([shared_SD[ref_R.view(torch.int32)], own_LD]) if len(ref_R) else own_LD

        return decode


class Fp8:
    """e4m3 with one float32 scale per row: the row's largest entry becomes the format's largest number."""

    parts: tuple[str, ...] = ("", "scale")
    common: tuple[str, ...] = ()
    blocks = False

    def encode(self, state_TD: Tensor, offsets: Sequence[int]) -> dict[str, Tensor]:
        wide_TD = state_TD.float()
        scale_T = wide_TD.abs().amax(dim=1) / torch.finfo(FP8).max
        scale_T = torch.where(scale_T > 0, scale_T, torch.ones_like(scale_T))
        return {"": (wide_TD / scale_T[:, None]).to(FP8), "scale": scale_T}

    def decoder(self, common: dict[str, Tensor], width: int, dtype: torch.dtype) -> Decode:
        return lambda parts: (parts[""].float() * parts["scale"][:, None]).to(dtype)


CODECS: dict[str, Codec] = {"raw": Raw(), "lossless": Lossless(), "fp8": Fp8()}


def find_codec(name: str) -> Codec:
    """The codec of that name."""
    if name not in CODECS:
        raise UserError("a store's codec must be one of " + ", ".join(CODECS), name, "choose one")
    return CODECS[name]


def split_planes(state_TD: Tensor) -> Tensor:
    """Bytes that are alike, together: uint8 [P, T, D], the most significant first.

    bfloat16 gives its exponents and, in one byte, signs and mantissas.
    """
    if state_TD.dtype == torch.bfloat16:
        bits = state_TD.contiguous().view(torch.int16)
        exponent = (bits >> 7).to(torch.uint8)  # the conversion keeps the low eight bits
        rest = ((bits >> 8) & 0x80 | bits & 0x7F).to(torch.uint8)
        return torch.stack([exponent, rest])
    byte_TDP = state_TD.contiguous().view(torch.uint8).unflatten(1, (-1, state_TD.dtype.itemsize))
    return byte_TDP.permute(2, 0, 1).flip(0).contiguous()


def join_planes(plane_PLD: Tensor, dtype: torch.dtype) -> Tensor:
    """What `split_planes` undoes."""
    if dtype == torch.bfloat16:
        exponent, rest = plane_PLD[0].short(), plane_PLD[1].short()
        return ((rest & 0x80) << 8 | exponent << 7 | rest & 0x7F).view(dtype)
    return torch.stack(list(plane_PLD.flip(0)), dim=-1).view(dtype).flatten(1)


def repeated_beginnings(
    state_TD: Tensor, offsets: Sequence[int]
) -> tuple[np.ndarray, list[np.ndarray]]:
    """Rows that begin more than one sequence, bit for bit.

    Returns:
        The first place [S] of each such row, ascending, and for each sequence which of them it begins with (int32).
    """
    byte_TB = state_TD.contiguous().view(torch.uint8).numpy()
    row_T = byte_TB.view(np.dtype((np.void, byte_TB.shape[1]))).ravel()
    _, first, inverse, counts = np.unique(
        row_T, return_index=True, return_inverse=True, return_counts=True
    )
    origin_T, repeated_T = first[inverse], counts[inverse] > 1
    begins = []
    for start, stop in pairwise(offsets):
        unlike = np.flatnonzero(~repeated_T[start:stop])
        begins.append(origin_T[start : start + unlike[0] if len(unlike) else stop])
    shared_S = np.unique(np.concatenate(begins))
    return shared_S, [np.searchsorted(shared_S, begin).astype(np.int32) for begin in begins]


def _frames(compress: Callable[[bytes], bytes], first: np.ndarray, plane_PLD: Tensor) -> bytes:
    """An array and planes, each compressed, each behind its length."""
    pieces = [first.tobytes(), *(plane.contiguous().numpy().tobytes() for plane in plane_PLD)]
    packed = [compress(piece) for piece in pieces]
    return b"".join(len(piece).to_bytes(4, "little") + piece for piece in packed)


def _unframe(block: Tensor) -> list[Tensor]:
    """What `_frames` wrote, as uint8."""
    decompress = zstandard.ZstdDecompressor().decompress
    data = block.numpy().data
    pieces, at = [], 0
    while at < len(data):
        stop = at + 4 + int.from_bytes(data[at : at + 4], "little")
        try:
            piece = decompress(data[at + 4 : stop])
        except zstandard.ZstdError as error:
            raise ValueError(str(error)) from error
        pieces.append(_bytes(piece))
        at = stop
    return pieces


def _bytes(data: bytes) -> Tensor:
    return torch.from_numpy(np.frombuffer(bytearray(data), dtype=np.uint8))
