"""Heads on disk and in the serving layout: bound to their target, complete, and loaded back before they count."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from toys import make_target, toy_config

from mtp_train.checkpoint.heads import (
    CARD,
    TENSORS,
    HeadCard,
    find_checkpoints,
    load_head,
    read_card,
    save_checkpoint,
)
from mtp_train.core.errors import UserError
from mtp_train.core.provenance import SEAL, file_digest, sealed
from mtp_train.export import mimo
from mtp_train.export.check import check_export
from mtp_train.export.layout import METHOD_WORDS
from mtp_train.export.stage import RECORD, ExportConfig, export_head, import_head
from mtp_train.heads.mtp import MtpConfig, MtpHead, build
from mtp_train.models.target import Target

P = "model.mtp_layers.0."


def trained(target: Target) -> MtpHead:
    """A head with no weight left as it began: norms differ from 1 and from each other."""
    head = build(target, MtpConfig(embedding_noise=1.0))
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.1)
    return head


def card(target: Target) -> HeadCard:
    return HeadCard(
        "mtp",
        target.hash,
        target.state,
        target.hidden_size,
        target.vocab_size,
        7,
        config={"epochs": 1},
        head=asdict(MtpConfig(embedding_noise=1.0)),
    )


@pytest.fixture
def saved(toy_target: Target, tmp_path: Path) -> Path:
    save_checkpoint(
        tmp_path / "head",
        trained(toy_target),
        card(toy_target),
        extra={"more.safetensors": {"x": torch.ones(2)}},
        notes={"note.json": [1]},
    )
    return tmp_path / "head"


# --- checkpoints ----------------------------------------------------------------------------------------------


def test_a_head_comes_back_bit_for_bit(toy_target: Target, saved: Path) -> None:
    head, found = load_head(saved, toy_target)
    expected = trained(toy_target).state_dict()
    assert head.state_dict().keys() == expected.keys()
    assert all(torch.equal(value, expected[name]) for name, value in head.state_dict().items())
    assert {parameter.dtype for parameter in head.parameters()} == {torch.float32}
    assert replace(found, sha256="", files={}) == card(toy_target)
    assert found.files == {
        name: file_digest(saved / name) for name in ("more.safetensors", "note.json")
    }
    assert found.sha256 == file_digest(saved / TENSORS)
    assert sorted(path.name for path in saved.iterdir()) == [
        CARD,
        TENSORS,
        "more.safetensors",
        "note.json",
    ]
    assert "lm_head" not in "".join(expected) and "embed" not in "".join(expected), (
        "both are the target's own"
    )


def test_saving_again_replaces_the_folder_as_a_whole(toy_target: Target, saved: Path) -> None:
    save_checkpoint(saved, build(toy_target, MtpConfig()), card(toy_target))
    assert sorted(path.name for path in saved.iterdir()) == [CARD, TENSORS]
    assert [path.name for path in saved.parent.iterdir()] == ["head"]


def test_the_same_head_gives_the_same_bytes(
    toy_target: Target, saved: Path, tmp_path: Path
) -> None:
    save_checkpoint(
        tmp_path / "again",
        trained(toy_target),
        card(toy_target),
        extra={"more.safetensors": {"x": torch.ones(2)}},
        notes={"note.json": [1]},
    )
    assert all(
        (saved / name).read_bytes() == (tmp_path / "again" / name).read_bytes()
        for name in (CARD, TENSORS)
    )


def test_checkpoints_are_found_in_order_and_only_whole_ones(
    toy_target: Target, tmp_path: Path
) -> None:
    for step in (20, 100, 3):
        save_checkpoint(
            tmp_path / f"step-{step:08d}", build(toy_target, MtpConfig()), card(toy_target)
        )
    (tmp_path / "step-00000999").mkdir()
    (tmp_path / ".step-00001000.part").mkdir()
    assert [path.name for path in find_checkpoints(tmp_path)] == [
        "step-00000003",
        "step-00000020",
        "step-00000100",
    ]


def test_a_head_is_refused_by_another_target(tmp_path: Path) -> None:
    targets = []
    for seed in (1, 2):
        make_target(seed=seed).model.save_pretrained(tmp_path / str(seed))
        targets.append(Target.load(tmp_path / str(seed), "float32"))
    own, other = targets
    save_checkpoint(tmp_path / "head", trained(own), card(own))
    load_head(tmp_path / "head", own)
    with pytest.raises(
        UserError, match=f"own target \\(target_hash {other.hash}\\); received {own.hash}"
    ):
        load_head(tmp_path / "head", other)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"vocab_size": 60}, "vocab_size 61"),
        ({"state": "pre_norm"}, "state post_norm"),
        ({"hidden_size": 64}, "hidden_size 32"),
    ],
)
def test_a_head_for_another_vocabulary_state_or_width_is_refused(
    toy_target: Target, tmp_path: Path, changes: dict, named: str
) -> None:
    save_checkpoint(tmp_path / "head", trained(toy_target), replace(card(toy_target), **changes))
    with pytest.raises(UserError, match=f"own target \\({named}\\)"):
        load_head(tmp_path / "head", toy_target)


def test_a_head_of_an_unknown_family_is_refused(toy_target: Target, tmp_path: Path) -> None:
    save_checkpoint(
        tmp_path / "head", trained(toy_target), replace(card(toy_target), family="unheard-of")
    )
    with pytest.raises(UserError, match=r"family must be one of mtp, .*; received unheard-of"):
        load_head(tmp_path / "head", toy_target)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_weight_that_is_not_finite_is_refused_and_named(
    toy_target: Target, tmp_path: Path, value: float
) -> None:
    head = trained(toy_target)
    with torch.no_grad():
        head.hnorm.weight[3] = value
    save_checkpoint(tmp_path / "head", head, card(toy_target))
    with pytest.raises(UserError, match=r"must be finite; received hnorm\.weight"):
        load_head(tmp_path / "head", toy_target)


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-3] ^= 1
    path.write_bytes(bytes(data))


@pytest.mark.parametrize(
    "damage",
    [
        flip,
        lambda path: path.write_bytes(path.read_bytes()[:-1]),
        lambda path: path.write_bytes(b""),
        lambda path: path.unlink(),
    ],
    ids=["flipped", "truncated", "empty", "gone"],
)
def test_damaged_tensors_are_refused_and_named(
    toy_target: Target, saved: Path, damage: Callable[[Path], object]
) -> None:
    damage(saved / TENSORS)
    with pytest.raises(UserError, match=r"head\.safetensors"):
        load_head(saved, toy_target)


def retell(folder: Path) -> None:
    """Make the card name the tensor file's present bytes."""
    value = json.loads((folder / CARD).read_text())
    value.pop(SEAL)
    value = sealed(value | {"sha256": file_digest(folder / TENSORS)})
    (folder / CARD).write_text(json.dumps(value))


def test_a_truncated_file_that_its_card_names_is_refused_still(
    toy_target: Target, saved: Path
) -> None:
    (saved / TENSORS).write_bytes((saved / TENSORS).read_bytes()[:-1])
    retell(saved)
    with pytest.raises(UserError, match="whole safetensors file"):
        load_head(saved, toy_target)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda tensors: tensors.pop("enorm.weight"), "enorm.weight"),
        (lambda tensors: tensors.update(extra=torch.ones(1)), "extra"),
        (
            lambda tensors: tensors.update({"enorm.weight": torch.ones(31)}),
            r"enorm.weight \(31,\) for \(32,\)",
        ),
    ],
    ids=["missing", "extra", "shape"],
)
def test_other_tensors_than_the_heads_are_refused(
    toy_target: Target, saved: Path, change: Callable[[dict], object], message: str
) -> None:
    tensors = load_file(saved / TENSORS)
    change(tensors)
    save_file(tensors, saved / TENSORS)
    retell(saved)
    with pytest.raises(UserError, match=message):
        load_head(saved, toy_target)


@pytest.mark.parametrize(
    "damage",
    [
        lambda card: card.unlink(),
        lambda card: card.write_text("{"),
        lambda card: card.write_text("{}"),
    ],
    ids=["gone", "no JSON", "empty"],
)
def test_a_folder_without_a_whole_card_is_no_checkpoint(
    saved: Path, damage: Callable[[Path], object]
) -> None:
    damage(saved / CARD)
    with pytest.raises(UserError):
        read_card(saved)


# --- the MiMo-MTP layout --------------------------------------------------------------------------------------

SHAPES = {
    "token_layernorm.weight": [32],
    "hidden_layernorm.weight": [32],
    "final_layernorm.weight": [32],
    "input_layernorm.weight": [32],
    "post_attention_layernorm.weight": [32],
    "input_proj.weight": [32, 64],
    "self_attn.q_proj.weight": [32, 32],
    "self_attn.k_proj.weight": [16, 32],
    "self_attn.v_proj.weight": [16, 32],
    "self_attn.o_proj.weight": [32, 32],
    "self_attn.q_proj.bias": [32],
    "self_attn.k_proj.bias": [16],
    "self_attn.v_proj.bias": [16],
    "mlp.gate_proj.weight": [48, 32],
    "mlp.up_proj.weight": [48, 32],
    "mlp.down_proj.weight": [32, 48],
}


def forget(folder: Path) -> None:
    """Make it another trainer's folder: without the record of what was written."""
    (folder / RECORD).unlink()


@pytest.fixture
def exported(toy_target: Target, tmp_path: Path) -> Path:
    export_head(trained(toy_target), toy_target, ExportConfig(), tmp_path / "out", {})
    return tmp_path / "out"


def test_the_layout_holds_these_tensors_and_no_others(toy_target: Target, exported: Path) -> None:
    """SERVING.md's list for a dense Llama-type target, names and shapes; the biases are there, and zero."""
    tensors = load_file(exported / "model.safetensors")
    assert {name: list(tensor.shape) for name, tensor in tensors.items()} == {
        P + name: shape for name, shape in SHAPES.items()
    }
    assert {tensor.dtype for tensor in tensors.values()} == {toy_target.dtype}
    assert not any(tensors[P + name].any() for name in SHAPES if name.endswith("bias"))
    assert all(tensors[P + name].any() for name in SHAPES if name.endswith("weight"))


def test_each_tensor_holds_what_its_name_says(toy_target: Target, exported: Path) -> None:
    head, tensors = trained(toy_target), load_file(exported / "model.safetensors")
    assert torch.equal(tensors[P + "token_layernorm.weight"], head.enorm.weight)
    assert torch.equal(tensors[P + "hidden_layernorm.weight"], head.hnorm.weight)
    assert torch.equal(tensors[P + "final_layernorm.weight"], head.final_norm.weight)
    assert torch.equal(tensors[P + "input_proj.weight"][:, :32], head.eh_proj.weight[:, 32:]), (
        "[hidden | embedding]"
    )
    assert torch.equal(tensors[P + "input_proj.weight"][:, 32:], head.eh_proj.weight[:, :32])
    for name, value in head.block.state_dict().items():
        assert torch.equal(tensors[P + name], value), name


def test_the_config_is_the_targets_with_one_layer(toy_target: Target, exported: Path) -> None:
    config = json.loads((exported / "config.json").read_text())
    assert config["architectures"] == ["MiMoForCausalLM"]
    assert config["model_type"] == "llama"
    assert config["num_hidden_layers"] == config["num_nextn_predict_layers"] == 1
    assert config["tie_word_embeddings"] is False
    assert config["dtype"] == "float32"
    expected = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "vocab_size": 61,
        "max_position_embeddings": 256,
        "rms_norm_eps": toy_target.config.rms_norm_eps,
        "rope_parameters": toy_target.config.rope_parameters,
        "hidden_act": "silu",
    }
    assert {key: config[key] for key in expected} == expected


def test_rope_scaling_reaches_the_config(tmp_path: Path) -> None:
    """DEFECTS 26: theta and scaling are the target's, and logits at position 5000 come out alike."""
    rope = {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    target = make_target(rope_parameters=rope, max_position_embeddings=8192)
    check = export_head(trained(target), target, ExportConfig(), tmp_path / "out", {})
    assert json.loads((tmp_path / "out" / "config.json").read_text())["rope_parameters"] == rope
    assert {name.split(",")[0] for name in check} == {"position 1", "position 5000"}
    assert len(check) == 6
    assert set(check.values()) == {0.0}


def test_a_head_goes_out_and_comes_back(toy_target: Target, exported: Path) -> None:
    _, head = import_head(exported, toy_target)
    expected = trained(toy_target).state_dict()
    assert all(torch.equal(value, expected[name]) for name, value in head.state_dict().items())


def test_a_bfloat16_target_gets_a_bfloat16_head_whose_logits_are_the_heads_own(
    tmp_path: Path,
) -> None:
    target = Target.from_config(toy_config(), dtype=torch.bfloat16)
    check = export_head(trained(target), target, ExportConfig(), tmp_path / "out", {})
    assert {
        tensor.dtype for tensor in load_file(tmp_path / "out" / "model.safetensors").values()
    } == {torch.bfloat16}
    assert set(check.values()) == {0.0}


def test_the_readme_names_the_target_and_the_figures(toy_target: Target, tmp_path: Path) -> None:
    figures = {"greedy": {"tau": 1.875, "per_position": [0.5, 0.25, 0.125], "prompts": 12}}
    export_head(trained(toy_target), toy_target, ExportConfig(), tmp_path / "out", figures)
    text = (tmp_path / "out" / "README.md").read_text()
    assert all(
        part in text
        for part in (
            toy_target.hash,
            "tau 1.875",
            "0.500 / 0.250 / 0.125",
            "12 held-out prompts",
            "num_nextn_predict_layers",
        )
    )


# --- refusals -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda tensors: tensors.pop(P + "hidden_layernorm.weight"),
            r"missing \['model.mtp_layers.0.hidden_layernorm.weight'\]",
        ),
        (
            lambda tensors: tensors.update({"model.embed_tokens.weight": torch.ones(61, 32)}),
            "another embed_tokens.weight",
        ),
        (
            lambda tensors: tensors.update({P + "odd.weight": torch.ones(2)}),
            r"extra \['model.mtp_layers.0.odd.weight'\]",
        ),
        (
            lambda tensors: tensors.update({P + "input_proj.weight": torch.ones(32, 60)}),
            r"input_proj.weight \(32, 60\) for \(32, 64\)",
        ),
        (
            lambda tensors: tensors.update({P + "self_attn.k_proj.bias": torch.ones(16)}),
            "must be zero",
        ),
    ],
    ids=["missing", "embedding", "extra", "shape", "bias"],
)
def test_a_folder_with_other_tensors_is_refused(
    toy_target: Target, exported: Path, change: Callable[[dict], object], message: str
) -> None:
    tensors = load_file(exported / "model.safetensors")
    change(tensors)
    save_file(tensors, exported / "model.safetensors")
    forget(exported)
    with pytest.raises(UserError, match=message):
        import_head(exported, toy_target)


def test_a_folder_without_biases_is_imported(toy_target: Target, exported: Path) -> None:
    """Trainers that know nothing of vLLM's biases leave them out."""
    tensors = {
        name: tensor
        for name, tensor in load_file(exported / "model.safetensors").items()
        if not name.endswith("bias")
    }
    save_file(tensors, exported / "model.safetensors")
    forget(exported)
    assert torch.equal(
        import_head(exported, toy_target)[1].hnorm.weight, trained(toy_target).hnorm.weight
    )


def test_the_tensors_say_what_a_folder_is(toy_target: Target, exported: Path) -> None:
    """Not the architectures of its config.json, nor how many layers it says."""
    config = json.loads((exported / "config.json").read_text())
    (exported / "config.json").write_text(
        json.dumps(config | {"architectures": ["LlamaForCausalLM"], "num_hidden_layers": 36})
    )
    forget(exported)
    assert import_head(exported, toy_target)[0].name == "mimo_mtp"


def test_a_block_that_the_layout_can_not_hold_is_refused(tmp_path: Path) -> None:
    target = make_target(attention_bias=True)
    with pytest.raises(
        UserError, match=r"mimo_mtp holds; .*LlamaDecoderLayer with self_attn\.o_proj\.bias"
    ):
        export_head(trained(target), target, ExportConfig(), tmp_path / "out", {})
    assert not (tmp_path / "out").exists()


def export_wrongly(
    target: Target, out: Path, monkeypatch: pytest.MonkeyPatch, wrong: Callable[[dict], object]
) -> None:
    """Export with a fault in what is written; reading stays as it is."""
    right = mimo.MimoMtp.tensors

    def tensors(
        layout: mimo.MimoMtp, head: MtpHead, target: Target, dtype: torch.dtype
    ) -> dict[str, torch.Tensor]:
        made = right(layout, head, target, dtype)
        wrong(made)
        return made

    monkeypatch.setattr(mimo.MimoMtp, "tensors", tensors)
    export_head(trained(target), target, ExportConfig(), out, {})


def swap(tensors: dict, one: str, other: str) -> None:
    tensors[P + one], tensors[P + other] = tensors[P + other], tensors[P + one]


@pytest.mark.parametrize(
    "wrong",
    [
        lambda tensors: tensors.update(
            {
                P + "input_proj.weight": mimo.swap_halves(
                    tensors[P + "input_proj.weight"]
                ).contiguous()
            }
        ),
        lambda tensors: swap(tensors, "token_layernorm.weight", "hidden_layernorm.weight"),
        lambda tensors: swap(tensors, "self_attn.q_proj.weight", "self_attn.o_proj.weight"),
        lambda tensors: swap(tensors, "mlp.gate_proj.weight", "mlp.up_proj.weight"),
        lambda tensors: tensors[P + "final_layernorm.weight"].add_(1e-3),
    ],
    ids=["halves", "input norms", "q and o", "gate and up", "one norm"],
)
def test_a_wrong_mapping_is_caught_and_nothing_is_left_to_serve(
    toy_target: Target,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    wrong: Callable[[dict], object],
) -> None:
    with pytest.raises(UserError, match="logits must be the head's own"):
        export_wrongly(toy_target, tmp_path / "out", monkeypatch, wrong)
    assert not (tmp_path / "out").exists()


def test_halves_that_are_never_swapped_are_caught(
    toy_target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One function swaps both ways; made idle, both ways agree: the layout's order must be checked by itself."""
    monkeypatch.setattr(mimo, "swap_halves", lambda weight: weight)
    with pytest.raises(UserError, match="logits must be the head's own"):
        export_head(trained(toy_target), toy_target, ExportConfig(), tmp_path / "out", {})


def test_a_refused_export_leaves_the_last_good_one(
    toy_target: Target, exported: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = {path.name: path.read_bytes() for path in exported.iterdir()}
    with pytest.raises(UserError):
        export_wrongly(
            toy_target,
            exported,
            monkeypatch,
            lambda tensors: tensors[P + "final_layernorm.weight"].add_(1),
        )
    assert {path.name: path.read_bytes() for path in exported.iterdir()} == before


def test_a_refused_export_leaves_no_other_folder(
    toy_target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UserError):
        export_wrongly(
            toy_target,
            tmp_path / "out",
            monkeypatch,
            lambda tensors: tensors[P + "final_layernorm.weight"].add_(1),
        )
    assert [path.name for path in tmp_path.iterdir()] == []


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_logits_that_are_not_numbers_are_no_equal_logits(
    toy_target: Target, tmp_path: Path, value: float
) -> None:
    head = trained(toy_target)
    with torch.no_grad():
        head.final_norm.weight[0] = value
    with pytest.raises(UserError):
        export_head(head, toy_target, ExportConfig(), tmp_path / "out", {})


@pytest.mark.parametrize("word", METHOD_WORDS)
def test_a_path_that_vllm_would_misread_is_refused_before_anything_is_written(
    toy_target: Target, tmp_path: Path, word: str
) -> None:
    out = tmp_path / f"my-{word.upper()}x" / "mimo_mtp"
    with pytest.raises(UserError, match="must not contain"):
        export_head(trained(toy_target), toy_target, ExportConfig(), out, {})
    assert list(tmp_path.iterdir()) == []


def test_an_unknown_format_is_refused_with_the_choices() -> None:
    with pytest.raises(
        UserError, match=r"export\.format must be one of auto, mimo_mtp.*; received gguf"
    ):
        ExportConfig(format="gguf")


def test_the_check_does_not_change_the_head_it_checks(toy_target: Target, exported: Path) -> None:
    head = trained(toy_target)
    before = {name: value.clone() for name, value in head.state_dict().items()}
    assert set(check_export(head, toy_target, mimo.MimoMtp(), exported).values()) == {0.0}
    assert all(torch.equal(value, before[name]) for name, value in head.state_dict().items())
