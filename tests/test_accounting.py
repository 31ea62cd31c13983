"""A model is what its files say: each tensor is accounted for before weights are read, or refused by name."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from test_deepseek_folder import FP8, published
from toy_families import CONFIGS, toy
from toys import make_target, make_tokenizer

from mtp_train.core.errors import UserError
from mtp_train.export.layout import require_tensors
from mtp_train.heads import native
from mtp_train.heads.draft_model import DraftModelConfig, build
from mtp_train.models import folder
from mtp_train.models.accounting import require_accounted
from mtp_train.models.folder import INDEX, SINGLE, weights_digest
from mtp_train.models.sizes import folder_config
from mtp_train.models.target import Target

Tensors = dict[str, torch.Tensor]
UP = "model.layers.0.mlp.up_proj.weight"
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
EXPERT = "model.layers.0.block_sparse_moe.experts"
STACK = "model.layers.0.mlp.experts.down_proj"


def write(folder: Path, tensors: Tensors) -> None:
    save_file(tensors, folder / SINGLE, metadata={"format": "pt"})


def retell(folder: Path, **values: object) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | values))


def mxfp4(tensors: Tensors) -> Tensors:
    """Stacked experts [E, K, N] as blocks of 32 numbers and their scales; what the numbers are does not matter."""
    made = {}
    for name, value in tensors.items():
        if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            made[name] = value
            continue
        experts, inner, outer = value.shape
        shape = (experts, outer, inner // 32)
        made[f"{name}_blocks"] = torch.zeros((*shape, 16), dtype=torch.uint8)
        made[f"{name}_scales"] = torch.full(shape, 127, dtype=torch.uint8)
    return made


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Whole folders by name: plain, tied, in shards, with experts, fp8 and mxfp4."""
    made = {}
    gpt = CONFIGS["gpt_oss"].to_diff_dict() | {"hidden_size": 32, "intermediate_size": 64}
    targets = {
        "plain": make_target(),
        "tied": make_target(tie_word_embeddings=True),
        "shards": make_target(),
        "experts": toy("mixtral"),
        "fp8": make_target(),
        "mxfp4": Target.from_config(type(CONFIGS["gpt_oss"])(**gpt)),
    }
    for name, target in targets.items():
        made[name] = tmp_path_factory.mktemp(name)
        size = "20KB" if name == "shards" else "5GB"
        target.model.save_pretrained(made[name], max_shard_size=size)  # type: ignore[operator]
    write(made["fp8"], published(load_file(made["fp8"] / SINGLE)))
    retell(made["fp8"], quantization_config=FP8)
    write(made["mxfp4"], mxfp4(load_file(made["mxfp4"] / SINGLE)))
    retell(made["mxfp4"], quantization_config={"quant_method": "mxfp4"})
    return made


def copied(source: Path, folder: Path) -> Path:
    for path in source.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    return folder


def account(folder: Path) -> None:
    require_accounted(folder, folder_config(folder))


def without(*names: str) -> Callable[[Tensors], None]:
    return lambda tensors: [tensors.pop(name) for name in names].clear()


@pytest.mark.parametrize("name", ["plain", "tied", "shards", "experts", "fp8", "mxfp4"])
def test_a_whole_folder_is_accounted_for(folders: dict[str, Path], name: str) -> None:
    account(folders[name])


@pytest.mark.parametrize(
    ("name", "edit", "message"),
    [
        ("plain", without(HEAD), f"hold all of its tensors.*without {HEAD}.*tie_word_embeddings"),
        ("plain", without(UP), f"without {UP}"),
        ("plain", without("model.norm.weight"), "without model.norm.weight"),
        ("tied", without(EMBEDDING), f"without {HEAD}, {EMBEDDING}"),
        (
            "plain",
            lambda t: t.update({UP: torch.ones(40, 32)}),
            rf"{UP} \(40, 32\) for \(48, 32\)",
        ),
        (
            "plain",
            lambda t: t.update({UP: torch.ones(48, 32).to(torch.int8)}),
            f"quantisation none must be F16.*{UP} of I8",
        ),
        (
            "plain",
            lambda t: t.update({UP: t[UP].to(torch.float8_e4m3fn)}),
            f"quantisation none must be F16.*{UP} of F8_E4M3",
        ),
        (
            "plain",
            lambda t: t.update({"model.layers.0.self_attn.q_proj.bias": torch.ones(32)}),
            "no tensors but its own.*layers.0.self_attn.q_proj.bias",
        ),
        (
            "plain",
            lambda t: t.update({UP.replace("0", "2"): torch.ones(48, 32)}),
            r"no tensors but its own.*layers.2.*num_hidden_layers",
        ),
        ("tied", lambda t: t.update({HEAD: t[EMBEDDING] + 1}), f"ties {HEAD} to {EMBEDDING}"),
        ("experts", without(f"{EXPERT}.2.w1.weight"), f"no {EXPERT}.2.w1.weight"),
        (
            "experts",
            without(*(f"{EXPERT}.3.w{part}.weight" for part in (1, 2, 3))),
            r"layers.0.mlp.experts.down_proj \(3, 32, 48\) for \(4, 32, 48\)",
        ),
        (
            "experts",
            lambda t: t.update({f"{EXPERT}.5.w1.weight": t.pop(f"{EXPERT}.3.w1.weight")}),
            f"no {EXPERT}.3.w1.weight",
        ),
        ("fp8", without(f"{UP}_scale_inv"), f"matrix and its scales.*no {UP}_scale_inv"),
        ("fp8", without(UP), f"{UP}_scale_inv alone"),
        (
            "fp8",
            lambda t: t.update({f"{UP}_scale_inv": torch.ones(1, 1)}),
            rf"\(6, 4\) for {UP}; received \(1, 1\)",
        ),
        ("mxfp4", without(f"{STACK}_scales"), f"blocks and scales.*no {STACK}_scales"),
        ("mxfp4", without(f"{STACK}_blocks"), f"blocks and scales.*no {STACK}_blocks"),
        ("mxfp4", without(f"{STACK}_blocks", f"{STACK}_scales"), f"without {STACK}"),
    ],
)
def test_a_tensor_that_is_not_the_models_is_refused_by_name(
    folders: dict[str, Path],
    tmp_path: Path,
    name: str,
    edit: Callable[[Tensors], None],
    message: str,
) -> None:
    copied(folders[name], tmp_path)
    tensors = load_file(tmp_path / SINGLE)
    edit(tensors)
    write(tmp_path, tensors)
    with pytest.raises(UserError, match=message):
        Target.load(tmp_path, "float32")


def shards(folder: Path) -> list[Path]:
    return sorted(folder.glob("model-*.safetensors"))


def cut(folder: Path) -> None:
    last = shards(folder)[-1]
    last.write_bytes(last.read_bytes()[:-100])


def twice(folder: Path) -> None:
    first, last = load_file(shards(folder)[0]), load_file(shards(folder)[-1])
    name = sorted(first)[0]
    save_file(last | {name: first[name]}, shards(folder)[-1], metadata={"format": "pt"})


def reindexed(edit: Callable[[dict[str, str]], object]) -> Callable[[Path], None]:
    def work(folder: Path) -> None:
        index = json.loads((folder / INDEX).read_text())
        edit(index["weight_map"])
        (folder / INDEX).write_text(json.dumps(index))

    return work


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda f: shards(f)[1].unlink(), r"the files that .*index.json names.*model-00002-of"),
        (lambda f: (f / INDEX).unlink(), r"must hold model.safetensors.*model-00001-of"),
        (cut, r"whole safetensors files.*model-000.*copy the file again"),
        (twice, r"each tensor once.*in model-00001-of-\d+.safetensors and model-"),
        (reindexed(lambda names: names.pop(UP)), f"index must name every tensor.*{UP}"),
        (reindexed(lambda names: names.update(other=names[UP])), "that its index names.*other"),
        (
            lambda f: (f / "model-00009-of-00009.safetensors").write_bytes(
                shards(f)[0].read_bytes()
            ),
            "no safetensors but the model's.*model-00009",
        ),
        (
            lambda f: (f / SINGLE).write_bytes(shards(f)[0].read_bytes()),
            "no safetensors but the model's.*model.safetensors",
        ),
        (lambda f: (f / INDEX).write_text("{}"), "index must hold a weight_map"),
        (lambda f: (f / "adapter_config.json").write_text("{}"), "no adapter.*merge"),
    ],
)
def test_files_that_are_not_the_models_are_refused_by_name(
    folders: dict[str, Path], tmp_path: Path, edit: Callable[[Path], object], message: str
) -> None:
    edit(copied(folders["shards"], tmp_path))
    for ends in (False, True):
        with pytest.raises(UserError, match=message):
            Target.load(tmp_path, "float32", ends=ends)


def test_what_is_known_and_harmless_is_let_pass(
    folders: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Old rotary buffers, zero biases, an equal copy of a tied matrix, published MTP modules, a second form: said."""
    copied(folders["tied"], tmp_path)
    tensors = load_file(tmp_path / SINGLE)
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(4)
    tensors[HEAD] = tensors[EMBEDDING].clone()
    tensors["model.mtp_layers.0.input_proj.weight"] = torch.ones(32, 64)
    tensors["model.layers.2.eh_proj.weight"] = torch.ones(32, 64)
    tensors["model.layers.2.self_attn.q_proj.weight"] = torch.ones(32, 32)
    tensors["model.layers.1.self_attn.q_proj.bias"] = torch.zeros(32)
    write(tmp_path, tensors)
    (tmp_path / "consolidated.safetensors").write_bytes((tmp_path / SINGLE).read_bytes())
    for _ in range(2):
        account(tmp_path)
    said = capsys.readouterr().err
    for kind in (
        "3 tensors of MTP modules (model.layers.2.eh_proj.weight, model.layers.2.self_attn.q",
        "1 old rotary buffers (model.layers.0.self_attn.rotary_emb.inv_freq)",
        "1 zero biases (model.layers.1.self_attn.q_proj.bias)",
        "1 files with the weights again (consolidated.safetensors)",
    ):
        assert said.count(kind) == 1, f"{kind} once for a folder"


def test_only_the_lm_head_of_a_tied_pair_is_enough(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    copied(folders["tied"], tmp_path)
    tensors = load_file(tmp_path / SINGLE)
    tensors[HEAD] = tensors.pop(EMBEDDING)
    write(tmp_path, tensors)
    target = Target.load(tmp_path, "float32")
    assert torch.equal(target.base.get_input_embeddings().weight, tensors[HEAD])


def test_a_folder_is_looked_at_again_when_a_file_changed(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    account(copied(folders["plain"], tmp_path))
    retell(tmp_path, intermediate_size=40)
    with pytest.raises(UserError, match=r"mlp.down_proj.weight \(32, 48\) for \(32, 40\)"):
        account(tmp_path)


def test_a_draft_model_is_accounted_for(folders: dict[str, Path], tmp_path: Path) -> None:
    copied(folders["plain"], tmp_path)
    make_tokenizer().save_pretrained(tmp_path)
    tensors = load_file(tmp_path / SINGLE)
    del tensors[UP]
    write(tmp_path, tensors)
    with pytest.raises(UserError, match=f"without {UP}"):
        build(make_target(), DraftModelConfig(path=str(tmp_path)))


def test_fp8_without_scales_is_no_head() -> None:
    """A head's folder that is imported, and MTP modules: values without their scales would be taken as they are."""
    packed = {"fc.weight": torch.ones(4, 4).to(torch.float8_e4m3fn)}
    with pytest.raises(UserError, match=r"16 bits or more.*fc.weight torch.float8_e4m3fn"):
        require_tensors(packed, {"fc.weight": torch.ones(4, 4)})
    with pytest.raises(UserError, match=r"scales must come together.*fc.weight_scale_inv"):
        native.whole(packed, (4, 4))
    scaled = native.whole(packed | {"fc.weight_scale_inv": torch.full((1, 1), 2.0)}, (4, 4))
    assert torch.equal(scaled["fc.weight"], torch.full((4, 4), 2.0))


def test_weights_are_hashed_once_while_they_stay_as_they_are(
    folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copied(folders["plain"], tmp_path)
    read: list[Path] = []
    whole = folder.file_digest
    monkeypatch.setattr(folder, "file_digest", lambda path: (read.append(path), whole(path))[1])
    first = weights_digest(tmp_path)
    assert weights_digest(tmp_path) == first and len(read) == 1
    tensors = load_file(tmp_path / SINGLE)
    write(tmp_path, tensors | {UP: tensors[UP] + 1})
    assert weights_digest(tmp_path) != first and len(read) == 2
