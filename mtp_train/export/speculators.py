"""The `speculators` layout: an `eagle3` head with its target's name in its config.json, which `vllm serve HEAD` reads.

vLLM 0.32 takes the layer from `transformer_layer_config`, and from the top level the draft vocabulary, the auxiliary
layers and the flags (`transformers_utils/configs/speculators/`); without `norm_before_residual` it takes true, so all
flags are written. The layout has other kinds of drafts; of ours it holds `eagle3`, not `eagle` or `mtp`.

Knows tensors and config keys only.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from mtp_train.core.errors import UserError
from mtp_train.export import llama
from mtp_train.export.eagle3 import FLAGS, IDS, Eagle3
from mtp_train.export.layout import Chain, Serving
from mtp_train.heads.base import DraftHead
from mtp_train.heads.eagle3 import Eagle3Head
from mtp_train.models.target import Target

KIND = "speculators_model_type"
LAYER = "transformer_layer_config"
OUTER = ("draft_vocab_size", "target_hidden_size", *FLAGS, IDS)
VERSION = "0.3.0"  # of the format
DRAFTS = 3


class Speculators(Eagle3):
    """`speculators`."""

    name = "speculators"
    prefix = "layers.0."

    def config(self, head: DraftHead, target: Target) -> dict[str, Any]:
        inner = super().config(head, target)
        layer = {
            **llama.dimensions(target, head.config.layer),
            **llama.window_keys(head.config.window, head.config.layers),
            "model_type": "llama",
            "num_hidden_layers": head.config.layers,
        }
        return {
            "architectures": ["Eagle3Speculator"],
            KIND: "eagle3",
            "speculators_version": VERSION,
            **{key: inner[key] for key in OUTER},
            "tie_word_embeddings": False,
            "dtype": inner["dtype"],
            LAYER: layer,
            "speculators_config": {
                "algorithm": "eagle3",
                "default_proposal_method": "greedy",
                "proposal_methods": [
                    {
                        "proposal_type": "greedy",
                        "speculative_tokens": DRAFTS,
                        "verifier_accept_k": 1,
                        "accept_tolerance": 0.0,
                    }
                ],
                "verifier": {
                    "name_or_path": str(target.path.resolve()) if target.path else "TARGET",
                    "architectures": target.config.architectures or [],
                },
            },
        }

    def recognises(self, config: Mapping[str, Any]) -> bool:
        return KIND in config

    def read(
        self, tensors: dict[str, Tensor], config: Mapping[str, Any], target: Target
    ) -> Eagle3Head:
        if config[KIND] != "eagle3":
            raise UserError(f"{KIND} must be eagle3", config[KIND], "this kind is not run here")
        return super().read(tensors, flat(config), target)

    def served(
        self, tensors: Mapping[str, Tensor], config: Mapping[str, Any], chain: Chain
    ) -> list[Tensor]:
        return super().served(tensors, flat(config), chain)

    def serving(self, config: Any, target: str, head: str, drafts: int) -> list[Serving]:
        how = f"""```
vllm serve {head}
```

It serves the target that `config.json` names as its verifier, with {DRAFTS} drafts per step. Another folder of the same
target, or another number of drafts:

{llama.vllm("eagle3", target, head, drafts)}"""
        return [Serving("vLLM", "0.32.0, CPU build", True, how)]


def flat(config: Mapping[str, Any]) -> dict[str, Any]:
    """What vLLM makes of it: the layer's config with the keys beside it, and its defaults."""
    defaults = {"norm_before_residual": True}
    beside = {key: config[key] for key in OUTER if config.get(key) is not None}
    return {**config[LAYER], **defaults, **beside}
