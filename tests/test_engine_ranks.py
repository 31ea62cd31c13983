"""A target that two ranks hold together says what one rank's says, whoever drafts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from engine_ranks import KINDS, outputs
from toy_families import toy

from mtp_train.models.target import Target

FAMILIES = ["llama", "qwen3", "deepseek_v3"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two ranks' records of every family. Run once: starting them costs more than their work."""
    made = tmp_path_factory.mktemp("engine-ranks")
    for name in FAMILIES:
        toy(name).model.save_pretrained(made / name)  # type: ignore[operator]
    script = Path(__file__).with_name("engine_ranks.py")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", "2", str(script), str(made)]
    environment = {key: value for key, value in os.environ.items() if "PYTEST" not in key}
    environment |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr[-3000:]
    return made


def records(folder: Path, name: str) -> list[dict[str, Any]]:
    return [json.loads(path.read_text()) for path in sorted(folder.glob(f"{name}-*.json"))]


@pytest.mark.parametrize("name", FAMILIES)
def test_two_ranks_give_one_ranks_tokens(name: str, folder: Path) -> None:
    two = records(folder, name)
    assert [(one["world"], one["backend"]) for one in two] == [(2, "gloo")] * 2
    one = outputs(Target.load(folder / name, "float32"))
    assert len(one) == 15 * len(KINDS)
    for scheme, expected in one.items():
        for rank, record in enumerate(two):
            assert record["outputs"][scheme] == expected, (scheme, rank)
    others = outputs(Target.load(folder / name, "float32"), rank=1)
    assert others["plain, sampled"] != one["plain, sampled"]
    speculative = [steps for each in one.values() for _, _, steps in each]
    assert any(accepted for steps in speculative for _, accepted in steps)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_head_is_spread_and_a_draft_model_is_on_the_lead_alone(name: str, folder: Path) -> None:
    lead, other = records(folder, name)
    for record in (lead, other):
        assert record["shares"]
        assert all(2 * mine == whole for _, mine, whole in record["shares"])
    spread = {matrix for matrix, _, _ in lead["shares"]}
    attention = {f"block.self_attn.{part}_proj.weight" for part in "qkvo"}
    assert attention <= spread or name == "deepseek_v3"  # whose plan leaves latent attention whole
    assert (lead["draft model's layers"], other["draft model's layers"]) == (1, 0)
