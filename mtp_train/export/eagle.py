"""The EAGLE-1/2 layout, as published: an `eagle` head for vLLM (`eagle`) or SGLang (`eagle_sglang`).

Both compute `fc([E | H])`, a Llama layer without its input norm, whole Llama layers after it where there are more, and
feed the last residual back and to the target's lm_head (vLLM 0.32 `llama_eagle.py`; SGLang `llama_eagle.py`). They
differ in what a folder must say:

    vLLM     LlamaForCausalLM        raises on `norm`, `lm_head` and `layers.0.input_layernorm`; has no fc.bias
    SGLang   LlamaForCausalLMEagle   its fc has a bias, random where the folder has none: zeros are written

So they are two layouts, a folder each. SGLang alone takes a part of the target's lm_head for a draft vocabulary: it is
told its tokens by a file of them (`--speculative-token-map`; `load_token_map`, a list that torch pickled). No pickle is
written here: the folder holds the list as JSON, and the model card the line that turns it into one.

Knows tensors, config keys and that list.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mtp_train.core.provenance import read_json, write_json
from mtp_train.export import llama
from mtp_train.export.layout import Chain, Layout, Serving, cast, require_tensors
from mtp_train.export.reference import Layer, chained
from mtp_train.heads.base import DraftHead
from mtp_train.heads.eagle import EagleConfig, EagleHead
from mtp_train.heads.vocabulary import require_vocabulary
from mtp_train.models.target import Target

PREFIX = "layers.0."
BIAS = "fc.bias"
TOKENS, TOKEN_FILE = "token_map", "token_map.json"


class Eagle(Layout):
    """`eagle`, for vLLM."""

    name = "eagle"
    family = EagleHead.family
    needs = ("fc.weight", "layers.0.self_attn.q_proj.weight")
    never = ("layers.0.input_layernorm.weight", "*hidden_norm.weight", "midlayer.*")
    architecture = "LlamaForCausalLM"

    def head_faults(self, config: Any) -> Iterator[str]:
        if config.fc_bias:
            yield "head.fc_bias=true (vLLM leaves it out)"

    def target_faults(self, config: Any, target: Target) -> Iterator[str]:
        yield from llama.block_faults(config, target, {*llama.MATRICES, *llama.NORMS})
        yield from llama.embedding_faults(target)
        yield from llama.output_faults(target)

    def tensors(self, head: DraftHead, target: Target, dtype: torch.dtype) -> dict[str, Tensor]:
        ours = head.state_dict()
        return cast({theirs: ours[mine] for theirs, mine in _names(head).items()}, dtype)

    def config(self, head: DraftHead, target: Target) -> dict[str, Any]:
        return llama.dimensions(target, head.config.layer) | {
            "architectures": [self.architecture],
            "model_type": "llama",
            "num_hidden_layers": head.config.layers,
        }

    def recognises(self, config: Mapping[str, Any]) -> bool:
        known = ([self.architecture], [f"Eagle{self.architecture}"])
        return config.get("architectures") in known

    def read(
        self, tensors: dict[str, Tensor], config: Mapping[str, Any], target: Target
    ) -> EagleHead:
        bias = BIAS in tensors and bool(tensors[BIAS].any())  # not a number too
        block = llama.settings(config, target, tensors, PREFIX)
        token_U = tensors.get(TOKENS)
        drafted = 0 if token_U is None else len(token_U)
        settings = EagleConfig(**block, fc_bias=bias, draft_vocabulary=drafted)
        head = EagleHead(target, settings)
        ours, names = head.state_dict(), _names(head)
        wanted = {theirs: ours[mine] for theirs, mine in names.items()}
        require_tensors(tensors, wanted, {BIAS, TOKENS})
        loaded = {mine: tensors[theirs].float() for theirs, mine in names.items()}
        if token_U is not None:
            loaded["vocabulary"] = token_U.sort().values  # their order tells nothing
            require_vocabulary(loaded["vocabulary"], target.vocab_size)
        head.load_state_dict(loaded)
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
            for number in range(1, config["num_hidden_layers"]):
                out = Layer(tensors, config, f"layers.{number}.").whole(out, position)
            return out, out

        def lm_head(read_ND: Tensor) -> Tensor:
            logits_NV = chain.lm_head(read_ND)
            if TOKENS not in tensors:
                return logits_NV
            whole_NV = torch.full_like(logits_NV, float("-inf"))
            whole_NV[:, tensors[TOKENS]] = logits_NV[:, tensors[TOKENS]]
            return whole_NV

        return chained(step, chain, chain.states["post_norm"], lm_head)

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
    vocabularies = True

    def write(self, folder: Path, head: DraftHead, target: Target) -> None:
        super().write(folder, head, target)
        if head.vocabulary is not None:
            write_json(folder / TOKEN_FILE, head.vocabulary.tolist())

    def load(self, folder: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
        tensors, config = super().load(folder)
        if (folder / TOKEN_FILE).is_file():
            tensors[TOKENS] = torch.tensor(read_json(folder / TOKEN_FILE), dtype=torch.int64)
        return tensors, config

    def tensors(self, head: DraftHead, target: Target, dtype: torch.dtype) -> dict[str, Tensor]:
        zeros = {BIAS: torch.zeros(target.hidden_size, dtype=dtype)}
        return zeros | super().tensors(head, target, dtype)

    def head_faults(self, config: Any) -> Iterator[str]:
        yield from ()

    def serving(self, config: Any, target: str, head: str, drafts: int) -> list[Serving]:
        command = llama.sglang("EAGLE", target, head, drafts)
        if config.draft_vocabulary:
            pickled = Path(TOKEN_FILE).with_suffix(".pt")
            made = f"torch.save(json.load(open('{head}/{TOKEN_FILE}')), '{head}/{pickled}')"
            told = f" \\\n    --speculative-token-map {head}/{pickled}\n```"
            python = f'```\npython -c "import json, torch; {made}"\n'
            command = python + command.removeprefix("```\n").removesuffix("\n```") + told
        tree = (
            f"{command}\n\n`--speculative-eagle-topk` above 1 verifies an EAGLE-2 tree, of "
            "`--speculative-num-draft-tokens` tokens."
        )
        return [Serving("SGLang, algorithm `EAGLE`", "mid 2026", False, tree)]


def _names(head: DraftHead) -> dict[str, str]:
    """Name in the layout -> name in `EagleHead`, for every tensor that the head has."""
    outer = {"fc.weight": "fc.weight"} | ({BIAS: BIAS} if head.config.fc_bias else {})
    return outer | llama.layer_names(head, PREFIX)
