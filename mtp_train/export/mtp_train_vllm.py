"""The layout of our own vLLM plug-in (`mtp_train.serving_plugin`): any `mtp` head around a Llama-type layer.

`modules.{k}.*` with our own names, of as many modules as the head has; config.json says which norms. It holds what no
stock layout does: heads with norms left out, several modules of which each serves its own draft step, and modules of
several decoder layers.

Knows tensors and config keys only.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any, cast

import torch
from torch import Tensor

from mtp_train.core.errors import UserError
from mtp_train.export import llama
from mtp_train.export.deepseek_nextn import Module, chained_modules
from mtp_train.export.layout import METHOD_WORDS, Chain, Layout, Serving, require_tensors
from mtp_train.export.layout import cast as as_written
from mtp_train.export.mimo import BIASES, HELD, SWITCHES, block_kind
from mtp_train.export.reference import Layer
from mtp_train.heads.base import DraftHead
from mtp_train.heads.mtp import MtpConfig, MtpHead
from mtp_train.models.target import Target

ARCHITECTURE = "MtpTrainMTPModel"
VLLM = "0.32.0, CPU build"


class MtpTrainVllm(Layout):
    """`mtp_train_vllm`."""

    name = "mtp_train_vllm"
    family = MtpHead.family
    forbidden = METHOD_WORDS
    needs = ("modules.0.eh_proj.weight",)

    def head_faults(self, config: Any) -> Iterator[str]:
        yield from ()

    def target_faults(self, config: Any, target: Target) -> Iterator[str]:
        yield from llama.block_faults(config, target, HELD)
        if not config.enorm:  # which undoes a factor
            yield from llama.embedding_faults(target)
        yield from llama.output_faults(target)

    def tensors(self, head: DraftHead, target: Target, dtype: torch.dtype) -> dict[str, Tensor]:
        return as_written(_named(cast(MtpHead, head)), dtype)

    def config(self, head: DraftHead, target: Target) -> dict[str, Any]:
        return llama.dimensions(target) | {
            "architectures": [ARCHITECTURE],
            "model_type": "mtp",
            "num_hidden_layers": head.cache_layers,
            "num_nextn_predict_layers": head.depths,
            "module_layers": head.config.layers,
            "norms": [name for name in SWITCHES if getattr(head.config, name)],
            "attention_bias": False,
            "qkv_bias": f"block.{BIASES[0]}" in head.state_dict(),
        }

    def recognises(self, config: Mapping[str, Any]) -> bool:
        return config.get("architectures") == [ARCHITECTURE]

    def read(
        self, tensors: dict[str, Tensor], config: Mapping[str, Any], target: Target
    ) -> MtpHead:
        norms = set(config["norms"])
        if norms - set(SWITCHES):
            raise UserError(
                "a head's norms must be among " + ", ".join(SWITCHES),
                sorted(norms - set(SWITCHES)),
                "export the head again",
            )
        modules = int(config["num_nextn_predict_layers"])
        switches: dict[str, Any] = {name: name in norms for name in SWITCHES}
        layers = int(config.get("module_layers", 1))
        settings = MtpConfig(modules=modules, layers=layers, block=block_kind(target), **switches)
        head = MtpHead(target, settings)
        require_tensors(tensors, _named(head))
        with torch.no_grad():
            for name, ours in _named(head).items():
                ours.copy_(tensors[name])
        return head

    def served(
        self, tensors: Mapping[str, Tensor], config: Mapping[str, Any], chain: Chain
    ) -> list[Tensor]:
        modules = [
            _module(tensors, config, f"modules.{depth}.")
            for depth in range(config["num_nextn_predict_layers"])
        ]
        return chained_modules(modules, chain)

    def serving(self, config: Any, target: str, head: str, drafts: int) -> list[Serving]:
        draft = json.dumps({"method": "mtp", "model": head, "num_speculative_tokens": drafts})
        how = f"""vLLM needs the plug-in that comes with mtp_train, whose own dependencies stay out:

```
pip install --no-deps mtp_train    # in vLLM's environment
vllm serve {target} --speculative-config '{draft}'
```"""
        return [Serving("vLLM with mtp_train's plug-in, method `mtp`", VLLM, True, how)]


def _named(head: MtpHead) -> dict[str, Tensor]:
    """The layout's name of every tensor -> the head's own."""
    return {
        f"modules.{depth}.{name}": value
        for depth, module in enumerate(head.in_order())
        for name, value in module.state_dict(keep_vars=True).items()
        if not name.startswith("later.") and name != "vocabulary"
    }


def _module(tensors: Mapping[str, Tensor], config: Mapping[str, Any], prefix: str) -> Module:
    inner = f"{prefix}block."
    layer, norms = Layer(tensors, config, inner), set(config["norms"])

    def normed(name: str, switch: str, rows: Tensor) -> Tensor:
        return layer.norm(f"{name}.weight", rows) if switch in norms else rows

    def run(embedding: Tensor, state: Tensor, position: Tensor) -> Tensor:
        embedding = torch.where(position.unsqueeze(1) == 0, 0, embedding)
        token = normed(f"{prefix}enorm", "enorm", embedding)
        hidden = normed(f"{prefix}hnorm", "hnorm", state)
        rows = torch.cat([token, hidden], dim=-1) @ tensors[f"{prefix}eh_proj.weight"].T
        first = normed(f"{inner}input_layernorm", "input_norm", rows)
        rows = rows + layer.attention(first, position)
        second = layer.norm(f"{inner}post_attention_layernorm.weight", rows)
        rows = rows + layer.mlp(second)
        for at in range(config["module_layers"] - 1):
            rows = Layer(tensors, config, f"{prefix}later_blocks.{at}.").whole(rows, position)
        return normed(f"{prefix}final_norm", "final_norm", rows)

    return run
