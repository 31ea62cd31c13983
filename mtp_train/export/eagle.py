"""The EAGLE-1/2 layout, as published: an `eagle` head for vLLM (`eagle`) or SGLang (`eagle_sglang`).

Both compute `fc([E | H])`, a Llama layer without its input norm, a residual add, and feed the sum back and to the
target's lm_head (vLLM 0.32 `llama_eagle.py`; SGLang `llama_eagle.py`). They differ in what a folder must say:

    vLLM     LlamaForCausalLM        raises on `norm`, `lm_head` and `layers.0.input_layernorm`; has no fc.bias
    SGLang   LlamaForCausalLMEagle   its fc has a bias, random where the folder has none: zeros are written

So they are two layouts, a folder each. Knows tensors and config keys only.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from mtp_train.core.errors import UserError
from mtp_train.export import llama
from mtp_train.export.layout import Chain, Layout, Serving, cast, require_tensors
from mtp_train.export.reference import Layer, chained
from mtp_train.heads.base import DraftHead
from mtp_train.heads.eagle import EagleConfig, EagleHead
from mtp_train.models.target import Target

PREFIX = "layers.0."
NAMES = {"fc.weight": "fc.weight"} | {
    f"{PREFIX}{name}": f"block.{name}"
    for name in (*llama.MATRICES, "post_attention_layernorm.weight")
}
BIAS = "fc.bias"


class Eagle(Layout):
    """`eagle`, for vLLM."""

    name = "eagle"
    family = EagleHead.family
    mark = "fc.weight"  # a Llama of one layer has the same config.json
    architecture = "LlamaForCausalLM"

    def head_faults(self, config: Any) -> Iterator[str]:
        yield from ()

    def target_faults(self, config: Any, target: Target) -> Iterator[str]:
        yield from llama.block_faults(config, target, {*llama.MATRICES, *llama.NORMS})
        yield from llama.embedding_faults(target)
        yield from llama.output_faults(target)

    def tensors(self, head: DraftHead, target: Target, dtype: torch.dtype) -> dict[str, Tensor]:
        ours = head.state_dict()
        return cast({theirs: ours[mine] for theirs, mine in NAMES.items()}, dtype)

    def config(self, head: DraftHead, target: Target) -> dict[str, Any]:
        return llama.dimensions(target, head.config.layer) | {
            "architectures": [self.architecture],
            "model_type": "llama",
            "num_hidden_layers": 1,
        }

    def recognises(self, config: Mapping[str, Any]) -> bool:
        return (
            config.get("architectures") in ([self.architecture], [f"Eagle{self.architecture}"])
            and config.get("num_hidden_layers") == 1
        )

    def read(
        self, tensors: dict[str, Tensor], config: Mapping[str, Any], target: Target
    ) -> EagleHead:
        head = EagleHead(target, EagleConfig(**llama.settings(config, target)))
        ours = head.state_dict()
        wanted = {theirs: ours[mine] for theirs, mine in NAMES.items()}
        require_tensors(tensors, wanted, {BIAS})
        if BIAS in tensors and bool(tensors[BIAS].any()):
            raise UserError(
                "an eagle head's fc must have no bias, or zeros: vLLM leaves it out",
                f"{BIAS} up to {float(tensors[BIAS].abs().max()):.3g}",
                "use a head that was trained without it",
            )
        head.load_state_dict({mine: tensors[theirs].float() for theirs, mine in NAMES.items()})
        return head

    def served(
        self, tensors: Mapping[str, Tensor], config: Mapping[str, Any], chain: Chain
    ) -> list[Tensor]:
        layer, bias = Layer(tensors, config, PREFIX), tensors.get(BIAS, 0.0)

        def step(embedding: Tensor, state: Tensor, position: Tensor) -> tuple[Tensor, Tensor]:
            rows = torch.cat([embedding, state], dim=-1) @ tensors["fc.weight"].T + bias
            rows = rows + layer.attention(rows, position)
            normed = layer.norm(f"{PREFIX}post_attention_layernorm.weight", rows)
            out = rows + layer.mlp(normed)
            return out, out

        return chained(step, chain, chain.states["post_norm"], chain.lm_head)

    def serving(self, config: Any, target: str, head: str, drafts: int) -> list[Serving]:
        return [
            Serving(
                "vLLM, method `eagle`",
                "0.32.0, CPU build",
                True,
                llama.vllm("eagle", target, head, drafts),
            )
        ]

    def tidied(self, tensors: dict[str, Tensor], target: Target) -> dict[str, Tensor]:
        return llama.tidied(tensors, target, shared_lm_head=True)


class EagleSglang(Eagle):
    """`eagle_sglang`, for SGLang."""

    name = "eagle_sglang"
    architecture = "LlamaForCausalLMEagle"

    def tensors(self, head: DraftHead, target: Target, dtype: torch.dtype) -> dict[str, Tensor]:
        return super().tensors(head, target, dtype) | {
            BIAS: torch.zeros(target.hidden_size, dtype=dtype)
        }

    def serving(self, config: Any, target: str, head: str, drafts: int) -> list[Serving]:
        command = llama.sglang("EAGLE", target, head, drafts)
        tree = (
            f"{command}\n\n`--speculative-eagle-topk` above 1 verifies an EAGLE-2 tree, of "
            "`--speculative-num-draft-tokens` tokens."
        )
        return [Serving("SGLang, algorithm `EAGLE`", "mid 2026", False, tree)]
