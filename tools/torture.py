"""Faults on purpose: kills, full and read-only disks, wrong bytes, foreign files, in every stage of a small run.

    python tools/torture.py --kills 30 --seed 0 --ranks 1,2 --table docs/reliability.md

One unbroken run first. Each trial then brings about one fault and repeats the same command: it must end with the bytes
of the unbroken run, or say in one line what to do, and leave foreign files alone. Exit status 1 if one did not. Results
are kept in `--out` from call to call, so that kinds can be tried one by one (`--only`) into one table. Full and
read-only disks need root, for a mount of their own; without it they are left out, and said so.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import re
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tools")]

from torture_judge import FAILED, LINE, MAY_DIFFER, SAME, WHY  # noqa: E402
from torture_trials import KINDS, STAGES, Bench, Trial, can_mount, trials  # noqa: E402

from mtp_train.core.errors import UserError  # noqa: E402

TARGET = Path(".cache/targets/smollm2-135m-instruct")
SETTINGS = [  # in float32, since a batch of other rows may round bfloat16 otherwise; several of everything that is kept
    "recipe=smollm2_mtp_cpu",
    "threads=1",
    "target.dtype=float32",
    "precision=float32",
    "regenerate.limits={train: 8, heldout: 2, ood: 1}",
    "regenerate.max_new_tokens=8",
    "engine.max_batch=3",
    "precompute.rows_per_shard=256",
    "precompute.rows_per_forward=256",
    "train.epochs=1",
    "train.rows=256",
    "train.warmup_steps=1",
    "train.validations=1",
    "train.checkpoints=2",
    "evaluate.drafts=1",
    "evaluate.max_new_tokens=4",
    "evaluate.sampled_prompts=1",
    "evaluate.speed_prompts=1",
    "evaluate.speed_batches=[1]",
    "evaluate.cost_batches=[1]",
    "evaluate.cost_repeats=1",
    "evaluate.lossless_prompts=1",
    "evaluate.lossless_tokens=4",
    "evaluate.reference_prompts=1",
    "evaluate.examples=1",
]
BLOCK = re.compile(r"(?<=<!-- torture -->\n).*?(?=<!-- /torture -->)", re.DOTALL)
HEADINGS = {
    "kills": "kill -9",
    "disk": "full disk",
    "readonly": "read-only folder",
    "corrupt": "wrong byte",
    "foreign": "foreign files",
}
NEEDS_MOUNT = {"disk", "readonly"}


@dataclass(frozen=True)
class Result:
    """A trial's outcome, as it is kept."""

    name: str
    kind: str
    stage: str
    ranks: int
    verdict: str
    detail: str


def main(arguments: Sequence[str] | None = None) -> int:
    args = _arguments(arguments)
    ranks = [int(number) for number in args.ranks.split(",")]
    bench = Bench(args.out.resolve(), [*SETTINGS, f"target.path={args.target.resolve()}"])
    kept = prepare(bench, ranks)
    wanted = [
        trial
        for trial in trials(bench, args.kills, ranks, args.only or KINDS)
        if args.match in trial.name
    ]
    if not can_mount(bench.disk):
        left = sorted({trial.kind for trial in wanted} & NEEDS_MOUNT)
        print(f"torture: left out, no right to mount: {', '.join(left)}", flush=True)
        wanted = [trial for trial in wanted if trial.kind not in NEEDS_MOUNT]
    results = carry_out(wanted, args.seed, kept, args.out / "results.json")
    if args.table:
        asked = f"--kills {args.kills} --seed {args.seed} --ranks {args.ranks}"
        asked += "".join(f" --only {kind}" for kind in args.only or ())
        write_table(args.table, results, asked + (f" --match {args.match}" if args.match else ""))
    wrong = [result for result in results.values() if result.verdict == FAILED]
    print(f"torture: {len(results)} trials, {len(wanted)} of them now, {len(wrong)} failed")
    return 1 if wrong else 0


def prepare(bench: Bench, ranks: Sequence[int]) -> dict[str, Result]:
    """Make the unbroken run, unless it is there; the results so far that were held against it."""
    path, settings = (
        bench.out / "reference.json",
        {"overrides": bench.overrides, "ranks": list(ranks)},
    )
    if path.is_file():
        found = json.loads(path.read_text())
        if found["settings"] == settings and found["code"] == code_digest():
            bench.cpu = found["cpu"]
            results = bench.out / "results.json"
            rows = json.loads(results.read_text()) if results.is_file() else []
            return {row["name"]: Result(**row) for row in rows}
    print("torture: the unbroken run", flush=True)
    bench.make_reference(ranks)
    path.write_text(json.dumps({"settings": settings, "code": code_digest(), "cpu": bench.cpu}))
    seconds = ", ".join(f"{name} {value:.1f}" for name, value in bench.cpu.items())
    print(f"torture: processor seconds by stage and ranks: {seconds}", flush=True)
    return {}


def code_digest() -> str:
    from mtp_train.core.provenance import digest, file_digest

    return digest([file_digest(path) for path in sorted((ROOT / "mtp_train").rglob("*.py"))])


def carry_out(
    wanted: Sequence[Trial], seed: int, results: dict[str, Result], path: Path
) -> dict[str, Result]:
    """Do trials one after the other; each has a random generator of its own, so that it can be done alone."""
    began = time.monotonic()
    for number, trial in enumerate(wanted, 1):
        outcome = trial.work(random.Random(f"{seed} {trial.name}"))
        results[trial.name] = Result(
            trial.name, trial.kind, trial.stage, trial.ranks, outcome.verdict, outcome.detail
        )
        path.write_text(json.dumps([asdict(result) for result in results.values()], indent=1))
        left = (time.monotonic() - began) / number * (len(wanted) - number)
        print(
            f"torture: {number}/{len(wanted)} {trial.name}: {outcome} ({left / 60:.0f} min left)",
            flush=True,
        )
    return results


def table(results: dict[str, Result], command: str) -> str:
    """The outcomes by kind of fault, stage and number of ranks, in Markdown."""
    counts: dict[tuple[str, str, int], Counter[str]] = {}
    for result in results.values():
        key = (result.kind, result.stage, result.ranks)
        counts.setdefault(key, Counter())[result.verdict] += 1
    order = sorted(counts, key=lambda key: (KINDS.index(key[0]), STAGES.index(key[1]), key[2]))
    rows = [
        f"| {HEADINGS[kind]} | {stage} | {ranks} | {counts[kind, stage, ranks].total()} | "
        + " | ".join(str(counts[kind, stage, ranks][verdict]) for verdict in (SAME, LINE, FAILED))
        + " |"
        for kind, stage, ranks in order
    ]
    total = sum(counts.values(), Counter())
    rows.append(f"| all | | | {total.total()} | {total[SAME]} | {total[LINE]} | {total[FAILED]} |")
    wrong = [
        f"- `{result.name}`: {plain(result.detail)}"
        for result in results.values()
        if result.verdict == FAILED
    ]
    return "\n".join(
        [
            f"`python tools/torture.py {command}`, {date.today()}, {os.cpu_count()} cores of {processor()},"
            f" Python {platform.python_version()}:",
            "",
            f"| fault | stage | ranks | trials | {SAME} | {LINE} | failed |",
            "|---|---|---|---|---|---|---|",
            *rows,
            *(["", "Failed:", "", *wrong] if wrong else []),
            "",
        ]
    )


def plain(detail: str) -> str:
    """What was said, without the folders of this machine."""
    return re.sub(r"/\S*/(?=disk/run)", "", detail)


def processor() -> str:
    """The processor's name, as the system says it."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return platform.machine()
    found = re.search(r"model name\s*:\s*(.+)", text)
    return found[1] if found else platform.machine()


def write_table(path: Path, results: dict[str, Result], command: str) -> None:
    """Put the table between the marks of a page."""
    text = path.read_text(encoding="utf-8")
    if not BLOCK.search(text):
        raise UserError("the page must hold <!-- torture --> marks", path, "add them")
    path.write_text(table(results, command).join(BLOCK.split(text, maxsplit=1)), encoding="utf-8")


def _arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    differ = "; ".join(f"{name}: {', '.join(keys)}" for name, keys in MAY_DIFFER.items())
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").splitlines()[0],
        epilog=f"Not compared: {differ}. " + "; ".join(f"{key}: {why}" for key, why in WHY.items()),
    )
    parser.add_argument("--target", type=Path, default=TARGET)
    parser.add_argument("--kills", type=int, default=30)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--ranks", default="1,2", help="numbers of ranks, with commas")
    parser.add_argument(
        "--only", choices=KINDS, action="append", help="a kind of fault; repeat it for several"
    )
    parser.add_argument("--match", default="", help="only trials whose names contain this")
    parser.add_argument("--out", type=Path, default=Path("runs/torture"))
    parser.add_argument("--table", type=Path, help="a page, whose marked part becomes the table")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
