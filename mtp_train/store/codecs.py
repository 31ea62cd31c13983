"""How states are written into a shard: as they are, without loss in fewer bytes, or rounded to eight bits.

Each sequence of a shard can be decoded alone. The same states give the same bytes. Knows no file and no model.

Shapes: T rows of a shard, L rows of one sequence, D hidden width, B sequences.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Protocol

import numpy as np
import torch
import zstandard
from torch import Tensor

from mtp_train.core.errors import UserError

LEVEL = 3
FP8 = torch.float8_e4m3fn


class Codec(Protocol):
    """Tensors are named by a suffix to the state's name: "" is the state's own.

    A codec with a "blocks" part (int64 [B + 1]) cuts its "" part at those bytes per sequence; all else is cut by rows.
    """

    parts: tuple[str, ...]  # suffixes that `decode` needs, cut to one sequence
    blocks: bool

    def encode(self, state_TD: Tensor, offsets: Sequence[int]) -> dict[str, Tensor]:
        """The stored tensors, by suffix; offsets [B + 1] bound the sequences."""
        ...

    def decode(self, parts: dict[str, Tensor], width: int, dtype: torch.dtype) -> Tensor:
        """One sequence's states [L, D]; `ValueError` for damaged bytes."""
        ...


class Raw:
    """The target's own numbers."""

    parts: tuple[str, ...] = ("",)
    blocks = False

    def encode(self, state_TD: Tensor, offsets: Sequence[int]) -> dict[str, Tensor]:
        return {"": state_TD}

    def decode(self, parts: dict[str, Tensor], width: int, dtype: torch.dtype) -> Tensor:
        return parts[""]


class Lossless:
    """Byte planes, compressed per sequence."""

    parts: tuple[str, ...] = ("",)
    blocks = True

    def encode(self, state_TD: Tensor, offsets: Sequence[int]) -> dict[str, Tensor]:
        compress = zstandard.ZstdCompressor(level=LEVEL, write_checksum=True).compress
        width = state_TD.dtype.itemsize
        byte_TDW = state_TD.contiguous().view(torch.uint8).unflatten(1, (-1, width))
        blocks = []
        for start, stop in pairwise(offsets):
            plane_WLD = byte_TDW[start:stop].permute(2, 0, 1).contiguous().numpy()
            blocks.append(compress(plane_WLD))
        edges = np.cumsum([0, *map(len, blocks)], dtype=np.int64)
        data = np.frombuffer(bytearray(b"".join(blocks)), dtype=np.uint8)
        return {"": torch.from_numpy(data), "blocks": torch.from_numpy(edges)}

    def decode(self, parts: dict[str, Tensor], width: int, dtype: torch.dtype) -> Tensor:
        try:
            plane = zstandard.ZstdDecompressor().decompress(parts[""].numpy().data)
        except zstandard.ZstdError as error:
            raise ValueError(str(error)) from error
        plane_WLD = torch.frombuffer(bytearray(plane), dtype=torch.uint8)
        plane_WLD = plane_WLD.view(dtype.itemsize, -1, width)
        return plane_WLD.permute(1, 2, 0).contiguous().view(dtype).flatten(1)


class Fp8:
    """e4m3 with one float32 scale per row: the row's largest entry becomes the format's largest number."""

    parts: tuple[str, ...] = ("", "scale")
    blocks = False

    def encode(self, state_TD: Tensor, offsets: Sequence[int]) -> dict[str, Tensor]:
        wide_TD = state_TD.float()
        scale_T = wide_TD.abs().amax(dim=1) / torch.finfo(FP8).max
        scale_T = torch.where(scale_T > 0, scale_T, torch.ones_like(scale_T))
        return {"": (wide_TD / scale_T[:, None]).to(FP8), "scale": scale_T}

    def decode(self, parts: dict[str, Tensor], width: int, dtype: torch.dtype) -> Tensor:
        return (parts[""].float() * parts["scale"][:, None]).to(dtype)


CODECS: dict[str, Codec] = {"raw": Raw(), "lossless": Lossless(), "fp8": Fp8()}


def find_codec(name: str) -> Codec:
    """The codec of that name."""
    if name not in CODECS:
        raise UserError("a store's codec must be one of " + ", ".join(CODECS), name, "choose one")
    return CODECS[name]
