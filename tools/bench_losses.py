"""The chunked losses against the slow equations: time in one run, and peak memory over the number of rows.

Every measurement has a process of its own, forked before any tensor exists, so that its peak is its own. float32 on
the CPU, both sides the same arithmetic. Writes losses.json and losses.svg.

    python tools/bench_losses.py --out runs/bench_losses
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import resource
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mtp_train.losses.chunked import CHUNK, ON_DISTRIBUTION, ON_LABELS, distill
from mtp_train.losses.terms import TERMS

NAMES = (*ON_DISTRIBUTION, *ON_LABELS)
ALL = "all together"
COLOURS = ("#c0392b", "#2471a3", "#1e8449")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("runs/bench_losses"))
    parser.add_argument("--vocabulary", type=int, default=49152)
    parser.add_argument("--width", type=int, default=576)
    parser.add_argument("--rows", type=int, nargs="+", default=[256, 1024, 2048, 4096])
    parser.add_argument("--timed-rows", type=int, default=512)
    parser.add_argument(
        "--reference-rows", type=int, default=2048, help="beyond it the slow equations are left out"
    )
    args = parser.parse_args()
    sizes = {"vocabulary": args.vocabulary, "width": args.width}
    times = [compare(name, args.timed_rows, **sizes) for name in (*NAMES, ALL)]
    curves = {
        "fused, kl": curve("fused", "kl", args.rows, **sizes),
        f"fused, {ALL}": curve("fused", ALL, args.rows, **sizes),
        "reference, kl": curve(
            "reference", "kl", [rows for rows in args.rows if rows <= args.reference_rows], **sizes
        ),
    }
    result = {
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "chunk": CHUNK,
        **sizes,
        "terms": times,
        "peak_mb": curves,
    }
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "losses.json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    (args.out / "losses.svg").write_text(plot(curves), encoding="utf-8")
    print(table(times, args.timed_rows))
    for name, points in curves.items():
        print(f"{name}: " + ", ".join(f"{rows} rows {mb:.0f} MB" for rows, mb in points))
    return 0


def compare(name: str, rows: int, **sizes: int) -> dict[str, Any]:
    """One term both ways: seconds of a forward and backward pass, their ratio, and peaks in MB."""
    fused, slow = (
        apart(lambda kind=kind: measure(kind, name, rows, repeat=2, **sizes))
        for kind in ("fused", "reference")
    )
    return {
        "term": name,
        "reference_over_fused": slow["seconds"] / fused["seconds"],
        "fused": fused,
        "reference": slow,
    }


def curve(kind: str, name: str, rows: list[int], **sizes: int) -> list[tuple[int, float]]:
    """Peak memory in MB at each number of rows."""
    found = [apart(lambda count=count: measure(kind, name, count, **sizes)) for count in rows]
    return [(count, result["peak_mb"]) for count, result in zip(rows, found, strict=True)]


def apart(work: Callable[[], dict[str, float]]) -> dict[str, float]:
    """The result of `work` in a process of its own."""
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=lambda: theirs.send(work()))
    process.start()
    theirs.close()
    try:
        result: dict[str, float] = ours.recv()
    finally:
        process.join()
    return result


def measure(
    kind: str, name: str, rows: int, *, vocabulary: int, width: int, repeat: int = 1
) -> dict[str, float]:
    """Least seconds of a forward and backward pass, and how far memory rose above the inputs'."""
    generator = torch.Generator().manual_seed(0)
    head = torch.randn(vocabulary, width, generator=generator).mul_(0.1)
    teacher = torch.randn(rows, width, generator=generator)
    student = teacher + 0.3 * torch.randn(1, rows, width, generator=generator)
    label = torch.randint(vocabulary, (rows,), generator=generator)
    weights = dict.fromkeys(NAMES if name == ALL else (name,), 1.0)
    loss = fused_loss if kind == "fused" else reference_loss
    before, seconds = peak_mb(), []
    for _ in range(repeat):
        leaf = student.clone().requires_grad_()
        started = time.perf_counter()
        loss(leaf, teacher, head, weights, label).backward()
        seconds.append(time.perf_counter() - started)
    return {"seconds": min(seconds), "peak_mb": peak_mb() - before}


def fused_loss(
    student: Tensor, teacher: Tensor, head: Tensor, weights: dict[str, float], label: Tensor
) -> Tensor:
    return distill(student, teacher, head, weights, label_N=label).loss


def reference_loss(
    student: Tensor, teacher: Tensor, head: Tensor, weights: dict[str, float], label: Tensor
) -> Tensor:
    """Each term by its own equation: what a sum of separate loss functions costs."""
    total = torch.zeros(())
    for name, weight in weights.items():
        of = (student, head, label) if name in ON_LABELS else (student, teacher, head)
        total = total + weight * TERMS[name].reference(*of).sum()
    return total


def peak_mb() -> float:
    kilobytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return kilobytes / 1024


def table(times: list[dict[str, Any]], rows: int) -> str:
    lines = [
        f"| term, {rows} rows | reference / fused, time | fused MB | reference MB |",
        "|---|---|---|---|",
    ]
    for row in times:
        peaks = [f"{row[kind]['peak_mb']:.0f}" for kind in ("fused", "reference")]
        lines.append(f"| {row['term']} | {row['reference_over_fused']:.2f} | {' | '.join(peaks)} |")
    return "\n".join(lines)


def plot(curves: dict[str, list[tuple[int, float]]], width: int = 560, height: int = 320) -> str:
    """Peak memory over rows as SVG: one line per curve, labelled at its end."""
    left, right, top, bottom = 60, 150, 20, 45
    far = max(rows for points in curves.values() for rows, _ in points)
    high = max(mb for points in curves.values() for _, mb in points)

    def at(rows: float, mb: float) -> tuple[float, float]:
        x = left + (width - left - right) * rows / far
        return x, height - bottom - (height - top - bottom) * mb / high

    base = height - bottom
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        'font-family="sans-serif" font-size="11">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
        f'<path d="M{left} {top}V{base}H{width - right}" fill="none" stroke="#555"/>',
        f'<text x="{left}" y="{height - 10}">rows (across); peak memory beyond the inputs in MB (up)</text>',
    ]
    for share in (0.25, 0.5, 0.75, 1.0):
        (x, _), (_, y) = at(far * share, 0), at(0, high * share)
        parts.append(
            f'<text x="{left - 6}" y="{y:.0f}" text-anchor="end">{high * share:.0f}</text>'
        )
        parts.append(
            f'<text x="{x:.0f}" y="{base + 14}" text-anchor="middle">{far * share:.0f}</text>'
        )
    for index, (name, points) in enumerate(curves.items()):
        places = [at(*point) for point in points]
        colour = COLOURS[index]
        path = " ".join(f"{x:.0f},{y:.0f}" for x, y in places)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        x, y = places[-1][0], places[-1][1] + 14 * index  # flat curves lie on each other
        parts.append(f'<text x="{x + 6:.0f}" y="{y:.0f}" fill="{colour}">{name}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"


if __name__ == "__main__":
    sys.exit(main())
