"""How a side of tools/bench_trainer.py is driven: a step for every line on stdin, a JSON line for every answer.

Knows no trainer and needs only the standard library, so that it runs in any environment.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path


def serve(step: Callable[[], float], trained: int) -> None:
    """Answer with seconds and loss of each step; at the end with memory in MB and `trained` predictions a step.

    The peak is that of the steps: what making the model took before is forgotten.
    """
    Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM
    held = memory_mb("VmRSS")
    say({"ready": True})
    while input_line():
        begin = time.perf_counter()
        loss = step()
        say({"seconds": time.perf_counter() - begin, "loss": loss})
    say({"peak_mb": memory_mb("VmHWM"), "held_mb": held, "trained": trained})


def memory_mb(name: str) -> float:
    """A field of this process's status."""
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    (line,) = [row for row in status.splitlines() if row.startswith(name + ":")]
    return round(int(line.split()[1]) / 1024, 1)


def input_line() -> bool:
    """Whether another step is wanted."""
    try:
        return bool(input())
    except EOFError:
        return False


def say(answer: dict[str, float]) -> None:
    print(json.dumps(answer), flush=True)
