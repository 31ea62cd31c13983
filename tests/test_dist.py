"""How ranks meet: all of one attempt, and none of an earlier one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import pytest
from restarted_ranks import MEETINGS
from torch.distributed import DistStoreError, HashStore

from mtp_train.core import dist
from mtp_train.core.dist import Ranks, launched_ranks


def launched(monkeypatch: pytest.MonkeyPatch, store: HashStore, rank: int, attempt: int) -> Ranks:
    """A rank of two, as torchrun describes it."""
    described = {
        "RANK": rank,
        "WORLD_SIZE": 2,
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": 1,
        "TORCHELASTIC_USE_AGENT_STORE": True,
        "TORCHELASTIC_RESTART_COUNT": attempt,
    }
    for name, value in described.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setattr(dist, "TCPStore", lambda *_args, **_kwargs: store)
    return launched_ranks()


def test_ranks_that_were_started_again_wait_for_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """The launcher's store still holds what the attempt before them left there."""
    store = HashStore()
    for attempt in range(2):
        first, second = (launched(monkeypatch, store, rank, attempt) for rank in range(2))
        with monkeypatch.context() as patch, pytest.raises(DistStoreError):
            patch.setattr(dist, "PATIENCE", timedelta(milliseconds=20))
            first.wait()
        assert not first.all_say("done", timedelta(milliseconds=20))
        with ThreadPoolExecutor() as pool:
            waiting = pool.submit(
                launched(monkeypatch, store, 0, attempt).grouped(1).all_say,
                "more",
                timedelta(seconds=20),
            )
            assert second.all_say("more", timedelta(seconds=20)) and waiting.result()
        second.wait()
        assert second.all_say("done", timedelta(seconds=20))


def test_two_ranks_of_which_one_dies_once_meet_again(tmp_path: Path) -> None:
    script = Path(__file__).with_name("restarted_ranks.py")
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [sys.executable, *launcher, "--max-restarts", "1", str(script), str(tmp_path)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, check=False, timeout=300
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = [json.loads((tmp_path / f"rank-{rank}.json").read_text()) for rank in range(2)]
    assert found == [{"attempt": 1, "met": [2] * MEETINGS, "joined": 2}] * 2
