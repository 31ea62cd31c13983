"""Attention of blocks that are drafted at once, for training: rows without queries, and blocks of rows that read them.

A block hangs on a row of a document, its start. Its rows see the document's context rows up to the start, and the rows
of their own block, both ways or causally; never another block. Context rows have keys and values alone.

    context   k[0] .. k[start] | block   b0  b1  b2
    row b1    see       see    |         see see see (causal: -)

Blocks of one document run some at a time, as dense attention under a mask, forward and backward: memory is linear
in what is packed. Holds the keys and values of the context, once per layer, and no other state.

Shapes: T context rows, N blocks of B rows (each, or each its own number), R rows of all, H query heads, G key/value
heads, d key width, w value width.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from mtp_train.attention.interface import AttentionRule, as_autocast, attend

TILE_ROWS = 128  # rows of blocks that run at once


@dataclass(frozen=True)
class BlockLayout:
    """Where blocks hang, on the host.

    Attributes:
        begins: first context row of each block's document, rising.
        starts: the context row that each hangs on, rising.
        rows: B; or of each block.
        causal: whether a block's row sees only those of its block before it.
        after: positions between the start and the block's first row.
    """

    begins: Sequence[int]
    starts: Sequence[int]
    rows: int | Sequence[int]
    causal: bool = False
    after: int = 1

    @property
    def ends(self) -> np.ndarray:
        """Index of the row after each block's last, with 0 in front [N + 1]."""
        rows = self.rows
        each = [rows] * len(self.starts) if isinstance(rows, int) else rows
        return np.concatenate([[0], np.cumsum(np.asarray(each, dtype=np.int64))])


@dataclass(frozen=True)
class _Tile:
    rows: slice  # of the blocks
    context: slice
    seen: Tensor | None  # bool [rows, context + rows]; none: all

    def parts(
        self, query: Tensor, key_TGd: Tensor, value_TGw: Tensor, key: Tensor, value: Tensor
    ) -> tuple[Tensor, ...]:
        """Views of what the tile reads."""
        own, context = self.rows, self.context
        return query[own], key_TGd[context], value_TGw[context], key[own], value[own]


class BlockContext:
    """The blocks' attention context."""

    def __init__(self, layout: BlockLayout) -> None:
        self.layout = layout
        self._stored: dict[int, tuple[Tensor, Tensor]] = {}
        self._tiles: dict[int | None, list[_Tile]] = {}

    def store(self, layer: int, key_TGd: Tensor, value_TGw: Tensor) -> None:
        """Keep the context rows of a layer."""
        self._stored[layer] = as_autocast(key_TGd), as_autocast(value_TGw)

    def __call__(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, rule: AttentionRule
    ) -> Tensor:
        """query [R, H, d], key [R, G, d], value [R, G, w] of the blocks, one after the other -> [R, H, w]."""
        assert rule.softcap is None and rule.sinks is None, "blocks have neither caps nor sinks"
        query, key, value = (as_autocast(rows) for rows in (query, key, value))
        stored = self._stored[layer]
        tiles = self._tiled(rule.window, query.device)
        out: Tensor = _Blocks.apply(query, *stored, key, value, tiles, rule.scaling)
        return out

    def _tiled(self, window: int | None, device: torch.device) -> list[_Tile]:
        if window not in self._tiles:
            self._tiles[window] = list(self._cut(window, device))
        return self._tiles[window]

    def _cut(self, window: int | None, device: torch.device) -> Iterator[_Tile]:
        layout, ends = self.layout, self.layout.ends
        begins, starts = np.asarray(layout.begins), np.asarray(layout.starts)
        edges = [0, *(np.flatnonzero(np.diff(begins)) + 1).tolist(), len(begins)]
        for low, high in _parts(ends, edges):
            start_B = starts[low:high]
            begin, end = int(begins[low]), int(start_B.max()) + 1
            if window is not None:
                begin = max(begin, int(start_B.min()) + layout.after - window + 1)
                begin = min(begin, end)
            rows_B = np.diff(ends[low : high + 1])
            seen = _seen(layout, start_B, rows_B, np.arange(begin, end), window)
            mask = None
            if not seen.all():
                mask = torch.from_numpy(seen).to(device)
            yield _Tile(slice(int(ends[low]), int(ends[high])), slice(begin, end), mask)


def _parts(ends: np.ndarray, edges: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Blocks that run at once: of one document, TILE_ROWS rows of them or one block."""
    for low, last in pairwise(edges):
        while low < last:
            high = int(np.searchsorted(ends, ends[low] + TILE_ROWS, side="right")) - 1
            high = min(max(high, low + 1), last)
            yield low, high
            low = high


class _Blocks(torch.autograd.Function):
    """Attention tile by tile; the backward pass computes each tile anew, so that none is kept."""

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key_TGd: Tensor,
        value_TGw: Tensor,
        key: Tensor,
        value: Tensor,
        tiles: list[_Tile],
        scaling: float,
    ) -> Tensor:
        ctx.save_for_backward(query, key_TGd, value_TGw, key, value)
        ctx.tiles, ctx.scaling = tiles, scaling
        out = query.new_empty(*query.shape[:2], value.shape[-1])
        for tile in tiles:
            parts = tile.parts(query, key_TGd, value_TGw, key, value)
            out[tile.rows] = _attend(parts, tile.seen, scaling)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors
        totals = [torch.zeros_like(one, dtype=_exact(one)) for one in saved]
        for tile in ctx.tiles:
            with torch.enable_grad():
                parts = [one.detach().requires_grad_() for one in tile.parts(*saved)]
                out = _attend(parts, tile.seen, ctx.scaling)
            found = torch.autograd.grad(out, parts, grad[tile.rows])
            for total, one in zip(tile.parts(*totals), found, strict=True):
                total += one
        return *(total.to(one.dtype) for total, one in zip(totals, saved, strict=True)), None, None


def _attend(parts: Sequence[Tensor], seen: Tensor | None, scaling: float) -> Tensor:
    """Of one tile: its rows, the context rows that any of them sees, its own keys and values."""
    query, key_CGd, value_CGw, key, value = parts
    keys, values = torch.cat([key_CGd, key]), torch.cat([value_CGw, value])
    rows, keys, values = (part.transpose(0, 1).unsqueeze(0) for part in (query, keys, values))
    out = attend(rows, keys, values, scaling, causal=False, mask=seen)
    return out.squeeze(0).transpose(0, 1)


def _exact(rows: Tensor) -> torch.dtype:
    return torch.promote_types(rows.dtype, torch.float32)


def _seen(
    layout: BlockLayout,
    start_B: np.ndarray,
    rows_B: np.ndarray,
    column: np.ndarray,
    window: int | None,
) -> np.ndarray:
    """Which context rows and rows of the tile's blocks each of them sees [rows, context + rows]."""
    block = np.repeat(np.arange(len(start_B)), rows_B)
    slot = np.arange(len(block)) - np.repeat(np.cumsum(rows_B) - rows_B, rows_B)
    place = start_B[block] + layout.after + slot  # positions, counted as rows of the context
    context = column[None] <= start_B[block][:, None]
    own = block[:, None] == block[None]
    if layout.causal:
        own &= slot[None] <= slot[:, None]
    if window is not None:
        context &= column[None] > place[:, None] - window
        own &= place[None] > place[:, None] - window
    return np.concatenate([context, own], axis=1)
