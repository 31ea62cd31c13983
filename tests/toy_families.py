"""Toy targets of every type that is admitted, by a name for test ids, and transformers' own models of them."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from toys import toy_config
from transformers import (
    AutoModelForCausalLM,
    DeepseekV2Config,
    DeepseekV3Config,
    Gemma2Config,
    Gemma3TextConfig,
    GemmaConfig,
    GptOssConfig,
    MistralConfig,
    MixtralConfig,
    Qwen2Config,
    Qwen3Config,
)

from mtp_train.models.target import Target

SIZES = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
}
WINDOW = {"sliding_window": 7}  # shorter than the tests' texts
CAPS = {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0}
LATENT = {  # keys of 12, values of 6
    **{key: SIZES[key] for key in SIZES if key not in ("head_dim", "num_key_value_heads")},
    "num_key_value_heads": 4,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 6,
    "kv_lora_rank": 10,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.5,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
    "mscale": 0.7,
    "mscale_all_dim": 0.7,
}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
ROPES = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e2},
    "full_attention": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0},
}


def deep(pattern: str) -> dict[str, Any]:
    """A layer per letter: s(liding) or f(ull)."""
    types = {"s": "sliding_attention", "f": "full_attention"}
    return {"num_hidden_layers": len(pattern), "layer_types": [types[one] for one in pattern]}


CONFIGS = {
    "llama": toy_config(),
    "mistral": MistralConfig(**SIZES, sliding_window=None),
    "mistral-window": MistralConfig(**SIZES, **WINDOW),
    "qwen2": Qwen2Config(**{key: SIZES[key] for key in SIZES if key != "head_dim"}),
    "qwen3": Qwen3Config(**SIZES),
    "qwen3-window": Qwen3Config(**SIZES, **WINDOW, use_sliding_window=True, max_window_layers=1),
    "gemma": GemmaConfig(**SIZES),
    "gemma2": Gemma2Config(**SIZES | deep("sf"), **WINDOW, **CAPS, query_pre_attn_scalar=5),
    "gemma2-slides-last": Gemma2Config(**SIZES | deep("fs"), **WINDOW, **CAPS),
    "gemma3": Gemma3TextConfig(**SIZES | deep("ssf"), **WINDOW, rope_parameters=ROPES),
    "gemma3-slides-last": Gemma3TextConfig(**SIZES | deep("fs"), **WINDOW, rope_parameters=ROPES),
    "deepseek_v2": DeepseekV2Config(**LATENT, q_lora_rank=None),
    "deepseek_v2-groups": DeepseekV2Config(
        **LATENT,
        q_lora_rank=9,
        topk_method="group_limited_greedy",
        n_group=2,
        topk_group=1,
        rope_parameters=YARN,
    ),
    "deepseek_v3": DeepseekV3Config(
        **LATENT, q_lora_rank=9, n_group=2, topk_group=1, rope_parameters=YARN
    ),
    "mixtral": MixtralConfig(**SIZES, **EXPERTS),
    "gpt_oss": GptOssConfig(**SIZES | deep("sf"), **WINDOW, **EXPERTS),
    "gpt_oss-slides-last": GptOssConfig(**SIZES | deep("fs"), **WINDOW, **EXPERTS),
}


@cache
def toy(name: str) -> Target:
    """A toy of that name; weights, norms and sinks differ from what a module begins with."""
    target = Target.from_config(CONFIGS[name], seed=1)
    generator = torch.Generator().manual_seed(2)
    for tensor in target.model.parameters():
        if tensor.ndim == 1:
            tensor.add_(torch.rand(tensor.shape, generator=generator) - 0.3)
        else:
            tensor.mul_(4.0)  # scores and logits that a cap changes
    return target


def reference_model(target: Target) -> Any:
    """transformers' own model with its own attention."""
    config = type(target.config)(**target.config.to_diff_dict())
    plain = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    plain.load_state_dict(target.model.state_dict())
    return plain
