"""The layout of our vLLM plug-in, and what of the plug-in runs without vLLM."""

from __future__ import annotations

import importlib
import json
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch
from head_variants import VARIANTS, make_variant
from safetensors.torch import load_file, save_file
from toys import make_target

from mtp_train import serving_plugin
from mtp_train.core.errors import UserError
from mtp_train.export import mtp_train_vllm
from mtp_train.export.formats import LAYOUTS
from mtp_train.export.stage import RECORD, ExportConfig, export_head, import_head
from mtp_train.heads.mtp import MtpConfig
from mtp_train.models.target import Target
from mtp_train.serving_plugin.rows import Rows

LAYOUT = "mtp_train_vllm"
HEADS = [name for name in VARIANTS if name.startswith("mtp") and "part" not in name]


@pytest.fixture
def target() -> Target:
    return make_target()


@pytest.mark.parametrize("variant", HEADS)
def test_every_mtp_head_goes_out_and_comes_back(
    target: Target, tmp_path: Path, variant: str
) -> None:
    head = make_variant(target, variant)
    export_head(head, target, ExportConfig(LAYOUT), tmp_path / "out", {})
    layout, again = import_head(tmp_path / "out", target)
    assert layout.name == LAYOUT
    assert again.state_dict().keys() == head.state_dict().keys()
    assert all(
        torch.equal(value, again.state_dict()[name]) for name, value in head.state_dict().items()
    )


def test_the_config_says_which_norms_and_how_many_modules(target: Target, tmp_path: Path) -> None:
    head = make_variant(target, "mtp-2-modules")
    export_head(head, target, ExportConfig(LAYOUT), tmp_path / "two", {})
    config = json.loads((tmp_path / "two" / "config.json").read_text())
    assert config["num_nextn_predict_layers"] == 2
    assert config["norms"] == ["enorm", "hnorm", "input_norm", "final_norm"]
    assert config["architectures"] == [serving_plugin.ARCHITECTURE]
    assert config["model_type"] == serving_plugin.MODEL_TYPE
    assert (config["num_hidden_layers"], config["module_layers"]) == (2, 1)
    export_head(
        make_variant(target, "mtp-2-modules-2-layers"),
        target,
        ExportConfig(LAYOUT),
        tmp_path / "deep",
        {},
    )
    config = json.loads((tmp_path / "deep" / "config.json").read_text())
    assert (config["num_hidden_layers"], config["module_layers"]) == (4, 2)
    export_head(
        make_variant(target, "mtp-hnorm"), target, ExportConfig(LAYOUT), tmp_path / "one", {}
    )
    config = json.loads((tmp_path / "one" / "config.json").read_text())
    assert "hnorm" not in config["norms"]
    assert "modules.0.hnorm.weight" not in load_file(tmp_path / "one" / "model.safetensors")


def test_a_module_in_anothers_place_is_caught(
    target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reading and writing share the mapping: only the engine's own equation sees it."""
    named = mtp_train_vllm._named

    def swapped(head: Any) -> dict[str, torch.Tensor]:
        return {
            name.replace(f"modules.{depth}.", f"modules.{1 - depth}."): value
            for name, value in named(head).items()
            for depth in [int(name.split(".")[1])]
        }

    monkeypatch.setattr(mtp_train_vllm, "_named", swapped)
    head = make_variant(target, "mtp-2-modules")
    with pytest.raises(UserError, match="must be the head's own"):
        export_head(head, target, ExportConfig(LAYOUT), tmp_path / "out", {})
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda config: config.update(norms=["enorm", "qnorm"]), "qnorm"),
        (lambda config: config.update(norms=["enorm", "hnorm", "input_norm"]), "final_norm"),
        (lambda config: config.update(num_nextn_predict_layers=3), "modules.2"),
    ],
)
def test_a_config_that_the_tensors_contradict_is_refused(
    target: Target, tmp_path: Path, change: Any, message: str
) -> None:
    export_head(
        make_variant(target, "mtp-2-modules"), target, ExportConfig(LAYOUT), tmp_path / "out", {}
    )
    path = tmp_path / "out" / "config.json"
    config = json.loads(path.read_text())
    change(config)
    path.write_text(json.dumps(config))
    (tmp_path / "out" / RECORD).unlink()
    with pytest.raises(UserError, match=message):
        import_head(tmp_path / "out", target)


def test_a_weight_that_is_not_finite_is_refused(target: Target, tmp_path: Path) -> None:
    export_head(make_variant(target, "mtp"), target, ExportConfig(LAYOUT), tmp_path / "out", {})
    path = tmp_path / "out" / "model.safetensors"
    tensors = load_file(path)
    tensors["modules.0.eh_proj.weight"][0, 0] = float("nan")
    save_file(tensors, path)
    (tmp_path / "out" / RECORD).unlink()
    with pytest.raises(UserError, match="finite"):
        import_head(tmp_path / "out", target)


def test_scaled_embeddings_go_only_where_a_norm_undoes_them(
    target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = target.embed
    monkeypatch.setattr(target, "embed", lambda token_T: plain(token_T) * 2)
    assert LAYOUTS[LAYOUT].not_held(MtpConfig(), target) == ""
    assert "scaled embeddings" in LAYOUTS[LAYOUT].not_held(MtpConfig(enorm=False), target)


def test_the_entry_point_is_the_plug_ins() -> None:
    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]
    module, _, name = project["entry-points"]["vllm.general_plugins"]["mtp_train"].partition(":")
    assert getattr(importlib.import_module(module), name) is serving_plugin.register


def rows(first: int, tokens: list[int]) -> Rows:
    state_RD = torch.tensor(tokens).float().unsqueeze(1).expand(-1, 4)
    return Rows(torch.tensor(tokens), state_RD, first + len(tokens) - 1)


def test_kept_rows_go_before_those_that_follow_them_and_no_others() -> None:
    kept = rows(3, [30, 40, 50, 60]).tail(2)
    assert (kept.first, kept.last) == (5, 6)
    whole = rows(7, [70, 80]).after(kept)
    assert whole.token_R.tolist() == [50, 60, 70, 80]
    assert (whole.first, whole.last) == (5, 8)
    assert whole.state_RD[:, 0].tolist() == [50, 60, 70, 80]
    for first in (0, 6, 8):  # begun anew, drafted again, or with a hole in between
        assert rows(first, [1]).after(kept).token_R.tolist() == [1]
    assert rows(0, [1, 2]).after(None).token_R.tolist() == [1, 2]
    assert rows(0, [1]).tail(2).token_R.tolist() == [1]
