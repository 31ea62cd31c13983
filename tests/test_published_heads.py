"""Heads as others publish them: names, shapes and config.json of their own tools, in toy sizes.

Each is recognised by its tensors, read, held against its family's equation in plain torch, and drafts in the engine.
docs/exports.md lists where each form is from.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Any

import plain_heads
import pytest
import torch
from plain_heads import Sizes
from safetensors.torch import save_file
from torch import Tensor
from toy_families import toy
from toys import make_target

from mtp_train.attention.packed import PackedContext
from mtp_train.core.errors import UserError
from mtp_train.engine.chain import ChainProposer
from mtp_train.engine.engine import Engine, EngineConfig
from mtp_train.engine.sequences import Request
from mtp_train.export.stage import import_head, layout_in
from mtp_train.heads.base import DraftHead
from mtp_train.models.target import Target

D, V, U = 32, 61, 40  # hidden width, vocabulary, draft vocabulary
ROWS, STEPS = 14, 3
LAST = ROWS - 1 - STEPS  # the row whose chain is looked at
SMALL = EngineConfig(max_batch=2, cache_rows=256, page_size=4)
REQUESTS = [Request("a", (5, 9, 2), 5), Request("b", tuple(range(1, 9)), 5)]
Shapes = dict[str, tuple[int, ...]]
LLAMA = Sizes()


def block(
    prefix: str,
    *,
    norms: Sequence[str] = ("input_layernorm",),
    reads: int = D,
    heads: tuple[int, int, int] = (4, 2, 8),
    inner: int = 48,
    biases: bool = False,
    head_norms: bool = False,
) -> Shapes:
    """A Llama-type layer's tensors; `heads`: query heads, key/value heads, their width."""
    count, groups, width = heads
    rows = {"q": count * width, "k": groups * width, "v": groups * width}
    found: Shapes = {f"self_attn.{kind}_proj.weight": (size, reads) for kind, size in rows.items()}
    found["self_attn.o_proj.weight"] = (D, count * width)
    found |= {"mlp.gate_proj.weight": (inner, D), "mlp.up_proj.weight": (inner, D)}
    found |= {"mlp.down_proj.weight": (D, inner)}
    found |= {f"{name}.weight": (D,) for name in (*norms, "post_attention_layernorm")}
    if biases:
        found |= {f"self_attn.{kind}_proj.bias": (size,) for kind, size in rows.items()}
    if head_norms:
        found |= {f"self_attn.{kind}_norm.weight": (width,) for kind in "qk"}
    return {prefix + name: shape for name, shape in found.items()}


first_of_eagle = partial(block, norms=())
first_of_eagle3 = partial(block, norms=("input_layernorm", "hidden_norm"), reads=2 * D)
FC: Shapes = {"fc.weight": (D, 2 * D)}
OUTER: Shapes = {"fc.weight": (D, 3 * D), "norm.weight": (D,), "lm_head.weight": (U, D)}
EMBEDDING: Shapes = {"embed_tokens.weight": (V, D)}  # a copy of the target's


def llama(*architectures: str, **keys: Any) -> dict[str, Any]:
    """A config.json as older transformers write it: no head_dim, no rope_parameters."""
    sizes = {
        "architectures": list(architectures),
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": D,
        "intermediate_size": 48,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_hidden_layers": 1,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
        "torch_dtype": "float16",
        "transformers_version": "4.28.1",
        "use_cache": True,
        "vocab_size": V,
        "pad_token_id": 0,
    }
    return sizes | keys


def speculators(layer: dict[str, Any] | None = None, **keys: Any) -> dict[str, Any]:
    inner = llama("LlamaForCausalLM", head_dim=8, attention_bias=False, **(layer or {}))
    outer = {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "speculators_version": "0.3.0",
        "draft_vocab_size": U,
        "norm_before_residual": True,
        "norm_before_fc": False,
        "eagle_aux_hidden_state_layer_ids": None,
        "embed_requires_grad": False,
        "target_hidden_size": None,
        "transformer_layer_config": inner,
        "speculators_config": {"algorithm": "eagle3", "verifier": {"name_or_path": "org/target"}},
    }
    return outer | keys


@dataclass(frozen=True)
class Published:
    """A publisher's folder.

    Attributes:
        layout: what it is recognised as.
        tensors: shapes by name; d2t and t2d are added for `draft_tokens`.
        reference: (weights, embeddings, states) -> what the lm_heads read at each step.
        expected: settings of the head that it must become.
        missing: of d2t and t2d, the one that the publisher leaves out.
    """

    layout: str
    tensors: Shapes
    config: dict[str, Any]
    reference: Callable[[dict[str, Tensor], Tensor, list[Tensor]], list[Tensor]]
    target: str = "deep llama"
    dtype: torch.dtype = torch.float16
    file: str = "model.safetensors"
    draft_tokens: int = 0
    missing: str = ""
    states: tuple[str, ...] = ("post_norm",)
    expected: dict[str, Any] = field(default_factory=dict)


def eagle(sizes: Sizes = LLAMA) -> Any:
    return lambda w, e, states: plain_heads.eagle(w, e, states[0], STEPS, sizes)


def eagle3(sizes: Sizes = LLAMA, **options: Any) -> Any:
    return lambda w, e, states: plain_heads.eagle3(w, e, states, STEPS, sizes, **options)


def medusa(layers: int, name: Callable[[int, int], str]) -> Any:
    def read(w: dict[str, Tensor], _: Tensor, states: list[Tensor]) -> list[Tensor]:
        return [plain_heads.medusa(w, states[0][-1], at, layers, name) for at in range(STEPS)]

    return read


def dflash(sizes: Sizes = LLAMA, first_slot: int = 1) -> Any:
    return lambda w, e, states: plain_heads.dflash(w, e, states, STEPS, sizes, 3, first_slot)


def block_head(architecture: str, **keys: Any) -> dict[str, Any]:
    """A config.json of a block head as its trainers write it: Qwen3's keys and their own."""
    layer = {"model_type": "qwen3", "head_dim": 8, "attention_bias": False, "num_hidden_layers": 2}
    layers = {"layer_types": ["full_attention"] * 2, "num_target_layers": 7, "block_size": 4}
    return llama(architecture, **layer | layers | keys)


USUAL = ("layer_2", "layer_3", "layer_4")  # vLLM's default for 7 layers: 2, 7 // 2, 7 - 3
EAGLE3 = {"layout": "eagle3", "states": USUAL, "draft_tokens": U}
PARALLEL = first_of_eagle3("layers.0.") | block("layers.1.") | {"mask_hidden": (1, 1, 3 * D)}
LATER = (("layers.1.", "input_layernorm"),)
BLOCKS: Shapes = (
    {"fc.weight": (D, 2 * D), "hidden_norm.weight": (D,), "norm.weight": (D,)}
    | block("layers.0.", head_norms=True)
    | block("layers.1.", head_norms=True)
)
MARKOV: Shapes = {
    "markov_head.markov_w1.weight": (V, 8),
    "markov_head.markov_w2.weight": (V, 8),
    "confidence_head.proj.weight": (1, D + 8),
    "confidence_head.proj.bias": (1,),
}
SPECULATED: dict[str, Any] = {"aux_hidden_state_layer_ids": [2, 5], "mask_token_id": 3}
MIMO = {
    f"model.mtp_layers.0.{name}.weight": (D,)
    for name in ("token_layernorm", "hidden_layernorm", "final_layernorm")
} | {"model.mtp_layers.0.input_proj.weight": (D, 2 * D)}

FOLDERS: dict[str, Published] = {
    # --- EAGLE-1 and 2
    "SafeAILab EAGLE, fc with a bias, embedding beside it": Published(
        "eagle",
        FC | {"fc.bias": (D,)} | first_of_eagle("layers.0.") | EMBEDDING,
        llama("LlamaForCausalLM", rms_norm_eps=1e-5),
        eagle(Sizes(epsilon=1e-5)),
        expected={"fc_bias": True, "layers": 1, "layer": {"rms_norm_eps": 1e-5}},
    ),
    "SafeAILab EAGLE, the target's number of layers": Published(
        "eagle",
        FC | first_of_eagle("layers.0."),
        llama("LlamaForCausalLM", num_hidden_layers=7, bias=False),
        eagle(),
        expected={"fc_bias": False, "layers": 1},
    ),
    "SafeAILab EAGLE for Mixtral, key/value heads of its own": Published(
        "eagle",
        FC | {"fc.bias": (D,)} | first_of_eagle("layers.0.", heads=(4, 4, 8)),
        llama("LlamaForCausalLM", model_type="mixtral", num_key_value_heads=4, rope_scaling=None),
        eagle(Sizes(kv_heads=4)),
        expected={"layer": {"num_key_value_heads": 4}, "block": "llama"},
    ),
    "SafeAILab EAGLE for Qwen2, q, k and v biases": Published(
        "eagle",
        FC | {"fc.bias": (D,)} | first_of_eagle("layers.0.", biases=True),
        llama("LlamaForCausalLM", qkv_bias=True, torch_dtype="bfloat16"),
        eagle(),
        target="qwen2",
        dtype=torch.bfloat16,
        expected={"block": "target"},
    ),
    "SafeAILab EAGLE of two layers": Published(
        "eagle",
        FC | first_of_eagle("layers.0.") | block("layers.1."),
        llama("LlamaForCausalLM", num_hidden_layers=2, bias=False),
        eagle(),
        expected={"layers": 2},
    ),
    "BaldEagle": Published(
        "eagle_sglang",
        FC | {"fc.bias": (D,)} | first_of_eagle("layers.0.") | EMBEDDING,
        llama("LlamaForCausalLMEagle", eos_token_id=[1, 2, 3], torch_dtype="bfloat16"),
        eagle(),
        dtype=torch.bfloat16,
        expected={"fc_bias": True},
    ),
    # --- EAGLE-3
    "SafeAILab EAGLE-3": Published(
        tensors=OUTER | first_of_eagle3("midlayer."),
        config=llama("LlamaForCausalLM", rms_norm_eps=1e-5, draft_vocab_size=U),
        reference=eagle3(Sizes(epsilon=1e-5)),
        **EAGLE3,
        expected={"layers": 1, "norm_before_residual": False},
    ),
    "SafeAILab EAGLE-3 for Vicuna, the target's number of layers, all tokens": Published(
        "eagle3",
        OUTER | {"lm_head.weight": (V, D)} | first_of_eagle3("midlayer."),
        llama("LlamaForCausalLM", num_hidden_layers=7, draft_vocab_size=V),
        eagle3(),
        states=USUAL,
        draft_tokens=V,
        expected={"layers": 1, "draft_vocabulary": 0},
    ),
    "SpecForge": Published(
        tensors=OUTER | first_of_eagle3("midlayer."),
        config=llama(
            "LlamaForCausalLMEagle3", rope_theta=1e6, rope_scaling=None, draft_vocab_size=U
        ),
        reference=eagle3(Sizes(theta=1e6)),
        **EAGLE3,
        dtype=torch.bfloat16,
    ),
    "SpecForge for gpt-oss, layers in eagle_config": Published(
        tensors=OUTER | first_of_eagle3("midlayer."),
        config=llama(
            "LlamaForCausalLMEagle3",
            draft_vocab_size=U,
            eagle_config={"eagle_aux_hidden_state_layer_ids": [0, 2, 5]},
        ),
        reference=eagle3(),
        **(EAGLE3 | {"states": ("layer_1", "layer_3", "layer_6")}),
    ),
    "SpecForge for DeepSeek-V3, heads of its own": Published(
        tensors=OUTER | first_of_eagle3("midlayer.", heads=(8, 1, 4), inner=40),
        config=llama(
            "LlamaForCausalLMEagle3",
            draft_vocab_size=U,
            num_attention_heads=8,
            num_key_value_heads=1,
            intermediate_size=40,
        ),
        reference=eagle3(Sizes(heads=8, kv_heads=1)),
        **EAGLE3,
    ),
    "SpecForge 3.1": Published(
        tensors=OUTER
        | first_of_eagle3("midlayer.")
        | {f"fc_norm.{part}.weight": (D,) for part in range(3)},
        config=llama("LlamaForCausalLMEagle3", draft_vocab_size=U, fc_norm=True, norm_output=True),
        reference=eagle3(flags=("fc_norm", "norm_output")),
        **EAGLE3,
    ),
    "speculators": Published(
        tensors=OUTER | first_of_eagle3("layers.0.") | EMBEDDING,
        config=speculators(),
        reference=eagle3(first="layers.0.", flags=("norm_before_residual",)),
        **(EAGLE3 | {"layout": "speculators"}),
        expected={"norm_before_residual": True},
    ),
    "speculators of two layers": Published(
        tensors=OUTER | first_of_eagle3("layers.0.") | block("layers.1."),
        config=speculators({"num_hidden_layers": 2}, norm_before_residual=False),
        reference=eagle3(first="layers.0.", later=(("layers.1.", "input_layernorm"),)),
        **(EAGLE3 | {"layout": "speculators"}),
        expected={"layers": 2},
    ),
    "speculators for gpt-oss, one norm before fc": Published(
        tensors=OUTER | first_of_eagle3("layers.0.") | {"input_norm.weight": (3 * D,)},
        config=speculators(norm_before_fc=True),
        reference=eagle3(first="layers.0.", flags=("norm_before_residual", "norm_before_fc")),
        **(EAGLE3 | {"layout": "speculators"}),
        expected={"norm_before_fc": True},
    ),
    "speculators for Qwen3, q and k norms": Published(
        tensors=OUTER | first_of_eagle3("layers.0.", head_norms=True),
        config=speculators(
            {"model_type": "qwen3"},
            norm_before_residual=False,
            eagle_aux_hidden_state_layer_ids=[0, 1, 2],
        ),
        reference=eagle3(first="layers.0."),
        **(EAGLE3 | {"layout": "speculators", "states": ("layer_0", "layer_1", "layer_2")}),
        target="qwen3",
        expected={"block": "target"},
    ),
    "NVIDIA, several layers, no t2d": Published(
        tensors=OUTER | first_of_eagle3("layers.0.") | block("layers.1.") | block("layers.2."),
        config=llama(
            "LlamaForCausalLMEagle3",
            num_hidden_layers=3,
            draft_vocab_size=U,
            bos_token_id=None,
            pad_token_id=None,
            rope_theta=1e4,
            rope_scaling={"rope_type": "default", "rope_theta": 1e4},
            eagle_config={
                "eagle_aux_hidden_state_layer_ids": [1, 2, 3],
                "use_aux_hidden_state": True,
                "use_input_layernorm_in_first_layer": True,
                "use_last_layernorm": True,
                "use_mtp_layernorm": False,
                "next_layer_regular": True,
                "parallel_draft_step": 1,
                "parallel_draft_heads_num_layers": 1,
            },
        ),
        reference=eagle3(
            first="layers.0.",
            later=(("layers.1.", "input_layernorm"), ("layers.2.", "input_layernorm")),
        ),
        **EAGLE3,
        missing="t2d",
        expected={"layers": 3},
    ),
    "NVIDIA from Megatron, midlayer.1": Published(
        tensors=OUTER
        | first_of_eagle3("midlayer.0.")
        | block("midlayer.1.", norms=("hidden_norm",)),
        config=llama("LlamaForCausalLMEagle3", num_hidden_layers=2, draft_vocab_size=U),
        reference=eagle3(first="midlayer.0.", later=(("midlayer.1.", "hidden_norm"),)),
        **EAGLE3,
        missing="t2d",
        expected={"layers": 2},
    ),
    "NVIDIA without a draft vocabulary or an lm_head": Published(
        "eagle3",
        {name: size for name, size in OUTER.items() if name != "lm_head.weight"}
        | first_of_eagle3("layers.0."),
        llama("LlamaForCausalLMEagle3", draft_vocab_size=None),
        eagle3(first="layers.0."),
        states=USUAL,
        expected={"draft_vocabulary": 0},
    ),
    "AngelSlim, tied in its config, embedding beside it": Published(
        tensors=OUTER | first_of_eagle3("midlayer.") | EMBEDDING,
        config=llama(
            "Eagle3LlamaForCausalLM",
            target_model_type="qwen3",
            head_dim=8,
            tie_word_embeddings=True,
            draft_vocab_size=U,
            rope_theta=1e6,
        ),
        reference=eagle3(Sizes(theta=1e6)),
        **EAGLE3,
        dtype=torch.bfloat16,
    ),
    # --- P-EAGLE
    "AWS P-EAGLE": Published(
        "peagle",
        OUTER | {"lm_head.weight": (V, D)} | PARALLEL | EMBEDDING,
        llama("LlamaForCausalLMEagle3", num_hidden_layers=2, ptd_token_id=3),
        eagle3(first="layers.0.", later=LATER, mask=3),
        states=USUAL,
        expected={"layers": 2, "mask_token": 3, "depths": 8, "draft_vocabulary": 0},
    ),
    "SpecForge P-EAGLE, its mask token written into the config": Published(
        "peagle",
        OUTER | PARALLEL | EMBEDDING,
        llama(
            "PEagleDraftModel",
            num_hidden_layers=2,
            draft_vocab_size=U,
            norm_before_residual=True,
            ptd_token_id=5,
        ),
        eagle3(first="layers.0.", later=LATER, flags=("norm_before_residual",), mask=5),
        states=USUAL,
        draft_tokens=U,
        expected={"layers": 2, "mask_token": 5},
    ),
    "P-EAGLE with neither embedding nor lm_head, a flat mask": Published(
        "peagle",
        {name: size for name, size in OUTER.items() if name != "lm_head.weight"}
        | first_of_eagle3("midlayer.")
        | {"mask_hidden": (1, 3 * D)},
        llama("LlamaForCausalLMEagle3", pard_token=5, num_depths=4),
        eagle3(mask=5),
        states=USUAL,
        expected={"layers": 1, "mask_token": 5, "depths": 4},
    ),
    "speculators P-EAGLE": Published(
        "peagle",
        OUTER | PARALLEL | EMBEDDING,
        speculators(
            {"num_hidden_layers": 2},
            speculators_model_type="peagle",
            norm_before_residual=True,
            mask_token_id=3,
            num_depths=8,
        ),
        eagle3(first="layers.0.", later=LATER, flags=("norm_before_residual",), mask=3),
        states=USUAL,
        draft_tokens=U,
        expected={"layers": 2, "mask_token": 3, "norm_before_residual": True},
    ),
    # --- DFlash and DSpark
    "z-lab DFlash": Published(
        "dflash",
        BLOCKS,
        block_head(
            "DFlashDraftModel", dflash_config={"mask_token_id": 3, "target_layer_ids": [1, 4]}
        )
        | {"auto_map": {"AutoModel": "dflash.DFlashDraftModel"}, "rope_theta": 1e6},
        dflash(Sizes(theta=1e6)),
        states=("layer_2", "layer_5"),
        dtype=torch.bfloat16,
        expected={"layers": 2, "block_size": 4, "mask_token": 3, "window": 0},
    ),
    "z-lab DFlash, layers below model., a window that is not used": Published(
        "dflash",
        {f"model.{name}": shape for name, shape in BLOCKS.items()},
        block_head(
            "DFlashDraftModel", dflash_config={"mask_token_id": 3, "target_layer_ids": [1, 4]}
        )
        | {"sliding_window": 8, "use_sliding_window": False},
        lambda w, e, states: dflash()(
            {name.removeprefix("model."): value for name, value in w.items()}, e, states
        ),
        states=("layer_2", "layer_5"),
        expected={"window": 0},
    ),
    "speculators DFlash, embedding beside it": Published(
        "dflash",
        BLOCKS | EMBEDDING,
        speculators(
            {"model_type": "qwen3", "num_hidden_layers": 2, "layer_types": ["full_attention"] * 2},
            **SPECULATED | {"architectures": ["DFlashSpeculator"], "block_size": 4},
            speculators_model_type="dflash",
            sample_from_anchor=False,
            sliding_window_non_causal=False,
        ),
        dflash(),
        states=("layer_2", "layer_5"),
        expected={"block_size": 4, "mask_token": 3, "window": 0},
    ),
    "DSpark as vLLM reads it": Published(
        "dspark",
        BLOCKS | MARKOV,
        block_head("Qwen3DSparkModel", target_layer_ids=[1, 4], mask_token_id=3, block_size=3)
        | {"markov_rank": 8, "markov_head_type": "vanilla", "enable_confidence_head": True}
        | {"confidence_head_with_markov": True},
        dflash(first_slot=0),
        states=("layer_2", "layer_5"),
        dtype=torch.bfloat16,
        expected={"block_size": 3, "mask_token": 3, "markov_rank": 8},
    ),
    "speculators DSpark": Published(
        "dspark",
        BLOCKS | MARKOV,
        speculators(
            {"model_type": "qwen3", "num_hidden_layers": 2},
            **SPECULATED | {"architectures": ["DSparkSpeculator"], "block_size": 3},
            speculators_model_type="dspark",
            sample_from_anchor=True,
            markov_rank=8,
            markov_head_type="vanilla",
            enable_confidence_head=True,
            confidence_head_with_markov=True,
        ),
        dflash(first_slot=0),
        states=("layer_2", "layer_5"),
        expected={"block_size": 3, "mask_token": 3, "markov_rank": 8},
    ),
    # --- Medusa
    "Medusa 1, biases, fewer heads in its config": Published(
        "medusa",
        {f"{i}.{j}.linear.weight": (D, D) for i in range(STEPS) for j in range(1)}
        | {f"{i}.0.linear.bias": (D,) for i in range(STEPS)}
        | {f"{i}.1.weight": (V, D) for i in range(STEPS)},
        {"medusa_num_heads": 2, "medusa_num_layers": 1, "base_model_name_or_path": "org/target"},
        medusa(1, lambda i, j: f"{i}.{j}.linear."),
        file="medusa_lm_head.safetensors",
        expected={"steps": STEPS, "bias": True, "own_lm_heads": True},
    ),
    "Medusa 2, the target's lm_head": Published(
        "medusa",
        {f"{i}.{j}.linear.weight": (D, D) for i in range(STEPS) for j in range(2)}
        | {f"{i}.{j}.linear.bias": (D,) for i in range(STEPS) for j in range(2)},
        {"medusa_num_heads": STEPS, "medusa_num_layers": 2, "version": "2"},
        medusa(2, lambda i, j: f"{i}.{j}.linear."),
        file="medusa_lm_head.safetensors",
        expected={"layers": 2, "own_lm_heads": False},
    ),
    "Medusa as trainers save it": Published(
        "medusa",
        {f"medusa_head.{i}.0.linear.weight": (D, D) for i in range(STEPS)}
        | {f"medusa_head.{i}.0.linear.bias": (D,) for i in range(STEPS)}
        | {f"medusa_head.{i}.1.weight": (V, D) for i in range(STEPS)},
        llama("MedusaLlamaModel", medusa_num_heads=STEPS, medusa_num_layers=1),
        medusa(1, lambda i, j: f"medusa_head.{i}.{j}.linear."),
        dtype=torch.bfloat16,
    ),
    "Medusa for vLLM": Published(
        "medusa",
        {f"blocks.{i}.layers.0.weight": (D, D) for i in range(STEPS)}
        | {f"lm_heads.{i}.weight": (V, D) for i in range(STEPS)},
        {
            "architectures": ["MedusaModel"],
            "model_type": "medusa",
            "hidden_size": D,
            "vocab_size": V,
            "num_heads": STEPS,
            "num_hidden_layers": 1,
            "max_paths": 64,
            "topk": 10,
        },
        medusa(1, lambda i, j: f"blocks.{i}.layers.{j}."),
        expected={"bias": False},
    ),
    # --- MiMo
    "MiMo's MTP layer alone, with the whole model's config": Published(
        "mimo_mtp",
        MIMO | block("model.mtp_layers.0.", biases=True),
        llama("MiMoForCausalLM", model_type="mimo", num_hidden_layers=2, num_nextn_predict_layers=1)
        | {"auto_map": {"AutoConfig": "configuration_mimo.MiMoConfig"}, "attention_bias": True},
        lambda w, e, states: plain_heads.mimo(w, e, states[0], STEPS, Sizes()),
        target="qwen2",
        dtype=torch.bfloat16,
    ),
    "MiMo's MTP layer without the prefix, beside the embedding": Published(
        "mimo_mtp",
        MIMO | block("model.mtp_layers.0.") | {"model.embed_tokens.weight": (V, D)},
        llama("MiMoForCausalLM", model_type="mimo", num_hidden_layers=36),
        lambda w, e, states: plain_heads.mimo(w, e, states[0], STEPS, Sizes()),
    ),
}


@cache
def target_of(name: str) -> Target:
    return make_target(num_hidden_layers=7) if name == "deep llama" else toy(name)


def made(published: Published, target: Target) -> dict[str, Tensor]:
    """Random tensors of the folder's names, in its dtype."""
    generator = torch.Generator().manual_seed(1)
    found = {}
    for name, shape in sorted(published.tensors.items()):
        value = torch.randn(shape, generator=generator) * 0.2
        if "norm" in name:
            value = 1 + value
        if name.endswith("embed_tokens.weight"):
            value = target.base.get_input_embeddings().weight.clone()
        found[name] = value.to(published.dtype)
    if published.draft_tokens:
        chosen = torch.randperm(V, generator=generator)[: published.draft_tokens].sort().values
        member = torch.zeros(V, dtype=torch.bool)
        member[chosen] = True
        found |= {"d2t": chosen - torch.arange(len(chosen)), "t2d": member}
        found.pop(published.missing, None)
    return found


def written(folder: Path, published: Published, tensors: dict[str, Tensor]) -> Path:
    folder.mkdir(exist_ok=True)
    save_file(tensors, folder / published.file, metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(published.config))
    return folder


def text_and_states(target: Target, names: tuple[str, ...]) -> tuple[Tensor, dict[str, Tensor]]:
    token_T = torch.randint(V, (ROWS,), generator=torch.Generator().manual_seed(3))
    position_T = torch.arange(ROWS)
    with torch.no_grad():
        return token_T, target.capture(token_T, position_T, PackedContext([0, ROWS]), names)


def drafted(
    head: DraftHead, target: Target, token_T: Tensor, states: dict[str, Tensor]
) -> list[Tensor]:
    """The head's logits of the chain of row LAST, by training's forward."""
    mask_T, start_N = torch.ones_like(token_T), torch.tensor([LAST])
    aligned = head.align(token_T, mask_T, [0, ROWS], STEPS, start_N=start_N)
    with torch.no_grad():
        found = head.unroll(target, aligned, states)
        logits = [head.project(target, one, at)[0] for at, one in enumerate(found.read_SNE)]
        if found.bias is not None:
            read_SNR, matrix_VR = found.bias
            logits = [one + matrix_VR @ read_SNR[at, 0] for at, one in enumerate(logits)]
        return logits


@pytest.mark.parametrize("name", FOLDERS)
def test_a_published_head_is_recognised_read_and_drafts(name: str, tmp_path: Path) -> None:
    published = FOLDERS[name]
    target = target_of(published.target)
    tensors = made(published, target)
    layout, head = import_head(written(tmp_path / "head", published, tensors), target)
    assert layout.name == published.layout
    found = {key: getattr(head.config, key) for key in published.expected}
    assert found == published.expected
    assert head.states == published.states

    token_T, states = text_and_states(target, published.states)
    known = token_T[1 : LAST + 1 + STEPS]
    with torch.no_grad():
        shown = [states[state][: LAST + 1] for state in published.states]
        weights = {key: value.float() for key, value in tensors.items()}
        own = weights.setdefault("embed_tokens.weight", target.embed(torch.arange(V)))
        embedding = own[known] if published.layout == "peagle" else target.embed(known)
        read = published.reference(weights, embedding, shown)
        for step, (ours, one) in enumerate(
            zip(drafted(head, target, token_T, states), read, strict=True)
        ):
            expected = one @ output(weights, target, step).T
            if "markov_head.markov_w1.weight" in weights:
                before_R = weights["markov_head.markov_w1.weight"][token_T[LAST + 1 + step]]
                expected = expected + weights["markov_head.markov_w2.weight"] @ before_R
            torch.testing.assert_close(ours, expected, atol=2e-4, rtol=1e-3)

    served = Engine(target, ChainProposer(target, head, 2), SMALL).generate(REQUESTS)
    assert [one.tokens for one in served] == plain_answers(published.target)


@cache
def plain_answers(target: str) -> list[tuple[int, ...]]:
    done = Engine(target_of(target), None, SMALL).generate(REQUESTS)
    return [one.tokens for one in done]


def output(weights: dict[str, Tensor], target: Target, step: int) -> Tensor:
    """The lm_head of a draft step: the folder's own, by whichever name, or the target's."""
    names = ["lm_head.weight", f"lm_heads.{step}.weight"]
    names += [f"{prefix}{step}.1.weight" for prefix in ("", "medusa_head.")]
    for name in names:
        if name in weights:
            return weights[name]
    return target.lm_head.weight


# --- what is not read -----------------------------------------------------------------------------------------

DFLASH = OUTER | {"hidden_norm.weight": (D,)} | block("layers.0.", head_norms=True)
NOT_READ: dict[str, tuple[Shapes, dict[str, Any], str]] = {
    "P-EAGLE without its mask token": (
        OUTER | PARALLEL | {"lm_head.weight": (V, D)},
        llama("LlamaForCausalLMEagle3"),
        "must name its mask token as ptd_token_id; received none",
    ),
    "Domino": (DFLASH | {"prefix_gru.weight_ih_l0": (12, D)}, llama("Domino"), "a Domino head"),
    "NVIDIA with parallel heads": (
        OUTER
        | first_of_eagle3("midlayer.")
        | {"parallel_draft_heads.0.medusa_layers.0.linear.weight": (D, D)},
        llama("LlamaForCausalLMEagle3"),
        "parallel Medusa heads",
    ),
    "NVIDIA for Kimi-K2": (
        OUTER
        | {"layers.0.hidden_norm.weight": (D,)}
        | {"layers.0.self_attn.kv_a_proj_with_mqa.weight": (14, 2 * D)},
        llama("Eagle3DeepseekV2ForCausalLM", model_type="kimi_k2"),
        "latent attention",
    ),
    "SGLang's later layers": (
        OUTER
        | first_of_eagle3("midlayer.")
        | block("additional_layers.0.", norms=("hidden_norm",)),
        llama("LlamaForCausalLMEagle3"),
        "SGLang's",
    ),
    "HASS": (
        FC | first_of_eagle("layers.0.") | {"embedding_layernorm.weight": (D,)},
        llama("LlamaForCausalLM"),
        "a HASS head",
    ),
    "Qwen3-Next's MTP layers": (
        {"mtp.fc.weight": (D, 2 * D)} | block("mtp.layers.0."),
        llama("Qwen3NextForCausalLM"),
        "head.init=native",
    ),
    "speculators' MTP head": (
        {name.removeprefix("model."): shape for name, shape in MIMO.items()}
        | block("mtp_layers.0."),
        speculators(speculators_model_type="mtp"),
        "MTP head of speculators.*received speculators_model_type mtp",
    ),
    "an EAGLE-3 head narrower than its target": (
        OUTER | first_of_eagle3("midlayer."),
        llama("LlamaForCausalLMEagle3", hidden_size=16, target_hidden_size=D),
        "hidden_size 16 for target_hidden_size 32",
    ),
    "NVIDIA without auxiliary states": (
        {name: size for name, size in OUTER.items() if name != "fc.weight"} | block("layers.0."),
        llama("LlamaForCausalLMEagle3", eagle_config={"use_aux_hidden_state": False}),
        r"known layout; .*eagle: no fc.weight; .*eagle3: no midlayer.hidden_norm.weight",
    ),
    "EAGLE-1 with an input norm": (
        FC | block("layers.0."),
        llama("LlamaForCausalLM"),
        "eagle: layers.0.input_layernorm.weight is there",
    ),
    "a trained embedding": (
        OUTER | first_of_eagle3("layers.0.") | {"embed_tokens.weight": (V + 3, D)},
        speculators(embed_requires_grad=True),
        "another embed_tokens.weight",
    ),
}


@pytest.mark.parametrize("name", NOT_READ)
def test_a_head_that_is_not_read_is_refused_by_name(name: str, tmp_path: Path) -> None:
    shapes, config, message = NOT_READ[name]
    tensors = {key: torch.ones(shape) for key, shape in shapes.items()}
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match=message) as refused:
        import_head(tmp_path, target_of("deep llama"))
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    "file", ["pytorch_model.bin", "medusa_lm_head.pt", "pytorch_model-00001-of-00002.bin"]
)
def test_a_folder_of_pickled_weights_alone_is_refused_with_what_to_do(
    file: str, tmp_path: Path
) -> None:
    (tmp_path / file).write_bytes(b"pickled")
    (tmp_path / "config.json").write_text(json.dumps(llama("LlamaForCausalLM")))
    with pytest.raises(UserError, match=rf"must be safetensors; received .*{file}; convert them"):
        layout_in(tmp_path)


def test_an_index_of_another_model_is_passed_over(tmp_path: Path) -> None:
    """SGLang's tool leaves DeepSeek's own index beside nextn_layer_parameters.safetensors."""
    published = FOLDERS["SafeAILab EAGLE-3"]
    target = target_of(published.target)
    tensors = made(published, target)
    save_file(tensors, tmp_path / "nextn_layer_parameters.safetensors")
    index = {"weight_map": {name: "model-00001-of-00163.safetensors" for name in tensors}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    (tmp_path / "config.json").write_text(json.dumps(published.config))
    assert import_head(tmp_path, target)[0].name == "eagle3"
