"""A causal LM's tensors by the names that it is published with, and a model made of them. Knows no file and no head."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedConfig
from transformers.core_model_loading import revert_weight_conversion

from mtp_train.models.target import Target

OUTPUT = "lm_head.weight"


def outline(config: PreTrainedConfig) -> Any:
    """transformers' model of that config, without storage."""
    with torch.device("meta"):
        return Target.from_config(config).model


def published(config: PreTrainedConfig, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A model's state by the names it is published with: experts one by one."""
    named: dict[str, Tensor] = revert_weight_conversion(outline(config), dict(state))
    return named


def wanted(config: PreTrainedConfig) -> dict[str, Tensor]:
    """The tensors that a model of that config is published with, without storage; tied ones once."""
    state = dict(outline(config).state_dict())
    if config.tie_word_embeddings:
        state.pop(OUTPUT, None)
    return published(config, state)


def model_of(config: PreTrainedConfig, tensors: Mapping[str, Tensor]) -> Target:
    """The model whose published tensors are these, in float32."""
    prepared = Target.from_config(config).config  # our attention is asked for in it
    return Target(_loaded(prepared, tensors))


@torch.no_grad()
def plain_logits(
    config: PreTrainedConfig, tensors: Mapping[str, Tensor], token_T: Tensor, position_T: Tensor
) -> Tensor:
    """Logits [T, V] of one text by transformers' model and transformers' attention, in float32."""
    model: Any = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    whole = _loaded(model.config, tensors)
    out = whole(token_T.unsqueeze(0), position_ids=position_T.unsqueeze(0), use_cache=False)
    logits: Tensor = out.logits[0]
    return logits


def _loaded(config: PreTrainedConfig, tensors: Mapping[str, Tensor]) -> Any:
    return type(outline(config)).from_pretrained(
        None, config=config, state_dict=dict(tensors), dtype=torch.float32
    )
