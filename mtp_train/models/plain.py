"""A plain Llama decoder layer of a target's sizes, for heads whose block is not to be the target's own.

No q or k norms, no biases, no experts, no latent attention: what the common serving layouts hold. Knows no head.
"""

from __future__ import annotations

from typing import Any

from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import (
    LlamaDecoderLayer,
    LlamaRMSNorm,
    LlamaRotaryEmbedding,
)

from mtp_train.models.target import ROPE_TYPES, Target

Layer, Norm, Rotary = LlamaDecoderLayer, LlamaRMSNorm, LlamaRotaryEmbedding
Config = LlamaConfig


def plain_config(target: Target) -> LlamaConfig:
    """A Llama with the target's widths, heads, positions, RoPE and norm epsilon."""
    theirs: Any = target.config
    config = LlamaConfig(
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
    config._attn_implementation = theirs._attn_implementation
    return config


def _rope(theirs: Any) -> dict[str, Any]:
    """The target's RoPE where it turns whole heads in every layer alike; else the plain one with its base."""
    found = dict(getattr(theirs, "rope_parameters", None) or {})
    partial = found.get("partial_rotary_factor", 1.0) != 1.0 or hasattr(theirs, "kv_lora_rank")
    if found.get("rope_type") in ROPE_TYPES and not partial:
        return found
    return {"rope_type": "default", "rope_theta": found.get("rope_theta", 10000.0)}
