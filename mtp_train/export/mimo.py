"""The MiMo-MTP layout: an `mtp` head of a Llama-type target, as stock vLLM and SGLang load it.

vLLM computes `input_proj([hidden_layernorm(H) | token_layernorm(E)])`, a Qwen2 block, a residual add and
`final_layernorm`; it zeroes the embedding at position 0 and feeds the normed output back (vLLM 0.32,
`mimo_mtp.py`). Our head has the embedding first, so the two halves of the projection change places. vLLM always
builds q/k/v biases and leaves missing ones uninitialised, so zeros are written for a block without them.

Knows tensors and config keys only; the reload check is `reload.py`'s.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mtp_train.core.errors import UserError
from mtp_train.heads.base import DraftHead
from mtp_train.heads.block import unlike_llama
from mtp_train.heads.mtp import MtpHead
from mtp_train.heads.native import swap_halves
from mtp_train.models.target import Target

PREFIX = "model.mtp_layers.0."
NORMS = {
    "token_layernorm": "enorm",
    "hidden_layernorm": "hnorm",
    "final_layernorm": "final_norm",
    "input_layernorm": "block.input_layernorm",
    "post_attention_layernorm": "block.post_attention_layernorm",
}
SWITCHES = ("enorm", "hnorm", "input_norm", "final_norm")  # of MtpConfig
BLOCK = (
    "self_attn.q_proj.weight",
    "self_attn.k_proj.weight",
    "self_attn.v_proj.weight",
    "self_attn.o_proj.weight",
    "mlp.gate_proj.weight",
    "mlp.up_proj.weight",
    "mlp.down_proj.weight",
)
BIASES = ("self_attn.q_proj.bias", "self_attn.k_proj.bias", "self_attn.v_proj.bias")
HELD = {*BLOCK, *BIASES, "input_layernorm.weight", "post_attention_layernorm.weight"}
CONFIG_KEYS = (
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
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
)


def names() -> dict[str, str]:
    """Name in the layout -> name in `MtpHead`, for every tensor that the head has."""
    norms = {f"{PREFIX}{theirs}.weight": f"{ours}.weight" for theirs, ours in NORMS.items()}
    block = {f"{PREFIX}{name}": f"block.{name}" for name in BLOCK}
    return norms | block | {f"{PREFIX}input_proj.weight": "eh_proj.weight"}


def export_tensors(head: MtpHead, dtype: torch.dtype) -> dict[str, Tensor]:
    """The layout's tensors, complete: nothing missing, nothing else."""
    ours = require_head(head).state_dict()
    require_block(ours)
    tensors = {theirs: ours[mine] for theirs, mine in names().items()}
    tensors[f"{PREFIX}input_proj.weight"] = swap_halves(tensors[f"{PREFIX}input_proj.weight"])
    for bias in BIASES:
        rows = tensors[f"{PREFIX}{bias.replace('.bias', '.weight')}"].shape[0]
        tensors[f"{PREFIX}{bias}"] = ours.get(f"block.{bias}", torch.zeros(rows))
    return {name: tensor.to(dtype).contiguous().clone() for name, tensor in sorted(tensors.items())}


def import_tensors(tensors: dict[str, Tensor], head: MtpHead) -> None:
    """Load the layout's tensors into `head`; a missing, extra or misshapen one is an error that names it."""
    ours = head.state_dict()
    require_block(ours)
    zero_biases = {f"{PREFIX}{bias}": f"block.{bias}" for bias in BIASES}
    wanted = names() | {theirs: mine for theirs, mine in zero_biases.items() if mine in ours}
    _require_names(set(tensors), set(wanted), optional=set(zero_biases))
    for theirs in set(zero_biases) - set(wanted):
        if theirs in tensors and bool(tensors[theirs].any()):
            raise UserError(
                "a bias must be zero for a target without biases",
                theirs,
                "import it for another target",
            )
    loaded = {mine: tensors[theirs].float() for theirs, mine in wanted.items()}
    loaded["eh_proj.weight"] = swap_halves(loaded["eh_proj.weight"])
    for name, tensor in loaded.items():
        if tensor.shape != ours[name].shape:
            raise UserError(
                "a tensor must have the target's dimensions",
                f"{name} {tuple(tensor.shape)} for {tuple(ours[name].shape)}",
                "use the head's own target",
            )
    head.load_state_dict(loaded)


def config(target: Target) -> dict[str, Any]:
    """The folder's config.json: the target's dimensions, RoPE and norm epsilon, one layer."""
    theirs = target.config.to_dict()
    kept = {key: theirs[key] for key in CONFIG_KEYS if key in theirs}
    kept["head_dim"] = target.head_width
    return kept | {
        "architectures": ["MiMoForCausalLM"],
        "model_type": theirs["model_type"],
        "num_hidden_layers": 1,
        "num_nextn_predict_layers": 1,
        "tie_word_embeddings": False,
        "dtype": str(target.dtype).removeprefix("torch."),
    }


def require_head(head: DraftHead) -> MtpHead:
    """The head, if the layout holds its family and its norms; else a `UserError` that names what it can't hold."""
    cannot = not_held(head.config)
    if cannot or not isinstance(head, MtpHead):
        raise UserError(
            "the MiMo-MTP layout holds heads of family mtp of one module with all norms: engines run each of them",
            cannot,
            "use this head in mtp_train's engine, or train one that the layout holds",
        )
    return head


def not_held(config: Any) -> str:
    """What of a head's configuration the layout can't hold; empty if it holds such heads."""
    if config.family != MtpHead.family:
        return f"head.family={config.family}"
    several = [f"head.modules={config.modules}"] if config.modules > 1 else []
    missing = [f"head.{name}=false" for name in SWITCHES if not getattr(config, name)]
    return ", ".join(several + missing)


def block_kind(target: Target) -> str:
    """`head.block` of a head that the layout holds: the target's own class if it has the layout's tensors."""
    own = set(target.base.layers[-1].state_dict())
    return "target" if own <= HELD and not unlike_llama(target) else "llama"


def require_target(head: MtpHead, target: Target) -> None:
    """Refuse what engines would compute otherwise: they run a plain block and the bare lm_head."""
    odd = unlike_llama(target) if head.config.block == "target" else []
    if odd:
        raise UserError(
            "the MiMo-MTP layout holds a Llama-type block",
            f"{target.config.model_type} with {', '.join(odd)}",
            "train a head with head.block=llama",
        )
    if target.logit_softcap is not None:
        raise UserError(
            "the MiMo-MTP layout has no cap on logits",
            f"{target.config.model_type} with {target.logit_softcap}",
            "use this head in mtp_train's engine",
        )


def require_block(state: dict[str, Tensor]) -> None:
    """Refuse a head whose block the layout can't hold."""
    block = {name.removeprefix("block.") for name in state if name.startswith("block.")}
    extra = block - HELD
    missing = {*BLOCK, "input_layernorm.weight", "post_attention_layernorm.weight"} - block
    if extra or missing:
        raise UserError(
            "the MiMo-MTP layout holds a Llama-type block",
            f"extra {sorted(extra)}, missing {sorted(missing)}",
            "train a head with head.block=llama",
        )


def _require_names(found: set[str], wanted: set[str], optional: set[str]) -> None:
    missing, extra = wanted - found, found - wanted - optional
    if missing or extra:
        raise UserError(
            "a head folder must hold the layout's tensors and nothing else",
            f"missing {sorted(missing)}, extra {sorted(extra)}",
            "export the head again",
        )
