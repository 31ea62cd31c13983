"""A target's last two steps alone, its final norm and its lm_head: for targets whose layers something else runs.

Reads only these tensors from the checkpoint, whether it is one file or sharded, tied or not. Knows no attention.

Shapes: T rows, D hidden width, V vocabulary.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig

from mtp_train.core.errors import UserError
from mtp_train.models.folder import read_headers, require_model_folder
from mtp_train.models.identity import Identity, folder_identity
from mtp_train.models.quantised import folder_quantisation
from mtp_train.models.target import capped_logits, require_dtype, target_hash

INDEX = "model.safetensors.index.json"


class Readout:
    """Pre-norm states in, post-norm states and logits out."""

    def __init__(
        self, config: PreTrainedConfig, norm: nn.Module, lm_head: Tensor, path: Path
    ) -> None:
        self.config, self.norm, self.lm_head_VD, self.path = config, norm, lm_head, path
        self.chat_template_kwargs: dict[str, Any] = {}  # what its text is rendered with

    @classmethod
    def load(cls, path: str | Path, dtype: str, *, trust_remote_code: bool = False) -> Readout:
        """Of the target in a local folder of safetensors."""
        folder = require_model_folder(path)
        config = AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code)
        read_headers(folder)  # whole files; which tensors a type has is vLLM's to check
        with torch.device("meta"):
            model: Any = AutoModelForCausalLM.from_config(
                config, trust_remote_code=trust_remote_code
            )
        norm: nn.Module = model.base_model.norm
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        wanted = require_dtype(dtype)
        for name, parameter in list(norm.named_parameters()):
            value = read_tensor(folder, names[id(parameter)]).to(wanted)
            setattr(norm, name, nn.Parameter(value, requires_grad=False))
        tied = bool(config.tie_word_embeddings)
        source = model.get_input_embeddings() if tied else model.get_output_embeddings()
        return cls(
            config, norm.eval(), read_tensor(folder, names[id(source.weight)]).to(wanted), folder
        )

    @property
    def hash(self) -> str:
        return target_hash(self.path)

    @property
    def identity(self) -> Identity:
        return folder_identity(self.path, self.chat_template_kwargs)

    @property
    def quantisation(self) -> str:
        return folder_quantisation(self.path)

    @property
    def layers(self) -> int:
        return int(self.config.num_hidden_layers)

    def normed(self, pre_norm_TD: Tensor) -> Tensor:
        return cast(Tensor, self.norm(pre_norm_TD))

    def logits(self, post_norm_TD: Tensor) -> Tensor:
        return capped_logits(post_norm_TD @ self.lm_head_VD.T, self.config)


def read_tensor(folder: Path, name: str) -> Tensor:
    """One tensor of a checkpoint: a single safetensors file, or shards with an index."""
    index = folder / INDEX
    if index.is_file():
        file = json.loads(index.read_text())["weight_map"].get(name, "")
        candidates = [folder / file] if file else []
    else:
        candidates = sorted(folder.glob("*.safetensors"))
    for path in candidates:
        try:
            with safe_open(path, framework="pt") as tensors:
                if name in tensors.keys():  # noqa: SIM118 - not a mapping
                    return tensors.get_tensor(name)
        except (SafetensorError, FileNotFoundError) as error:
            raise UserError(
                "a target's weights must be whole safetensors files",
                f"{path}: {error}",
                "copy the file again",
            ) from error
    raise UserError(
        "a target's checkpoint must hold its norm and lm_head under transformers' names",
        f"no {name} in {folder}",
        "check the checkpoint, or capture through the engine",
    )
