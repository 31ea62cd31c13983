"""A plain Llama decoder layer of a target's sizes, for heads whose block is not to be the target's own.

No q or k norms, no biases, no experts, no latent attention: what the common serving layouts hold. Knows no head.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import (
    LlamaDecoderLayer,
    LlamaRMSNorm,
    LlamaRotaryEmbedding,
    apply_rotary_pos_emb,
)

from mtp_train.models.target import ROPE_TYPES, Target

Layer, Norm, Rotary = LlamaDecoderLayer, LlamaRMSNorm, LlamaRotaryEmbedding
Config = LlamaConfig


def plain_config(target: Target, other: Mapping[str, Any] | None = None) -> LlamaConfig:
    """A Llama with the target's widths, heads, positions, RoPE and norm epsilon.

    other: keys that are not the target's.
    """
    theirs: Any = target.config
    values = dict(
        vocab_size=target.vocab_size,
        hidden_size=target.hidden_size,
        intermediate_size=theirs.intermediate_size,
        num_hidden_layers=target.layers,
        num_attention_heads=theirs.num_attention_heads,
        num_key_value_heads=target.kv_heads * target.tensor_parallel,
        head_dim=target.head_width,
        hidden_act=getattr(theirs, "hidden_act", None) or "silu",
        max_position_embeddings=target.max_positions,
        rms_norm_eps=theirs.rms_norm_eps,
        rope_parameters=_rope(theirs),
        attention_bias=False,
        mlp_bias=False,
    )
    config = LlamaConfig(**(values | dict(other or {})))
    config._attn_implementation = theirs._attn_implementation
    return config


def _rope(theirs: Any) -> dict[str, Any]:
    """The target's RoPE where it turns whole heads in every layer alike; else the plain one with its base."""
    found = dict(getattr(theirs, "rope_parameters", None) or {})
    partial = found.get("partial_rotary_factor", 1.0) != 1.0 or hasattr(theirs, "kv_lora_rank")
    if found.get("rope_type") in ROPE_TYPES and not partial:
        return found
    return {"rope_type": "default", "rope_theta": found.get("rope_theta", 10000.0)}


def rotated(rows_THd: Tensor, cosine_Td: Tensor, sine_Td: Tensor) -> Tensor:
    """Rows turned to their positions, by what `Rotary` gives of these [T, H, d]."""
    turned, _ = apply_rotary_pos_emb(rows_THd, rows_THd[:, :0], cosine_Td, sine_Td, unsqueeze_dim=1)
    return turned


def read_config(values: Mapping[str, Any]) -> LlamaConfig:
    """The Llama that a config.json describes, what it leaves out by the defaults that engines take."""
    left_out = ("architectures", "model_type", "dtype", "torch_dtype", "transformers_version")
    return LlamaConfig(**{key: value for key, value in values.items() if key not in left_out})


def rotary_table(config: Mapping[str, Any], position_T: Tensor) -> tuple[Tensor, Tensor]:
    """Cosine and sine [T, H / 2] in float32 of a Llama whose config.json says this."""
    known = ("hidden_size", "num_attention_heads", "head_dim", "max_position_embeddings")
    sizes = {name: config[name] for name in (*known, "rope_parameters")}
    rotary = Rotary(LlamaConfig(**sizes))
    cosine, sine = rotary(torch.zeros(1), position_ids=position_T.unsqueeze(0))
    half = cosine.shape[-1] // 2
    return cosine[0, :, :half], sine[0, :, :half]
