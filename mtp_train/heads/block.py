"""The target's own decoder layer as a head's block: its place in a paged cache, its RoPE, its norms.

Knows no head family.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from mtp_train.attention.interface import AttentionContext
from mtp_train.core.errors import UserError
from mtp_train.models.target import Target


class Rotary(nn.Module):
    """The target's RoPE. Its frequencies stay float32 when a head is cast, as in training and in serving engines.

    In bfloat16 the angle at distance 1,000 would be wrong by more than a radian.
    """

    def __init__(self, target: Target) -> None:
        super().__init__()
        self.inner = type(target.base.rotary_emb)(head_config(target))

    def forward(self, rows: Tensor, position: Tensor) -> tuple[Tensor, Tensor]:
        cosine_and_sine: tuple[Tensor, Tensor] = self.inner(rows, position_ids=position)
        return cosine_and_sine

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Rotary:
        kept = dict(self.inner.named_buffers())
        super()._apply(fn, recurse)
        for name, value in kept.items():
            setattr(self.inner, name, value.to(fn(value).device))
        return self


def make_block(target: Target, *, input_norm: bool = True, depth: int = 0) -> nn.Module:
    """A decoder layer of the target's class; the layer's first norm can be left out.

    Its keys and values are those of layer `depth` after the target's.
    """
    layer = target.layers + depth
    block: nn.Module = type(target.base.layers[-1])(head_config(target, depth), layer_idx=layer)
    if not input_norm:
        block.input_layernorm = nn.Identity()
    return block


def run_block(
    block: nn.Module,
    rotary: nn.Module,
    rows_TD: Tensor,
    position_T: Tensor,
    context: AttentionContext,
) -> Tensor:
    """The block's output [T, D]."""
    rows, position = rows_TD.unsqueeze(0), position_T.unsqueeze(0)
    out: Tensor = block(
        rows,
        attention_mask=None,
        position_ids=position,
        position_embeddings=rotary(rows, position),
        attention_context=context,
    )
    return out.squeeze(0)


def run_attention(
    attention: nn.Module,
    rotary: nn.Module,
    rows_TD: Tensor,
    position_T: Tensor,
    context: AttentionContext,
) -> Tensor:
    """The output [T, D] of a layer's attention alone; its rows may be wider than D."""
    rows, position = rows_TD.unsqueeze(0), position_T.unsqueeze(0)
    out, _ = attention(
        hidden_states=rows,
        attention_mask=None,
        position_embeddings=rotary(rows, position),
        attention_context=context,
    )
    attended: Tensor = out.squeeze(0)
    return attended


def make_norm(target: Target, wanted: bool = True) -> nn.Module:
    """A norm of the target's class; the identity where none is wanted."""
    norm = target.base.norm
    if not wanted:
        return nn.Identity()
    made: nn.Module = type(norm)(target.hidden_size, eps=_epsilon(norm))
    return made


def head_config(target: Target, depth: int = 0) -> Any:
    """The target's config for a block that stands `depth` layers after its last one."""
    config = copy.deepcopy(target.config)
    config._attn_implementation = target.config._attn_implementation
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types + [config.layer_types[-1]] * (depth + 1)
    return config


def start_linears(head: nn.Module) -> None:
    """The random start of every matrix."""
    for module in head.modules():
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=0.02)


def float_state(module: nn.Module) -> dict[str, Tensor]:
    """A frozen module's tensors as a head begins: in float32 on the CPU."""
    return {name: value.float().cpu() for name, value in module.state_dict().items()}


def _epsilon(norm: nn.Module) -> float:
    """The epsilon of a target's norm, under either name that transformers gives it."""
    names = [name for name in ("variance_epsilon", "eps") if hasattr(norm, name)]
    if not names:
        raise UserError(
            "a target's norm must say its epsilon",
            type(norm).__name__,
            "choose another architecture",
        )
    return float(getattr(norm, names[0]))


def nonzero(weight_D: torch.Tensor, smallest: float = 1e-3) -> Tensor:
    """The weights with their magnitude kept away from 0."""
    return torch.where(weight_D < 0, -1.0, 1.0) * weight_D.abs().clamp(min=smallest)
