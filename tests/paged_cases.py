"""Ragged batches over paged caches, some rows of draft trees, and their attention by the plainest means."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from mtp_train.attention.interface import AttentionContext, AttentionRule
from mtp_train.attention.paged import BatchPlan, PagedKV, TreeRows, plan_batch

PAGE = 4
MakeContext = Callable[[PagedKV, BatchPlan], AttentionContext]


@dataclass(frozen=True)
class Row:
    """A cached row: where it stands, and the places of the rows it sees."""

    position: int
    sees: tuple[int, ...]


@dataclass(frozen=True)
class Item:
    """One sequence: `cached` rows before the batch, `rows` of the batch; a tree's tail as the parent of each node."""

    cached: int
    rows: int
    parents: tuple[int, ...] | None = None

    @property
    def length(self) -> int:
        return self.cached + self.rows

    @property
    def base(self) -> int:
        return self.length - len(self.parents or ())

    def row(self, place: int) -> Row:
        if self.parents is None or place < self.base:
            return Row(place, tuple(range(place + 1)))
        path = []
        node = place - self.base
        while node >= 0:
            path.append(node)
            node = self.parents[node]
        return Row(
            self.base + len(path) - 1,
            (*range(self.base), *(self.base + node for node in reversed(path))),
        )

    @property
    def tree(self) -> TreeRows | None:
        if self.parents is None:
            return None
        tail = len(self.parents)
        rows = [self.row(self.base + node) for node in range(tail)]
        seen = np.zeros((tail, tail), dtype=bool)
        for node, row in enumerate(rows):
            seen[node, [place - self.base for place in row.sees if place >= self.base]] = True
        depth = np.asarray([row.position - self.base for row in rows])
        return TreeRows(self.base, depth, seen[tail - self.rows :])


def random_tree(cached: int, tail: int, rows: int, seed: int) -> Item:
    """A tree of `tail` nodes after `cached` rows; the batch holds its last `rows`."""
    generator = np.random.default_rng(seed)
    parents = [-1, *(int(generator.integers(0, node)) for node in range(1, tail))]
    return Item(cached + tail - rows, rows, tuple(parents))


@dataclass(frozen=True)
class Heads:
    heads: int = 4
    kv_heads: int = 2
    width: int = 8
    value_width: int = 8


@dataclass(frozen=True)
class Case:
    """A batch whose earlier rows are cached already, in every layer alike."""

    items: tuple[Item, ...]
    cache: PagedKV
    plan: BatchPlan
    query_THd: Tensor
    keys: tuple[Tensor, ...]  # per sequence, of all its places
    values: tuple[Tensor, ...]

    def run(self, make: MakeContext, rule: AttentionRule, layer: int = 0) -> Tensor:
        return self.call(make(self.cache, self.plan), rule, layer)

    def call(self, context: AttentionContext, rule: AttentionRule, layer: int = 0) -> Tensor:
        key, value = (
            torch.cat([rows[item.cached :] for item, rows in zip(self.items, every, strict=True)])
            for every in (self.keys, self.values)
        )
        return context(layer, self.query_THd, key, value, rule)

    def expected(self, rule: AttentionRule) -> Tensor:
        """Row by row in float64, from the rows that each one sees by name."""
        out, row = [], 0
        for item, keys, values in zip(self.items, self.keys, self.values, strict=True):
            for place in range(item.cached, item.length):
                places = _seen(item, place, rule.window)
                out.append(_attend(self.query_THd[row], keys[places], values[places], rule))
                row += 1
        return torch.stack(out)


def make_case(
    items: list[Item],
    heads: Heads | None = None,
    dtype: torch.dtype = torch.float64,
    device: str = "cpu",
    layers: int = 1,
    seed: int = 0,
    page: int = PAGE,
) -> Case:
    """Random keys and values over pages that are scattered through the cache."""
    sizes = heads or Heads()
    generator = torch.Generator().manual_seed(seed)

    def draw(rows: int, heads: int, width: int) -> Tensor:
        return torch.randn(rows, heads, width, generator=generator).to(dtype).to(device)

    need = [-(-item.length // page) for item in items]
    order = torch.randperm(sum(need) + 3, generator=generator).tolist()
    tables = [order[sum(need[:index]) :][:count] for index, count in enumerate(need)]
    keys = tuple(draw(item.length, sizes.kv_heads, sizes.width) for item in items)
    values = tuple(draw(item.length, sizes.kv_heads, sizes.value_width) for item in items)
    cache = PagedKV(layers, len(order), page, dtype=dtype, device=torch.device(device))
    for table, item, key, value in zip(tables, items, keys, values, strict=True):
        place = torch.arange(item.cached)
        slots = torch.tensor(table)[place // page] * page + place % page
        for layer in range(layers if item.cached else 0):
            cache.write(layer, slots.to(device), key[: item.cached], value[: item.cached])
    trees = [item.tree for item in items]
    plan = plan_batch(
        tables,
        [item.cached for item in items],
        [item.rows for item in items],
        page,
        torch.device(device),
        trees,
    )
    query = draw(sum(item.rows for item in items), sizes.heads, sizes.width)
    return Case(tuple(items), cache, plan, query, keys, values)


def rules(heads: int) -> dict[str, AttentionRule]:
    """What targets ask for, and every mix of a window with the rest."""
    sinks = torch.linspace(-1.0, 2.0, heads)
    plain = {
        "plain": AttentionRule(0.4),
        "softcap": AttentionRule(0.8, softcap=1.5),
        "sinks": AttentionRule(0.4, sinks=sinks),
    }
    windowed = {
        f"{name}, window {window}": replace(rule, window=window)
        for name, rule in plain.items()
        for window in (1, 3, 9, 500)
    }
    return plain | windowed


def _seen(item: Item, place: int, window: int | None) -> list[int]:
    row = item.row(place)
    reach = window or row.position + 1
    return [other for other in row.sees if row.position - item.row(other).position < reach]


def _attend(query_Hd: Tensor, key_LGd: Tensor, value_LGw: Tensor, rule: AttentionRule) -> Tensor:
    shared = len(query_Hd) // key_LGd.shape[1]
    key, value = (rows.double().repeat_interleave(shared, 1) for rows in (key_LGd, value_LGw))
    score_HL = torch.einsum("hd,lhd->hl", query_Hd.double(), key) * rule.scaling
    if rule.softcap is not None:
        score_HL = rule.softcap * torch.tanh(score_HL / rule.softcap)
    weight_HL = score_HL.exp()
    total_H1 = weight_HL.sum(1, keepdim=True)
    if rule.sinks is not None:
        total_H1 = total_H1 + rule.sinks.double().to(total_H1.device).exp().unsqueeze(1)
    return torch.einsum("hl,lhw->hw", weight_HL / total_H1, value)
