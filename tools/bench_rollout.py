"""Measure a rollout's attention, forward and backward: in tiles against the slow equation, in one run.

Times are per rollout of three steps over one document, with SmolLM2's heads; memory is the growth of the process's
peak over what it held before, each case in a process of its own. The slow equation is left out where its score
matrices would not fit.

    python tools/bench_rollout.py --out docs/benchmarks/rollout.json
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import platform
import resource
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mtp_train.attention import reference
from mtp_train.attention.chain import Span, chain_attention
from mtp_train.attention.interface import AttentionRule
from mtp_train.attention.packed import PackedContext

HEADS, GROUPS, WIDTH, STEPS = 9, 3, 64, 3
RULE = AttentionRule(WIDTH**-0.5)
ROWS = (128, 512, 2048, 8192, 32768)
SLOW_ROWS = 4096  # at most, by the slow equation: 4 GB, and four times as much for twice the rows
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
ENOUGH = 2.0  # seconds of repeats

Attention = Callable[[Tensor, list[Tensor], list[Tensor], list[Span], float], Tensor]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="JSON file to write")
    parser.add_argument("--rows", type=int, nargs="+", default=ROWS)
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=list(DTYPES))
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    args = parser.parse_args()
    shape = {"heads": HEADS, "kv_heads": GROUPS, "width": WIDTH, "steps": STEPS}
    machine = {"processor": platform.machine(), "threads": args.threads, "torch": torch.__version__}
    result: dict[str, Any] = {"shape": shape, "machine": machine, "cases": []}
    args.out.parent.mkdir(parents=True, exist_ok=True)
    for dtype in args.dtypes:
        for rows in args.rows:
            result["cases"].append(compare(dtype, rows, args.threads))
            print(json.dumps(result["cases"][-1]), flush=True)
            args.out.write_text(json.dumps(result, indent=2) + "\n")
    return 0


def compare(dtype: str, rows: int, threads: int) -> dict[str, Any]:
    """Seconds and MB of each twin, and how many times less the tiles need."""
    names = [name for name in TWINS if name != "slow" or rows <= SLOW_ROWS]
    row: dict[str, Any] = {"dtype": dtype, "rows": rows}
    row["seconds"] = apart(seconds, names, dtype, rows, threads)
    row["peak_mb"] = {name: apart(peak_mb, name, dtype, rows, threads) for name in names}
    if len(names) > 1:
        for measure in ("seconds", "peak_mb"):
            row[f"ratio_{measure}"] = round(row[measure]["slow"] / row[measure]["tiles"], 2)
    return row


def apart(work: Callable[..., Any], *args: Any) -> Any:
    """`work(*args)` in a fresh process."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(work, args)


def seconds(names: list[str], dtype: str, rows: int, threads: int) -> dict[str, float]:
    """The least of several rollouts each, taken in turn; a long one is measured once."""
    torch.set_num_threads(threads)
    for name in names:
        roll_out(TWINS[name], make_inputs(DTYPES[dtype], 16))
    inputs = make_inputs(DTYPES[dtype], rows)
    taken: dict[str, list[float]] = {name: [] for name in names}
    begin = time.perf_counter()
    while time.perf_counter() - begin < ENOUGH * len(names):
        for name in names:
            start = time.perf_counter()
            roll_out(TWINS[name], inputs)
            taken[name].append(time.perf_counter() - start)
    return {name: round(min(each), 5) for name, each in taken.items()}


def peak_mb(name: str, dtype: str, rows: int, threads: int) -> float:
    """What one rollout adds to the process's peak, its inputs and gradients included."""
    torch.set_num_threads(threads)
    roll_out(TWINS[name], make_inputs(DTYPES[dtype], 16))  # the libraries' own buffers
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    roll_out(TWINS[name], make_inputs(DTYPES[dtype], rows))
    return round((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024, 1)


def make_inputs(dtype: torch.dtype, rows: int) -> list[list[Tensor]]:
    """Per step: query, key, value."""
    torch.manual_seed(0)
    return [
        [
            torch.randn(rows, heads, WIDTH).to(dtype).requires_grad_()
            for heads in (HEADS, GROUPS, GROUPS)
        ]
        for _ in range(STEPS)
    ]


def roll_out(attention: Attention, inputs: list[list[Tensor]]) -> None:
    """All steps, then all gradients."""
    keys, values = [step[1] for step in inputs], [step[2] for step in inputs]
    spans = [(0, len(keys[0]))]
    outs = [
        attention(step[0], keys[: past + 1], values[: past + 1], spans, RULE)
        for past, step in enumerate(inputs)
    ]
    leaves = [rows for step in inputs for rows in step]
    torch.autograd.grad(outs, leaves, [torch.ones_like(out) for out in outs])


def slow(
    query: Tensor,
    keys: list[Tensor],
    values: list[Tensor],
    _spans: list[Span],
    rule: AttentionRule,
) -> Tensor:
    """The slow equation of the one document; its first step is causal attention, for which torch has a kernel."""
    if len(keys) == 1:
        return PackedContext([0, len(query)])(0, query, keys[0], values[0], rule)
    return reference.chain_attention(query, keys, values, rule)


TWINS: dict[str, Attention] = {"slow": slow, "tiles": chain_attention}


if __name__ == "__main__":
    sys.exit(main())
