"""Which parts of a target stay in memory where it is trained against and not run: its ends.

A head is trained on stored states. Of the target it needs the embedding, the final norm and the lm_head; a fresh one
also looks at the last layer, and once at the states of a short text. So the ends and the last layer are loaded, and
the layers between them are read from the files, one at a time, whenever a forward comes by: transformers' own disk
offloading, which computes what the whole target computes. Knows no head and no trainer.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedConfig
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter

DISK = "disk"


def ends_only(config: PreTrainedConfig, device: str, *, trust_remote_code: bool) -> dict[str, str]:
    """Where each part of the model belongs, by module name; empty if this one has to be loaded whole.

    That is so where the files hold other tensors than the model (experts one by one, which it keeps as one): they
    can't be read by name.
    """
    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code)
    return places_of(model, device)


def places_of(model: Any, device: str = "cpu") -> dict[str, str]:
    """As `ends_only`, of a model without storage."""
    if any(isinstance(rule, WeightConverter) for rule in get_model_conversion_mapping(model)):
        return {}
    layers = model.base_model.layers
    between = {id(layer) for layer in layers[:-1]}
    names = {id(module): name for name, module in model.named_modules()}
    above = {id(model), id(model.base_model), id(layers)}
    parts = [part for group in (model, model.base_model, layers) for part in group.children()]
    return {
        names[id(part)]: DISK if id(part) in between else device
        for part in parts
        if id(part) not in above
    }


def resident_bytes(model: nn.Module, *, whole: bool) -> int:
    """Bytes of a model's parameters that stay in memory, counted on one without storage."""
    places = {} if whole else places_of(model)
    found = {
        id(parameter): parameter.numel() * parameter.element_size()
        for name, parameter in model.named_parameters()
        if not any(name.startswith(f"{part}.") for part, place in places.items() if place == DISK)
    }
    return sum(found.values())
