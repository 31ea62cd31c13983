"""Medusa heads and draft models as engines load them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from head_variants import SMALL_MODEL, make_variant
from safetensors.torch import load_file, save_file
from toy_families import CONFIGS, toy
from toys import make_target, make_tokenizer, toy_config
from transformers import AutoModelForCausalLM, AutoTokenizer

from mtp_train.attention.packed import PackedContext
from mtp_train.core.errors import UserError
from mtp_train.export.draft_model import DraftModel
from mtp_train.export.formats import LAYOUTS
from mtp_train.export.medusa import Medusa
from mtp_train.export.stage import RECORD, ExportConfig, export_head, import_head
from mtp_train.heads.base import DraftHead
from mtp_train.heads.draft_model import DraftModelConfig
from mtp_train.heads.families import build_head
from mtp_train.heads.medusa import MedusaConfig
from mtp_train.models.target import Target, config_values

MEDUSA = pytest.mark.parametrize("variant", ["medusa", "medusa-frozen"])


def exported(target: Target, variant: str, folder: Path) -> DraftHead:
    head = make_variant(target, variant)
    name = variant.split("-")[0]
    check = export_head(head, target, ExportConfig(name), folder, {})
    assert len(check) == 6 and set(check.values()) == {0.0}
    return head


def edited(folder: Path) -> Path:
    """A folder that a test has changed, as somebody else's: without the note of its bytes."""
    (folder / RECORD).unlink()
    return folder


def same(one: DraftHead, other: DraftHead) -> bool:
    mine, theirs = one.state_dict(), other.state_dict()
    return mine.keys() == theirs.keys() and all(torch.equal(v, theirs[n]) for n, v in mine.items())


# --- medusa ---------------------------------------------------------------------------------------------------


@MEDUSA
def test_the_layout_holds_blocks_and_lm_heads(
    variant: str, toy_target: Target, tmp_path: Path
) -> None:
    head = exported(toy_target, variant, tmp_path / "out")
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    layers = head.config.layers
    blocks = {f"blocks.{i}.layers.{j}.weight": [32, 32] for i in range(3) for j in range(layers)}
    if head.config.bias:
        blocks |= {f"blocks.{i}.layers.{j}.bias": [32] for i in range(3) for j in range(layers)}
    own = {f"lm_heads.{i}.weight": [61, 32] for i in range(3)}
    outputs = own if head.config.own_lm_heads else {"lm_head.weight": [61, 32]}
    assert {name: list(value.shape) for name, value in tensors.items()} == blocks | outputs
    assert same(head, import_head(tmp_path / "out", toy_target)[1])


def test_a_part_of_the_lm_head_goes_out_with_its_tokens(toy_target: Target, tmp_path: Path) -> None:
    """vLLM takes the rows as they are where there are as many as the map has tokens, and cuts a whole lm_head."""
    head = exported(toy_target, "medusa-part", tmp_path / "out")
    file = tmp_path / "out" / "model.safetensors"
    tensors = load_file(file)
    assert head.vocabulary is not None and tensors["token_map"].dtype == torch.int64
    assert tensors["token_map"].tolist() == head.vocabulary.tolist()
    assert torch.equal(tensors["lm_head.weight"], toy_target.lm_head.weight[head.vocabulary])
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (config["vocab_size"], config["truncated_vocab_size"]) == (61, 40)
    assert same(head, import_head(tmp_path / "out", toy_target)[1])
    save_file(tensors | {"lm_head.weight": toy_target.lm_head.weight.detach().clone()}, file)
    assert same(head, import_head(edited(tmp_path / "out"), toy_target)[1])


@pytest.mark.parametrize(
    ("how", "keys", "message"),
    [
        (lambda t: t.pop("token_map"), {}, "truncated_vocab_size 40 for 61"),
        (lambda t: t["token_map"][:1].sub_(1), {}, "the target's own lm_head"),
        (lambda t: t["token_map"].add_(30), {}, "token ids below 61"),
        (lambda t: None, {"truncated_vocab_size": 61}, "truncated_vocab_size 61 for 40"),
        (
            lambda t: t.update({"lm_heads.0.weight": t.pop("lm_head.weight")}),
            {},
            "beside lm_heads of its own",
        ),
    ],
    ids=["no map", "other tokens", "outside", "whole", "own"],
)
def test_a_map_that_is_not_the_rows_is_refused(
    how: Callable[[dict], object], keys: dict, message: str, toy_target: Target, tmp_path: Path
) -> None:
    exported(toy_target, "medusa-part", tmp_path / "out")
    file = tmp_path / "out" / "model.safetensors"
    tensors = load_file(file)
    how(tensors)
    save_file(tensors, file)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    (tmp_path / "out" / "config.json").write_text(json.dumps(config | keys))
    with pytest.raises(UserError, match=message):
        import_head(edited(tmp_path / "out"), toy_target)


@MEDUSA
def test_every_key_that_vllm_reads_is_written(
    variant: str, toy_target: Target, tmp_path: Path
) -> None:
    exported(toy_target, variant, tmp_path / "out")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config == {
        "architectures": ["MedusaModel"],
        "model_type": "medusa",
        "hidden_size": 32,
        "vocab_size": 61,
        "truncated_vocab_size": 61,
        "num_heads": 3,
        "num_hidden_layers": 1 if variant == "medusa" else 2,
        "medusa_fc_bias": variant != "medusa",
        "original_lm_head": variant != "medusa",
        "logit_scale": 1.0,
        "tie_word_embeddings": False,
        "dtype": "float32",
    }
    # vLLM's config class takes any key with both words as one of two.
    counts = [key for key in config if "num" in key and ("heads" in key or "layers" in key)]
    assert counts == ["num_heads", "num_hidden_layers"]


def test_older_names_are_read(toy_target: Target, tmp_path: Path) -> None:
    head = exported(toy_target, "medusa", tmp_path / "out")
    file = tmp_path / "out" / "model.safetensors"
    tensors = load_file(file)
    older = {}
    for at in range(3):
        older[f"{at}.0.linear.weight"] = tensors[f"blocks.{at}.layers.0.weight"]
        older[f"{at}.0.linear.bias"] = torch.zeros(32)
        older[f"{at}.1.weight"] = tensors[f"lm_heads.{at}.weight"]
    save_file(older, file)
    (tmp_path / "out" / "config.json").write_text(
        json.dumps({"medusa_num_heads": 3, "medusa_num_layers": 1})
    )
    assert same(head, import_head(edited(tmp_path / "out"), toy_target)[1])


@pytest.mark.parametrize(
    ("how", "keys", "message"),
    [
        (lambda t: t.pop("lm_heads.2.weight"), {}, "missing.*lm_heads.2.weight"),
        (lambda t: t.update({"blocks.0.layers.1.weight": torch.ones(32, 32)}), {}, "extra"),
        (lambda t: t.update({"lm_heads.0.weight": torch.ones(60, 32)}), {}, r"\(60, 32\)"),
        (lambda t: t["lm_heads.0.weight"].fill_(float("inf")), {}, "finite"),
        (lambda t: t.update({"0.0.linear.bias": torch.ones(32)}), {}, "layers.0.bias"),
        (lambda t: None, {"truncated_vocab_size": 40}, "truncated_vocab_size 40"),
        (lambda t: None, {"vocab_size": 40}, "vocab_size 40 for 61"),
        (lambda t: None, {"hidden_size": 40}, "hidden_size 40 for 32"),
    ],
    ids=["missing", "extra", "shape", "infinite", "bias", "truncated", "vocabulary", "width"],
)
def test_other_medusa_heads_are_refused_and_named(
    how: Callable[[dict], object],
    keys: dict,
    message: str,
    toy_target: Target,
    tmp_path: Path,
) -> None:
    exported(toy_target, "medusa", tmp_path / "out")
    file = tmp_path / "out" / "model.safetensors"
    tensors = load_file(file)
    how(tensors)
    save_file(tensors, file)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    (tmp_path / "out" / "config.json").write_text(json.dumps(config | keys))
    with pytest.raises(UserError, match=message):
        import_head(edited(tmp_path / "out"), toy_target)[1]


def test_a_copy_of_another_targets_lm_head_is_refused(toy_target: Target, tmp_path: Path) -> None:
    exported(toy_target, "medusa-frozen", tmp_path / "out")
    with pytest.raises(UserError, match="the target's own lm_head"):
        import_head(edited(tmp_path / "out"), make_target(seed=9))[1]


def test_a_wrong_order_of_heads_is_caught_though_reading_shares_it(
    toy_target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, read = Medusa.tensors, Medusa.read
    turned = {"0": "2", "1": "1", "2": "0"}

    def changed(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {
            ".".join([one, turned[at], *rest]): value
            for (one, at, *rest), value in ((n.split("."), v) for n, v in tensors.items())
        }

    monkeypatch.setattr(Medusa, "tensors", lambda *args: changed(write(*args)))
    monkeypatch.setattr(Medusa, "read", lambda self, t, *args: read(self, changed(t), *args))
    with pytest.raises(UserError, match="the engine's equation"):
        export_head(
            make_variant(toy_target, "medusa"),
            toy_target,
            ExportConfig("medusa"),
            tmp_path / "o",
            {},
        )


def test_a_capped_target_keeps_a_head_that_reads_its_lm_head() -> None:
    layout = LAYOUTS["medusa"]
    assert "3.0" in layout.not_held(MedusaConfig(own_lm_heads=False), toy("gemma2"))
    assert not layout.not_held(MedusaConfig(), toy("gemma2"))
    assert layout.not_held(DraftModelConfig(), toy("llama")) == "head.family=draft_model"


# --- a draft model --------------------------------------------------------------------------------------------

DRAFTS: dict[str, dict] = {
    "small": SMALL_MODEL,
    "tied, padded": SMALL_MODEL | {"tie_word_embeddings": True, "vocab_size": 70},
    "padded": SMALL_MODEL | {"vocab_size": 70},
    "qwen3": config_values(CONFIGS["qwen3"]),
    "gemma": config_values(CONFIGS["gemma"]),
    "mixtral": config_values(CONFIGS["mixtral"]),
}


def draft(target: Target, name: str) -> DraftHead:
    head = build_head(target, DraftModelConfig(model=DRAFTS[name]), seed=2)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.05)
    return head


@pytest.fixture
def whole_target(tmp_path: Path) -> Target:
    """A target with a folder and a tokenizer."""
    make_target().model.save_pretrained(tmp_path / "target")  # type: ignore[operator]
    make_tokenizer().save_pretrained(tmp_path / "target")
    return Target.load(tmp_path / "target", "float32")


def load(folder: Path) -> tuple[Any, dict[str, Any]]:
    loaded: Any = AutoModelForCausalLM.from_pretrained(
        folder, attn_implementation="eager", output_loading_info=True
    )
    model, info = loaded
    return model, info


@pytest.mark.parametrize("name", list(DRAFTS))
def test_transformers_loads_the_folder_to_the_same_logits(
    name: str, whole_target: Target, tmp_path: Path
) -> None:
    head = draft(whole_target, name)
    check = export_head(head, whole_target, ExportConfig("draft_model"), tmp_path / "out", {})
    assert len(check) == 6 and set(check.values()) == {0.0}
    model, info = load(tmp_path / "out")
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert model.config.vocab_size == 61
    token, position = torch.arange(1, 14), torch.arange(13) + 5000
    with torch.no_grad():
        theirs = model(token[None], position_ids=position[None]).logits[0]
        out = head(
            head.embed(whole_target, token), torch.empty(0), position, PackedContext([0, 13])
        )
        mine = head.logits(whole_target, out, 0)
    torch.testing.assert_close(theirs, mine, atol=2e-4, rtol=1e-4)
    again = import_head(tmp_path / "out", whole_target)[1]
    with torch.no_grad():
        out = again(
            again.embed(whole_target, token), torch.empty(0), position, PackedContext([0, 13])
        )
    assert torch.equal(again.logits(whole_target, out, 0), mine)


def test_the_folder_is_a_whole_model_with_the_targets_tokenizer(
    whole_target: Target, tmp_path: Path
) -> None:
    export_head(
        draft(whole_target, "padded"),
        whole_target,
        ExportConfig("draft_model"),
        tmp_path / "out",
        {},
    )
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    expected = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 24,
        "num_hidden_layers": 3,
        "vocab_size": 61,
        "tie_word_embeddings": False,
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-6,
        "dtype": "float32",
    }
    assert {key: config[key] for key in expected} == expected
    assert "rope_theta" in config["rope_parameters"]
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    assert list(tensors["lm_head.weight"].shape) == [61, 24]
    assert list(tensors["model.embed_tokens.weight"].shape) == [61, 24]
    known = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert known.get_vocab() == make_tokenizer().get_vocab()


@pytest.mark.parametrize(
    ("how", "message"),
    [
        (lambda t: t.pop("model.norm.weight"), r"missing \['model.norm.weight'\]"),
        (lambda t: t.update(odd=torch.ones(2)), r"extra \['odd'\]"),
        (lambda t: t.update({"model.norm.weight": torch.ones(23)}), r"\(23,\) for \(24,\)"),
        (lambda t: t["model.norm.weight"].fill_(float("nan")), "finite"),
    ],
    ids=["missing", "extra", "shape", "nan"],
)
def test_other_draft_models_are_refused_and_named(
    how: Callable[[dict], object], message: str, toy_target: Target, tmp_path: Path
) -> None:
    exported(toy_target, "draft_model", tmp_path / "out")
    file = tmp_path / "out" / "model.safetensors"
    tensors = load_file(file)
    how(tensors)
    save_file(tensors, file)
    with pytest.raises(UserError, match=message):
        import_head(edited(tmp_path / "out"), toy_target)[1]


def test_a_draft_with_fewer_tokens_than_the_target_is_refused(
    toy_target: Target, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match="a vocabulary of 50 for the target's 61"):
        exported(toy_target, "draft_model-fewer", tmp_path / "out")


def test_a_draft_model_is_recognised_last() -> None:
    assert isinstance(list(LAYOUTS.values())[-1], DraftModel)
    assert DraftModel().recognises(toy_config().to_dict() | {"architectures": ["LlamaForCausalLM"]})
