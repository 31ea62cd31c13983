"""MTP layers by the names that targets are published with: beside a target, and in a copy of it."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from toy_families import toy
from toys import toy_config
from transformers import AutoModelForCausalLM, DeepseekV3Config

from mtp_train.attention.packed import PackedContext
from mtp_train.core.errors import UserError
from mtp_train.engine.chain import ChainProposer
from mtp_train.engine.engine import Engine, EngineConfig
from mtp_train.engine.sequences import Request
from mtp_train.export import deepseek_nextn
from mtp_train.export.formats import LAYOUTS, difference
from mtp_train.export.stage import RECORD, ExportConfig, export_head, import_head
from mtp_train.heads.mtp import MtpConfig, MtpHead, build
from mtp_train.heads.native import LAYOUTS as NAMES
from mtp_train.heads.native import begin_as_native, module_tensors
from mtp_train.models.target import Target
from mtp_train.models.weights import INDEX, find_tensors

ATTENTION = {
    "q_a_proj.weight": [9, 32],
    "q_a_layernorm.weight": [9],
    "q_b_proj.weight": [48, 9],
    "kv_a_proj_with_mqa.weight": [14, 32],
    "kv_a_layernorm.weight": [10],
    "kv_b_proj.weight": [56, 10],
    "o_proj.weight": [32, 24],
}
EXPERT = {"gate_proj.weight": [24, 32], "up_proj.weight": [24, 32], "down_proj.weight": [32, 24]}
MODULE = {  # of the toy DeepSeek-V3, as published
    "enorm.weight": [32],
    "hnorm.weight": [32],
    "eh_proj.weight": [32, 64],
    "shared_head.norm.weight": [32],
    "input_layernorm.weight": [32],
    "post_attention_layernorm.weight": [32],
    **{f"self_attn.{name}": shape for name, shape in ATTENTION.items()},
    "mlp.gate.weight": [4, 32],
    "mlp.gate.e_score_correction_bias": [4],
    **{f"mlp.experts.{at}.{name}": shape for at in range(4) for name, shape in EXPERT.items()},
    **{f"mlp.shared_experts.{name}": shape for name, shape in EXPERT.items()},
}


def shaken(target: Target, **options: object) -> MtpHead:
    """A head with no weight left as it began."""
    head = build(target, MtpConfig(**options))  # type: ignore[arg-type]
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in head.parameters():
            size = 0.1 * float(parameter.square().mean().sqrt()) + 0.02
            parameter.add_(torch.randn(parameter.shape, generator=generator) * size)
    return head


def edited(folder: Path) -> Path:
    """A folder that a test has changed, as somebody else's: without the note of its bytes."""
    (folder / RECORD).unlink()
    return folder


def same(one: MtpHead, other: torch.nn.Module) -> bool:
    theirs = other.state_dict()
    mine = one.state_dict()
    return mine.keys() == theirs.keys() and all(torch.equal(v, theirs[n]) for n, v in mine.items())


def on_disk(folder: Path, kind: str) -> Target:
    """A toy target of that kind, loaded from its own folder."""
    toy(kind).model.save_pretrained(folder)  # type: ignore[operator]
    (folder / "tokenizer_config.json").write_text("{}")
    return Target.load(folder, "float32")


# --- DeepSeek's NextN -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("modules", [1, 2])
def test_the_layout_holds_these_tensors_and_no_others(modules: int, tmp_path: Path) -> None:
    target = toy("deepseek_v3")
    head = shaken(target, modules=modules)
    check = export_head(head, target, ExportConfig("deepseek_nextn"), tmp_path / "out", {})
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    assert {name: list(value.shape) for name, value in tensors.items()} == {
        f"model.layers.{2 + depth}.{name}": shape
        for depth in range(modules)
        for name, shape in MODULE.items()
    }
    assert all(tensor.any() for name, tensor in tensors.items() if "correction" not in name)
    assert set(check.values()) == {0.0}
    assert {name.split(",")[0] for name in check} == {"position 1", "position 5000"}
    assert len(check) == 6
    assert same(head, import_head(tmp_path / "out", target)[1])


def test_the_config_says_how_experts_are_chosen_and_how_many_modules_there_are(
    tmp_path: Path,
) -> None:
    target = toy("deepseek_v3")
    export_head(
        shaken(target, modules=2), target, ExportConfig("deepseek_nextn"), tmp_path / "out", {}
    )
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    expected = {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        "num_hidden_layers": 2,
        "num_nextn_predict_layers": 2,
        "tie_word_embeddings": False,
        "dtype": "float32",
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "norm_topk_prob": True,
        "n_group": 2,
        "topk_group": 1,
        "routed_scaling_factor": 1.5,
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "first_k_dense_replace": 1,
        "q_lora_rank": 9,
        "kv_lora_rank": 10,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 4,
        "v_head_dim": 6,
        "hidden_size": 32,
        "moe_intermediate_size": 24,
        "vocab_size": 61,
        "rope_parameters": target.config.rope_parameters,
    }
    assert {key: config[key] for key in expected} == expected
    assert "quantization_config" not in config


@pytest.mark.parametrize("kind", ["deepseek_v2", "deepseek_v2-groups"])
def test_a_second_deepseeks_head_goes_out_as_a_thirds_with_its_own_routing(
    kind: str, tmp_path: Path
) -> None:
    target = toy(kind)
    head = shaken(target)
    export_head(head, target, ExportConfig("deepseek_nextn"), tmp_path / "out", {})
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    read = DeepseekV3Config(**{key: v for key, v in config.items() if key != "model_type"})
    assert config["model_type"] == "deepseek_v3"
    assert (read.scoring_func, read.norm_topk_prob) == ("softmax", False)
    assert read.topk_method == target.config.topk_method
    assert same(head, import_head(tmp_path / "out", target)[1])


@pytest.mark.parametrize("layers", [1, 2])
def test_a_head_alone_that_is_numbered_from_0_is_read(layers: int, tmp_path: Path) -> None:
    """As SGLang reads it, whether its config says its own number of layers or the target's."""
    target = toy("deepseek_v3")
    head = shaken(target)
    export_head(head, target, ExportConfig("deepseek_nextn"), tmp_path / "out", {})
    file = tmp_path / "out" / "model.safetensors"
    save_file({n.replace("layers.2.", "layers.0."): v for n, v in load_file(file).items()}, file)
    edit(tmp_path / "out", num_hidden_layers=layers)
    assert same(head, import_head(edited(tmp_path / "out"), target)[1])


def edit(folder: Path, **changes: object) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))


@pytest.mark.parametrize(
    ("how", "message"),
    [
        (lambda t: t.pop("model.layers.2.hnorm.weight"), "other hnorm.weight"),
        (lambda t: t.update({"model.layers.2.odd": torch.ones(2)}), "other block.odd"),
        (lambda t: t.update({"model.layers.3.enorm.weight": torch.ones(32)}), "layers.3.enorm"),
        (lambda t: t.update({"model.layers.2.enorm.weight": torch.ones(31)}), r"\(31,\)"),
        (lambda t: t["model.layers.2.enorm.weight"].fill_(float("nan")), "finite"),
        (lambda t: t.pop("model.layers.2.mlp.experts.3.up_proj.weight"), "experts"),
        (
            lambda t: t.update({"model.layers.2.embed_tokens.weight": torch.ones(61, 32)}),
            "another embedding",
        ),
    ],
    ids=["missing", "extra", "module", "shape", "nan", "expert", "embedding"],
)
def test_other_tensors_are_refused_and_named(
    how: Callable[[dict], object], message: str, tmp_path: Path
) -> None:
    target = toy("deepseek_v3")
    export_head(shaken(target), target, ExportConfig("deepseek_nextn"), tmp_path / "out", {})
    file = tmp_path / "out" / "model.safetensors"
    tensors = load_file(file)
    how(tensors)
    save_file(tensors, file)
    with pytest.raises(UserError, match=message):
        import_head(edited(tmp_path / "out"), target)[1]


@pytest.mark.parametrize(
    ("wrong", "where"),
    [
        ("halves", "eh_proj"),
        ("input norms", "norm"),
        ("experts", "experts"),
        ("rope", "q_b_proj"),
    ],
)
def test_a_wrong_mapping_is_caught_though_reading_shares_it(
    wrong: str, where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Written and read by the same wrong names, as a fault in the shared table would do it."""
    layout = deepseek_nextn.DeepseekNextn
    write, read = layout.tensors, layout.read

    def changed(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        made = dict(tensors)
        p = "model.layers.2."
        if wrong == "halves":
            made[f"{p}eh_proj.weight"] = made[f"{p}eh_proj.weight"].roll(32, 1)
        elif wrong == "input norms":
            names = f"{p}enorm.weight", f"{p}hnorm.weight"
            made |= dict(zip(names, (made[name] for name in reversed(names)), strict=True))
        elif wrong == "experts":
            kinds = ("gate_proj", "up_proj")
            for one, other in (kinds, kinds[::-1]):
                made |= {
                    f"{p}mlp.experts.{at}.{one}.weight": tensors[
                        f"{p}mlp.experts.{at}.{other}.weight"
                    ]
                    for at in range(4)
                }
        else:
            made[f"{p}self_attn.q_b_proj.weight"] = made[f"{p}self_attn.q_b_proj.weight"].roll(
                24, 0
            )
        assert any(not torch.equal(made[n], tensors[n]) for n in tensors if where in n)
        return made

    monkeypatch.setattr(layout, "tensors", lambda *args: changed(write(*args)))
    monkeypatch.setattr(layout, "read", lambda self, t, *args: read(self, changed(t), *args))
    target = toy("deepseek_v3")
    with pytest.raises(UserError, match="the engine's equation"):
        export_head(shaken(target), target, ExportConfig("deepseek_nextn"), tmp_path / "out", {})
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("kind", "options", "reason"),
    [
        ("deepseek_v3", {"block": "llama"}, "head.block=llama"),
        ("deepseek_v3", {"hnorm": False}, "head.hnorm=false"),
        ("deepseek_v3", {"layers": 2}, "head.layers=2"),
        ("llama", {}, "a llama target"),
    ],
)
def test_what_the_layout_can_not_hold_is_refused_with_the_reason(
    kind: str, options: dict, reason: str, tmp_path: Path
) -> None:
    target = toy(kind)
    assert reason in LAYOUTS["deepseek_nextn"].not_held(MtpConfig(**options), target)
    head = build(target, MtpConfig(**options, init="random"))
    with pytest.raises(UserError, match=reason):
        export_head(head, target, ExportConfig("deepseek_nextn"), tmp_path / "out", {})


# --- a target with its MTP layers -----------------------------------------------------------------------------

KINDS = pytest.mark.parametrize("kind", ["llama", "mistral", "qwen2", "deepseek_v3"])


@KINDS
def test_a_head_of_the_stitched_target_begins_as_the_one_that_was_exported(
    kind: str, tmp_path: Path
) -> None:
    target = on_disk(tmp_path / "target", kind)
    head = shaken(target)
    check = export_head(head, target, ExportConfig("stitched"), tmp_path / "out", {})
    assert len(check) == 6 and set(check.values()) == {0.0}
    whole = Target.load(tmp_path / "out", "float32")
    assert all(
        torch.equal(value, target.model.state_dict()[name])
        for name, value in whole.model.state_dict().items()
    )
    native = build(whole, MtpConfig(init="native"))
    assert same(head, native)
    requests = [Request(str(n), tuple(range(1, n)), 8) for n in (3, 9)]
    small = EngineConfig(max_batch=2, cache_rows=256, page_size=4)
    done = [
        Engine(one, ChainProposer(one, its, 3), small).generate(requests)
        for one, its in ((target, head), (whole, native))
    ]
    assert [one.tokens for one in done[0]] == [one.tokens for one in done[1]]
    assert [one.steps for one in done[0]] == [one.steps for one in done[1]]


@KINDS
def test_transformers_reads_the_stitched_folder_as_the_target(kind: str, tmp_path: Path) -> None:
    target = on_disk(tmp_path / "target", kind)
    export_head(shaken(target), target, ExportConfig("stitched"), tmp_path / "out", {})
    loaded: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    model, info = loaded
    assert not info["missing_keys"] and not info["mismatched_keys"]
    token = torch.arange(1, 14)
    state = target.forward(token, torch.arange(13), PackedContext([0, 13]))
    with torch.no_grad():
        logits = model(token[None]).logits[0]
    torch.testing.assert_close(logits, target.logits(state), atol=2e-4, rtol=1e-4)


def test_the_targets_shards_are_linked_and_the_rest_is_there(tmp_path: Path) -> None:
    target = on_disk(tmp_path / "target", "llama")
    export_head(shaken(target), target, ExportConfig("stitched"), tmp_path / "out", {})
    assert sorted(path.name for path in (tmp_path / "out").glob("model*")) == [
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
        INDEX,
    ]
    first = tmp_path / "out" / "model-00001-of-00002.safetensors"
    assert os.path.samefile(first, tmp_path / "target" / "model.safetensors")
    assert (tmp_path / "out" / "tokenizer_config.json").is_file()
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    theirs = json.loads((tmp_path / "target" / "config.json").read_text())
    assert config == theirs | {
        "architectures": ["MiMoForCausalLM"],
        "num_nextn_predict_layers": 1,
    }
    files = find_tensors(tmp_path / "out")
    assert files.keys() > find_tensors(tmp_path / "target").keys()
    made = load_file(tmp_path / "out" / "model-00002-of-00002.safetensors")
    zeros = {name for name in made if name.startswith("model.layers.")}
    assert zeros == {
        f"model.layers.{at}.self_attn.{name}_proj.bias" for at in range(2) for name in "qkv"
    }
    assert not any(made[name].any() for name in zeros)
    assert {name: list(made[name].shape) for name in sorted(zeros)[:3]} == {
        "model.layers.0.self_attn.k_proj.bias": [16],
        "model.layers.0.self_attn.q_proj.bias": [32],
        "model.layers.0.self_attn.v_proj.bias": [16],
    }


def test_shards_are_copied_where_they_can_not_be_linked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_link(*_: object) -> None:
        raise OSError(18, "Invalid cross-device link")

    monkeypatch.setattr(os, "link", no_link)
    target = on_disk(tmp_path / "target", "llama")
    export_head(shaken(target), target, ExportConfig("stitched"), tmp_path / "out", {})
    first = tmp_path / "out" / "model-00001-of-00002.safetensors"
    assert first.read_bytes() == (tmp_path / "target" / "model.safetensors").read_bytes()
    assert not os.path.samefile(first, tmp_path / "target" / "model.safetensors")


def test_a_target_with_mtp_layers_gets_others_in_their_place(tmp_path: Path) -> None:
    target = on_disk(tmp_path / "target", "deepseek_v3")
    first, second = shaken(target), build(target, MtpConfig())
    export_head(first, target, ExportConfig("stitched"), tmp_path / "one", {})
    with_layers = Target.load(tmp_path / "one", "float32")
    export_head(second, with_layers, ExportConfig("stitched"), tmp_path / "two", {})
    names = [
        name
        for file in sorted((tmp_path / "two").glob("*.safetensors"))
        for name in load_file(file)
    ]
    assert len(names) == len(set(names)) == len(find_tensors(tmp_path / "two"))
    again = Target.load(tmp_path / "two", "float32")
    assert same(second, build(again, MtpConfig(init="native")))
    assert again.hash != with_layers.hash


@pytest.mark.parametrize("kind", ["llama", "deepseek_v3"])
def test_a_published_target_with_its_layers_is_imported_as_a_head(
    kind: str, tmp_path: Path
) -> None:
    target = on_disk(tmp_path / "target", kind)
    head = shaken(target)
    export_head(head, target, ExportConfig("stitched"), tmp_path / "out", {})
    assert same(head, import_head(tmp_path / "out", target)[1])


def test_a_bias_that_is_missing_or_not_zero_is_refused(tmp_path: Path) -> None:
    target = on_disk(tmp_path / "target", "llama")
    export_head(shaken(target), target, ExportConfig("stitched"), tmp_path / "out", {})
    file = tmp_path / "out" / "model-00002-of-00002.safetensors"
    tensors = load_file(file)
    name = "model.layers.1.self_attn.v_proj.bias"
    save_file(tensors | {name: tensors[name] + 1}, file)
    with pytest.raises(UserError, match=name):
        import_head(edited(tmp_path / "out"), target)[1]


@pytest.mark.parametrize(
    ("kind", "options", "reason"),
    [
        ("qwen3", {}, "a qwen3 target"),
        ("gemma", {"block": "llama"}, "a gemma target"),
        ("deepseek_v2", {}, "a deepseek_v2 target"),
        ("mistral-window", {"block": "llama"}, "sliding window"),
        ("llama", {"modules": 2}, "head.modules=2"),
        ("llama", {"layers": 2}, "head.layers=2"),
        ("llama", {"final_norm": False}, "head.final_norm=false"),
        ("deepseek_v3", {"block": "llama"}, "head.block=llama"),
    ],
)
def test_targets_whose_engines_read_no_layers_are_refused(
    kind: str, options: dict, reason: str, tmp_path: Path
) -> None:
    target = on_disk(tmp_path / "target", kind)
    assert reason in LAYOUTS["stitched"].not_held(MtpConfig(**options), target)


def test_heads_wider_or_narrower_than_the_hidden_width_are_refused(tmp_path: Path) -> None:
    """vLLM's MiMo takes the head width from the hidden width."""
    Target.from_config(toy_config(head_dim=16)).model.save_pretrained(tmp_path)  # type: ignore[operator]
    target = Target.load(tmp_path, "float32")
    assert "4 heads of 16 for a width of 32" in LAYOUTS["stitched"].not_held(MtpConfig(), target)


def test_a_target_that_is_nowhere_on_disk_is_refused() -> None:
    assert "without a folder" in LAYOUTS["stitched"].not_held(MtpConfig(), toy("llama"))


@pytest.mark.parametrize("names", list(NAMES))
def test_what_is_written_by_published_names_is_read_by_them(
    names: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All three families of names, those of norms that add one among them."""
    target = on_disk(tmp_path, "llama")
    head, again = shaken(target), build(target, MtpConfig())
    made = module_tensors(target, NAMES[names], 0, head, torch.float32)
    file = tmp_path / "model.safetensors"
    save_file(load_file(file) | made, file, metadata={"format": "pt"})
    begin_as_native(target, [again])
    expected = head.state_dict()
    assert all(
        torch.allclose(value, expected[name], atol=1e-6)
        for name, value in again.state_dict().items()
    )


def test_experts_that_are_never_set_are_none_in_a_random_head() -> None:
    head = build(toy("deepseek_v3"), MtpConfig(init="random"))
    for name, parameter in head.state_dict().items():
        assert bool(parameter.isfinite().all()), name
        assert parameter.ndim < 2 or 0.01 < float(parameter.std()) < 0.03, name


def test_whole_models_and_heads_are_told_apart_by_their_tensors() -> None:
    """A whole MiMo has its decoder layers beside the MTP layers, a head has not; both have the whole's config."""
    head = {"mtp_layers.0.input_proj.weight", "mtp_layers.0.final_layernorm.weight"}
    whole = head | {"layers.0.self_attn.q_proj.weight", "embed_tokens.weight"}
    fits = {
        name
        for name, layout in LAYOUTS.items()
        for names in (head, whole)
        if not difference(layout, names)
    }
    assert fits == {"mimo_mtp", "stitched"}
    assert difference(LAYOUTS["mimo_mtp"], whole) == "layers.0.self_attn.q_proj.weight is there"
    assert difference(LAYOUTS["stitched"], head) == "no layers.*"
