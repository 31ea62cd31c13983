"""States from vLLM: held against our engine's where vLLM is installed, and its failures as one line."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from toys import conversation, make_target

from mtp_train.core.dist import Ranks
from mtp_train.core.errors import UserError
from mtp_train.core.records import Accounting
from mtp_train.models.readout import Readout
from mtp_train.models.target import Target
from mtp_train.precompute import vllm_states
from mtp_train.precompute.gate import GateResult, Sample
from mtp_train.precompute.sources import EngineStates, VllmConfig
from mtp_train.precompute.stage import PrecomputeConfig, precompute
from mtp_train.precompute.vllm_states import VllmStates
from mtp_train.store.shards import FeatureStore

PYTHON = Path(__file__).parents[1] / ".venv-serving" / "bin" / "python"
STATES = ["post_norm", "pre_norm", "layer_2"]
CHATS = [
    conversation("short", [1, 2, 3], [4]),
    conversation("prefix", list(range(100, 164)), [7, 8]),
    conversation("same prefix", list(range(100, 164)), [9, 10, 11]),
    conversation("long", list(range(300, 500)), list(range(20, 60))),
]


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Readout:
    folder = tmp_path_factory.mktemp("toy")
    make_target().model.save_pretrained(folder)
    return Readout.load(folder, "float32")


def test_an_interpreter_that_is_not_there(toy: Readout) -> None:
    with pytest.raises(UserError, match=r"precompute\.vllm\.python.*nowhere/python"):
        VllmStates(toy, VllmConfig("/nowhere/python"), "float32", ["post_norm"])


def test_an_environment_without_vllm_tells_its_own_error(toy: Readout) -> None:
    with pytest.raises(UserError, match=r"vLLM must run the target.*No module named 'vllm'"):
        VllmStates(toy, VllmConfig(sys.executable), "float32", ["post_norm"])


def test_a_program_that_dies_at_work_tells_its_last_error(
    toy: Readout, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "dies.py"
    program.write_text(
        "import sys\nprint('{}', flush=True)\nsys.stdin.readline()\nraise MemoryError('no room')\n"
    )
    monkeypatch.setattr(vllm_states, "PROGRAM", program)
    with VllmStates(toy, VllmConfig(sys.executable), "float32", ["post_norm"]) as source:  # noqa: SIM117
        with pytest.raises(UserError, match="MemoryError: no room"):
            source.capture(CHATS[:1])


@pytest.fixture(scope="module")
def served(smollm2_path: Path) -> Iterator[VllmStates]:
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    readout = Readout.load(smollm2_path, "bfloat16")
    config = VllmConfig(str(PYTHON), {"max_model_len": 1024})
    with VllmStates(readout, config, "bfloat16", STATES) as source:
        yield source


@pytest.mark.serving
def test_vllm_gives_the_engines_states(served: VllmStates, smollm2_path: Path) -> None:
    """In any order and company, prefixes in common included (DEFECTS 3)."""
    ours = EngineStates(Target.load(smollm2_path), STATES)
    for chats in (CHATS, CHATS[::-1]):
        theirs = served.capture(chats)
        with torch.no_grad():
            expected = ours.capture(chats)
        for name in STATES:
            error = (theirs[name].float() - expected[name].float()).norm(dim=-1)
            relative = error / expected[name].float().norm(dim=-1)
            assert relative.median() < 0.02, name


@pytest.mark.serving
def test_the_gate_takes_vllms_states_and_refuses_wrong_ones(
    served: VllmStates, tmp_path: Path
) -> None:
    config = PrecomputeConfig(STATES)
    accounting = Accounting(used=len(CHATS)).as_dict()
    precompute(served, CHATS, config, tmp_path / "features", accounting, Ranks())
    store = FeatureStore(tmp_path / "features")
    assert store.manifest.gate["rows"] > 0
    captured = store[3].states
    tokens = CHATS[3].tokens
    served.check([Sample("right", tokens, captured)], GateResult())
    with pytest.raises(UserError, match="must be vLLM's own token"):
        served.check([Sample("wrong", tokens, {"post_norm": captured["pre_norm"]})], GateResult())
    with pytest.raises(UserError, match="layer_2 states must be the engine's own"):
        served.check([Sample("wrong", tokens, {"layer_2": captured["pre_norm"]})], GateResult())
