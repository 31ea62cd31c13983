"""Attention over paged keys and values, for inference: one page table per sequence, shared by target and head.

A `BatchPlan` is made once per batch and serves every layer of target and head. Its index arrays are
FlashInfer's (`qo_indptr`, `kv_page_indptr`, `kv_page_indices`, `kv_last_page_len`); the torch backend here is the
reference for others. Knows no scheduler, no sampling and no model.

Shapes: T rows, B sequences, H query heads, G key/value heads, d head width, R rows per sequence of a uniform batch,
C cached rows of the longest sequence.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from mtp_train.attention.interface import attend
from mtp_train.attention.packed import PackedContext


class PagedKV:
    """Keys and values of every layer in fixed-size pages.

    Args:
        layers: layers of the target plus the head's.
        pages, page_size: capacity; a slot is page * page_size + offset.
    """

    def __init__(self, layers: int, pages: int, page_size: int, kv_heads: int, width: int, *, dtype: torch.dtype, device: torch.device) -> None:
        self.page_size = page_size
        self.pages = pages
        shape = (layers, pages * page_size, kv_heads * width)
        self.key = torch.zeros(shape, dtype=dtype, device=device)
        self.value = torch.zeros(shape, dtype=dtype, device=device)


@dataclass(frozen=True)
class BatchPlan:
    """Where the rows of one ragged batch stand.

    Sequence b contributes rows qo_indptr[b]..qo_indptr[b+1] at consecutive positions that end its cached length.
    """

    qo_indptr: np.ndarray  # [B + 1] int64
    kv_page_indptr: np.ndarray  # [B + 1] int64
    kv_page_indices: np.ndarray  # [pages of all sequences] int64
    kv_last_page_len: np.ndarray  # [B] int64, 1..page_size
    page_size: int
    positions: Tensor  # [T] int64
    slots: Tensor  # [T] int64, where the rows' own keys and values are written
    contexts: dict[int, PagedContext] = field(default_factory=dict, repr=False, compare=False)

    @property
    def sequences(self) -> int:
        return len(self.qo_indptr) - 1

    @property
    def rows(self) -> np.ndarray:
        """Rows per sequence [B]."""
        return np.diff(self.qo_indptr)

    @property
    def kv_lengths(self) -> np.ndarray:
        """Cached rows per sequence, the batch's own included [B]."""
        return (np.diff(self.kv_page_indptr) - 1) * self.page_size + self.kv_last_page_len

    def last_rows(self) -> Tensor:
        """Index of the last row of each sequence [B]."""
        return torch.from_numpy(self.qo_indptr[1:] - 1).to(self.slots.device)


def plan_batch(pages: Sequence[Sequence[int]], starts: Sequence[int], rows: Sequence[int], page_size: int, device: torch.device) -> BatchPlan:
    """Plan rows at positions starts[b] .. starts[b] + rows[b] - 1 of sequences with page tables `pages`."""
    lengths = [start + count for start, count in zip(starts, rows, strict=True)]
    used = [-(-length // page_size) for length in lengths]
    assert all(len(table) >= need for table, need in zip(pages, used, strict=True)), "a page for every row"
    tables = [np.asarray(table[:need], dtype=np.int64) for table, need in zip(pages, used, strict=True)]
    positions = [np.arange(start, length) for start, length in zip(starts, lengths, strict=True)]
    slots = [table[where // page_size] * page_size + where % page_size for table, where in zip(tables, positions, strict=True)]
    return BatchPlan(
        qo_indptr=_indptr(rows),
        kv_page_indptr=_indptr(used),
        kv_page_indices=np.concatenate(tables),
        kv_last_page_len=np.asarray([length - (need - 1) * page_size for length, need in zip(lengths, used, strict=True)]),
        page_size=page_size,
        positions=torch.from_numpy(np.concatenate(positions)).to(device),
        slots=torch.from_numpy(np.concatenate(slots)).to(device),
    )


class PagedContext:
    """The torch backend: write the rows' keys and values into their slots, then attend over the cached ones.

    Sequences with equal row counts run as one dense batch, padded to the longest cache; others run one by one.
    """

    def __init__(self, cache: PagedKV, plan: BatchPlan) -> None:
        self.cache = cache
        self.plan = plan
        rows, lengths = plan.rows, plan.kv_lengths
        self.fresh = bool((rows == lengths).all())  # nothing cached before: plain prefill
        self.uniform = bool((rows == rows[0]).all()) and not self.fresh
        self.groups = [] if self.fresh else _groups(plan, self.uniform, cache.key.dtype)

    @classmethod
    def of(cls, cache: PagedKV, plan: BatchPlan) -> PagedContext:
        """The context of `plan`, made once: target and head share it."""
        made = plan.contexts.get(id(cache))
        if made is None:
            made = plan.contexts[id(cache)] = cls(cache, plan)
        return made

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        self.cache.key[layer].index_copy_(0, self.plan.slots, key.flatten(1))
        self.cache.value[layer].index_copy_(0, self.plan.slots, value.flatten(1))
        if self.fresh:
            return _fresh_prefill(query, key, value, scaling, self.plan.qo_indptr)
        kv_heads = key.shape[1]
        outs = [self._gathered(layer, query[group.start : group.stop], group, kv_heads, scaling) for group in self.groups]
        return outs[0] if len(outs) == 1 else torch.cat(outs)

    def _gathered(self, layer: int, query_THd: Tensor, group: _Group, kv_heads: int, scaling: float) -> Tensor:
        batch, rows, cached = group.batch, group.rows, group.cached
        _, heads, width = query_THd.shape
        shared = heads // kv_heads
        key, value = (
            pool[layer].index_select(0, group.slots).view(batch, cached, kv_heads, width).transpose(1, 2)
            for pool in (self.cache.key, self.cache.value)
        )
        # Query heads that share a key/value head become rows of one attention: no copy of the cache per head.
        query = query_THd.view(batch, rows, kv_heads, shared, width).permute(0, 2, 3, 1, 4)
        query = query.reshape(batch, kv_heads, shared * rows, width)
        mask = None if group.mask is None else group.mask.repeat(1, 1, shared, 1)
        out = attend(query, key, value, scaling, causal=False, mask=mask)
        out = out.view(batch, kv_heads, shared, rows, width).permute(0, 3, 1, 2, 4)
        return out.reshape(batch * rows, heads, width)


@dataclass(frozen=True)
class _Group:
    """Sequences that run as one dense batch."""

    start: int  # first row
    stop: int
    batch: int
    rows: int  # per sequence
    cached: int  # of the longest sequence
    slots: Tensor  # [batch * cached]
    mask: Tensor | None  # additive [batch, 1, rows, cached]; None where every row sees every slot


def _groups(plan: BatchPlan, uniform: bool, dtype: torch.dtype) -> list[_Group]:
    if uniform:
        return [_group(plan, 0, plan.sequences, dtype)]
    return [_group(plan, index, index + 1, dtype) for index in range(plan.sequences)]


def _group(plan: BatchPlan, first: int, last: int, dtype: torch.dtype) -> _Group:
    rows = int(plan.rows[first])
    lengths = plan.kv_lengths[first:last]
    cached = int(lengths.max())
    column = np.arange(cached)
    table = plan.kv_page_indices[_padded_page(plan, first, last, column)]
    slots = table * plan.page_size + column % plan.page_size
    # Row r of a sequence with `length` cached rows stands at position length - rows + r and sees up to itself.
    seen = column[None, None, :] <= (lengths[:, None] - rows + np.arange(rows)[None, :])[:, :, None]
    mask = None
    if not seen.all():
        mask = torch.zeros(seen.shape, dtype=dtype).masked_fill_(torch.from_numpy(~seen), float("-inf")).unsqueeze(1)
        mask = mask.to(plan.slots.device)
    return _Group(
        start=int(plan.qo_indptr[first]),
        stop=int(plan.qo_indptr[last]),
        batch=last - first,
        rows=rows,
        cached=cached,
        slots=torch.from_numpy(slots.reshape(-1)).to(plan.slots.device),
        mask=mask,
    )


def _padded_page(plan: BatchPlan, first: int, last: int, column: np.ndarray) -> np.ndarray:
    """Index into kv_page_indices of each sequence's page for each column; past the end, its last page (masked)."""
    begins = plan.kv_page_indptr[first:last, None]
    ends = plan.kv_page_indptr[first + 1 : last + 1, None]
    return np.minimum(begins + column[None, :] // plan.page_size, ends - 1)


def _fresh_prefill(query: Tensor, key: Tensor, value: Tensor, scaling: float, indptr: np.ndarray) -> Tensor:
    return PackedContext(indptr.tolist())(0, query, key, value, scaling)


def _indptr(counts: Sequence[int]) -> np.ndarray:
    return np.concatenate([[0], np.cumsum(np.asarray(counts, dtype=np.int64))]).astype(np.int64)
