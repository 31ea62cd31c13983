"""Every recipe: its plan is the one in its README, and its stages run on a tiny model of its target's architecture."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from toys import VOCABULARY, make_tokenizer
from transformers import AutoConfig, AutoModelForCausalLM

from mtp_train.cli.config import load_config
from mtp_train.cli.main import dispatch, guarded
from mtp_train.models.sizes import target_sizes
from mtp_train.models.target import Target
from recipes import RECIPES, dimensions, sized

sys.path.insert(0, str(RECIPES.parent / "tools"))
from plan_recipes import BLOCK, plan_table

EACH = sized()
PARAMETERS = {  # in 10^9, as the models' names say
    "llama31_8b_mtp_8gpu": 8.03,
    "llama31_8b_eagle3_8gpu": 8.03,
    "llama33_70b_mtp_8gpu": 70.55,
    "qwen3_8b_mtp_8gpu": 8.19,
    "deepseek_v2_lite_mtp_8gpu": 15.71,
    "llama32_1b_draft_llama33_70b_8gpu": 70.55,
}
TINY = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
}
TINY_LATENT = {
    "moe_intermediate_size": 16,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
    "num_key_value_heads": 4,
}
SIZES_ONLY = [
    "target.dtype=float32",
    "target.device=cpu",
    "regenerate.server=''",
    "regenerate.max_new_tokens=10",
    "data.max_tokens=256",
    "data.context=128",
    "precompute.tensor_parallel=1",
    "precompute.rows_per_shard=64",
    "precompute.rows_per_forward=64",
    "plan.allow_shortfall=true",
    "train.epochs=1",
    "train.rows=64",
    "train.warmup_steps=1",
    "train.validations=1",
    "train.checkpoints=1",
    "engine.cache_rows=1024",
    "engine.max_batch=4",
    "evaluate.drafts=2",
    "evaluate.max_new_tokens=6",
    "evaluate.speed_prompts=0",
    "evaluate.lossless_prompts=1",
    "evaluate.reference_prompts=1",
    "evaluate.examples=1",
]


def test_every_recipe_brings_all_its_parts() -> None:
    assert set(sized()) == set(PARAMETERS)
    for name in sized():
        files = {path.name for path in (RECIPES / name).iterdir()}
        assert files - {"draft"} == {"README.md", "config.yaml", "run.sh", "target"}
        script = (RECIPES / name / "run.sh").read_text()
        assert script.count(f"recipe={name} ") == script.count("recipe=") >= 3
        checked = subprocess.run(["bash", "-n", str(RECIPES / name / "run.sh")], check=False)
        assert checked.returncode == 0
        assert (RECIPES / name / "run.sh").stat().st_mode & 0o100


@pytest.mark.parametrize("name", sized())
def test_the_dimensions_are_those_of_the_model(name: str) -> None:
    sizes = target_sizes(RECIPES / name / "target", "bfloat16")
    assert sizes.parameters / 1e9 == pytest.approx(PARAMETERS[name], abs=0.01)


@pytest.mark.parametrize("name", EACH)
def test_the_table_in_the_readme_is_what_plan_computes(name: str) -> None:
    """If not: python tools/plan_recipes.py."""
    found = BLOCK.search((RECIPES / name / "README.md").read_text())
    assert found is not None
    assert found[0] == plan_table(name)
    assert "computed, not measured" in found[0]


@pytest.mark.parametrize("name", EACH)
def test_a_recipe_is_planned_as_its_readme_says_before_anything_is_downloaded(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    line = f"mtp-train plan recipe={name}"
    assert line in (RECIPES / name / "README.md").read_text()
    assert guarded(lambda: dispatch("plan", [f"recipe={name}", "plan.allow_shortfall=true"])) == 0
    told = capsys.readouterr()
    assert f"recipes/{name}/target" in told.err and "isn't there yet" in told.err
    chosen = next(row for row in plan_table(name).splitlines() if ", chosen" in row)
    assert chosen.split("|")[2].strip() in told.out
    assert guarded(lambda: dispatch("plan", [f"recipe={name}", "target.path=elsewhere"])) == 2
    assert "elsewhere without config.json" in capsys.readouterr().err, "no other folder's stand-in"


def test_a_plan_needs_config_and_tokenizer_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tiny_target(EACH[0], tmp_path / "target")
    for path in target.glob("*.safetensors"):
        path.unlink()
    chats = {"train": ("name a bird.", "a wren."), "heldout": ("name a fish.", "a pike.")}
    for name, (prompt, completion) in chats.items():
        row = {"prompt": prompt, "completion": completion}
        (tmp_path / f"own-{name}.jsonl").write_text(json.dumps(row) + "\n")
    own = [f"data.sets.{name}={tmp_path}/own-{name}.jsonl" for name in chats]
    lines = [f"target.path={target}", f"run={tmp_path / 'run'}"]
    for text in (own, write_prompts(tmp_path)):
        assert guarded(lambda text=text: dispatch("plan", [*lines, *text])) == 0
        assert "sequences" in capsys.readouterr().out
    (target / "tokenizer.json").unlink()
    (target / "tokenizer_config.json").unlink()
    assert guarded(lambda: dispatch("plan", [*lines, *write_prompts(tmp_path)])) == 2
    assert "must hold its tokenizer" in capsys.readouterr().err
    (target / "config.json").unlink()
    assert guarded(lambda: dispatch("plan", [*lines, *own])) == 2
    told = capsys.readouterr().err
    assert len(told.splitlines()) == 1
    assert all(name in told for name in ("config.json", "tokenizer.json", "plan.tokens"))


@pytest.mark.parametrize("name", EACH)
def test_a_recipe_runs_small(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All of its own values but sizes, paths and devices."""
    lines = [
        f"recipe={name}",
        f"target.path={tiny_target(name, tmp_path / 'target')}",
        f"run={tmp_path / 'run'}",
        *write_prompts(tmp_path),
        *draft(name, tmp_path),
        *SIZES_ONLY,
    ]
    loaded: list[bool] = []
    load = Target.load
    monkeypatch.setattr(
        Target, "load", lambda *a, **k: (loaded.append(k.get("ends", False)), load(*a, **k))[1]
    )
    dispatch("plan", [*lines, "plan.tokens=1000"])
    assert not loaded, "a plan loads nothing"
    stages = ["regenerate", "precompute", "train", "evaluate", "report", *exported(name)]
    for stage in stages:
        loaded.clear()
        dispatch(stage, lines)
        if stage in ("train", "export"):
            assert loaded[0], "the target's ends are enough"
    evaluation = json.loads((tmp_path / "run" / "evaluate" / "evaluation.json").read_text())
    assert evaluation["head"]["step"] > 0
    assert evaluation["lossless"]["different"] == []


def exported(name: str) -> list[str]:
    return ["export"] if "export recipe=" in (RECIPES / name / "run.sh").read_text() else []


def tiny_target(name: str, folder: Path) -> Path:
    """A random model of the recipe's architecture, with a tokenizer."""
    return save_tiny(dimensions(name), folder)


def save_tiny(values: dict[str, Any], folder: Path) -> Path:
    small = TINY | (TINY_LATENT if "kv_lora_rank" in values else {})
    config = AutoConfig.for_model(**(values | small | {"torch_dtype": "float32"}))
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return folder


def draft(name: str, folder: Path) -> list[str]:
    """A tiny model in the place of the small one that a recipe trains as a draft."""
    if load_config([f"recipe={name}"])["head"]["family"] != "draft_model":
        return []
    values = json.loads((RECIPES / name / "draft" / "config.json").read_text())
    return [f"head.path={save_tiny(values, folder / 'draft')}"]


def write_prompts(folder: Path) -> list[str]:
    texts = {
        "train": ["what is 2 + 2?", "name a bird.", "say hello", "count to 3", "why?"],
        "heldout": ["what is 3 + 1?", "name a fish."],
    }
    for name, questions in texts.items():
        rows = [
            {"id": f"{name}-{at}", "messages": [{"role": "user", "content": text}]}
            for at, text in enumerate(questions)
        ]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return [f"regenerate.prompts.{name}={folder / name}.jsonl" for name in texts]
