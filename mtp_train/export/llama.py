"""What layouts around one Llama-type decoder layer share: its tensors, its config keys, what a target may not have.

Knows no layout.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from mtp_train.core.errors import UserError
from mtp_train.heads.block import OWN, POSITIONS, unlike_llama
from mtp_train.models.plain import plain_config, read_config
from mtp_train.models.target import ROPE_TYPES, Target

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
SLIDING = "sliding_attention"
LAYER = re.compile(r"layers\.(\d+)\.")
TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")


def dimensions(target: Target, own: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """config.json's keys of a Llama layer of the target's sizes, but for those of its own.

    `rope_theta` and `rope_scaling` say what `rope_parameters` does, for engines that know only them.
    """
    layer, theirs = plain_config(target, own).to_dict(), target.config.to_dict()
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


def window_keys(window: int, layers: int) -> dict[str, Any]:
    """config.json's keys of a draft whose layers all have one window, as vLLM's Llama reads them; none: no keys."""
    if not window:
        return {}
    return {"layer_types": [SLIDING] * layers, "sliding_window": window}


def read_window(config: Mapping[str, Any], layers: int) -> int:
    """`head.window` of a draft of so many layers: other trainers' files may name more of them, the target's."""
    kinds = set((config.get("layer_types") or [])[:layers])
    if SLIDING not in kinds:
        return 0
    window = config.get("sliding_window")
    if len(kinds) > 1 or not isinstance(window, int) or window < 1:
        rule = "a head's layers must all have one window, of a position or more"
        value = f"layer_types {sorted(kinds)}, sliding_window {window}"
        raise UserError(rule, value, "this kind is not trained or run here")
    return window


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


def embedding_faults(target: Target) -> Iterator[str]:
    """What a target does to its embeddings, which a draft in an engine leaves out."""
    token_T = torch.arange(8, device=target.device)  # the row of a padding token may be zeros
    if not torch.equal(target.embed(token_T), target.base.get_input_embeddings().weight[token_T]):
        yield f"scaled embeddings ({target.config.model_type})"


def output_faults(target: Target) -> Iterator[str]:
    """What stands between the target's lm_head and its logits, which a draft in an engine leaves out."""
    if target.logit_softcap is not None:
        yield f"a cap on the target's logits ({target.logit_softcap})"


def block_kind(target: Target, found: Collection[str]) -> str:
    """`head.block` of a head that is read: the target's own class where it has the tensors of the head's first layer.

    Another trainer's layer multiplies by its norms' weights and has no window, whatever the target's does.
    """
    outer = {
        "input_layernorm.weight",
        "hidden_norm.weight",
    }  # which the first layer of a family lacks, or has more
    same = set(target.base.layers[-1].state_dict()) - outer == set(found) - outer
    return "target" if same and not unlike_llama(target) else "llama"


def read_layer(config: Mapping[str, Any], target: Target) -> dict[str, Any]:
    """`head.layer` of a Llama-type draft: what its config.json says other than the target, of what a head may.

    Tensors of the same shapes can be cut into other heads, and turn by another RoPE: other sizes are an error.
    """
    theirs, ours = read_config(config).to_dict(), plain_config(target).to_dict()
    if config.get("target_hidden_size") not in (None, theirs["hidden_size"]):
        raise UserError(
            "a head must have its target's hidden size",
            f"hidden_size {theirs['hidden_size']} for target_hidden_size {config['target_hidden_size']}",
            "this kind is not trained or run here",
        )
    for name in ("hidden_size", "vocab_size"):
        if theirs[name] != ours[name]:
            raise UserError(
                f"a head must be used with its own target ({name} {ours[name]})",
                f"{name} {theirs[name]}",
                "name the target that it was trained for",
            )
    others = [key for key in SIZES if key not in OWN]
    odd = [f"{key} {theirs[key]} for {ours[key]}" for key in others if theirs[key] != ours[key]]
    if odd:
        raise UserError(
            "a head's layer must be of the target's kind",
            ", ".join(odd),
            "check its config.json against the target's",
        )
    if POSITIONS not in config or theirs[POSITIONS] > ours[POSITIONS]:
        theirs[POSITIONS] = ours[POSITIONS]  # a head is run at its target's positions
    rope = theirs["rope_parameters"].get("rope_type")
    if rope not in ROPE_TYPES:
        raise UserError(
            "a head's RoPE must not depend on the text's length: " + ", ".join(ROPE_TYPES),
            f"rope_type {rope}",
            "this kind is not trained or run here",
        )
    return {key: theirs[key] for key in OWN if theirs[key] != ours[key]}


def layer_faults(config: Any) -> Iterator[str]:
    """Stock engines' MTP modules have one decoder layer."""
    if config.layers > 1:
        yield f"head.layers={config.layers} (mtp_train_vllm holds it)"


def settings(
    config: Mapping[str, Any], target: Target, tensors: Mapping[str, Tensor], first: str
) -> dict[str, Any]:
    """`head.block`, `layer`, `layers` and `init` of a draft that is read.

    How many layers it has its tensors say: published config.json files often give the target's number.

    Args:
        first: prefix of the first layer's tensors; later ones lie in `layers.1.` and so on.
    """
    own = {name.removeprefix(first) for name in tensors if name.startswith(first)}
    layer = read_layer(_with_head_width(config, tensors.get(f"{first}{MATRICES[0]}")), target)
    return {
        "block": "llama" if layer else block_kind(target, own),
        "layer": layer,
        "layers": max([0, *(int(match[1]) for match in map(LAYER.match, tensors) if match)]) + 1,
        "init": "random" if layer else "last_layer",
    }


def _with_head_width(config: Mapping[str, Any], query: Tensor | None) -> dict[str, Any]:
    """A config with a head_dim: where it names none, what the query matrix is cut into."""
    heads = config.get("num_attention_heads")
    if config.get("head_dim") or query is None or not heads:
        return dict(config)
    return {**config, "head_dim": len(query) // heads}


def layer_names(head: Any, first: str) -> dict[str, str]:
    """Name in a layout -> name in the head, of its decoder layers; the first has prefix `first`."""
    names = {f"{first}{name}": f"block.{name}" for name in head.block.state_dict()}
    for number, block in enumerate(head.later, start=1):
        names |= {
            f"layers.{number}.{name}": f"later.{number - 1}.{name}" for name in block.state_dict()
        }
    return names


def tidied(
    tensors: Mapping[str, Tensor], target: Target, *, shared_lm_head: bool
) -> dict[str, Tensor]:
    """Without the prefix `model.`, RoPE tables, and copies of the target's embedding and lm_head."""
    found = {name.removeprefix("model."): value for name, value in tensors.items()}
    found = {name: value for name, value in found.items() if "rotary_emb." not in name}
    own = {"embed_tokens.weight": target.base.get_input_embeddings().weight}
    if shared_lm_head:
        own["lm_head.weight"] = target.lm_head.weight
    for name, theirs in own.items():
        if name in found:
            _require_copy(name, found.pop(name), theirs.detach().cpu())
    return found


def _require_copy(name: str, copy: Tensor, theirs: Tensor) -> None:
    """Raise unless a tensor is the target's, up to the rounding of another dtype."""
    if copy.shape != theirs.shape or not torch.allclose(
        copy.float(), theirs.float(), rtol=1e-2, atol=1e-5
    ):
        raise UserError(
            "a head's embedding and lm_head must be the target's",
            f"another {name} {tuple(copy.shape)} for {tuple(theirs.shape)}",
            "name the target that it was trained for",
        )


def vllm(method: str, target: str, head: str, drafts: int, *, parallel: bool = False) -> str:
    """vLLM's command, in Python and as a server; `parallel`: one forward drafts all tokens."""
    draft = {"method": method, "model": head, "num_speculative_tokens": drafts}
    draft |= {"parallel_drafting": True} if parallel else {}
    said = json.dumps(draft)
    return f"""```python
from vllm import LLM

llm = LLM(model="{target}", speculative_config={said.replace(": true", ": True")})
```

```
vllm serve {target} --speculative-config '{said}'
```"""


def sglang(algorithm: str, target: str, head: str, drafts: int) -> str:
    """SGLang's command for a chain of drafts."""
    return f"""```
python -m sglang.launch_server --model-path {target} --speculative-algorithm {algorithm} \\
    --speculative-draft-model-path {head} --speculative-num-steps {drafts} \\
    --speculative-eagle-topk 1 --speculative-num-draft-tokens {drafts + 1}
```"""
