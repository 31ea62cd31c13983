"""A draft model as a causal LM's folder: what transformers, vLLM (`draft_model`) and SGLang (`STANDALONE`) load.

Nothing is shared with the target. Names and shapes are those that transformers saves the model's class with; vLLM wants
the target's vocabulary size in the draft's config, so a draft's rows of padding past it are left out.

Knows tensors and config keys only.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mtp_train.export.layout import METHOD_WORDS, Chain, Layout, Serving, cast, require_tensors
from mtp_train.export.llama import sglang
from mtp_train.export.texts import copy_texts
from mtp_train.heads.base import DraftHead
from mtp_train.heads.draft_model import DraftModelConfig, DraftModelHead
from mtp_train.models.published import OUTPUT, model_of, outline, plain_logits, published, wanted
from mtp_train.models.target import Target, config_of, config_values

EMBEDDING = "model.embed_tokens.weight"
OF_THE_FILE = ("quantization_config", "auto_map", "_name_or_path", "transformers_version")


class DraftModel(Layout):
    """`draft_model`."""

    name = "draft_model"
    family = DraftModelHead.family
    forbidden = METHOD_WORDS
    needs = ("embed_tokens.weight", "layers.0.input_layernorm.weight")
    never = ("fc.weight", "mtp_layers.*", "*eh_proj.weight", "*hidden_norm.weight")

    def head_faults(self, config: Any) -> Iterator[str]:
        yield from ()

    def target_faults(self, config: Any, target: Target) -> Iterator[str]:
        size = config.model.get("vocab_size", target.vocab_size)
        if size < target.vocab_size:
            yield f"a vocabulary of {size} for the target's {target.vocab_size}"

    def tensors(self, head: DraftHead, target: Target, dtype: torch.dtype) -> dict[str, Tensor]:
        ours = {
            name.replace("base.", "model.", 1): value
            for name, value in head.state_dict().items()
            if name != "vocabulary"
        }
        for name in {EMBEDDING, OUTPUT} & set(ours):
            ours[name] = ours[name][: target.vocab_size]
        return cast(published(_model_config(head, target), ours), dtype)

    def config(self, head: DraftHead, target: Target) -> dict[str, Any]:
        """The model's own, every key written out, of the target's vocabulary and dtype."""
        made = _model_config(head, target)
        values = {key: value for key, value in made.to_dict().items() if key not in OF_THE_FILE}
        return values | {
            "architectures": [type(outline(made)).__name__],
            "model_type": made.model_type,
            "dtype": str(target.dtype).removeprefix("torch."),
        }

    def recognises(self, config: Mapping[str, Any]) -> bool:
        """Any causal LM's: to be asked last."""
        name = str(config.get("architectures", [None])[0])
        return name.endswith("ForCausalLM") and "model_type" in config

    def read(
        self, tensors: dict[str, Tensor], config: Mapping[str, Any], target: Target
    ) -> DraftHead:
        made = config_of(dict(config))
        require_tensors(tensors, wanted(made))
        settings = DraftModelConfig(model=config_values(made))
        return DraftModelHead(target, settings, model_of(made, tensors))

    def served(
        self, tensors: Mapping[str, Tensor], config: Mapping[str, Any], chain: Chain
    ) -> list[Tensor]:
        """transformers' own model with its own attention, over the text and the drafts."""
        position_N = chain.start + torch.arange(chain.rows + chain.steps - 1)
        made, token_N = config_of(dict(config)), chain.token_N[: len(position_N)]
        return list(plain_logits(made, tensors, token_N, position_N)[chain.rows - 1 :])

    def serving(self, config: Any, target: str, head: str, drafts: int) -> list[Serving]:
        draft = {"method": "draft_model", "model": head, "num_speculative_tokens": drafts}
        how = f"```\nvllm serve {target} --speculative-config '{json.dumps(draft)}'\n```"
        return [
            Serving("vLLM, method `draft_model`", "0.32.0, CPU build", True, how),
            Serving(
                "SGLang, algorithm `STANDALONE`",
                "mid 2026",
                False,
                sglang("STANDALONE", target, head, drafts),
            ),
        ]

    def write(self, folder: Path, head: DraftHead, target: Target) -> None:
        super().write(folder, head, target)
        if target.path is not None:
            copy_texts(target.path, folder)  # a draft's tokens are the target's


def _model_config(head: DraftHead, target: Target) -> Any:
    made = config_of(head.config.model)
    made.vocab_size = target.vocab_size
    return made
