"""How a side of a benchmark is driven: a piece of work for every line on stdin, a JSON line for every answer.

Knows no trainer and needs only the standard library, so that it runs in any environment.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any


def serve(step: Callable[[], float], trained: int) -> None:
    """Answer with seconds and loss of each step; at the end with memory in MB and `trained` predictions a step."""
    answer_all(lambda _: {"loss": step()}, {"trained": trained})


def answer_all(work: Callable[[str], dict[str, Any]], about: dict[str, Any]) -> None:
    """Answer every line with what `work` says to it, and its seconds of wall and of CPU time.

    At the end with memory in MB and `about`. The peak is that of the work: what making the model took before is
    forgotten.
    """
    Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM
    held = memory_mb("VmRSS")
    say({"ready": True})
    while (wanted := input_line()) is not None:
        begin, cpu = time.perf_counter(), time.process_time()
        told = work(wanted)
        seconds, cpu = time.perf_counter() - begin, time.process_time() - cpu
        say({"seconds": seconds, "cpu_seconds": cpu} | told)
    say({"peak_mb": memory_mb("VmHWM"), "held_mb": held} | about)


def memory_mb(name: str) -> float:
    """A field of this process's status."""
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    (line,) = [row for row in status.splitlines() if row.startswith(name + ":")]
    return round(int(line.split()[1]) / 1024, 1)


def input_line() -> str | None:
    """What is wanted next; None: no more."""
    try:
        return input()
    except EOFError:
        return None


def say(answer: dict[str, Any]) -> None:
    print(json.dumps(answer), flush=True)


def prompts_of(spec: dict[str, Any], batch: int, number: int) -> list[list[int]]:
    """The prompts of run `number` at a batch size: others in every run, so that none finds its prefix cached."""
    prompts = spec["prompts"]
    first = batch * number
    return [prompts[index % len(prompts)] for index in range(first, first + batch)]
