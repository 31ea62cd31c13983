"""The DeepSeek-V3 NextN layout: `mtp` heads of targets with latent attention, one module or several.

    eh_proj([enorm(E) | hnorm(H)]) -> the target's own decoder layer -> shared_head.norm

as `model.layers.{L + k}.*` beside the target's layers 0..L-1, L read from the target's config by vLLM and from this
folder's by SGLang. Embedding and lm_head are the target's: vLLM 0.32 shares both with every MTP module
(llm_base_proposer.py), SGLang too, so no copies are written; copies that somebody wrote are accepted if they are equal.
A published checkpoint with its MTP modules in it is read as such a folder.

vLLM 0.32 drafts every step with module 0 (its proposer passes no step index); SGLang takes one module alone.

Knows tensors and config keys only. Names are `heads.native`'s.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from mtp_train.core.errors import UserError
from mtp_train.export.deepseek_layer import DeepseekLayer
from mtp_train.export.layout import METHOD_WORDS, Chain, Layout, Serving
from mtp_train.export.llama import layer_faults, sglang
from mtp_train.heads.base import DraftHead
from mtp_train.heads.mtp import MtpConfig, MtpHead
from mtp_train.heads.native import LAYOUTS, belongs, module_tensors, set_module
from mtp_train.heads.native import Layout as Names
from mtp_train.models.target import POST_NORM, Target

NAMES = LAYOUTS["deepseek"]
TARGETS = ("deepseek_v3", "deepseek_v2")  # whose layers vLLM's DeepSeekMTP builds
NORMS = ("enorm", "hnorm", "input_norm", "final_norm")
LAYER = re.compile(r"model\.layers\.(\d+)\.")
Module = Callable[[Tensor, Tensor, Tensor], Tensor]  # embedding, state, position -> output
OF_THE_FILE = ("quantization_config", "auto_map", "_name_or_path", "transformers_version")


class DeepseekNextn(Layout):
    """`deepseek_nextn`."""

    name = "deepseek_nextn"
    family = "mtp"
    forbidden = METHOD_WORDS
    needs = ("layers.*.eh_proj.weight",)

    def head_faults(self, config: Any) -> Iterator[str]:
        yield from (f"head.{name}=false" for name in NORMS if not getattr(config, name))
        yield from layer_faults(config)
        if config.block != "target":
            yield f"head.block={config.block} (engines build DeepSeek's own layer)"

    def target_faults(self, config: Any, target: Target) -> Iterator[str]:
        if target.config.model_type not in TARGETS:
            yield f"a {target.config.model_type} target (engines build DeepSeek's layer)"
        if quantised(target):
            yield "a quantised target (engines would read the head as quantised)"

    def tensors(self, head: DraftHead, target: Target, dtype: torch.dtype) -> dict[str, Tensor]:
        made: dict[str, Tensor] = {}
        for depth, module in enumerate(cast(MtpHead, head).in_order()):
            made |= module_tensors(target, NAMES, depth, module, dtype)
        return dict(sorted(made.items()))

    def config(self, head: DraftHead, target: Target) -> dict[str, Any]:
        """The target's, as DeepSeek-V3's, with the number of modules.

        vLLM knows an MTP draft by DeepSeek-V3's model type. It builds the layer that the other keys describe, so a
        DeepSeek-V2 target's way of choosing experts is written out.
        """
        theirs = plain_values(target)
        return (
            theirs
            | routing(theirs)
            | {
                "architectures": ["DeepseekV3ForCausalLM"],
                "model_type": "deepseek_v3",
                "num_hidden_layers": target.layers,
                "num_nextn_predict_layers": head.depths,
                "tie_word_embeddings": False,
                "dtype": str(target.dtype).removeprefix("torch."),
            }
        )

    def recognises(self, config: Mapping[str, Any]) -> bool:
        known = ("DeepseekV3ForCausalLM", "DeepseekV3ForCausalLMNextN")
        return config.get("architectures", [None])[0] in known

    def load(self, folder: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
        tensors, values = super().load(folder)
        first = _modules(tensors)[0]
        if any(0 <= _layer(name) < first for name in tensors):
            # A whole checkpoint: the target's own tensors are not the head's.
            tensors = {name: one for name, one in tensors.items() if _layer(name) >= first}
        return tensors, values

    def read(
        self, tensors: dict[str, Tensor], config: Mapping[str, Any], target: Target
    ) -> DraftHead:
        modules = _modules(tensors)
        alone = modules[0] == 0  # as SGLang's tool exports them
        renamed = {
            _raised(name, target.layers if alone else 0): value for name, value in tensors.items()
        }
        return read_modules(target, NAMES, renamed, len(modules))

    def served(
        self, tensors: Mapping[str, Tensor], config: Mapping[str, Any], chain: Chain
    ) -> list[Tensor]:
        first = config["num_hidden_layers"]
        modules = [
            _module(tensors, config, f"model.layers.{first + depth}.")
            for depth in range(config["num_nextn_predict_layers"])
        ]
        return chained_modules(modules, chain)

    def serving(self, config: Any, target: str, head: str, drafts: int) -> list[Serving]:
        draft = json.dumps({"method": "mtp", "model": head, "num_speculative_tokens": drafts})
        overrides = json.dumps({"num_nextn_predict_layers": config.modules})
        vllm = f"""```
vllm serve {target} --hf-overrides '{overrides}' --speculative-config '{draft}'
```

`hf-overrides` says how many modules there are, where the target's own config does not. vLLM drafts every step with the
first module, also where there are several."""
        return [
            Serving("vLLM, method `mtp`", "0.32.0", False, vllm),
            Serving(
                "SGLang, algorithm `EAGLE`",
                "mid 2026",
                False,
                sglang("EAGLE", target, head, drafts) + "\n\nIt takes heads of one module.",
            ),
        ]


def plain_values(target: Target) -> dict[str, Any]:
    """The target's config, every key, without what belongs to its own files."""
    values: dict[str, Any] = target.config.to_dict()
    return {key: value for key, value in values.items() if key not in OF_THE_FILE}


def quantised(target: Target) -> bool:
    return getattr(target.config, "quantization_config", None) is not None


def routing(theirs: Mapping[str, Any]) -> dict[str, Any]:
    """How experts are chosen: its defaults differ between DeepSeek's versions and between engines."""
    third = theirs["model_type"] == "deepseek_v3"
    return {
        "scoring_func": "sigmoid" if third else "softmax",
        "topk_method": "noaux_tc" if third else theirs["topk_method"],
        "norm_topk_prob": bool(theirs.get("norm_topk_prob")),
        "n_group": theirs.get("n_group") or 1,
        "topk_group": theirs.get("topk_group") or 1,
    }


def read_modules(
    target: Target, names: Names, tensors: dict[str, Tensor], modules: int, block: str = "target"
) -> MtpHead:
    """A head of so many modules from a layout's tensors; a missing, extra or misshapen one is an error naming it."""
    odd = [name for name, value in tensors.items() if not bool(value.float().isfinite().all())]
    if odd:
        raise UserError("a head's weights must be finite", odd[0], "use an earlier export")
    head, left = MtpHead(target, MtpConfig(modules=modules, block=block)), dict(tensors)
    for depth, module in enumerate(head.in_order()):
        own = [name for name in left if belongs(name, names, target, depth)]
        set_module(target, {name: left.pop(name) for name in own}, names, depth, module)
    if left:
        raise UserError(
            f"a head folder must hold the layout's tensors of {modules} modules and nothing else",
            f"extra {sorted(left)[:8]}",
            "export the head again, or check its layout",
        )
    return head


def chained_modules(modules: Sequence[Module], chain: Chain) -> list[Tensor]:
    """Logits [V] of each step: module k serves step k, on every row; the last one goes on from its own output.

    Row p of module k has token x[p+1+k] and stands at position p + k.
    """
    embedding, position, logits = chain.embedding(), chain.position(), []
    state_TD = chain.states[POST_NORM]
    for step in range(chain.steps):
        depth = min(step, len(modules) - 1)
        rows = slice(depth, depth + len(state_TD))
        out_TD = modules[depth](embedding[rows], state_TD, position[rows])
        logits.append(chain.lm_head(out_TD[-1:])[0])
        recurrent = step >= len(modules) - 1
        state_TD = torch.cat([state_TD, out_TD[-1:]]) if recurrent else out_TD
    return logits


def _module(tensors: Mapping[str, Tensor], config: Mapping[str, Any], prefix: str) -> Module:
    layer = DeepseekLayer(tensors, config, prefix)

    def normed(name: str, rows: Tensor) -> Tensor:
        return layer.norm(f"{prefix}{name}.weight", rows)

    def run(embedding: Tensor, state: Tensor, position: Tensor) -> Tensor:
        embedding = torch.where(position.unsqueeze(1) == 0, 0, embedding)
        both = torch.cat([normed("enorm", embedding), normed("hnorm", state)], dim=-1)
        rows = layer.linear("eh_proj", both)
        rows = rows + layer.attention(normed("input_layernorm", rows), position)
        rows = rows + layer.mlp(normed("post_attention_layernorm", rows))
        return normed("shared_head.norm", rows)

    return run


def _modules(tensors: Mapping[str, Tensor]) -> list[int]:
    """The numbers of the layers that are MTP modules."""
    return sorted({_layer(name) for name in tensors if name.endswith("eh_proj.weight")})


def _layer(name: str) -> int:
    """The decoder layer that a tensor is of; -1 for another."""
    found = LAYER.match(name)
    return int(found[1]) if found else -1


def _raised(name: str, layers: int) -> str:
    """A tensor's name with its layer's number raised by `layers`."""
    return LAYER.sub(lambda match: f"model.layers.{int(match[1]) + layers}.", name, count=1)
