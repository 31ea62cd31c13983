"""Attention of draft chains over packed documents, in memory linear in their length.

The equation is `reference.chain_attention`, forward and backward. Scores exist for one tile at a time, a few heads
and rows of one document, and the backward pass computes them anew. Holds no state between steps and knows no context.

A row's own keys of steps 1..S lie in front of step 0's keys, so that a tile's products are plain matrix products:

    rows 3, 4 of a document at step 2      k1  k2 | k0[0] k0[1] k0[2] k0[3] k0[4]
                                 row 3     own own|  see   see   see   see    -
                                 row 4     own own|  see   see   see   see   see

Zeros stand in for the own keys and values, which differ from row to row: the tile's own columns are overwritten, and
what the own values add is added outside the tiles.

Under a rule with a window, a tile leaves out the keys that none of its rows sees, and hides others row by row. A sink
is one more own column, with a score and no key or value.

A tile's scores are rounded to the operands' dtype, as any matrix product is. So each row's scores are taken less its
`anchor`, a guess at their maximum, inside the product: in bfloat16 that keeps a score of 100 as exact as one of 1.
(Soft-capped scores are computed in float32: the cap must have the score itself.)

Shapes: T rows, H query heads, G key/value heads, R = H/G query heads of each, d key width, w value width,
L rows of one document, N = L R queries of one document per key/value head, S own columns of a document: later steps,
the sink, spare ones; M = S + L.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import pad

from mtp_train.attention.interface import AttentionRule, soft_capped

TILE_ROWS = 128  # fewer: more passes over the keys' gradients; more: the scores leave the cache
TILE_SCORES = 2**24  # at most
# A library compiles and keeps a kernel of up to a megabyte for every shape it meets, so tiles come in few shapes:
OWN_COLUMNS = 8  # own columns, or a multiple; the spare ones are hidden
TILE_WIDTHS = 16  # of one long document; a narrower tile computes up to the next width

Span = tuple[int, int]  # first row of a document and the one past its last


def chain_attention(
    query_THd: Tensor,
    keys_TGd: Sequence[Tensor],
    values_TGw: Sequence[Tensor],
    spans: Sequence[Span],
    rule: AttentionRule,
) -> Tensor:
    """Row p sees keys 0..p of step 0 in its document and key p of every later step. Returns [T, H, w].

    The row of step s stands at position p + s, which a window counts from.

    Args:
        keys_TGd, values_TGw: one per step so far, in the query's dtype.
        spans: the documents, in order; together all rows.
    """
    groups = keys_TGd[0].shape[1]
    query_TGRd = query_THd.unflatten(1, (groups, -1))
    bare = replace(rule, sinks=None)
    out_TGRw: Tensor = _Chain.apply(
        query_TGRd, rule.sinks, tuple(spans), bare, *keys_TGd, *values_TGw
    )
    return out_TGRw.flatten(1, 2)


class _Chain(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query_TGRd: Tensor,
        sinks_H: Tensor | None,
        spans: tuple[Span, ...],
        rule: AttentionRule,
        *cached: Tensor,
    ) -> Tensor:
        ctx.save_for_backward(query_TGRd, sinks_H, *cached)
        ctx.spans, ctx.rule = spans, rule
        keys, values = _halves(cached)
        with torch.autocast(query_TGRd.device.type, enabled=False):
            documents = _documents(query_TGRd, keys, values[0], spans, rule, sinks_H)
            parts = [_attend(document) for document in documents]
            out_TGRw, weight_TGRS = (torch.cat(rows) for rows in zip(*parts, strict=True))
            return _plus_own(out_TGRw, weight_TGRS, values[1:]).to(query_TGRd.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_TGRw: Tensor) -> tuple[Tensor | None, ...]:
        query_TGRd, sinks_H, *cached = ctx.saved_tensors
        keys, values = _halves(cached)
        with torch.autocast(query_TGRd.device.type, enabled=False):
            own_grad_TGRS = _dots(grad_TGRw, values[1:]).to(grad_TGRw.dtype)
            documents = _documents(query_TGRd, keys, values[0], ctx.spans, ctx.rule, sinks_H)
            parts = [
                _attend_backward(
                    document, _by_group(grad_TGRw, span), _by_group(own_grad_TGRS, span)
                )
                for document, span in zip(documents, ctx.spans, strict=True)
            ]
            query, key, value, weight_TGRS, score_TGRS = (
                torch.cat(rows) for rows in zip(*parts, strict=True)
            )
            query = _plus_own(query, score_TGRS, keys[1:])
            own_keys = _own_gradients(score_TGRS, query_TGRd, len(keys) - 1)
            own_values = _own_gradients(weight_TGRS, grad_TGRw, len(keys) - 1)
            scaled = [rows * ctx.rule.scaling for rows in (query, key, *own_keys)]
            sinks = None
            if sinks_H is not None:
                sinks = score_TGRS[..., len(keys) - 1].sum(0, dtype=_exact(score_TGRS))
                sinks = sinks.flatten().to(sinks_H.dtype)
        grads = [rows.to(query_TGRd.dtype) for rows in (*scaled, value, *own_values)]
        return grads[0], sinks, None, None, *grads[1:]


@dataclass(frozen=True)
class _Document:
    """One document's operands, by key/value head."""

    query_GNd: Tensor
    key_GMd: Tensor  # S rows of zeros, then step 0's
    value_GMw: Tensor  # likewise
    own_GNS: (
        Tensor  # scores of the own columns, less the anchor; -inf in those that are hidden or spare
    )
    anchor_GN1: Tensor  # 0 under a soft cap
    scaling: float
    softcap: float | None
    reach: int | None  # row p sees step 0's keys from p - reach on; none: all

    @property
    def own(self) -> int:
        return self.own_GNS.shape[-1]

    @property
    def rows(self) -> int:
        return self.key_GMd.shape[1] - self.own

    def tiles(self) -> Iterator[_Tile]:
        """Every query once, in order of its key/value head and row."""
        groups, columns = self.key_GMd.shape[:2]
        shared = self.query_GNd.shape[1] // self.rows
        width = shared * columns  # scores of one row of one key/value head
        tall = max(1, min(TILE_ROWS, TILE_SCORES // width))
        deep = max(1, TILE_SCORES // (width * tall))
        grain = TILE_ROWS * -(-self.rows // (TILE_ROWS * TILE_WIDTHS))
        for group in range(0, groups, deep):
            for first in range(0, self.rows, tall):
                last = min(first + tall, self.rows)
                seen = min(-(-last // grain) * grain, self.rows)
                passed = 0 if self.reach is None else max(first - self.reach, 0)
                skipped = min(passed // grain * grain, seen)
                heads = slice(group, group + deep)
                yield _Tile(heads, first, last, shared, self.own, skipped, seen)

    def weights(self, tile: _Tile) -> tuple[Tensor, Tensor | None]:
        """Softmax weights of a tile [heads, queries, columns], and the soft cap's slope at their scores.

        Both in float32 at least under a soft cap.
        """
        query, key = self.query_GNd[tile.queries], tile.columns(self.key_GMd).transpose(1, 2)
        slope = None
        if self.softcap is None:
            anchor = self.anchor_GN1[tile.queries]
            score = torch.baddbmm(anchor, query, key, beta=-1, alpha=self.scaling)
            score[..., : self.own] = self.own_GNS[tile.queries]
        else:
            exact = _exact(query)
            score = soft_capped(query.to(exact) @ key.to(exact) * self.scaling, self.softcap)
            score[..., : self.own] = self.own_GNS[tile.queries]
            slope = (1 - (score / self.softcap).square_()).clamp_(min=0)
        self._hide(score, tile)
        return score.softmax(-1), slope

    def _hide(self, score: Tensor, tile: _Tile) -> None:
        rows = tile.last - tile.first
        by_row = score.unflatten(1, (rows, -1))
        if self.reach is None:
            after = by_row[..., self.own + tile.first :]
            after += score.new_full((rows, after.shape[-1]), float("-inf")).triu(1).unsqueeze(1)
            return
        column = torch.arange(tile.skipped, tile.seen, device=score.device)
        row = torch.arange(tile.first, tile.last, device=score.device).unsqueeze(1)
        hidden = (column > row) | (column < row - self.reach)
        by_row[..., self.own :].masked_fill_(hidden.unsqueeze(1), float("-inf"))


@dataclass(frozen=True)
class _Tile:
    """Rows first..last of some key/value heads, against the own columns and step 0's keys skipped..seen: all that any
    of them sees, or a few more.
    """

    heads: slice
    first: int
    last: int
    shared: int  # R
    own: int
    skipped: int
    seen: int

    @property
    def queries(self) -> tuple[slice, slice]:
        return self.heads, slice(self.first * self.shared, self.last * self.shared)

    def columns(self, rows_GMx: Tensor) -> Tensor:
        """Keys or values of the tile's columns."""
        rows = rows_GMx[self.heads]
        if not self.skipped:
            return rows[:, : self.own + self.seen]
        return torch.cat([rows[:, : self.own], self._kept(rows)], dim=1)

    def accumulate(self, total_GMx: Tensor, left: Tensor, right: Tensor) -> None:
        """total += left^T right per head, in the tile's columns; own columns may be left out."""
        total = total_GMx[self.heads]
        if self.skipped:
            _accumulate(self._kept(total), left[..., self.own :], right)
        else:
            _accumulate(total[:, : self.own + self.seen], left, right)

    def _kept(self, rows: Tensor) -> Tensor:
        return rows[:, self.own + self.skipped : self.own + self.seen]


def _attend(document: _Document) -> tuple[Tensor, Tensor]:
    """What step 0's values give, [L, G, R, w], and the own columns' weights, [L, G, R, S]."""
    query, value = document.query_GNd, document.value_GMw
    out_GNw = query.new_empty(*query.shape[:2], value.shape[-1])
    weight_GNS = torch.empty_like(document.own_GNS, dtype=query.dtype)
    for tile in document.tiles():
        weight = document.weights(tile)[0].to(query.dtype)
        out_GNw[tile.queries] = weight @ tile.columns(value)
        weight_GNS[tile.queries] = weight[..., : document.own]
    return _by_row(out_GNw, document), _by_row(weight_GNS, document)


def _attend_backward(
    document: _Document, grad_GNw: Tensor, own_grad_GNS: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of one document, those of query and keys before scaling.

    `own_grad_GNS` is the gradient of the own columns' weights. Returns the gradients of query [L, G, R, d], of step 0's
    keys [L, G, d] and values [L, G, w] (both summed in float32 at least: one rounding per tile would add up), the own
    columns' weights and the gradients of their scores [L, G, R, S].
    """
    query, key, value = document.query_GNd, document.key_GMd, document.value_GMw
    query_grad = torch.empty_like(query)
    key_grad, value_grad = (torch.zeros_like(rows, dtype=_exact(rows)) for rows in (key, value))
    weight_GNS, score_GNS = (
        torch.empty_like(document.own_GNS, dtype=query.dtype) for _ in range(2)
    )
    for tile in document.tiles():
        (soft, slope), grad = document.weights(tile), grad_GNw[tile.queries]
        weight = soft.to(query.dtype)
        tile.accumulate(value_grad, weight, grad)
        weight_grad = grad @ tile.columns(value).transpose(1, 2)
        weight_grad[..., : own_grad_GNS.shape[-1]] = own_grad_GNS[tile.queries]
        score_grad = torch._softmax_backward_data(weight_grad.to(soft.dtype), soft, -1, soft.dtype)
        if slope is not None:
            score_grad = (score_grad * slope).to(query.dtype)
        query_grad[tile.queries] = score_grad @ tile.columns(key)
        tile.accumulate(key_grad, score_grad, query[tile.queries])
        weight_GNS[tile.queries] = weight[..., : document.own]
        score_GNS[tile.queries] = score_grad[..., : document.own]
    return (
        _by_row(query_grad, document),
        key_grad[:, document.own :].transpose(0, 1),
        value_grad[:, document.own :].transpose(0, 1),
        _by_row(weight_GNS, document),
        _by_row(score_GNS, document),
    )


def _accumulate(total: Tensor, left: Tensor, right: Tensor) -> None:
    """total += left^T right, per head."""
    if total.dtype == left.dtype:
        total.baddbmm_(left.transpose(1, 2), right)
    else:
        total += left.transpose(1, 2) @ right


def _documents(
    query_TGRd: Tensor,
    keys_TGd: Sequence[Tensor],
    value_TGw: Tensor,
    spans: Sequence[Span],
    rule: AttentionRule,
    sinks_H: Tensor | None,
) -> Iterator[_Document]:
    step = len(keys_TGd) - 1
    dots_TGRS = _own_scores(query_TGRd, keys_TGd, rule, sinks_H)
    spare = -(dots_TGRS.shape[-1] - 1) % OWN_COLUMNS
    for span in spans:
        rows = span[1] - span[0]
        reach = None if rule.window is None else rule.window - 1 - step
        if reach is not None and reach >= rows - 1:
            reach = None
        query_GNd, dots_GNS = _by_group(query_TGRd, span), _by_group(dots_TGRS, span)
        own = dots_GNS.shape[-1] - 1 + spare
        key_GMd, value_GMw = (
            pad(rows_TGx[slice(*span)].transpose(0, 1), (0, 0, own, 0))
            for rows_TGx in (keys_TGd[0], value_TGw)
        )
        dtype, anchor_GN1 = dots_GNS.dtype, torch.zeros_like(dots_GNS[..., :1])
        if rule.softcap is None:
            first_Gd1 = keys_TGd[0][span[0]].unsqueeze(-1)
            first_GN1 = query_GNd @ first_Gd1 * rule.scaling
            dtype, anchor_GN1 = query_GNd.dtype, _anchor(first_GN1, dots_GNS, rows, reach)
        anchor_GN1 = anchor_GN1.to(dtype)
        own_GNS = (dots_GNS[..., 1:] - anchor_GN1).to(dtype)
        own_GNS = pad(own_GNS, (0, spare), value=float("-inf"))
        yield _Document(
            query_GNd, key_GMd, value_GMw, own_GNS, anchor_GN1, rule.scaling, rule.softcap, reach
        )


def _own_scores(
    query_TGRd: Tensor, keys_TGd: Sequence[Tensor], rule: AttentionRule, sinks_H: Tensor | None
) -> Tensor:
    """A row's scores of its own key of every step, step 0 first, then the sink's [T, G, R, steps (+ 1)]."""
    scores = _dots(query_TGRd, keys_TGd) * rule.scaling
    if rule.softcap is not None:
        scores = soft_capped(scores, rule.softcap)
    if rule.window is not None:
        scores[..., : max(len(keys_TGd) - rule.window, 0)] = float("-inf")
    if sinks_H is None:
        return scores
    sink_TGR1 = sinks_H.to(scores.dtype).view(*scores.shape[1:3], 1).expand(*scores.shape[:3], 1)
    return torch.cat([scores, sink_TGR1], dim=-1)


def _anchor(first_GN1: Tensor, dots_GNS: Tensor, rows: int, reach: int | None) -> Tensor:
    """Attention is drawn to the document's first row or stays near: their scores are close to the maximum."""
    if reach is not None:
        unseen_L = torch.arange(rows, device=first_GN1.device) > reach
        unseen_N1 = unseen_L.repeat_interleave(first_GN1.shape[1] // rows).unsqueeze(-1)
        first_GN1 = first_GN1.masked_fill(unseen_N1, float("-inf"))
    return first_GN1.maximum(dots_GNS.amax(-1, keepdim=True))


def _by_group(rows_TGRx: Tensor, span: Span) -> Tensor:
    """A document's rows as [G, L R, x]."""
    return rows_TGRx[slice(*span)].transpose(0, 1).flatten(1, 2).contiguous()


def _by_row(rows_GNx: Tensor, document: _Document) -> Tensor:
    """[G, L R, x] -> [L, G, R, x]."""
    return rows_GNx.unflatten(1, (document.rows, -1)).transpose(0, 1)


def _dots(rows_TGRx: Tensor, own_TGx: Sequence[Tensor]) -> Tensor:
    """Each row with its own key or value of each step: [T, G, R, steps], in float32 at least."""
    rows = rows_TGRx.to(_exact(rows_TGRx))
    dots = rows.new_empty(*rows.shape[:3], len(own_TGx))
    for step, own in enumerate(own_TGx):
        dots[..., step] = (rows * own.unsqueeze(2).to(rows.dtype)).sum(-1)
    return dots


def _plus_own(rows_TGRx: Tensor, weight_TGRS: Tensor, own_TGx: Sequence[Tensor]) -> Tensor:
    """rows + sum over later steps of weight x own key or value, in float32 at least."""
    exact = _exact(rows_TGRx)
    total, weight = rows_TGRx.to(exact), weight_TGRS.to(exact)
    for step, own in enumerate(own_TGx):
        total = torch.addcmul(total, weight[..., step, None], own.unsqueeze(2).to(exact))
    return total


def _exact(rows: Tensor) -> torch.dtype:
    return torch.promote_types(rows.dtype, torch.float32)


def _own_gradients(weight_TGRS: Tensor, rows_TGRx: Tensor, steps: int) -> list[Tensor]:
    """Of every later step's own keys or values [T, G, x]: the sum over query heads of weight x row."""
    weights = weight_TGRS.unbind(-1)[:steps]
    return [torch.einsum("tgr,tgrx->tgx", weight, rows_TGRx) for weight in weights]


def _halves(cached: Sequence[Tensor]) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
    """Keys, then values, of the steps so far."""
    steps = len(cached) // 2
    return cached[:steps], cached[steps:]
