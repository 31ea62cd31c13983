"""transformers' own model of a target, with its own attention: what our forward is held against.

The model is made anew from config.json; its weights are the target's, not a copy of them, so it costs no memory to
speak of on any device. That these weights are the files' is what `accounting` shows.

Shapes: T rows, D hidden width, V vocabulary.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from accelerate import init_empty_weights
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from mtp_train.models.target import Target


@torch.inference_mode(False)  # torchao's packed weights can't be passed on in it
def sharing_model(target: Target) -> Any:
    """transformers' model of the target's folder, on the weights that the target holds."""
    if target.path is None:
        config = copy.deepcopy(target.config)
    else:
        config = AutoConfig.from_pretrained(target.path, trust_remote_code=False)
    if hasattr(config, "quantization_config"):  # the weights are loaded already
        del config.quantization_config
    with init_empty_weights(include_buffers=False):  # buffers are computed, from the config
        model: Any = AutoModelForCausalLM.from_config(
            config, dtype=target.dtype, attn_implementation="eager"
        )
    model.requires_grad_(False)
    model.load_state_dict(target.model.state_dict(), assign=True)
    return model.to(target.device).eval()


@torch.no_grad()
def reference_rows(target: Target, token_T: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    """States [T, D] that enter the layers and leave the final norm, by their names, and logits [T, V] of one text."""
    out = sharing_model(target)(
        token_T.unsqueeze(0).to(target.device), use_cache=False, output_hidden_states=True
    )
    *entering, last = (state.squeeze(0) for state in out.hidden_states)
    named = {f"layer_{number}": state for number, state in enumerate(entering)}
    return named | {target.state: last}, out.logits.squeeze(0)
