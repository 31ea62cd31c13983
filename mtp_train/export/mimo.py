"""The MiMo-MTP layout: an `mtp` head of a Llama-type target, as stock vLLM and SGLang load it.

vLLM computes `input_proj([hidden_layernorm(H) | token_layernorm(E)])`, a Qwen2 block, a residual add and
`final_layernorm`; it zeroes the embedding at position 0 and feeds the normed output back (vLLM 0.32,
`mimo_mtp.py`). Our head has the embedding first, so the two halves of the projection change places. vLLM always
builds q/k/v biases and leaves missing ones uninitialised, so zeros are written for a block without them.

Knows tensors and config keys only; the check of an export is `check.py`'s.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from mtp_train.core.errors import UserError
from mtp_train.export import llama
from mtp_train.export.layout import METHOD_WORDS, Chain, Layout, Serving, cast, require_tensors
from mtp_train.export.reference import Layer, chained
from mtp_train.heads.base import DraftHead
from mtp_train.heads.block import unlike_llama
from mtp_train.heads.mtp import MtpConfig, MtpHead
from mtp_train.heads.native import swap_halves
from mtp_train.models.target import Target

PREFIX = "model.mtp_layers.0."
ARCHITECTURE = "MiMoForCausalLM"
NORMS = {
    "token_layernorm": "enorm",
    "hidden_layernorm": "hnorm",
    "final_layernorm": "final_norm",
    "input_layernorm": "block.input_layernorm",
    "post_attention_layernorm": "block.post_attention_layernorm",
}
SWITCHES = ("enorm", "hnorm", "input_norm", "final_norm")  # of MtpConfig
BIASES = ("self_attn.q_proj.bias", "self_attn.k_proj.bias", "self_attn.v_proj.bias")
HELD = {*llama.MATRICES, *BIASES, *llama.NORMS}
PROJECTION = f"{PREFIX}input_proj.weight"


class MimoMtp(Layout):
    """`mimo_mtp`."""

    name = "mimo_mtp"
    family = MtpHead.family
    forbidden = METHOD_WORDS
    needs = ("mtp_layers.0.input_proj.weight",)
    never = ("layers.*",)

    def head_faults(self, config: Any) -> Iterator[str]:
        if config.modules > 1:
            yield f"head.modules={config.modules}"
        yield from llama.layer_faults(config)
        yield from (f"head.{name}=false" for name in SWITCHES if not getattr(config, name))

    def target_faults(self, config: Any, target: Target) -> Iterator[str]:
        yield from llama.block_faults(config, target, HELD)
        yield from llama.output_faults(target)

    def tensors(self, head: DraftHead, target: Target, dtype: torch.dtype) -> dict[str, Tensor]:
        ours = head.state_dict()
        tensors = {theirs: ours[mine] for theirs, mine in names().items()}
        tensors[PROJECTION] = swap_halves(tensors[PROJECTION])
        for bias in BIASES:
            rows = tensors[f"{PREFIX}{bias.replace('.bias', '.weight')}"].shape[0]
            tensors[f"{PREFIX}{bias}"] = ours.get(f"block.{bias}", torch.zeros(rows))
        return cast(tensors, dtype)

    def config(self, head: DraftHead, target: Target) -> dict[str, Any]:
        """vLLM's MTP class reads the target's own config: this one must say the same."""
        return llama.dimensions(target) | {
            "architectures": [ARCHITECTURE],
            "model_type": target.config.model_type,
            "num_hidden_layers": 1,
            "num_nextn_predict_layers": 1,
        }

    def recognises(self, config: Mapping[str, Any]) -> bool:
        return config.get("architectures") == [ARCHITECTURE]

    def tidied(self, tensors: dict[str, Tensor], target: Target) -> dict[str, Tensor]:
        found = llama.tidied(tensors, target, shared_lm_head=True)
        return {f"model.{name}": value for name, value in found.items()}

    def read(
        self, tensors: dict[str, Tensor], config: Mapping[str, Any], target: Target
    ) -> MtpHead:
        if "speculators_model_type" in config:
            raise UserError(
                "an MTP head of speculators has MiMo's names and another equation",
                "speculators_model_type " + str(config["speculators_model_type"]),
                "stitch it into its target, as speculators does for serving, and set head.init=native",
            )
        head = MtpHead(target, MtpConfig(block=block_kind(target)))
        ours = head.state_dict()
        zero_biases = {f"{PREFIX}{bias}": f"block.{bias}" for bias in BIASES}
        wanted = names() | {theirs: mine for theirs, mine in zero_biases.items() if mine in ours}
        require_tensors(
            tensors, {theirs: ours[mine] for theirs, mine in wanted.items()}, zero_biases
        )
        for theirs in set(zero_biases) - set(wanted):
            if theirs in tensors and bool(tensors[theirs].any()):
                raise UserError(
                    "a bias must be zero for a target without biases",
                    theirs,
                    "import it for another target",
                )
        loaded = {mine: tensors[theirs].float() for theirs, mine in wanted.items()}
        loaded["eh_proj.weight"] = swap_halves(loaded["eh_proj.weight"])
        head.load_state_dict(loaded)
        return head

    def served(
        self, tensors: Mapping[str, Tensor], config: Mapping[str, Any], chain: Chain
    ) -> list[Tensor]:
        layer = Layer(tensors, config, PREFIX)

        def step(embedding: Tensor, state: Tensor, position: Tensor) -> tuple[Tensor, Tensor]:
            embedding = torch.where(position.unsqueeze(1) == 0, 0, embedding)
            hidden = layer.norm(f"{PREFIX}hidden_layernorm.weight", state)
            token = layer.norm(f"{PREFIX}token_layernorm.weight", embedding)
            rows = layer.linear("input_proj", torch.cat([hidden, token], dim=-1))
            normed = layer.norm(f"{PREFIX}input_layernorm.weight", rows)
            rows = rows + layer.attention(normed, position)
            normed = layer.norm(f"{PREFIX}post_attention_layernorm.weight", rows)
            out = layer.norm(f"{PREFIX}final_layernorm.weight", rows + layer.mlp(normed))
            return out, out

        return chained(step, chain, chain.states["post_norm"], chain.lm_head)

    def serving(self, config: Any, target: str, head: str, drafts: int) -> list[Serving]:
        overrides = '{"num_nextn_predict_layers": 1}'
        draft = f'{{"method": "mtp", "model": "{head}", "num_speculative_tokens": {drafts}}}'
        vllm = f"""```python
from vllm import LLM

llm = LLM(model="{target}", hf_overrides={overrides}, speculative_config={draft})
```

`hf_overrides` tells vLLM that the target has an MTP layer beside it. The same as a server (not run here):

```
vllm serve {target} --hf-overrides '{overrides}' --speculative-config '{draft}'
```"""
        return [
            Serving("vLLM, method `mtp`", "0.32.0, CPU build", True, vllm),
            Serving(
                "SGLang, algorithm `EAGLE`",
                "mid 2026",
                False,
                llama.sglang("EAGLE", target, head, drafts),
            ),
        ]


def names() -> dict[str, str]:
    """Name in the layout -> name in `MtpHead`, for every tensor that the head has."""
    norms = {f"{PREFIX}{theirs}.weight": f"{ours}.weight" for theirs, ours in NORMS.items()}
    block = {f"{PREFIX}{name}": f"block.{name}" for name in llama.MATRICES}
    return norms | block | {PROJECTION: "eh_proj.weight"}


def block_kind(target: Target) -> str:
    """`head.block` of a head that the layout holds: the target's own class if it has the layout's tensors."""
    own = set(target.base.layers[-1].state_dict())
    return "target" if own <= HELD and not unlike_llama(target) else "llama"
