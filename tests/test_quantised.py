"""Quantised targets: what is packed, that engine, features and heads run on them, and what is refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from safetensors.torch import load_file, save_file
from test_accounting import mxfp4, retell
from test_deepseek_folder import FP8, published
from toy_families import CONFIGS, toy
from toys import conversations, make_lively_target, make_store, make_target, make_tokenizer
from transformers import AutoModelForCausalLM, TorchAoConfig

from mtp_train.attention.packed import PackedContext
from mtp_train.checkpoint.heads import HeadCard, load_head, save_checkpoint
from mtp_train.cli.main import dispatch, guarded
from mtp_train.core.errors import UserError
from mtp_train.core.provenance import SEAL
from mtp_train.engine.chain import ChainProposer
from mtp_train.engine.engine import Engine, EngineConfig
from mtp_train.engine.sequences import Request
from mtp_train.export.stage import ExportConfig, export_head
from mtp_train.heads.eagle3 import Eagle3Config
from mtp_train.heads.families import build_head
from mtp_train.heads.medusa import MedusaConfig
from mtp_train.heads.mtp import MtpConfig, build
from mtp_train.models import quantised
from mtp_train.models.quantised import TORCHAO, as_numbers, is_packed, packed_matrices
from mtp_train.models.target import Target, target_hash
from mtp_train.train.config import TrainConfig
from mtp_train.train.loop import train

SMALL = EngineConfig(max_batch=3, cache_rows=256, page_size=4)
REQUESTS = [Request(str(n), tuple(range(1, n)), 20) for n in (3, 9, 20)]
HERE = [name for name in TORCHAO if name not in quantised.GPU_ONLY]
EACH = pytest.mark.parametrize("name", HERE)
EXACT = pytest.mark.parametrize("name", [name for name in HERE if name != "int8_dynamic"])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A plain target's folder; tied, so that its lm_head is an embedding."""
    path = tmp_path_factory.mktemp("plain")
    make_lively_target(tie_word_embeddings=True).model.save_pretrained(path)  # type: ignore[operator]
    return path


def theirs(folder: Path, name: str) -> Any:
    """transformers' own model, quantised by its own means."""
    import torchao.quantization

    config = TorchAoConfig(getattr(torchao.quantization, TORCHAO[name])())
    return AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, quantization_config=config, attn_implementation="eager"
    )


@EXACT
def test_states_and_greedy_tokens_are_those_of_transformers_quantised_model(
    name: str, folder: Path
) -> None:
    target, plain = Target.load(folder, "float32", quantisation=name), theirs(folder, name)
    assert packed_matrices(target.model) == 2 * 7  # every projection of both layers
    assert not is_packed(target.lm_head.weight)
    text = torch.arange(1, 30)
    state = target.forward(text, torch.arange(29), PackedContext([0, 29]))
    with torch.no_grad():
        expected = plain(text[None]).logits[0]
    torch.testing.assert_close(target.logits(state), expected, atol=2e-5, rtol=1e-4)
    whole = Target.load(folder, "float32")
    other = whole.logits(whole.forward(text, torch.arange(29), PackedContext([0, 29])))
    assert float((other - expected).abs().max()) > 0.01
    head = build(target, MtpConfig())
    done = Engine(target, None, SMALL).generate(REQUESTS)
    drafted = Engine(target, ChainProposer(target, head, 3), SMALL).generate(REQUESTS)
    assert [one.tokens for one in drafted] == [one.tokens for one in done]
    for one in done:
        prompt = torch.tensor([one.prompt])
        out = plain.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            do_sample=False,
            max_new_tokens=20,
            eos_token_id=None,
            pad_token_id=0,
        )
        assert tuple(out[0, prompt.shape[1] :].tolist()) == one.tokens


def test_rounded_activations_are_transformers_own_but_for_rows_that_round_otherwise(
    folder: Path,
) -> None:
    """int8_dynamic rounds activations: a difference in the last bit may become one of a whole step."""
    target = Target.load(folder, "float32", quantisation="int8_dynamic")
    whole = Target.load(folder, "float32")
    text, position = torch.arange(1, 30), torch.arange(29)
    found, other = (
        one.logits(one.forward(text, position, PackedContext([0, 29]))) for one in (target, whole)
    )
    with torch.no_grad():
        expected = theirs(folder, "int8_dynamic")(text[None]).logits[0]
    near, far = ((one - expected).norm(dim=-1).median() for one in (found, other))
    assert near < 0.3 * far


@EACH
def test_a_head_begins_as_the_quantised_last_layer(name: str, folder: Path) -> None:
    target = Target.load(folder, "float32", quantisation=name)
    counts = torch.arange(target.vocab_size)
    for config in (MtpConfig(), Eagle3Config(draft_vocabulary=30), MedusaConfig()):
        head = build_head(target, config, 3, counts).requires_grad_(False)
        assert not any(is_packed(value) for value in head.state_dict().values())
    last = target.base.layers[-1].mlp.up_proj.weight
    mine = build(target, MtpConfig()).block.mlp.up_proj.weight.detach()
    assert is_packed(last) and torch.equal(mine, as_numbers(last).float())
    plain = Target.load(folder, "float32").base.layers[-1].mlp.up_proj.weight
    assert 0 < float((mine - plain).abs().max()) < 0.05


def test_identity_changes_with_the_quantisation(folder: Path) -> None:
    hashes = {name: target_hash(folder, name) for name in ("none", *TORCHAO)}
    assert len(set(hashes.values())) == len(hashes)
    for name in ("none", "int8"):
        target = Target.load(folder, "float32", quantisation=name)
        assert (target.hash, target.quantisation) == (hashes[name], name)


def test_features_of_another_quantisation_are_refused_by_name(folder: Path, tmp_path: Path) -> None:
    plain, packed = (Target.load(folder, "float32", quantisation=n) for n in ("none", "int8"))
    chats = conversations(6)
    store = make_store(tmp_path / "plain", plain, chats)
    assert store.manifest.contract.quantisation == "none"
    own = make_store(tmp_path / "int8", packed, chats)
    assert own.manifest.gate["rows"] > 0  # the gate passed
    assert own.manifest.contract.quantisation == "int8"
    config = TrainConfig(epochs=1, rows=64)
    head = build(packed, MtpConfig())
    with pytest.raises(UserError, match=r"quantisation int8; received none"):
        train(packed, head, store, store, config, Accelerator(cpu=True), tmp_path / "a")
    with pytest.raises(UserError, match=r"quantisation none; received int8"):
        train(plain, head, own, own, config, Accelerator(cpu=True), tmp_path / "b")
    train(packed, head, own, own, config, Accelerator(cpu=True), tmp_path / "c")
    _, card = load_head(tmp_path / "c" / "head", packed)
    assert card.quantisation == "int8"
    with pytest.raises(UserError, match=r"quantisation none\); received int8"):
        load_head(tmp_path / "c" / "head", plain)
    load_head(tmp_path / "c" / "head", plain, same_weights=False)


def test_a_store_and_a_head_that_do_not_say_are_of_plain_targets(
    folder: Path, tmp_path: Path
) -> None:
    target = Target.load(folder, "float32")
    store = make_store(tmp_path / "store", target, conversations(3))
    manifest = json.loads((tmp_path / "store" / "manifest.json").read_text())
    del manifest["contract"]["quantisation"]
    manifest.pop(SEAL, None)  # as they were written before it was said
    (tmp_path / "store" / "manifest.json").write_text(json.dumps(manifest))
    assert type(store)(tmp_path / "store").manifest.contract == store.manifest.contract
    card = HeadCard("mtp", target.hash, target.state, target.hidden_size, target.vocab_size, step=0)
    save_checkpoint(tmp_path / "head", build(target, MtpConfig()), card)
    path = tmp_path / "head" / "head.json"
    values = json.loads(path.read_text())
    del values["quantisation"]
    values.pop(SEAL, None)
    path.write_text(json.dumps(values))
    assert load_head(tmp_path / "head", target)[1].quantisation == "none"


@EACH
def test_a_folder_that_torchao_packed_is_run_as_it_is(
    name: str, folder: Path, tmp_path: Path
) -> None:
    theirs(folder, name).save_pretrained(tmp_path)
    target = Target.load(tmp_path, "float32")
    assert (target.quantisation, packed_matrices(target.model)) == (name, 14)
    assert target.hash == target_hash(tmp_path) != target_hash(folder, name)
    made = Target.load(folder, "float32", quantisation=name)
    found, expected = (Engine(one, None, SMALL).generate(REQUESTS) for one in (target, made))
    assert [one.tokens for one in found] == [one.tokens for one in expected]
    with pytest.raises(UserError, match=f"already.*target.quantisation=int8 for one with {name}"):
        Target.load(tmp_path, "float32", quantisation="int8")


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"quant_method": "gptq", "bits": 4}, "received quantization_config with gptq"),
        ({"quant_method": "awq", "bits": 4}, "received quantization_config with awq"),
        (
            {"quant_method": "bitsandbytes", "load_in_4bit": True},
            "received quantization_config with bitsandbytes",
        ),
        ({"quant_method": "compressed-tensors"}, "received quantization_config with compressed-"),
        ({"load_in_8bit": True}, "received quantization_config with unnamed"),
        (
            {
                "quant_method": "torchao",
                "quant_type": {"default": {"_type": "Int4WeightOnlyConfig"}},
            },
            "received quantization_config with Int4WeightOnlyConfig",
        ),
        (
            {
                "quant_method": "torchao",
                "quant_type": {"default": {"_type": "Int8WeightOnlyConfig"}},
                "include_input_output_embeddings": True,
            },
            "embedding and lm_head must not be quantised",
        ),
    ],
)
def test_what_the_engine_lacks_is_refused_by_name(
    values: dict[str, Any], message: str, folder: Path, tmp_path: Path
) -> None:
    config = json.loads((folder / "config.json").read_text()) | {"quantization_config": values}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes())
    with pytest.raises(UserError, match=message):
        Target.load(tmp_path, "float32")


def test_other_names_and_places_are_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match=r"one of none, int8, .*received int4"):
        Target.load(folder, quantisation="int4")
    with pytest.raises(UserError, match="float8_dynamic needs a GPU"):
        Target.load(folder, quantisation="float8_dynamic")
    with pytest.raises(UserError, match="held whole by each rank"):
        Target.load(folder, quantisation="int8", tensor_parallel=2)
    monkeypatch.setitem(__import__("sys").modules, "torchao", None)
    with pytest.raises(UserError, match=r"needs torchao.*mtp_train\[quantised\]"):
        Target.load(folder, quantisation="int8")


def test_stacked_experts_are_not_passed_by_in_silence(tmp_path: Path) -> None:
    """torchao quantises linear layers; a mixture's experts would stay as they are."""
    toy("mixtral").model.save_pretrained(tmp_path)  # type: ignore[operator]
    with pytest.raises(UserError, match=r"experts.*mixtral"):
        Target.load(tmp_path, "float32", quantisation="int8")


def test_mxfp4_experts_are_multiplied_out(tmp_path: Path) -> None:
    """gpt-oss as published: two e2m1 numbers in a byte, a power of two for 32 of them."""
    config = type(CONFIGS["gpt_oss"])(
        **CONFIGS["gpt_oss"].to_diff_dict() | {"hidden_size": 32, "intermediate_size": 64}
    )
    plain = Target.from_config(config, seed=1)
    generator = torch.Generator().manual_seed(0)
    table = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    table = torch.cat([table, -table])
    tensors = {}
    for name, value in plain.model.state_dict().items():
        if not name.endswith(("gate_up_proj", "down_proj")):
            tensors[name] = value.contiguous()
            continue
        experts, inner, outer = value.shape
        shape = (experts, outer, inner // 32)
        codes = torch.randint(16, (*shape, 16, 2), generator=generator)
        power = torch.randint(122, 126, shape, generator=generator)
        tensors[f"{name}_blocks"] = (codes[..., 0] + 16 * codes[..., 1]).to(torch.uint8)
        tensors[f"{name}_scales"] = power.to(torch.uint8)
        numbers = table[codes].flatten(-2) * (2.0 ** (power - 127)).unsqueeze(-1)
        value.copy_(numbers.flatten(-2).transpose(1, 2))
    values = json.loads(config.to_json_string()) | {
        "quantization_config": {"quant_method": "mxfp4"}
    }
    (tmp_path / "config.json").write_text(json.dumps(values))
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    target = Target.load(tmp_path, "float32")
    assert (target.quantisation, packed_matrices(target.model)) == ("mxfp4", 0)
    for name, value in plain.model.state_dict().items():
        torch.testing.assert_close(target.model.state_dict()[name], value)


def test_a_draft_model_that_is_packed_is_refused(folder: Path, tmp_path: Path) -> None:
    from mtp_train.heads.draft_model import DraftModelConfig

    theirs(folder, "int8").save_pretrained(tmp_path)
    with pytest.raises(UserError, match=r"draft model must not be quantised.*int8"):
        build_head(
            replace_path(Target.load(folder, "float32")), DraftModelConfig(path=str(tmp_path))
        )


def replace_path(target: Target) -> Target:
    """A target of unknown folder: no tokenizers to compare."""
    target.path = None
    return target


@pytest.mark.parametrize("name", ["int8", "fp8", "mxfp4"])
def test_a_head_that_is_imported_for_a_quantised_target_can_be_evaluated(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The card that import writes says whose head it is, quantisation included."""
    path, asked = quantised_folder(tmp_path / "target", name), "int8" if name == "int8" else "none"
    make_tokenizer().save_pretrained(path)
    target = Target.load(path, "float32", quantisation=asked)
    head = build_head(target, MedusaConfig(), 0, torch.arange(target.vocab_size))
    export_head(head, target, ExportConfig(), tmp_path / "export", {})
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(json.dumps({"messages": [{"role": "user", "content": "a word"}]}) + "\n")
    ours = [f"target.path={path}", "target.dtype=float32", f"target.quantisation={asked}"]
    ours += [f"run={tmp_path / 'run'}", f"+evaluate.sets.own={prompts}"]
    small = ["speed_prompts=0", "lossless_prompts=0", "drafts=2", "max_new_tokens=4"]
    small += ["sampled_prompts=1"]
    assert guarded(lambda: dispatch("import", [str(tmp_path / "export"), *ours])) == 0
    card = load_head(tmp_path / "run" / "train" / "head", target)[1]
    assert (card.quantisation, card.identity) == (name, target.identity)
    more = [*ours, "head=medusa", *(f"evaluate.{one}" for one in small)]
    status = guarded(lambda: dispatch("evaluate", more))
    assert status == 0, capsys.readouterr().err
    told = json.loads((tmp_path / "run" / "evaluate" / "evaluation.json").read_text())
    assert told["target"]["quantisation"] == name
    assert told["sets"]["own"]["greedy"]["prompts"] == 1


def quantised_folder(path: Path, name: str) -> Path:
    """A toy target's folder: plain for int8, else as published in fp8 blocks or with mxfp4 experts."""
    gpt = CONFIGS["gpt_oss"].to_diff_dict() | {"hidden_size": 32, "intermediate_size": 64}
    made = Target.from_config(type(CONFIGS["gpt_oss"])(**gpt)) if name == "mxfp4" else make_target()
    made.model.save_pretrained(path)  # type: ignore[operator]
    packed = {"fp8": (published, FP8), "mxfp4": (mxfp4, {"quant_method": "mxfp4"})}
    if name in packed:
        pack, values = packed[name]
        tensors = pack(load_file(path / "model.safetensors"))
        save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
        retell(path, quantization_config=values)
    return path
