"""Route the attention calls of transformers' model code into a per-call context.

A forward is called with `attention_context=<context>`; each attention layer then calls
`context(layer_idx, query_THd, key_TGd, value_TGw, rule)` and gets `out_THw` back.
Knows neither pages nor documents: those are the contexts' own.

Shapes: T rows of the ragged batch, H query heads, G key/value heads, d key width, w value width.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface

from mtp_train.core.errors import UserError

ATTENTION_NAME = "mtp_train_context"

# What a layer may ask for that no context computes: running on would give other states than the target's.
UNSUPPORTED = ("position_bias",)


@dataclass(frozen=True)
class AttentionRule:
    """What a layer makes of queries and keys: softmax over the seen keys of cap(scaling * q k), and the sink.

    Attributes:
        window: a row sees the keys of so many positions, its own the last; none sees all before it.
        softcap: cap(x) = softcap * tanh(x / softcap); without one, x.
        sinks: a score per query head [H] that takes its share of the softmax and gives no value.
    """

    scaling: float
    window: int | None = None
    softcap: float | None = None
    sinks: Tensor | None = None

    def __post_init__(self) -> None:
        assert self.softcap is None or self.sinks is None, "no target has both"

    @property
    def plain(self) -> bool:
        """Whether this is what scaled dot-product attention computes."""
        return self.window is None and self.softcap is None and self.sinks is None

    def within(self, rows: int) -> AttentionRule:
        """The same rule for a document of `rows` rows: a window that holds all of it is none."""
        hides = self.window is not None and self.window < rows
        return self if hides or self.window is None else replace(self, window=None)


class AttentionContext(Protocol):
    """Where a ragged batch's keys and values live, and which of them each row sees."""

    def __call__(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, rule: AttentionRule
    ) -> Tensor:
        """query [T, H, d], key [T, G, d], value [T, G, w] -> [T, H, w]."""
        ...


@dataclass(frozen=True)
class Windowed:
    """A context whose rows see no more than so many positions, their own the last."""

    context: AttentionContext
    window: int

    def __call__(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, rule: AttentionRule
    ) -> Tensor:
        own = self.window if rule.window is None else min(rule.window, self.window)
        return self.context(layer, query, key, value, replace(rule, window=own))


def windowed(context: AttentionContext, window: int) -> AttentionContext:
    """The context with a window; as it is with none (0)."""
    return Windowed(context, window) if window else context


def _attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    attention_context: AttentionContext | None = None,
    **extras: Any,
) -> tuple[Tensor, None]:
    asked = [name for name in UNSUPPORTED if extras.get(name) is not None]
    if asked:
        raise UserError(
            "a target's attention may use only what the engine computes",
            f"{type(module).__name__} with {', '.join(asked)}",
            "choose a target without it",
        )
    if attention_context is None:
        raise RuntimeError("a forward through mtp_train's attention needs attention_context=...")
    # [1, H, T, d] -> [T, H, d]
    query_THd, key_TGd, value_TGw = (
        rows.squeeze(0).transpose(0, 1) for rows in (query, key, value)
    )
    layer: Any = module.layer_idx
    rule = AttentionRule(scaling, sliding_window, softcap, s_aux)
    out = attention_context(int(layer), query_THd, key_TGd, value_TGw, rule)
    return out.unsqueeze(0), None


def _no_mask(*_args: Any, **_kwargs: Any) -> None:
    """Masks are the context's business: none is built per model."""


def register() -> str:
    """Register the attention with transformers (once or often: the same) and return its name."""
    AttentionInterface.register(ATTENTION_NAME, _attend)
    AttentionMaskInterface.register(ATTENTION_NAME, _no_mask)
    return ATTENTION_NAME


def soft_capped(scores: Tensor, cap: float) -> Tensor:
    """cap * tanh(scores / cap): the score itself near 0, never beyond the cap."""
    return torch.tanh(scores / cap) * cap


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scaling: float,
    *,
    causal: bool,
    mask: Tensor | None = None,
) -> Tensor:
    """Scaled dot-product attention with grouped heads over a dense batch.

    query [B, H, Tq, d], key and value [B, G, Tk, d] with H a multiple of G; `mask` is additive and broadcasts
    to [B, H, Tq, Tk]. Returns [B, H, Tq, d].
    """
    return torch.nn.functional.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=mask,
        is_causal=causal,
        scale=scaling,
        enable_gqa=query.shape[1] != key.shape[1],
    )


def as_autocast(rows: Tensor) -> Tensor:
    """In the dtype that autocast computes attention in, where it is on."""
    device = rows.device.type
    if not torch.is_autocast_enabled(device):
        return rows
    return rows.to(torch.get_autocast_dtype(device))
