"""Paged attention per layer: FlashInfer against the torch backend, on the same plans in one run.

Every shape of batch that the engine makes: a row per sequence, verified rows, trees of drafts, a prompt. `first` is the
host's time until the first layer of a batch is under way, planning included; `layer` is the device's time for each
one after it. Sides take turns. Without a CUDA device the torch backend is measured alone.

    python tools/bench_attention.py --out runs/bench_attention.json
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mtp_train.attention.backends import Backend, backend_for
from mtp_train.attention.interface import AttentionRule
from mtp_train.attention.paged import BatchPlan, PagedKV, TreeRows, plan_batch

PAGE = 16
HEADS = {"smollm2": (9, 3, 64), "llama_8b": (32, 8, 128)}  # H, G, d


def main() -> None:
    args = _arguments()
    device = torch.device(args.device)
    names = ["torch"]
    if device.type == "cuda" and find_spec("flashinfer"):
        names.append("flashinfer")
    backends = [backend_for(device, name) for name in names]
    result = {
        "device": _device_name(device),
        "torch": torch.__version__,
        "dtype": "bfloat16",
        "cached": args.cached,
        "repeats": args.repeats,
        "batches": [
            {"heads": heads, "batch": batch}
            | measure(backends, HEADS[heads], batch, args.cached, args.repeats, device)
            for heads in args.heads
            for batch in batches(args.sizes)
        ],
        "refused": sorted(set().union(*(backend.refused for backend in backends))),
    }
    text = json.dumps(result, indent=1)
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(text + "\n")
    print(text)


def batches(sizes: list[int]) -> list[str]:
    kinds = [f"{kind} x {size}" for size in sizes for kind in ("1 row", "4 rows", "tree of 16")]
    return [*kinds, "prompt of 1024 x 1"]


@torch.inference_mode()
def measure(
    backends: list[Backend],
    heads: tuple[int, int, int],
    batch: str,
    cached: int,
    repeats: int,
    device: torch.device,
) -> dict[str, Any]:
    """Median milliseconds per backend, and torch's layer time over FlashInfer's."""
    plan, cache = _plan(batch, cached, device)
    query, shared, width = heads
    rows = tuple(
        torch.randn(len(plan.slots), count, width, dtype=torch.bfloat16, device=device)
        for count in (query, shared, shared)
    )
    rule = AttentionRule(width**-0.5)
    found: dict[str, list[tuple[float, float]]] = {backend.name: [] for backend in backends}
    for repeat in range(repeats + 2):  # the first two compile and fill caches
        for backend in backends:
            times = _one(backend, cache, replace(plan, contexts={}), rows, rule, device)
            if repeat >= 2:
                found[backend.name].append(times)
    ms: dict[str, Any] = {
        name: {
            "first_ms": round(1e3 * median(first for first, _ in times), 4),
            "layer_ms": round(1e3 * median(layer for _, layer in times), 4),
        }
        for name, times in found.items()
    }
    if len(ms) == 2:
        ms["torch_over_flashinfer"] = round(
            ms["torch"]["layer_ms"] / ms["flashinfer"]["layer_ms"], 3
        )
    return ms


def _one(
    backend: Backend,
    cache: PagedKV,
    plan: BatchPlan,
    rows: tuple[Tensor, ...],
    rule: AttentionRule,
    device: torch.device,
) -> tuple[float, float]:
    wait: Callable[[], None] = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    wait()
    begin = time.perf_counter()
    context = backend.of(cache, plan)
    context(0, *rows, rule)
    first = time.perf_counter() - begin
    wait()
    begin = time.perf_counter()
    for _ in range(8):
        context(0, *rows, rule)
    wait()
    return first, (time.perf_counter() - begin) / 8


def _plan(batch: str, cached: int, device: torch.device) -> tuple[BatchPlan, PagedKV]:
    kind, size = batch.rsplit(" x ", 1)
    count = int(size)
    rows = int(kind.split()[-1]) if "of" in kind else int(kind.split()[0])
    before = 0 if kind.startswith("prompt") else cached
    need = -(-(before + rows) // PAGE)
    order = np.random.default_rng(0).permutation(need * count).tolist()
    pages = [order[index * need :][:need] for index in range(count)]
    tree = _binary_tree(before, rows) if kind.startswith("tree") else None
    plan = plan_batch(pages, [before] * count, [rows] * count, PAGE, device, [tree] * count)
    return plan, PagedKV(1, len(order), PAGE, dtype=torch.bfloat16, device=device)


def _binary_tree(base: int, nodes: int) -> TreeRows:
    seen = np.eye(nodes, dtype=bool)
    for node in range(1, nodes):
        seen[node] |= seen[(node - 1) // 2]
    return TreeRows(base, seen.sum(1) - 1, seen)


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor()


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--heads", nargs="+", choices=HEADS, default=list(HEADS))
    parser.add_argument(
        "--sizes", type=int, nargs="+", default=[1, 8, 32], help="sequences per batch"
    )
    parser.add_argument("--cached", type=int, default=1024, help="rows cached before the batch")
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--out", type=Path)
    return parser.parse_args()


if __name__ == "__main__":
    main()
