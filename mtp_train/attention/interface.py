"""Route the attention calls of transformers' model code into a per-call context.

A forward is called with `attention_context=<context>`; each attention layer then calls
`context(layer_idx, query_THd, key_TGd, value_TGd, scaling)` and gets `out_THd` back.
Knows neither pages nor documents: those are the contexts' own.

Shapes: T rows of the ragged batch, H query heads, G key/value heads, d head width.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface

from mtp_train.core.errors import UserError

ATTENTION_NAME = "mtp_train_context"

# What a layer may ask for that no context computes: running on would give other states than the target's.
UNSUPPORTED = ("sliding_window", "softcap", "s_aux", "position_bias")


class AttentionContext(Protocol):
    """Where a ragged batch's keys and values live, and which of them each row sees."""

    def __call__(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float
    ) -> Tensor:
        """query [T, H, d], key and value [T, G, d] -> [T, H, d]."""
        ...


def _attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float,
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
    query_THd, key_TGd, value_TGd = (
        rows.squeeze(0).transpose(0, 1) for rows in (query, key, value)
    )
    layer: Any = module.layer_idx
    out = attention_context(int(layer), query_THd, key_TGd, value_TGd, scaling)
    return out.unsqueeze(0), None


def _no_mask(*_args: Any, **_kwargs: Any) -> None:
    """Masks are the context's business: none is built per model."""


def register() -> str:
    """Register the attention with transformers (once or often: the same) and return its name."""
    AttentionInterface.register(ATTENTION_NAME, _attend)
    AttentionMaskInterface.register(ATTENTION_NAME, _no_mask)
    return ATTENTION_NAME


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
