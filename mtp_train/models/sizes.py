"""A target's dimensions from its config alone: no weights are read, none need be there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from mtp_train.attention import interface
from mtp_train.core.errors import UserError
from mtp_train.core.records import Sizes
from mtp_train.models.target import Target, require_dtype


def target_sizes(path: str | Path, dtype: str, *, trust_remote_code: bool = False) -> Sizes:
    """Counted on a model without storage."""
    model, config = _model(path, trust_remote_code)
    return Sizes(
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        hidden=config.hidden_size,
        intermediate=config.intermediate_size,
        layers=config.num_hidden_layers,
        vocabulary=config.vocab_size,
        dtype=dtype,
    )


def outline(path: str | Path, dtype: str, *, trust_remote_code: bool = False) -> Target:
    """The target without storage: shapes, from its config alone."""
    model, _ = _model(path, trust_remote_code)
    return Target(model.to(require_dtype(dtype)))


def folder_config(path: str | Path, *, trust_remote_code: bool = False) -> Any:
    """The config in a model folder, whose weights need not be there."""
    folder = Path(path)
    if not (folder / "config.json").is_file():
        raise UserError(
            "a model folder must hold config.json",
            folder,
            "download it there, the weights can wait",
        )
    return AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code)


def _model(path: str | Path, trust_remote_code: bool) -> tuple[Any, Any]:
    config: Any = folder_config(path, trust_remote_code=trust_remote_code)
    config._attn_implementation = interface.register()
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code)
    return model, config
