"""Attention over paged keys and values, for inference: one page table per sequence, shared by target and head.

A `BatchPlan` is made once per batch and serves every layer of target and head. Its index arrays are
FlashInfer's (`qo_indptr`, `kv_page_indptr`, `kv_page_indices`, `kv_last_page_len`); the torch backend here is the
reference for others. Knows no scheduler, no sampling and no model.

Shapes: T rows, B sequences, H query heads, G key/value heads, d key width, w value width, R rows per sequence of a
uniform batch, C cached rows of the longest sequence (those in the window, where there is one).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from mtp_train.attention.interface import AttentionContext, AttentionRule, attend, soft_capped
from mtp_train.attention.packed import PackedContext

KEPT = 0.75  # a sequence joins a batch padded to `longest` if its cache is at least this share of it ...
SMALLEST = (
    12  # ... or if the batch is still smaller than this: a group costs some fixed time per layer
)


class PagedKV:
    """Keys and values of every layer in fixed-size pages.

    A layer's pools are made when it first writes, as wide as its own keys and values: a head's layer need not be like
    the target's, nor a value like a key.

    Args:
        layers: layers of the target plus the head's.
        pages, page_size: capacity; a slot is page * page_size + offset.
        backend: who makes a batch's context; the torch one if nobody is named.
    """

    def __init__(
        self,
        layers: int,
        pages: int,
        page_size: int,
        *,
        dtype: torch.dtype,
        device: torch.device,
        backend: Callable[[PagedKV, BatchPlan], AttentionContext] | None = None,
    ) -> None:
        self._backend = backend or PagedContext.of
        self.page_size = page_size
        self.pages = pages
        self.dtype, self.device = dtype, device
        self._pools: list[tuple[Tensor, Tensor] | None] = [None] * layers

    def context(self, plan: BatchPlan) -> AttentionContext:
        """The context of a batch over this cache, made once: target and head share it."""
        return self._backend(self, plan)

    def write(self, layer: int, slots: Tensor, key_TGd: Tensor, value_TGw: Tensor) -> None:
        pools = self._pools[layer]
        if pools is None:
            pools = self._pools[layer] = (self._pool(key_TGd), self._pool(value_TGw))
        for pool, rows in zip(pools, (key_TGd, value_TGw), strict=True):
            pool.index_copy_(0, slots, rows.flatten(1))

    def read(self, layer: int, slots: Tensor) -> tuple[Tensor, Tensor]:
        """Keys [slots, G * d] and values [slots, G * w]."""
        pools = self._pools[layer]
        assert pools is not None, "write before read"
        key, value = pools
        return key.index_select(0, slots), value.index_select(0, slots)

    def move(self, layers: int, source: Tensor, goal: Tensor) -> None:
        """Copy rows between slots in the first `layers` layers; all are read before any is written."""
        for pools in self._pools[:layers]:
            for pool in pools or ():
                pool.index_copy_(0, goal, pool.index_select(0, source))

    def clear(self, pages: Sequence[int]) -> None:
        """Zero these pages in every layer."""
        index = torch.tensor(pages, dtype=torch.int64, device=self.device)
        for pools in self._pools:
            for pool in pools or ():
                pool.view(self.pages, -1).index_fill_(0, index, 0)

    def _pool(self, rows: Tensor) -> Tensor:
        with torch.inference_mode(False):  # a later call may be outside of it
            size = (self.pages * self.page_size, rows[0].numel())
            return torch.zeros(size, dtype=self.dtype, device=self.device)


@dataclass(frozen=True)
class TreeRows:
    """How the newest rows of one sequence stand in a draft tree.

    The tail's rows lie in slots base, base + 1, ... in order; those of the batch are the last of them.

    Attributes:
        base: position of the tree's root; every row sees all cached rows before it.
        depth: int [tail], a row stands at position base + depth.
        seen: bool [rows, tail], which rows of the tail each of the batch's rows sees: its ancestors and itself.
    """

    base: int
    depth: np.ndarray
    seen: np.ndarray

    @property
    def positions(self) -> np.ndarray:
        """Of the batch's rows."""
        return self.base + self.depth[len(self.depth) - len(self.seen) :]


@dataclass(frozen=True)
class BatchPlan:
    """Where the rows of one ragged batch stand.

    Sequence b contributes rows qo_indptr[b]..qo_indptr[b+1] in consecutive slots that end its cached length, at
    consecutive positions too unless they are those of a tree.
    """

    qo_indptr: np.ndarray  # [B + 1] int64
    kv_page_indptr: np.ndarray  # [B + 1] int64
    kv_page_indices: np.ndarray  # [pages of all sequences] int64
    kv_last_page_len: np.ndarray  # [B] int64, 1..page_size
    page_size: int
    positions: Tensor  # [T] int64
    slots: Tensor  # [T] int64, where the rows' own keys and values are written
    trees: tuple[TreeRows | None, ...] | None = (
        None  # one per sequence; none where no rows are a tree's
    )
    contexts: dict[int, AttentionContext] = field(default_factory=dict, repr=False, compare=False)

    @property
    def sequences(self) -> int:
        return len(self.qo_indptr) - 1

    @cached_property
    def rows(self) -> np.ndarray:
        """Rows per sequence [B]."""
        return np.diff(self.qo_indptr)

    @cached_property
    def kv_lengths(self) -> np.ndarray:
        """Cached rows per sequence, the batch's own included [B]."""
        return (np.diff(self.kv_page_indptr) - 1) * self.page_size + self.kv_last_page_len

    def last_rows(self) -> Tensor:
        """Index of the last row of each sequence [B]."""
        return placed(self.qo_indptr[1:] - 1, self.slots.device)


def placed(values: np.ndarray, device: torch.device) -> Tensor:
    """An array of the host on the device. A GPU is not waited for: it copies from pinned memory when it gets there."""
    tensor = torch.from_numpy(values)
    if device.type != "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


def plan_batch(
    pages: Sequence[Sequence[int]],
    starts: Sequence[int],
    rows: Sequence[int],
    page_size: int,
    device: torch.device,
    trees: Sequence[TreeRows | None] | None = None,
) -> BatchPlan:
    """Plan rows in places starts[b] .. starts[b] + rows[b] - 1 of sequences with page tables `pages`."""
    lengths = [start + count for start, count in zip(starts, rows, strict=True)]
    used = [-(-length // page_size) for length in lengths]
    assert all(len(table) >= need for table, need in zip(pages, used, strict=True)), (
        "a page for every row"
    )
    tables = [
        np.asarray(table[:need], dtype=np.int64) for table, need in zip(pages, used, strict=True)
    ]
    places = [np.arange(start, length) for start, length in zip(starts, lengths, strict=True)]
    slots = [
        table[where // page_size] * page_size + where % page_size
        for table, where in zip(tables, places, strict=True)
    ]
    positions = [
        where if tree is None else tree.positions
        for where, tree in zip(places, trees or [None] * len(places), strict=True)
    ]
    return BatchPlan(
        qo_indptr=_indptr(rows),
        kv_page_indptr=_indptr(used),
        kv_page_indices=np.concatenate(tables),
        kv_last_page_len=np.asarray(
            [length - (need - 1) * page_size for length, need in zip(lengths, used, strict=True)]
        ),
        page_size=page_size,
        positions=placed(np.concatenate(positions), device),
        slots=placed(np.concatenate(slots), device),
        trees=tuple(trees) if trees and any(trees) else None,
    )


def plan_before(plan: BatchPlan, rows: Sequence[int]) -> BatchPlan:
    """Plan the rows[b] rows that end just before the plan's first row of each sequence."""
    tables = np.split(plan.kv_page_indices, plan.kv_page_indptr[1:-1])
    starts = plan.kv_lengths - plan.rows - np.asarray(rows)
    pages = [table.tolist() for table in tables]
    return plan_batch(pages, starts.tolist(), rows, plan.page_size, plan.slots.device)


class PagedContext:
    """The torch backend: write the rows' keys and values into their slots, then attend over the cached ones.

    Sequences with equal row counts and similar cache lengths run as one dense batch, padded to the longest of them.
    """

    def __init__(self, cache: PagedKV, plan: BatchPlan) -> None:
        self.cache = cache
        self.plan = plan
        # Nothing cached before, nothing but causal: prefill.
        self.fresh = plan.trees is None and bool((plan.rows == plan.kv_lengths).all())
        self._groups: dict[int | None, list[_Group]] = {}  # by window

    @classmethod
    def of(cls, cache: PagedKV, plan: BatchPlan) -> AttentionContext:
        """The context of `plan`, made once: target and head share it."""
        made = plan.contexts.get(id(cache))
        if made is None:
            made = plan.contexts[id(cache)] = cls(cache, plan)
        return made

    def __call__(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, rule: AttentionRule
    ) -> Tensor:
        self.cache.write(layer, self.plan.slots, key, value)
        if self.fresh:
            return PackedContext(self.plan.qo_indptr.tolist())(layer, query, key, value, rule)
        kv_heads = key.shape[1]
        groups = self.groups(rule.window)
        if len(groups) == 1:
            return self._gathered(layer, query, groups[0], kv_heads, rule)
        out = query.new_empty(*query.shape[:2], value.shape[-1])
        for group in groups:
            rows = query.index_select(0, group.row_index)
            out.index_copy_(0, group.row_index, self._gathered(layer, rows, group, kv_heads, rule))
        return out

    def groups(self, window: int | None = None) -> list[_Group]:
        """The dense batches of layers with that window, made once."""
        longest = int(self.plan.kv_lengths.max())
        window = None if window is None or window >= longest else window
        if window not in self._groups:
            self._groups[window] = _groups(self.plan, self.cache.dtype, window)
        return self._groups[window]

    def _gathered(
        self, layer: int, query_THd: Tensor, group: _Group, kv_heads: int, rule: AttentionRule
    ) -> Tensor:
        batch, rows, cached = group.batch, group.rows, group.cached
        _, heads, width = query_THd.shape
        shared = heads // kv_heads
        key, value = (
            rows_Sx.view(batch, cached, kv_heads, -1).transpose(1, 2)
            for rows_Sx in self.cache.read(layer, group.slots)
        )
        # Query heads that share a key/value head become rows of one attention: no copy of the cache per head.
        query = query_THd.view(batch, rows, kv_heads, shared, width).permute(0, 2, 3, 1, 4)
        query = query.reshape(batch, kv_heads, shared * rows, width)
        mask = group.shared_mask(shared)
        if rule.softcap is None and rule.sinks is None:
            out = attend(query, key, value, rule.scaling, causal=False, mask=mask)
        else:
            out = _attend_ruled(query, key, value, rule, mask)
        out = out.view(batch, kv_heads, shared, rows, -1).permute(0, 3, 1, 2, 4)
        return out.reshape(batch * rows, heads, -1)


@dataclass(frozen=True)
class _Group:
    """Sequences that run as one dense batch."""

    row_index: Tensor  # [batch * rows], the group's rows in the ragged batch
    batch: int
    rows: int  # per sequence
    cached: int  # of the longest sequence
    slots: Tensor  # [batch * cached]
    mask: Tensor | None  # additive [batch, 1, rows, cached]; None where every row sees every slot
    masks: dict[int, Tensor] = field(default_factory=dict, repr=False)

    def shared_mask(self, shared: int) -> Tensor | None:
        """The mask for `shared` query heads laid out as rows; made once, used by every layer."""
        if self.mask is None or self.rows == 1:
            return self.mask  # one row broadcasts
        if shared not in self.masks:
            self.masks[shared] = self.mask.repeat(1, 1, shared, 1)
        return self.masks[shared]


def _attend_ruled(
    query: Tensor, key: Tensor, value: Tensor, rule: AttentionRule, mask: Tensor | None
) -> Tensor:
    """As `attend` with a soft cap or sinks; query [B, G, H/G * R, d], scores in float32 at least."""
    exact = torch.promote_types(query.dtype, torch.float32)
    scores = query.to(exact) @ key.to(exact).transpose(-1, -2) * rule.scaling
    if rule.softcap is not None:
        scores = soft_capped(scores, rule.softcap)
    if mask is not None:
        scores = scores + mask
    if rule.sinks is None:
        return scores.softmax(-1).to(value.dtype) @ value
    batch, kv_heads, rows = scores.shape[:3]
    sink_GR1 = rule.sinks.to(exact).view(kv_heads, -1, 1)
    sink_GR1 = sink_GR1.repeat_interleave(rows // sink_GR1.shape[1], dim=1)
    scores = torch.cat([scores, sink_GR1.expand(batch, kv_heads, rows, 1)], dim=-1)
    return scores.softmax(-1)[..., :-1].to(value.dtype) @ value


def _groups(plan: BatchPlan, dtype: torch.dtype, window: int | None) -> list[_Group]:
    """Split the batch: equal rows, longest cache first, a new group where padding would waste too much."""
    lengths = plan.kv_lengths - _passed(plan, window)
    order = sorted(
        range(plan.sequences), key=lambda index: (plan.rows[index], -lengths[index], index)
    )
    members: list[list[int]] = []
    for index in order:
        first = members[-1][0] if members else index
        same = members and plan.rows[first] == plan.rows[index]
        if not same or (lengths[index] < KEPT * lengths[first] and len(members[-1]) >= SMALLEST):
            members.append([])
        members[-1].append(index)
    if len(members) == 1:
        members = [list(range(plan.sequences))]  # rows in place: nothing to reorder
    return [_group(plan, np.asarray(group), dtype, window) for group in members]


def _passed(plan: BatchPlan, window: int | None) -> np.ndarray:
    """Cached rows of each sequence that lie before every row's window [B]."""
    if window is None:
        return np.zeros_like(plan.kv_lengths)
    first = plan.kv_lengths - plan.rows
    for index, tree in enumerate(plan.trees or ()):
        if tree is not None:
            first[index] = tree.positions.min()
    return np.maximum(first - window + 1, 0)


def _group(plan: BatchPlan, members: np.ndarray, dtype: torch.dtype, window: int | None) -> _Group:
    rows = int(plan.rows[members[0]])
    lengths, passed = plan.kv_lengths[members], _passed(plan, window)[members]
    cached = int((lengths - passed).max())
    column = passed[:, None] + np.arange(cached)  # [B, C]
    slots = plan.kv_page_indices[_padded_page(plan, members, column)] * plan.page_size
    slots = slots + column % plan.page_size
    seen = _seen(plan, members, column, window)
    device = plan.slots.device
    mask = None
    if not seen.all():
        hidden = torch.from_numpy(~seen).unsqueeze(1)
        mask = torch.zeros(hidden.shape, dtype=dtype).masked_fill_(hidden, float("-inf")).to(device)
    row_index = (plan.qo_indptr[members][:, None] + np.arange(rows)).reshape(-1)
    return _Group(
        row_index=torch.from_numpy(row_index).to(device),
        batch=len(members),
        rows=rows,
        cached=cached,
        slots=torch.from_numpy(slots.reshape(-1)).to(device),
        mask=mask,
    )


def _seen(
    plan: BatchPlan, members: np.ndarray, column: np.ndarray, window: int | None
) -> np.ndarray:
    """Which cached rows, in places `column` [B, C], each row sees, bool [B, R, C]."""
    rows, lengths = int(plan.rows[members[0]]), plan.kv_lengths[members]
    # Row r of a sequence with `length` cached rows stands in place length - rows + r and sees up to itself.
    row_position = lengths[:, None] - rows + np.arange(rows)
    seen = column[:, None, :] <= row_position[:, :, None]
    position = column
    for index, member in enumerate(members if plan.trees else ()):
        tree = plan.trees[member] if plan.trees else None
        if tree is None:
            continue
        if position is column:
            position = column.copy()
        row_position[index] = tree.positions
        inside = (column[index] >= tree.base) & (column[index] < tree.base + len(tree.depth))
        node = column[index][inside] - tree.base
        position[index][inside] = tree.base + tree.depth[node]
        seen[index][:, inside] = tree.seen[:, node]
    if window is not None:
        seen &= position[:, None, :] > row_position[:, :, None] - window
    return seen


def _padded_page(plan: BatchPlan, members: np.ndarray, column: np.ndarray) -> np.ndarray:
    """Index into kv_page_indices of each member's page for its columns [B, C]; past the end, its last page (masked)."""
    begins = plan.kv_page_indptr[members, None]
    ends = plan.kv_page_indptr[members + 1, None]
    return np.minimum(begins + column // plan.page_size, ends - 1)


def _indptr(counts: Sequence[int]) -> np.ndarray:
    return np.concatenate([[0], np.cumsum(np.asarray(counts, dtype=np.int64))]).astype(np.int64)
