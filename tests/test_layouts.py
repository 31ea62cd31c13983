"""Every serving layout: its tensors by name and shape, its config's keys, out and back, and foreign folders read."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from head_variants import VARIANTS, make_variant
from safetensors.torch import load_file, save_file
from toy_families import toy
from toys import make_target, toy_config
from transformers import AutoConfig

from mtp_train.core.errors import UserError
from mtp_train.export import dflash, eagle, eagle3, llama
from mtp_train.export.formats import LAYOUTS, USUAL, usual
from mtp_train.export.layout import METHOD_WORDS
from mtp_train.export.stage import RECORD, ExportConfig, export_head, import_head
from mtp_train.heads.base import DraftHead
from mtp_train.heads.eagle import EagleConfig
from mtp_train.heads.eagle3 import Eagle3Config
from mtp_train.heads.families import build_head
from mtp_train.heads.mtp import MtpConfig
from mtp_train.models.target import Target, eagle3_states

LAYER = {
    "self_attn.q_proj.weight": [32, 32],
    "self_attn.k_proj.weight": [16, 32],
    "self_attn.v_proj.weight": [16, 32],
    "self_attn.o_proj.weight": [32, 32],
    "mlp.gate_proj.weight": [48, 32],
    "mlp.up_proj.weight": [48, 32],
    "mlp.down_proj.weight": [32, 48],
    "post_attention_layernorm.weight": [32],
}
EAGLE = {"fc.weight": [32, 64]} | {f"layers.0.{name}": shape for name, shape in LAYER.items()}
WIDE = {
    name: [shape[0], 64]
    for name, shape in LAYER.items()
    if name[10:16] in ("q_proj", "k_proj", "v_proj")
}
EAGLE3 = {
    "fc.weight": [32, 96],
    "norm.weight": [32],
    "lm_head.weight": [40, 32],
    "d2t": [40],
    "t2d": [61],
} | {
    f"midlayer.{name}": shape
    for name, shape in (
        LAYER | WIDE | {"input_layernorm.weight": [32], "hidden_norm.weight": [32]}
    ).items()
}
GOES = [
    ("mtp", "mimo_mtp"),
    ("eagle", "eagle"),
    ("eagle", "eagle_sglang"),
    ("eagle3", "eagle3"),
    ("eagle3-whole", "eagle3"),
    ("eagle3.1", "eagle3"),
    ("eagle3-llama", "eagle3"),
    ("eagle3", "speculators"),
    ("eagle3-whole", "speculators"),
    ("eagle3.1", "speculators"),
    ("eagle-own-layer", "eagle_sglang"),
    ("eagle-part", "eagle_sglang"),
    ("eagle3-window", "eagle3"),
    ("eagle3-window", "speculators"),
    ("peagle-window", "peagle"),
    ("eagle-2-layers", "eagle"),
    ("eagle-2-layers", "eagle_sglang"),
    ("eagle3-2-layers", "eagle3"),
    ("eagle3-2-layers", "speculators"),
    ("dflash", "dflash"),
    ("dflash-window", "dflash"),
    ("dspark", "dspark"),
    ("dspark-window", "dspark"),
    ("peagle", "peagle"),
    ("peagle-llama", "peagle"),
]


@pytest.fixture
def target() -> Target:
    return make_target(num_hidden_layers=7)


def exported(target: Target, variant: str, layout: str, folder: Path) -> DraftHead:
    head = make_variant(target, variant)
    export_head(head, target, ExportConfig(layout), folder, {})
    return head


def shapes(folder: Path) -> dict[str, list[int]]:
    return {
        name: list(value.shape) for name, value in load_file(folder / "model.safetensors").items()
    }


def config_of(folder: Path) -> dict[str, Any]:
    value: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return value


def rewrite(
    folder: Path,
    tensors: Callable[[dict[str, torch.Tensor]], object] = lambda _: None,
    config: Callable[[dict[str, Any]], object] = lambda _: None,
) -> None:
    """Change a folder as another trainer might have written it."""
    found, values = load_file(folder / "model.safetensors"), config_of(folder)
    tensors(found)
    config(values)
    save_file(found, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(values))
    (folder / RECORD).unlink(missing_ok=True)


# --- what is written ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("variant", "layout"), GOES)
def test_a_head_goes_out_and_comes_back(
    target: Target, tmp_path: Path, variant: str, layout: str
) -> None:
    head = exported(target, variant, layout, tmp_path / "out")
    found, again = import_head(tmp_path / "out", target)
    assert found.name == layout
    assert again.state_dict().keys() == head.state_dict().keys()
    assert all(
        torch.equal(value, again.state_dict()[name]) for name, value in head.state_dict().items()
    )
    assert again.states == head.states


@pytest.mark.parametrize(
    ("variant", "layout", "expected"),
    [
        ("eagle", "eagle", EAGLE),
        ("eagle", "eagle_sglang", EAGLE | {"fc.bias": [32]}),
        ("eagle3", "eagle3", EAGLE3),
        (
            "eagle3-whole",
            "eagle3",
            {name: shape for name, shape in EAGLE3.items() if name not in ("d2t", "t2d")}
            | {"lm_head.weight": [61, 32]},
        ),
        (
            "eagle-2-layers",
            "eagle",
            EAGLE
            | {
                f"layers.1.{name}": shape
                for name, shape in (LAYER | {"input_layernorm.weight": [32]}).items()
            },
        ),
        ("eagle3.1", "eagle3", EAGLE3 | {f"fc_norm.{part}.weight": [32] for part in range(3)}),
        (
            "peagle",
            "peagle",
            EAGLE3
            | {
                f"layers.1.{name}": shape
                for name, shape in (LAYER | {"input_layernorm.weight": [32]}).items()
            }
            | {"embed_tokens.weight": [61, 32], "mask_hidden": [1, 1, 96]},
        ),
        (
            "eagle3",
            "speculators",
            {name.replace("midlayer.", "layers.0."): shape for name, shape in EAGLE3.items()},
        ),
    ],
)
def test_a_layout_holds_these_tensors_and_no_others(
    target: Target, tmp_path: Path, variant: str, layout: str, expected: dict[str, list[int]]
) -> None:
    exported(target, variant, layout, tmp_path / "out")
    assert shapes(tmp_path / "out") == expected


def test_sglangs_fc_has_zeros_for_a_bias(target: Target, tmp_path: Path) -> None:
    exported(target, "eagle", "eagle_sglang", tmp_path / "out")
    assert not load_file(tmp_path / "out" / "model.safetensors")["fc.bias"].any()
    assert config_of(tmp_path / "out")["architectures"] == ["LlamaForCausalLMEagle"]


def test_sglang_is_told_a_draft_vocabulary_by_a_list_of_its_tokens(
    target: Target, tmp_path: Path
) -> None:
    head = exported(target, "eagle-part", "eagle_sglang", tmp_path / "out")
    assert head.vocabulary is not None and len(head.vocabulary) == 40
    listed = json.loads((tmp_path / "out" / "token_map.json").read_text())
    assert listed == head.vocabulary.tolist()
    assert shapes(tmp_path / "out") == EAGLE | {"fc.bias": [32]}, "the lm_head is the target's"
    told = (tmp_path / "out" / "README.md").read_text()
    assert f"--speculative-token-map {tmp_path / 'out'}/token_map.pt\n```" in told
    line = re.search(r'^python -c "(import json, torch; .*)"$', told, re.MULTILINE)
    assert line, told
    subprocess.run([sys.executable, "-c", line[1]], check=True)
    pickled = torch.load(tmp_path / "out" / "token_map.pt", weights_only=True)
    assert type(pickled) is list and pickled == listed, "what SGLang makes a tensor of"
    exported(target, "eagle", "eagle_sglang", tmp_path / "whole")
    assert "token-map" not in (tmp_path / "whole" / "README.md").read_text()


@pytest.mark.parametrize("tokens", [[3, 61], [-1, 4], [3, 3]])
def test_a_list_of_other_tokens_is_refused(
    target: Target, tmp_path: Path, tokens: list[int]
) -> None:
    exported(target, "eagle-part", "eagle_sglang", tmp_path / "out")
    (tmp_path / "out" / "token_map.json").write_text(json.dumps(tokens))
    with pytest.raises(UserError, match=r"record names; received .*token_map\.json"):
        import_head(tmp_path / "out", target)
    (tmp_path / "out" / RECORD).unlink()
    with pytest.raises(UserError, match="rising token ids below 61"):
        import_head(tmp_path / "out", target)


def test_offsets_and_members_name_the_draft_vocabulary(target: Target, tmp_path: Path) -> None:
    head = exported(target, "eagle3", "eagle3", tmp_path / "out")
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    assert head.vocabulary is not None
    assert tensors["d2t"].dtype == torch.int64 and tensors["t2d"].dtype == torch.bool
    assert (tensors["d2t"] + torch.arange(40)).tolist() == head.vocabulary.tolist()
    assert tensors["t2d"].nonzero().flatten().tolist() == head.vocabulary.tolist()
    assert config_of(tmp_path / "out")["draft_vocab_size"] == 40


@pytest.mark.parametrize(
    ("variant", "layout"),
    [
        *product(("eagle3", "eagle3-whole", "eagle3.1"), ("eagle3", "speculators")),
        *product(("peagle", "peagle-llama"), ("peagle",)),
    ],
)
def test_flags_and_layers_are_explicit(
    target: Target, tmp_path: Path, variant: str, layout: str
) -> None:
    """Engines' defaults differ. vLLM counts the layers that have run, SGLang names the last of them."""
    exported(target, variant, layout, tmp_path / "out")
    config = config_of(tmp_path / "out")
    options = VARIANTS[variant]
    assert {name: config[name] for name in eagle3.FLAGS} == {
        name: getattr(options, name) for name in eagle3.FLAGS
    }
    assert config["norm_before_fc"] is False
    assert config[eagle3.IDS] == [2, 3, 4]
    assert eagle3_states(7) == ("layer_2", "layer_3", "layer_4")
    if layout == "peagle":
        assert (config["ptd_token_id"], config["num_depths"]) == (9 if options.fc_norm else 0, 3)
    if layout != "speculators":
        assert config["eagle_config"][eagle3.IDS] == [1, 2, 3]
        assert config["architectures"] == ["LlamaForCausalLMEagle3"]


def test_a_speculators_folder_says_what_vllm_asks_of_it(target: Target, tmp_path: Path) -> None:
    exported(target, "eagle3", "speculators", tmp_path / "out")
    config = config_of(tmp_path / "out")
    assert config["speculators_model_type"] == "eagle3"
    assert config["speculators_config"]["proposal_methods"][0]["speculative_tokens"] == 3
    assert config["speculators_config"]["verifier"]["name_or_path"]
    assert config["transformer_layer_config"]["model_type"] == "llama"
    assert "model_type" not in config, "vLLM takes the layout for another model by it"


@pytest.mark.parametrize(
    ("variant", "layout"), [("mtp", "mimo_mtp"), ("eagle", "eagle"), ("eagle3", "eagle3")]
)
def test_rope_is_said_in_both_ways(tmp_path: Path, variant: str, layout: str) -> None:
    """DEFECTS 26: theta and scaling are the target's for engines on either transformers."""
    rope = {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    target = make_target(rope_parameters=rope, max_position_embeddings=8192)
    exported(target, variant, layout, tmp_path / "out")
    config = config_of(tmp_path / "out")
    assert config["rope_parameters"] == rope
    assert config["rope_theta"] == 500000.0 and config["rope_scaling"]["factor"] == 8.0
    read = AutoConfig.from_pretrained(tmp_path / "out")
    assert read.rope_parameters == rope
    assert read.head_dim == 8 and read.num_key_value_heads == 2


@pytest.mark.parametrize("layout", ["eagle", "eagle3", "speculators"])
def test_bfloat16(tmp_path: Path, layout: str) -> None:
    target = Target.from_config(toy_config(num_hidden_layers=7), dtype=torch.bfloat16)
    exported(target, "eagle" if layout == "eagle" else "eagle3", layout, tmp_path / "out")
    kinds = {value.dtype for value in load_file(tmp_path / "out" / "model.safetensors").values()}
    assert kinds - {torch.int64, torch.bool} == {torch.bfloat16}


def test_paths_that_name_eagle_are_served_by_eagle_heads(target: Target, tmp_path: Path) -> None:
    """vLLM takes a method from such a path only where it was not asked for eagle or eagle3."""
    for layout, variant in (("eagle", "eagle"), ("eagle3", "eagle3"), ("speculators", "eagle3")):
        exported(target, variant, layout, tmp_path / "my-eagle3-eagle-1" / layout)
    with pytest.raises(UserError, match="must not contain"):
        exported(target, "mtp", "mimo_mtp", tmp_path / "my-eagle3-eagle-1" / "mimo_mtp")
    assert METHOD_WORDS == ("eagle-", "eagle3", "dflash", "dspark")


def test_the_model_card_has_commands_and_licence_fields(target: Target, tmp_path: Path) -> None:
    figures = {"greedy": {"tau": 1.875, "per_position": [0.5, 0.25], "prompts": 12}}
    for variant, layout, words in (
        ("eagle", "eagle", ('"method": "eagle"', "vllm serve")),
        ("eagle", "eagle_sglang", ("--speculative-algorithm EAGLE ", "--speculative-num-steps 2")),
        ("eagle3", "eagle3", ('"method": "eagle3"', "--speculative-algorithm EAGLE3")),
        ("eagle3-whole", "eagle3", ("leaves out norm_before_residual",)),
        ("peagle", "peagle", ('"parallel_drafting": True}', '"parallel_drafting": true}\'')),
        ("eagle3", "speculators", (f"vllm serve {tmp_path / 'speculators'}",)),
    ):
        head = make_variant(target, variant)
        export_head(head, target, ExportConfig(layout), tmp_path / layout, figures)
        text = (tmp_path / layout / "README.md").read_text()
        assert text.startswith("---\nlicense:")
        for part in (*words, target.hash, "tau 1.875", "0.500 / 0.250", "12 held-out prompts"):
            assert part in text, part


# --- a wrong mapping is caught ----------------------------------------------------------------------------------


def wrong_tensors(
    monkeypatch: pytest.MonkeyPatch,
    kind: type[Any],
    wrong: Callable[[dict[str, torch.Tensor]], object],
) -> None:
    """Make a layout write and read tensors of a wrong meaning, both alike."""
    right_out, right_in = kind.tensors, kind.read

    def tensors(self: Any, *arguments: Any) -> dict[str, torch.Tensor]:
        made: dict[str, torch.Tensor] = right_out(self, *arguments)
        wrong(made)
        return made

    def read(self: Any, found: dict[str, torch.Tensor], *rest: Any) -> DraftHead:
        undone = dict(found)
        wrong(undone)
        head: DraftHead = right_in(self, undone, *rest)
        return head

    monkeypatch.setattr(kind, "tensors", tensors)
    monkeypatch.setattr(kind, "read", read)


def swap(one: str, other: str) -> Callable[[dict[str, torch.Tensor]], None]:
    def swapped(tensors: dict[str, torch.Tensor]) -> None:
        tensors[one], tensors[other] = tensors[other], tensors[one]

    return swapped


def halves(name: str) -> Callable[[dict[str, torch.Tensor]], None]:
    def swapped(tensors: dict[str, torch.Tensor]) -> None:
        tensors[name] = torch.cat(tensors[name].chunk(2, dim=1)[::-1], dim=1).contiguous()

    return swapped


def negated(name: str) -> Callable[[dict[str, torch.Tensor]], None]:
    return lambda tensors: tensors.update({name: -tensors[name]})


@pytest.mark.parametrize(
    ("variant", "kind", "wrong"),
    [
        ("eagle", eagle.Eagle, halves("fc.weight")),
        (
            "eagle",
            eagle.Eagle,
            swap("layers.0.mlp.gate_proj.weight", "layers.0.mlp.up_proj.weight"),
        ),
        (
            "eagle",
            eagle.Eagle,
            swap("layers.0.self_attn.k_proj.weight", "layers.0.self_attn.v_proj.weight"),
        ),
        ("eagle3", eagle3.Eagle3, halves("midlayer.self_attn.q_proj.weight")),
        (
            "eagle3",
            eagle3.Eagle3,
            swap("midlayer.hidden_norm.weight", "midlayer.input_layernorm.weight"),
        ),
        ("eagle3", eagle3.Eagle3, swap("norm.weight", "midlayer.post_attention_layernorm.weight")),
        ("eagle3", eagle3.Eagle3, negated("fc.weight")),
        ("eagle3.1", eagle3.Eagle3, swap("fc_norm.0.weight", "fc_norm.2.weight")),
    ],
)
def test_a_fault_that_writing_and_reading_share_is_caught(
    target: Target,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    variant: str,
    kind: type[Any],
    wrong: Callable[[dict[str, torch.Tensor]], object],
) -> None:
    """The read-back sees nothing: only the engine's equation, straight from the file, can."""
    wrong_tensors(monkeypatch, kind, wrong)
    with pytest.raises(UserError, match=r"logits must be the head's own.*the engine's equation"):
        exported(target, variant, kind.name, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("variant", "layout", "wrong"),
    [
        ("eagle", "eagle", {"rms_norm_eps": 1e-2}),
        ("eagle3", "eagle3", {"norm_before_residual": True}),
        ("eagle3", "eagle3", {"norm_output": True}),
        ("eagle3", "eagle3", {eagle3.IDS: [2, 3, 5]}),
        ("eagle3", "eagle3", {"rope_parameters": {"rope_type": "default", "rope_theta": 100.0}}),
        ("dspark-window", "dspark", {"is_causal": None}),
        ("dflash", "dflash", {"layer_types": ["sliding_attention"] * 2, "sliding_window": 5}),
        ("dspark", "dspark", {"target_layer_ids": [1, 3]}),
    ],
    ids=["epsilon", "residual", "fed back", "layers", "rope", "causal", "window", "states"],
)
def test_a_wrong_key_in_the_config_is_caught(
    target: Target,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    variant: str,
    layout: str,
    wrong: dict[str, Any],
) -> None:
    kind: Any = type(LAYOUTS[layout])
    right = kind.config
    monkeypatch.setattr(kind, "config", lambda *arguments: right(*arguments) | wrong)
    with pytest.raises((UserError, KeyError)):
        exported(target, variant, layout, tmp_path / "out")
    assert not (tmp_path / "out").exists()


# --- what goes where --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("layout", "config", "why"),
    [
        ("mimo_mtp", EagleConfig(), "head.family=eagle"),
        ("eagle", EagleConfig(fc_bias=True), "head.fc_bias=true"),
        ("mimo_mtp", MtpConfig(enorm=False, modules=2), "head.modules=2, head.enorm=false"),
        ("mimo_mtp", MtpConfig(layers=2), "head.layers=2 (mtp_train_vllm holds it)"),
        ("eagle", EagleConfig(draft_vocabulary=9), "head.draft_vocabulary=9 (it has no place"),
        ("mimo_mtp", MtpConfig(draft_vocabulary=9), "head.draft_vocabulary=9 (it has no place"),
        ("mtp_train_vllm", MtpConfig(draft_vocabulary=9), "head.draft_vocabulary=9"),
        ("stitched", MtpConfig(draft_vocabulary=9), "head.draft_vocabulary=9"),
        ("eagle", MtpConfig(), "head.family=mtp"),
        ("eagle3", EagleConfig(), "head.family=eagle"),
        ("eagle3", Eagle3Config(states=["layer_1", "layer_2", "post_norm"]), "post_norm"),
        ("eagle3", Eagle3Config(states=["layer_3", "layer_2", "layer_4"]), "order of layers"),
        ("speculators", MtpConfig(), "head.family=mtp"),
    ],
)
def test_what_a_layout_can_not_hold_is_named(
    target: Target, layout: str, config: Any, why: str
) -> None:
    assert why in LAYOUTS[layout].not_held(config, target)


@pytest.mark.parametrize(
    ("name", "layout", "why"),
    [
        ("qwen2", "eagle", "self_attn.q_proj.bias"),
        ("qwen3", "eagle", "self_attn.q_norm.weight.*head.block=llama"),
        ("gemma", "eagle", "does not multiply by its weight"),
        ("mistral-window", "eagle3", "a sliding window"),
    ],
)
def test_what_engines_would_compute_otherwise_is_named(name: str, layout: str, why: str) -> None:
    config: Any = {"eagle": EagleConfig(), "eagle3": Eagle3Config()}[LAYOUTS[layout].family]
    states = list(eagle3_states(toy(name).layers))
    config = replace(config, states=states) if layout == "eagle3" else config
    found = LAYOUTS[layout].not_held(config, toy(name))
    assert re.search(why, found), found


def test_scaled_embeddings_and_capped_logits_are_no_eagle_targets() -> None:
    plain = EagleConfig(block="llama")
    assert "scaled embeddings" in LAYOUTS["eagle"].not_held(plain, toy("gemma"))
    assert "a cap on the target's logits" in LAYOUTS["eagle"].not_held(plain, toy("gemma2"))
    assert not LAYOUTS["eagle"].not_held(plain, toy("qwen3"))


@pytest.mark.parametrize("name", ["qwen2", "qwen3", "gemma3", "deepseek_v2", "gpt_oss"])
def test_a_llama_block_beside_another_kind_of_layer_is_exported(name: str, tmp_path: Path) -> None:
    """An EAGLE-3 head has its own lm_head and norms its embeddings: it needs no more of the target than its states."""
    config = Eagle3Config(block="llama", init="random", draft_vocabulary=40)
    head = build_head(toy(name), config, 3, torch.arange(toy(name).vocab_size))
    export_head(head, toy(name), ExportConfig(), tmp_path / "out", {})


def test_every_usual_layout_is_there_and_of_its_family() -> None:
    for family, name in USUAL.items():
        assert LAYOUTS[name].family == family
        found = usual("auto", family)
        assert found is not None and found.name == name
    assert usual("auto", "unheard-of") is None
    assert {*USUAL.values()} <= {*LAYOUTS}


@pytest.mark.parametrize("layout", ["eagle", "eagle3", "speculators"])
def test_a_block_with_sizes_of_its_own_goes_out_and_comes_back(
    target: Target, tmp_path: Path, layout: str
) -> None:
    """Published heads turn by a plain RoPE where their target has scaling, or have a smaller mlp."""
    layer = {
        "intermediate_size": 20,
        "rms_norm_eps": 1e-3,
        "rope_parameters": {"rope_type": "default", "rope_theta": 77.0},
    }
    kind: Any = EagleConfig if layout == "eagle" else Eagle3Config
    config = kind(block="llama", layer=layer, init="random")
    head = build_head(target, config, 3, torch.arange(61))
    export_head(head, target, ExportConfig(layout), tmp_path / "out", {})
    _, again = import_head(tmp_path / "out", target)
    assert again.config.layer == layer and again.config.block == "llama"
    assert all(torch.equal(v, again.state_dict()[name]) for name, v in head.state_dict().items())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"layer": {"rms_norm_eps": 1e-3}}, "head.layer needs head.block=llama"),
        ({"layer": {"hidden_size": 8}, "block": "llama"}, "must be among intermediate_size"),
        ({"layer": {"intermediate_size": 8}, "block": "llama"}, "set head.init=random"),
    ],
)
def test_what_a_block_can_not_have_for_itself(options: dict[str, Any], message: str) -> None:
    for kind in (EagleConfig, Eagle3Config):
        with pytest.raises(UserError, match=message):
            kind(**options)


# --- somebody else's folders ------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["eagle", "eagle3"])
def test_a_prefix_copies_of_the_targets_ends_and_shards_are_read(
    target: Target, tmp_path: Path, layout: str
) -> None:
    """Published heads: `model.` before every name or not, the embedding beside them, in float16, in several files."""
    head = exported(target, layout, layout, tmp_path / "out")
    embedding = target.base.get_input_embeddings().weight
    found = load_file(tmp_path / "out" / "model.safetensors") | {
        "embed_tokens.weight": embedding.clone()
    }
    found = {
        f"model.{name}": value.half() if value.is_floating_point() else value
        for name, value in found.items()
    }
    (tmp_path / "out" / "model.safetensors").unlink()
    (tmp_path / "out" / RECORD).unlink()
    places = {}
    for number, name in enumerate(sorted(found)):
        places[name] = f"model-{number % 2 + 1:05d}-of-00002.safetensors"
    for file in set(places.values()):
        save_file({n: found[n] for n in found if places[n] == file}, tmp_path / "out" / file)
    (tmp_path / "out" / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": places})
    )
    _, again = import_head(tmp_path / "out", target)
    for name, value in head.state_dict().items():
        torch.testing.assert_close(again.state_dict()[name], value, rtol=1e-3, atol=1e-3)


def test_speculators_names_are_read_in_an_eagle3_folder(target: Target, tmp_path: Path) -> None:
    head = exported(target, "eagle3", "speculators", tmp_path / "there")
    exported(target, "eagle3", "eagle3", tmp_path / "out")
    other = load_file(tmp_path / "there" / "model.safetensors")

    def replaced(tensors: dict[str, torch.Tensor]) -> None:
        tensors.clear()
        tensors.update(other)

    rewrite(tmp_path / "out", replaced)
    _, again = import_head(tmp_path / "out", target)
    assert all(torch.equal(v, again.state_dict()[name]) for name, v in head.state_dict().items())


def test_a_head_without_an_lm_head_takes_the_targets(target: Target, tmp_path: Path) -> None:
    exported(target, "eagle3-whole", "eagle3", tmp_path / "out")
    rewrite(tmp_path / "out", lambda tensors: tensors.pop("lm_head.weight"))
    _, again = import_head(tmp_path / "out", target)
    assert torch.equal(again.state_dict()["lm_head.weight"], target.lm_head.weight)


def test_a_draft_vocabulary_in_another_order_is_sorted(target: Target, tmp_path: Path) -> None:
    head = exported(target, "eagle3", "eagle3", tmp_path / "out")
    order = torch.randperm(40, generator=torch.Generator().manual_seed(0))

    def shuffled(tensors: dict[str, torch.Tensor]) -> None:
        ids = (tensors["d2t"] + torch.arange(40))[order]
        tensors["d2t"] = ids - torch.arange(40)
        tensors["lm_head.weight"] = tensors["lm_head.weight"][order].contiguous()

    rewrite(tmp_path / "out", shuffled)
    _, again = import_head(tmp_path / "out", target)
    assert torch.equal(again.state_dict()["vocabulary"], head.state_dict()["vocabulary"])
    assert torch.equal(again.state_dict()["lm_head.weight"], head.state_dict()["lm_head.weight"])


@pytest.mark.parametrize(
    ("change", "states"),
    [
        (lambda config: config.pop(eagle3.IDS), ("layer_2", "layer_3", "layer_4")),
        (
            lambda config: (
                config.pop(eagle3.IDS),
                config["eagle_config"].update({eagle3.IDS: [0, 2, 5]}),
            ),
            ("layer_1", "layer_3", "layer_6"),
        ),
        (
            lambda config: (config.pop(eagle3.IDS), config.pop("eagle_config")),
            ("layer_2", "layer_3", "layer_4"),
        ),
        (lambda config: config.update({eagle3.IDS: [1, 2, 7]}), ("layer_1", "layer_2", "layer_7")),
    ],
    ids=["sglang's alone", "sglang's others", "none", "vllm's first"],
)
def test_auxiliary_layers_are_read_in_either_count(
    target: Target,
    tmp_path: Path,
    change: Callable[[dict[str, Any]], object],
    states: tuple[str, ...],
) -> None:
    exported(target, "eagle3", "eagle3", tmp_path / "out")
    rewrite(tmp_path / "out", config=change)
    assert import_head(tmp_path / "out", target)[1].states == states


def test_a_speculators_head_that_says_nothing_norms_before_the_residual(
    target: Target, tmp_path: Path
) -> None:
    """As vLLM takes it; an eagle3 folder that says nothing does not."""
    exported(target, "eagle3", "speculators", tmp_path / "out")
    rewrite(tmp_path / "out", config=lambda config: config.pop("norm_before_residual"))
    assert import_head(tmp_path / "out", target)[1].config.norm_before_residual is True
    exported(target, "eagle3", "eagle3", tmp_path / "two")
    rewrite(tmp_path / "two", config=lambda config: config.pop("norm_before_residual"))
    assert import_head(tmp_path / "two", target)[1].config.norm_before_residual is False


def poison(name: str, value: float) -> Callable[[dict[str, torch.Tensor]], object]:
    return lambda tensors: tensors[name].view(-1)[3:4].fill_(value)


FC = "fc.weight"


@pytest.mark.parametrize(
    ("variant", "tensors", "config", "message"),
    [
        ("eagle", poison(FC, float("nan")), None, "must be finite; received fc.weight"),
        (
            "eagle3",
            poison("norm.weight", float("inf")),
            None,
            "must be finite; received norm.weight",
        ),
        ("eagle", lambda t: t.pop(FC), None, "known layout"),
        ("eagle3", lambda t: t.pop(FC), None, r"missing \['fc.weight'\], extra \[\]"),
        (
            "eagle",
            lambda t: t.update({"norm.weight": torch.ones(32)}),
            None,
            r"extra \['norm.weight'\]",
        ),
        (
            "eagle",
            lambda t: t.update({FC: torch.ones(32, 60)}),
            None,
            r"fc.weight \(32, 60\) for \(32, 64\)",
        ),
        (
            "eagle",
            lambda t: t.update({FC: t[FC].int()}),
            None,
            r"kind of number.*fc.weight torch.int32",
        ),
        (
            "eagle",
            lambda t: t.update({"embed_tokens.weight": torch.zeros(61, 32)}),
            None,
            "must be the target's; received another embed_tokens.weight",
        ),
        (
            "eagle",
            None,
            {"vocab_size": 60},
            r"own target \(vocab_size 61\); received vocab_size 60",
        ),
        (
            "eagle3",
            None,
            {"hidden_size": 64},
            "target's hidden size; received hidden_size 64 for target_hidden_size 32",
        ),
        (
            "eagle3",
            None,
            {"hidden_size": 64, "target_hidden_size": 64},
            r"own target \(hidden_size 32\); received hidden_size 64",
        ),
        (
            "eagle",
            None,
            {"num_attention_heads": 2, "head_dim": 16},
            r"k_proj.weight \(16, 32\) for \(32, 32\)",
        ),
        (
            "eagle",
            None,
            {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}},
            "text's length: .*; received rope_type dynamic",
        ),
        ("eagle3", lambda t: (t.pop("d2t"), t.pop("t2d")), None, "40 of 61 tokens must say which"),
        ("eagle", None, {"attention_bias": True}, "attention_bias True for False"),
        (
            "eagle3",
            None,
            {"eagle_config": {"norm_before_fc": True}},
            r"missing \['input_norm.weight'\]",
        ),
        ("eagle3", None, {eagle3.IDS: [2, 3]}, "3 of the target's 7 layers"),
        ("eagle3", None, {eagle3.IDS: [2, 3, 8]}, "3 of the target's 7 layers"),
        ("eagle3", lambda t: t["d2t"].fill_(50), None, "d2t must lead to tokens below 61"),
        ("eagle3", lambda t: t["d2t"].copy_(-torch.arange(40)), None, "t2d must name the tokens"),
    ],
)
def test_a_folder_that_is_no_head_for_this_target_is_refused_by_name(
    target: Target,
    tmp_path: Path,
    variant: str,
    tensors: Callable[[dict[str, torch.Tensor]], object] | None,
    config: dict[str, Any] | None,
    message: str,
) -> None:
    exported(target, variant, variant, tmp_path / "out")
    rewrite(tmp_path / "out", tensors or (lambda _: None), lambda found: found.update(config or {}))
    with pytest.raises(UserError, match=message):
        import_head(tmp_path / "out", target)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda path: path.write_bytes(path.read_bytes()[:-1]), "whole safetensors"),
        (lambda path: path.write_bytes(b""), "whole safetensors"),
        (
            lambda path: path.rename(path.with_name("pytorch_model.bin")),
            "must be safetensors.*pytorch_model.bin",
        ),
    ],
    ids=["truncated", "empty", "pickled"],
)
def test_a_damaged_file_is_named(
    target: Target, tmp_path: Path, damage: Callable[[Path], object], message: str
) -> None:
    exported(target, "eagle", "eagle", tmp_path / "out")
    (tmp_path / "out" / RECORD).unlink()
    damage(tmp_path / "out" / "model.safetensors")
    with pytest.raises(UserError, match=message):
        import_head(tmp_path / "out", target)


def test_a_flipped_bit_in_an_export_of_ours_is_found(target: Target, tmp_path: Path) -> None:
    exported(target, "eagle", "eagle", tmp_path / "out")
    path = tmp_path / "out" / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[-3] ^= 1
    path.write_bytes(bytes(data))
    with pytest.raises(
        UserError, match=r"bytes that its record names; received .*model\.safetensors"
    ):
        import_head(tmp_path / "out", target)


def test_an_export_of_ours_is_refused_by_another_target(tmp_path: Path) -> None:
    targets = []
    for seed in (1, 2):
        make_target(seed=seed).model.save_pretrained(tmp_path / str(seed))
        targets.append(Target.load(tmp_path / str(seed), "float32"))
    own, other = targets
    exported(own, "eagle", "eagle", tmp_path / "out")
    import_head(tmp_path / "out", own)
    with pytest.raises(UserError, match=rf"target_hash {other.hash}\); received {own.hash}"):
        import_head(tmp_path / "out", other)


@pytest.mark.parametrize(
    ("variant", "layout", "name", "value"),
    [
        ("eagle", "eagle", "intermediate_size", -1),
        ("eagle3", "eagle3", "hidden_size", -1),
        ("eagle3", "eagle3", "eagle_aux_hidden_state_layer_ids", True),
        ("eagle3", "speculators", "transformer_layer_config", 3),
    ],
)
def test_a_config_that_holds_nonsense_is_a_users_error(
    target: Target, tmp_path: Path, variant: str, layout: str, name: str, value: object
) -> None:
    folder = tmp_path / "out"
    exported(target, variant, layout, folder)
    (folder / RECORD).unlink()
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {name: value}))
    with pytest.raises(UserError):
        import_head(folder, target)


@pytest.mark.parametrize("text", ["[]", '{"a": 1}', "3"])
def test_a_record_that_is_none_is_a_users_error(target: Target, tmp_path: Path, text: str) -> None:
    exported(target, "mtp", "mimo_mtp", tmp_path / "out")
    (tmp_path / "out" / RECORD).write_text(text)
    with pytest.raises(UserError):
        import_head(tmp_path / "out", target)


# --- block heads of other trainers ----------------------------------------------------------------------------


@pytest.mark.parametrize("variant", ["dflash", "dflash-window", "dspark"])
def test_a_block_head_as_others_write_it(target: Target, tmp_path: Path, variant: str) -> None:
    """With a prefix, with the target's embedding beside it, without layer types."""
    head = exported(target, variant, variant.split("-")[0], tmp_path / "out")

    def others(found: dict[str, torch.Tensor]) -> None:
        for name in list(found):
            found[f"model.{name}"] = found.pop(name)
        found["model.embed_tokens.weight"] = target.embed(torch.arange(61)).clone()

    rewrite(tmp_path / "out", others, lambda config: config.pop("layer_types"))
    if variant == "dspark":  # the public name of the same class
        rewrite(tmp_path / "out", config=lambda c: c.update(architectures=["DSparkDraftModel"]))
    layout, again = import_head(tmp_path / "out", target)
    assert layout.name == variant.split("-")[0] and again.config.window == head.config.window
    assert all(
        torch.equal(value, again.state_dict()[name]) for name, value in head.state_dict().items()
    )


@pytest.mark.parametrize(
    ("variant", "change", "why"),
    [
        ("dflash", {"is_causal": None, "dflash_config": {"causal": True}}, "see each other"),
        ("dflash", {"is_causal": True}, "see each other; received causal layers"),
        ("dflash-window", {"is_causal": None, "dflash_config": {"causal": None}}, "see each other"),
        ("dspark-window", {"is_causal": None}, "see each other; received causal layers"),
        ("dspark", {"markov_head_type": "gated"}, "markov_head_type vanilla; received .*gated"),
        ("dspark", {"sample_from_anchor": False}, "sample_from_anchor True; received"),
        (
            "dflash",
            {"dflash_config": {"sample_from_anchor": True}},
            "sample_from_anchor False; rec",
        ),
        ("dspark", {"dspark_bonus_anchor": True}, "received dspark_bonus_anchor True"),
        ("dspark", {"confidence_head_with_markov": False}, "confidence_head_with_markov True; rec"),
        ("dspark", {"confidence_temperatures": [1.0]}, "above 0 for each of 3 drafts"),
        ("dspark", {"confidence_temperatures": [1.0, 0.0, 1.0]}, "above 0 for each of 3 drafts"),
        ("dflash", {"dflash_config": {"attention_value_scale": 0.5}}, "attention_value_scale 1.0"),
        ("dflash", {"dflash_config": {"final_logit_softcapping": 30.0}}, "final_logit_softcapping"),
        ("dflash", {"is_neox_style": False}, "is_neox_style True; received is_neox_style False"),
        ("dspark", {"logit_scale": 0.5}, "logit_scale 1.0; received logit_scale 0.5"),
        ("dflash", {"layer_types": ["full_attention", "sliding_attention"]}, "all have one window"),
        (
            "dflash-window",
            {"sliding_window": None, "dflash_config": {"swa_window_size": None}},
            "must say its size as sliding_window; received None",
        ),
        ("dflash", {"dflash_config": {"target_layer_ids": [1, 60]}}, "from 0 to 6 at most"),
        (
            "dflash",
            {"dflash_config": {"target_layer_ids": [4, 1]}},
            r"must rise.*received \[4, 1\]",
        ),
        (
            "dflash",
            {"dflash_config": {"target_layer_ids": None}},
            "target_layer_ids; received none",
        ),
        ("dflash", {"dflash_config": {"mask_token_id": 600}}, "from 0 to 60; received 600"),
        ("dspark", {"mask_token_id": None}, "mask_token_id, from 0 to 60; received none"),
        ("dflash", {"block_size": None}, "block_size, from 2; received none"),
    ],
)
def test_a_block_head_that_is_computed_otherwise_is_refused(
    target: Target, tmp_path: Path, variant: str, change: dict[str, Any], why: str
) -> None:
    exported(target, variant, variant.split("-")[0], tmp_path / "out")

    def changed(config: dict[str, Any]) -> None:
        for key, value in change.items():
            config[key] = {**config[key], **value} if isinstance(value, dict) else value

    rewrite(tmp_path / "out", config=changed)
    with pytest.raises(UserError, match=why):
        import_head(tmp_path / "out", target)


def test_a_block_head_of_part_of_the_vocabulary_is_refused(target: Target, tmp_path: Path) -> None:
    exported(target, "dflash", "dflash", tmp_path / "out")

    def fewer(found: dict[str, torch.Tensor]) -> None:
        found |= {"d2t": torch.zeros(40, dtype=torch.int64), "lm_head.weight": torch.zeros(40, 32)}

    rewrite(tmp_path / "out", fewer)
    with pytest.raises(UserError, match="all 61 tokens; received d2t, which names 40 of them"):
        import_head(tmp_path / "out", target)


@pytest.mark.parametrize(
    ("said", "window", "causal"),
    [
        ({}, 0, False),
        ({"layer_types": ["full_attention"] * 2, "sliding_window": 9}, 0, False),
        ({"layer_types": ["sliding_attention"] * 2, "sliding_window": 9}, 9, True),
        ({"layer_types": ["sliding_attention"], "sliding_window": 9, "is_causal": False}, 9, False),
        ({"dflash_config": {"use_swa": True, "swa_window_size": 3}}, 3, False),
        ({"dflash_config": {"use_swa": True}, "sliding_window": 9}, 9, False),
        ({"dflash_config": {"causal": True}, "is_causal": False}, 0, False),
        ({"dflash_config": {"causal": True}}, 0, True),
        (
            {
                "layer_types": ["sliding_attention"],
                "sliding_window": 9,
                "dflash_config": {"swa_window_size": 3, "causal": False},
            },
            3,
            False,
        ),
    ],
)
def test_a_block_heads_attention_is_what_vllm_makes_of_its_config(
    said: dict[str, Any], window: int, causal: bool
) -> None:
    """vLLM 0.32, `_resolve_layer_attention` and `_dflash_layer_causal` of `models/qwen3_dflash.py`."""
    assert dflash.attention(said) == (window, causal)


def test_a_windowed_block_head_is_said_not_to_be_causal(target: Target, tmp_path: Path) -> None:
    """Without a word vLLM makes layers with a window causal; SGLang does so always, and is not offered."""
    for variant, said in (("dflash", "makes layers with a window causal"), ("dspark", "vLLM")):
        folder = tmp_path / f"windowed-{variant[1]}"
        exported(target, f"{variant}-window", variant, folder)
        assert config_of(folder)["is_causal"] is False
        assert said in (folder / "README.md").read_text()


@pytest.mark.parametrize("layout", ["eagle3", "speculators", "peagle"])
def test_a_window_is_said_as_vllms_llama_reads_it(
    target: Target, tmp_path: Path, layout: str
) -> None:
    """It takes the type of the draft's own layer i, and the window where that slides."""
    variant = "peagle-window" if layout == "peagle" else "eagle3-window"
    head = exported(target, variant, layout, tmp_path / "out")
    config = config_of(tmp_path / "out")
    layer = config.get("transformer_layer_config", config)
    assert layer["layer_types"] == ["sliding_attention"] * head.config.layers
    assert layer["sliding_window"] == head.config.window > 0
    exported(target, variant.split("-")[0], layout, tmp_path / "none")
    none = config_of(tmp_path / "none")
    assert "layer_types" not in none.get("transformer_layer_config", none)


@pytest.mark.parametrize(
    ("change", "window"),
    [
        ({"layer_types": ["full_attention"], "sliding_window": 9}, 0),
        (
            {
                "layer_types": ["sliding_attention", "full_attention"],
                "num_hidden_layers": 2,
                "sliding_window": 9,
            },
            9,
        ),
        ({"sliding_window": 9}, 0),
    ],
)
def test_a_window_is_the_drafts_own_layers(
    target: Target, tmp_path: Path, change: dict[str, Any], window: int
) -> None:
    """A file may name more layers than there are, the target's: one layer takes the first type."""
    exported(target, "eagle3", "eagle3", tmp_path / "out")
    rewrite(tmp_path / "out", config=lambda config: config.update(change))
    assert import_head(tmp_path / "out", target)[1].config.window == window


def test_layers_of_several_windows_are_refused(target: Target, tmp_path: Path) -> None:
    exported(target, "eagle3-2-layers", "eagle3", tmp_path / "out")
    mixed = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 9}
    rewrite(tmp_path / "out", config=lambda config: config.update(mixed))
    with pytest.raises(UserError, match="must all have one window"):
        import_head(tmp_path / "out", target)


def test_a_window_off_by_one_is_caught(
    target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Writing and reading could share the fault: the engine's equation does not."""
    write, read = llama.window_keys, llama.read_window
    monkeypatch.setattr(llama, "window_keys", lambda window, layers: write(window + 1, layers))
    monkeypatch.setattr(llama, "read_window", lambda config, layers: read(config, layers) - 1)
    with pytest.raises(UserError, match="the engine's equation"):
        exported(target, "eagle3-window", "eagle3", tmp_path / "out")


def test_a_layout_without_a_place_for_a_window_refuses_one(target: Target) -> None:
    for layout, config in (
        ("mimo_mtp", MtpConfig(window=9)),
        ("eagle", EagleConfig(window=9)),
        ("eagle_sglang", EagleConfig(window=9)),
        ("mtp_train_vllm", MtpConfig(window=9)),
    ):
        assert "head.window=9" in LAYOUTS[layout].not_held(config, target)
