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
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedConfig
from transformers.core_model_loading import revert_weight_conversion

from mtp_train.export.layout import METHOD_WORDS, Chain, Layout, Serving, cast, require_tensors
from mtp_train.export.llama import sglang
from mtp_train.export.texts import copy_texts
from mtp_train.heads.base import DraftHead
from mtp_train.heads.draft_model import DraftModelConfig, DraftModelHead
from mtp_train.models.target import Target, config_of, config_values

EMBEDDING, OUTPUT = "model.embed_tokens.weight", "lm_head.weight"
OF_THE_FILE = ("quantization_config", "auto_map", "_name_or_path", "transformers_version")


class DraftModel(Layout):
    """`draft_model`."""

    name = "draft_model"
    family = DraftModelHead.family
    forbidden = METHOD_WORDS

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
        outline: Any = _outline(_model_config(head, target))
        return cast(revert_weight_conversion(outline, ours), dtype)

    def config(self, head: DraftHead, target: Target) -> dict[str, Any]:
        """The model's own, every key written out, of the target's vocabulary and dtype."""
        made = _model_config(head, target)
        values = {key: value for key, value in made.to_dict().items() if key not in OF_THE_FILE}
        return values | {
            "architectures": [type(_outline(made)).__name__],
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
        outline: Any = _outline(made)
        require_tensors(tensors, _saved(outline))
        model = Target.from_config(made)
        whole = type(outline).from_pretrained(
            None, config=model.config, state_dict=dict(tensors), dtype=torch.float32
        )
        return DraftModelHead(target, DraftModelConfig(model=config_values(made)), Target(whole))

    def served(
        self, tensors: Mapping[str, Tensor], config: Mapping[str, Any], chain: Chain
    ) -> list[Tensor]:
        """transformers' own model with its own attention, over the text and the drafts."""
        made = config_of(dict(config))
        plain: Any = AutoModelForCausalLM.from_config(made, attn_implementation="eager")
        whole = type(plain).from_pretrained(
            None, config=plain.config, state_dict=dict(tensors), dtype=torch.float32
        )
        count = chain.rows + chain.steps - 1
        position_1N = (chain.start + torch.arange(count)).unsqueeze(0)
        token_1N = chain.token_N[:count].unsqueeze(0)
        logits_NV = whole(token_1N, position_ids=position_1N, use_cache=False).logits[0]
        return list(logits_NV[chain.rows - 1 :])

    def serving(self, target: str, head: str, drafts: int) -> list[Serving]:
        draft = {"method": "draft_model", "model": head, "num_speculative_tokens": drafts}
        how = f"```\nvllm serve {target} --speculative-config '{json.dumps(draft)}'\n```"
        return [
            Serving("vLLM, method `draft_model`", "0.32.0", False, how),
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


def _model_config(head: DraftHead, target: Target) -> PreTrainedConfig:
    made = config_of(head.config.model)
    made.vocab_size = target.vocab_size
    return made


def _outline(made: PreTrainedConfig) -> nn.Module:
    """A model without storage."""
    with torch.device("meta"):
        return Target.from_config(made).model


def _saved(outline: Any) -> dict[str, Tensor]:
    """The tensors that a model is saved with, without storage: by their published names, tied ones once."""
    state = dict(outline.state_dict())
    if outline.config.tie_word_embeddings:
        state.pop(OUTPUT, None)
    saved: dict[str, Tensor] = revert_weight_conversion(outline, state)
    return saved
