"""What layouts around one Llama-type decoder layer share: its tensors, its config keys, what a target may not have.

Knows no layout.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

from mtp_train.heads.block import unlike_llama
from mtp_train.models.plain import plain_config
from mtp_train.models.target import Target

MATRICES = (
    "self_attn.q_proj.weight",
    "self_attn.k_proj.weight",
    "self_attn.v_proj.weight",
    "self_attn.o_proj.weight",
    "mlp.gate_proj.weight",
    "mlp.up_proj.weight",
    "mlp.down_proj.weight",
)
NORMS = ("input_layernorm.weight", "post_attention_layernorm.weight")
SIZES = (
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "vocab_size",
    "max_position_embeddings",
    "rms_norm_eps",
    "rope_parameters",
    "hidden_act",
    "attention_bias",
    "mlp_bias",
)
TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")


def dimensions(target: Target) -> dict[str, Any]:
    """config.json's keys of a Llama layer of the target's sizes.

    `rope_theta` and `rope_scaling` say what `rope_parameters` does, for engines that know only them.
    """
    layer, theirs = plain_config(target).to_dict(), target.config.to_dict()
    rope = layer["rope_parameters"]
    return (
        {key: layer[key] for key in SIZES}
        | {key: theirs[key] for key in TOKENS if key in theirs}
        | {
            "rope_theta": rope["rope_theta"],
            "rope_scaling": None if rope["rope_type"] == "default" else rope,
            "tie_word_embeddings": False,
            "dtype": str(target.dtype).removeprefix("torch."),
        }
    )


def block_faults(config: Any, target: Target, held: Collection[str]) -> Iterator[str]:
    """What the head's block has that a Llama-type layer with these tensors has not."""
    if config.block != "target":
        return
    layer = target.base.layers[-1]
    own = set(layer.state_dict())
    faults = [*unlike_llama(target), *sorted(own - set(held))]
    faults += [f"no {name}" for name in (*MATRICES, *NORMS) if name not in own]
    if not faults and getattr(target.config, "hidden_act", "silu") != "silu":
        faults.append(f"hidden_act {target.config.hidden_act}")
    if faults:
        kind = type(layer).__name__
        yield f"the target's own layer {kind} with {', '.join(faults)} (set head.block=llama)"


def output_faults(target: Target) -> Iterator[str]:
    """What stands between the target's lm_head and its logits, which a draft in an engine leaves out."""
    if target.logit_softcap is not None:
        yield f"a cap on the target's logits ({target.logit_softcap})"


def sglang(algorithm: str, target: str, head: str, drafts: int) -> str:
    """SGLang's command for a chain of drafts."""
    return f"""```
python -m sglang.launch_server --model-path {target} --speculative-algorithm {algorithm} \\
    --speculative-draft-model-path {head} --speculative-num-steps {drafts} \\
    --speculative-eagle-topk 1 --speculative-num-draft-tokens {drafts + 1}
```"""
