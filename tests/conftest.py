"""What the tests share: a toy target, the real one's folder, and a clean slate for accelerate."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from toys import TwoRanks, make_target

from mtp_train.models.target import Target

SMOLLM2 = Path(__file__).parents[1] / ".cache" / "targets" / "smollm2-135m-instruct"


def pytest_configure() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def toy_target() -> Target:
    """A toy Llama with random weights, in float32. Frozen: every test may use the same one."""
    return make_target()


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """The real target's folder. Its absence is a failure: `make test` unpacks it first."""
    if not (SMOLLM2 / "config.json").is_file() or not any(SMOLLM2.glob("*.safetensors")):
        pytest.fail(f"the tests' real target is missing at {SMOLLM2}: run `make setup` once")
    return SMOLLM2


@pytest.fixture(scope="session")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> TwoRanks:
    """Two gloo ranks that made features and trained. Run once: starting them costs more than their work."""
    folder = tmp_path_factory.mktemp("two-ranks")
    script = Path(__file__).with_name("two_ranks.py")
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        str(script),
        str(folder),
    ]
    environment = {
        key: value
        for key, value in os.environ.items()
        if not key.startswith(("ACCELERATE_", "PYTEST_"))
    }
    environment |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, check=False, timeout=300
    )
    return TwoRanks(folder, done.stderr)


@pytest.fixture(autouse=True)
def fresh_accelerate() -> Iterator[None]:
    """accelerate keeps its first precision and process group for the process: forget them after each test."""
    yield
    if "accelerate.state" in sys.modules:
        sys.modules["accelerate.state"].AcceleratorState._reset_state(reset_partial_state=True)
