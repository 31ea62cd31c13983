"""Paged attention by FlashInfer's kernels, from the same `BatchPlan` as the torch backend.

FlashInfer plans a batch on the CPU and then runs it layer by layer. Here it plans once per batch and kind of layer
(heads, widths, scaling, window, cap: target and head may differ), from index arrays that stay on the CPU, so that
planning reads nothing back from the device. The pools of `PagedKV` are FlashInfer's NHD layout as they are.

    one row per sequence     BatchDecodeWithPagedKVCacheWrapper
    else                     BatchPrefillWithPagedKVCacheWrapper, causal
    draft trees              the same, with a mask; it holds the window too, which the kernels count in slots

A sink takes its share of the softmax from the log-sum-exp that the kernels return: out * sigmoid(lse - sink). That is
exact, holds for every mask, and needs no kernel of its own (FlashInfer's variant with sinks ignores a custom mask).

What the kernels lack falls back to the torch backend, layer by layer, and `Workspace.refused` says why: other dtypes
than bfloat16 and float16, other widths, and keys wider than values, as multi-head latent attention expands them
(Hopper's kernel wants equal strides). FlashInfer's own kernels for latent attention do not apply: they read compressed
keys, one latent of 512 and one rope part of 64 for all heads, and queries with the up-projection absorbed; this cache
holds what transformers' layers hand over, expanded keys and values per head.

No CUDA graph is captured: that takes wrappers made for one batch size with buffers of their own, and plans outside of
the graph. All work belongs on one stream, whose order keeps the shared buffers safe.
Knows no scheduler, no sampling and no model.

Shapes: T rows, B sequences, H query heads, G key/value heads, d key width, w value width, R rows of one sequence, L its
cached length.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass, replace
from functools import cached_property
from math import log
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from mtp_train.attention.interface import AttentionRule
from mtp_train.attention.paged import BatchPlan, PagedContext, PagedKV, TreeRows

# What FlashInfer 0.7 compiles in its default build; prefill and decode, FA2 and FA3 have them in common.
DTYPES = (torch.float16, torch.bfloat16)
WIDTHS = (64, 128, 256)
FEW = (
    1,
    2,
    3,
)  # H/G that decode without tensor cores: at 4 they are faster, and not every H/G has the kernel

WORKSPACE = 384 * 2**20  # bytes for partial results of long sequences, which several blocks share


@dataclass(frozen=True)
class Shape:
    """A kind of layer: what a plan is made for."""

    heads: int
    kv_heads: int
    key_width: int
    value_width: int
    dtype: torch.dtype
    scaling: float
    window: int | None
    softcap: float | None

    @property
    def shared(self) -> int:
        return self.heads // self.kv_heads

    @property
    def refusal(self) -> str:
        """Why no kernel here computes it; empty if one does."""
        if self.dtype not in DTYPES:
            return f"the kernels compute in bfloat16 or float16, not in {self.dtype}"
        if self.key_width != self.value_width:
            return f"keys of width {self.key_width} and values of {self.value_width} lie in pools of other strides"
        if self.key_width not in WIDTHS:
            return f"heads of width {self.key_width} have no kernel, only those of {WIDTHS}"
        return ""


class _Kind(NamedTuple):
    decode: bool
    tensor_cores: bool


class _Wrapper:
    """One of FlashInfer's wrappers, and when its newest plan has reached the device.

    Planning writes into page-locked memory that is copied later: the next plan must not overwrite it before.
    """

    def __init__(self, kind: _Kind, made: Any) -> None:
        self.kind = kind
        self.made = made
        self._copied: torch.cuda.Event | None = None

    @property
    def idle(self) -> bool:
        return self._copied is None or self._copied.query()

    def plan(self, device: torch.device, *arrays: Tensor, **options: Any) -> None:
        self.made.plan(*arrays, **options)
        if device.type == "cuda":
            self._copied = torch.cuda.Event()
            self._copied.record()


class Workspace:
    """What all batches on one device share: the scratch buffer, and wrappers that no live context holds.

    Args:
        library: the package `flashinfer`, or what stands in for it.
        size: bytes of scratch.
    """

    def __init__(self, device: torch.device, library: Any, size: int = WORKSPACE) -> None:
        self.device = device
        self.refused: set[str] = set()  # reasons why layers ran on the torch backend
        self._library = library
        # zeros: the decode kernels count in it from their first use on
        self._scratch = torch.zeros(size, dtype=torch.uint8, device=device)
        self._free: list[_Wrapper] = []

    def take(self, kind: _Kind) -> _Wrapper:
        """A wrapper that is nobody else's; a new one rather than waiting for a copy."""
        for index, wrapper in enumerate(self._free):
            if wrapper.kind == kind and wrapper.idle:
                return self._free.pop(index)
        with torch.inference_mode(False):  # its buffers outlive this call
            return _Wrapper(kind, self._make(kind))

    def _make(self, kind: _Kind) -> Any:
        if not kind.decode:
            return self._library.BatchPrefillWithPagedKVCacheWrapper(self._scratch, "NHD")
        return self._library.BatchDecodeWithPagedKVCacheWrapper(
            self._scratch, "NHD", use_tensor_cores=kind.tensor_cores
        )

    def give_back(self, wrappers: list[_Wrapper]) -> None:
        self._free += wrappers


class FlashInferContext:
    """Attention of one batch by FlashInfer: write the rows' keys and values, then attend over the cached ones.

    Holds its wrappers until it is gone; they are the next batch's then.
    """

    def __init__(self, cache: PagedKV, plan: BatchPlan, workspace: Workspace) -> None:
        self.cache = cache
        # A copy that knows no contexts: a ring with them would keep this one, and its wrappers, alive.
        self.plan = replace(plan, contexts={})
        self.workspace = workspace
        self._planned: dict[Shape, _Wrapper] = {}
        self._held: list[_Wrapper] = []
        weakref.finalize(self, workspace.give_back, self._held).atexit = False

    def __call__(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, rule: AttentionRule
    ) -> Tensor:
        shape = Shape(
            heads=query.shape[1],
            kv_heads=key.shape[1],
            key_width=key.shape[2],
            value_width=value.shape[2],
            dtype=query.dtype,
            scaling=rule.scaling,
            window=rule.within(self._longest).window,
            softcap=rule.softcap,
        )
        if shape.refusal:
            self.workspace.refused.add(shape.refusal)
            return self._torch(layer, query, key, value, rule)
        self.cache.write(layer, self.plan.slots, key, value)
        wrapper = self._planned.get(shape) or self._plan(shape)
        pages = _paged(self.cache, layer, shape.kv_heads)
        if rule.sinks is None:
            return wrapper.made.run(query.contiguous(), pages)
        out, lse_TH = wrapper.made.run(query.contiguous(), pages, return_lse=True)
        return with_sinks(out, lse_TH, rule.sinks)

    @cached_property
    def _torch(self) -> PagedContext:
        return PagedContext(self.cache, self.plan)

    @cached_property
    def _longest(self) -> int:
        return int(self.plan.kv_lengths.max())

    def _plan(self, shape: Shape) -> _Wrapper:
        decode = self.plan.trees is None and bool((self.plan.rows == 1).all())
        wrapper = self.workspace.take(_Kind(decode, decode and shape.shared not in FEW))
        self._held.append(wrapper)
        if decode:
            self._plan_decode(wrapper, shape)
        else:
            self._plan_prefill(wrapper, shape)
        self._planned[shape] = wrapper
        return wrapper

    def _plan_decode(self, wrapper: _Wrapper, shape: Shape) -> None:
        wrapper.plan(
            self.workspace.device,
            *self._pages,
            num_qo_heads=shape.heads,
            num_kv_heads=shape.kv_heads,
            head_dim=shape.key_width,
            page_size=self.plan.page_size,
            window_left=_window_left(shape.window),
            logits_soft_cap=shape.softcap,
            q_data_type=shape.dtype,
            kv_data_type=self.cache.dtype,
            sm_scale=shape.scaling,
        )

    def _plan_prefill(self, wrapper: _Wrapper, shape: Shape) -> None:
        trees = self.plan.trees
        wrapper.plan(
            self.workspace.device,
            _int32(self.plan.qo_indptr),
            *self._pages,
            num_qo_heads=shape.heads,
            num_kv_heads=shape.kv_heads,
            head_dim_qk=shape.key_width,
            page_size=self.plan.page_size,
            custom_mask=None if trees is None else self._mask(shape.window),
            causal=trees is None,
            window_left=-1 if trees else _window_left(shape.window),
            logits_soft_cap=shape.softcap,
            q_data_type=shape.dtype,
            kv_data_type=self.cache.dtype,
            sm_scale=shape.scaling,
        )

    @cached_property
    def _pages(self) -> tuple[Tensor, Tensor, Tensor]:
        plan = self.plan
        arrays = (plan.kv_page_indptr, plan.kv_page_indices, plan.kv_last_page_len)
        indptr, indices, last = (_int32(array) for array in arrays)
        return indptr, indices, last

    def _mask(self, window: int | None) -> Tensor:
        """Which cached rows each row sees, sequence after sequence, row by row, bool [sum of R * L].

        Bits that are packed already would save FlashInfer a read of their number from the device, but its plan
        counts the sequences' packed bits from wrong places (flashinfer#2201).
        """
        trees = self.plan.trees or ()
        seen = [
            seen_rows(rows, length, tree, window).ravel()
            for rows, length, tree in zip(self.plan.rows, self.plan.kv_lengths, trees, strict=True)
        ]
        return torch.from_numpy(np.concatenate(seen)).to(self.workspace.device, non_blocking=True)


def seen_rows(rows: int, length: int, tree: TreeRows | None, window: int | None) -> np.ndarray:
    """Which cached rows a sequence's `rows` newest see, bool [R, L]: of a tree, or all before."""
    place = np.arange(length)
    position = place.copy()
    seen = place <= place[length - rows :, None]
    if tree is not None:
        position[tree.base :] = tree.base + tree.depth
        seen[:, tree.base :] = tree.seen
    if window is not None:
        seen &= position > position[length - rows :, None] - window
    return seen


def with_sinks(out_THw: Tensor, lse_TH: Tensor, sinks_H: Tensor) -> Tensor:
    """What is left of softmax outputs when a sink takes its share; `lse_TH` is the log2 of the sum of exp(scores)."""
    share_TH = torch.sigmoid(lse_TH * log(2) - sinks_H.to(lse_TH.dtype))
    return (out_THw * share_TH.unsqueeze(-1)).to(out_THw.dtype)


def _paged(cache: PagedKV, layer: int, kv_heads: int) -> tuple[Tensor, Tensor]:
    """A layer's pools as pages [pages, page_size, G, d] and [.., w]: the same memory."""
    pools = cache._pools[layer]
    assert pools is not None, "write before read"
    key, value = (pool.view(cache.pages, cache.page_size, kv_heads, -1) for pool in pools)
    return key, value


def _window_left(window: int | None) -> int:
    """FlashInfer counts the keys before a row's own; -1 is all."""
    return -1 if window is None else window - 1


def _int32(array: np.ndarray) -> Tensor:
    return torch.from_numpy(array.astype(np.int32))
