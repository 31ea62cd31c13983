"""Processes that run a stage, on one rank or several, and are killed at a moment of their work.

A process is forked from a server that has imported the package and computed nothing, which saves the seconds of its
imports; it has a process group and files for its output of its own, and runs what `mtp-train STAGE` runs. Several
ranks get the environment and the key-value store that torchrun gives its own.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch.distributed import TCPStore

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(
    [
        *(f"mtp_train.cli.{name}" for name in ("job", "regenerate", "precompute", "train")),
        *(f"mtp_train.cli.{name}" for name in ("evaluate", "report", "export")),
        "transformers.models.llama.modeling_llama",
    ]
)
TICKS = os.sysconf("SC_CLK_TCK")
NOTICE = 0.005  # seconds between two looks at a process
PATIENCE = 1800.0  # seconds after which a process counts as hanging


@dataclass(frozen=True)
class Ended:
    """How a stage's processes ended.

    Attributes:
        statuses: exit status of each rank; negative: the signal that ended it.
        err: what all ranks wrote to stderr.
        cpu: processor seconds of all ranks, as far as they were looked at.
        killed: whether it was this tool that ended them.
    """

    statuses: tuple[int, ...]
    err: str = ""
    cpu: float = 0.0
    killed: bool = False


def run(
    stage: str,
    overrides: Sequence[str],
    logs: Path,
    ranks: int = 1,
    kill_at: float | None = None,
    first: int = 0,
) -> Ended:
    """Run a stage to its end, or to `kill_at` processor seconds of all ranks: SIGKILL, to rank `first` first.

    Processor seconds rather than those of a clock: the moment is then one of the work, however busy the machine is.
    """
    logs.mkdir(parents=True, exist_ok=True)
    store = TCPStore("127.0.0.1", 0, is_master=True) if ranks > 1 else None
    processes = [
        CONTEXT.Process(
            target=_enter,
            args=(stage, list(overrides), logs / f"{rank}", _environment(rank, ranks, store)),
        )
        for rank in range(ranks)
    ]
    for process in processes:
        process.start()
    cpu, killed, began = 0.0, False, time.monotonic()
    while any(process.is_alive() for process in processes):
        cpu = max(cpu, sum(cpu_seconds(process.pid) for process in processes))
        hangs = time.monotonic() - began > PATIENCE
        failed = any(process.exitcode for process in processes)
        if hangs or (kill_at is not None and cpu >= kill_at):
            killed = True
            _kill([processes[first], *processes])
        elif failed and ranks > 1:  # a launcher ends the other ranks when one fails
            time.sleep(1.0)
            _kill(processes)
        time.sleep(NOTICE)
    for process in processes:
        process.join()
    err = "".join((logs / f"{rank}.err").read_text("utf-8", "replace") for rank in range(ranks))
    return Ended(tuple(process.exitcode or 0 for process in processes), err, cpu, killed)


def cpu_seconds(pid: int | None) -> float:
    """Processor seconds that a process has used; 0 if it is gone."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / TICKS


def _kill(processes: Sequence[Any]) -> None:
    for process in processes:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.kill()  # where it had no group of its own yet


def _environment(rank: int, ranks: int, store: TCPStore | None) -> dict[str, str]:
    if store is None:
        return {}
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "GROUP_RANK": "0",
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_RUN_ID": "torture",
    }


def _enter(stage: str, overrides: list[str], log: Path, environment: dict[str, str]) -> None:
    """The child: what `python -m mtp_train.cli.STAGE` does, its output in files."""
    os.setsid()
    for number, suffix in ((1, ".out"), (2, ".err")):
        file = os.open(f"{log}{suffix}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        os.dup2(file, number)
        os.close(file)
    os.environ.update(environment)
    from mtp_train.cli.main import dispatch, guarded

    sys.exit(guarded(lambda: dispatch(stage, overrides)))
