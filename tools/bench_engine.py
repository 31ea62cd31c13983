"""The engine against stock vLLM and against itself with drafts: tokens per second, in one run.

    tools/setup_serving.sh
    python tools/bench_engine.py --target FOLDER --run runs/smollm2_mtp_cpu --out runs/bench_engine.json

Three comparisons, all greedy in bfloat16, every output as long as the others (stop tokens are tokens like any other):

    plain        our engine and vLLM's CPU build, the same prompts, threads and batch sizes; a process each, in turns
    speculative  every drafting scheme of ours against our plain decoding, in one process, in turns
    costs        seconds of target and head by rows and batch: what a verified row costs against a decoded one

A ratio is the median of the rounds' own; the first round is not counted. Between rounds prompts change, which prompts
there are more of than in the largest batch, and vLLM keeps no prefixes: nothing is read from a cache.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any

ROOT = Path(__file__).resolve().parents[1]
SIDES = ROOT / "tools" / "sides"
PLAIN = "plain"


def main() -> int:
    args = parse()
    prompts = read_prompts(args.prompts or args.run / "regenerate" / "heldout.jsonl")
    result: dict[str, Any] = {"threads": args.threads, "max_new_tokens": args.max_new_tokens}
    result |= {"prompts": len(prompts), "rounds": args.rounds, "compiled": args.compiled}
    args.out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        for part in measure(args, write_spec(args, prompts, Path(scratch))):
            result |= part
            args.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(table(result))
    return 0


def measure(args: argparse.Namespace, spec: Path) -> Iterator[dict[str, Any]]:
    """The comparisons, one after the other."""
    ours = Side([sys.executable, str(SIDES / "engine_ours.py"), str(spec)])
    if (python := args.serving / "bin" / "python").is_file():
        theirs = Side([str(python), str(SIDES / "engine_vllm.py"), str(spec)])
        rows = [against(ours, theirs, batch, args.rounds) for batch in args.plain_batches]
        yield {"plain": rows, "vllm": theirs.end()}
    else:
        print(f"bench: no vLLM in {args.serving} (tools/setup_serving.sh)", file=sys.stderr)
    yield {
        "speculative": [schemes(ours, args.schemes, batch, args.rounds) for batch in args.batches]
    }
    if args.cost_repeats:
        yield {"costs": ours.tell("costs")["costs"]}
    yield {"ours": ours.end()}


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--target", type=Path, required=True, help="folder of the target")
    parser.add_argument("--out", type=Path, required=True, help="JSON file to write")
    parser.add_argument("--run", type=Path, default=ROOT / "runs" / "smollm2_mtp_cpu")
    parser.add_argument("--head", type=Path, help="a trained head; without it, the run's")
    parser.add_argument("--prompts", type=Path, help="JSON lines with prompt_ids; else the run's")
    parser.add_argument("--serving", type=Path, default=ROOT / ".venv-serving")
    parser.add_argument("--compiled", action="store_true", help="let vLLM compile; else eager")
    parser.add_argument("--plain-batches", type=int, nargs="*", default=[1, 8, 32])
    parser.add_argument("--batches", type=int, nargs="*", default=[1, 4, 16])
    parser.add_argument("--schemes", nargs="*", default=["chain_1", "chain_2", "chain_3"])
    parser.add_argument("--cost-batches", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--cost-repeats", type=int, default=5, help="0 leaves the costs out")
    parser.add_argument("--rounds", type=int, default=3, help="counted rounds")
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    args = parser.parse_args()
    args.head = args.head or args.run / "train" / "head"
    return args


def read_prompts(path: Path) -> list[list[int]]:
    lines = path.read_text(encoding="utf-8").splitlines()
    return [json.loads(line)["prompt_ids"] for line in lines]


def write_spec(args: argparse.Namespace, prompts: list[list[int]], folder: Path) -> Path:
    """The file that tells a side what to run."""
    longest = max(map(len, prompts)) + args.max_new_tokens
    batches = [*args.plain_batches, *args.batches]
    spec = {
        "target": str(args.target),
        "head": str(args.head),
        "prompts": prompts,
        "max_new_tokens": args.max_new_tokens,
        "batches": batches,
        "threads": args.threads,
        "compiled": args.compiled,
        "cache_rows": max(batches) * (longest + 64),
        "costs": {
            "batches": args.cost_batches,
            "cached": sum(map(len, prompts)) // len(prompts) + args.max_new_tokens // 2,
            "repeats": args.cost_repeats,
        },
    }
    path = folder / "spec.json"
    path.write_text(json.dumps(spec), encoding="utf-8")
    return path


class Side:
    """A process that runs what it is told to."""

    def __init__(self, command: Sequence[str]) -> None:
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment()
        )
        self._answer("ready")

    def tell(self, line: str) -> dict[str, Any]:
        stdin = _pipe(self.process.stdin)
        stdin.write(line + "\n")
        stdin.flush()
        return self._answer("seconds")

    def end(self) -> dict[str, Any]:
        """End the process; its memory in MB, and what it says of itself."""
        _pipe(self.process.stdin).close()
        answer = self._answer("peak_mb")
        self.process.wait()
        return answer

    def _answer(self, key: str) -> dict[str, Any]:
        """The next answer; libraries may print other lines."""
        for line in _pipe(self.process.stdout):
            if line.startswith(f'{{"{key}"'):
                answer: dict[str, Any] = json.loads(line)
                return answer
        raise SystemExit(f"error: {self.process.args} ended before its work was done, see above")


def against(ours: Side, theirs: Side, batch: int, rounds: int) -> dict[str, Any]:
    """Both engines on the same prompts; who begins changes."""
    pairs = []
    for number in range(rounds + 1):
        sides = {"ours": ours, "vllm": theirs}
        order = list(sides) if number % 2 else list(reversed(sides))
        pairs.append({name: sides[name].tell(f"{PLAIN} {batch} {number}") for name in order})
    counted = pairs[1:]
    rates = {name: [rate(pair[name]) for pair in counted] for name in ("ours", "vllm")}
    return {
        "batch": batch,
        "tokens_per_s": {name: statistics.median(values) for name, values in rates.items()},
        "ratios": (found := ratios(rates["ours"], rates["vllm"])),
        "ratio": statistics.median(found),
        "cpu_ratio": statistics.median(cpu_ratio(pair) for pair in counted),
        "equal_tokens": statistics.mean(common_share(pair) for pair in counted),
    }


def schemes(ours: Side, names: Sequence[str], batch: int, rounds: int) -> dict[str, Any]:
    """Plain decoding and every scheme on the same prompts, in turns."""
    turns: dict[str, list[dict[str, Any]]] = {name: [] for name in (PLAIN, *names)}
    for number in range(rounds + 1):
        first = number % len(turns)
        for name in [*turns, *turns][first : first + len(turns)]:
            turns[name].append(ours.tell(f"{name} {batch} {number}"))
    counted = {name: answers[1:] for name, answers in turns.items()}
    plain = [rate(answer) for answer in counted[PLAIN]]
    found = {}
    for name, answers in counted.items():
        mine = ratios([rate(answer) for answer in answers], plain)
        found[name] = {
            "tokens_per_s": statistics.median(map(rate, answers)),
            "ratios": mine,
            "ratio": statistics.median(mine),
            "tau": statistics.mean(answer["tau"] for answer in answers),
            "shares": shares(answers),
        }
    return {"batch": batch, "schemes": found}


def rate(answer: dict[str, Any]) -> float:
    return float(answer["tokens"] / answer["seconds"])


def ratios(left: Sequence[float], right: Sequence[float]) -> list[float]:
    return [round(a / b, 3) for a, b in zip(left, right, strict=True)]


def cpu_ratio(pair: dict[str, Any]) -> float:
    """Ours to vLLM's tokens per second of CPU time, which work beside the benchmark slows less."""
    ours, vllm = (pair[name]["tokens"] / pair[name]["cpu_seconds"] for name in ("ours", "vllm"))
    return float(round(ours / vllm, 3))


def common_share(pair: dict[str, Any]) -> float:
    """How much of the outputs two engines say alike, up to each one's first difference."""
    outputs = list(zip(pair["ours"]["outputs"], pair["vllm"]["outputs"], strict=True))
    common = [
        next((at for at, (a, b) in enumerate(zip(*two, strict=True)) if a != b), len(two[0]))
        for two in outputs
    ]
    return sum(common) / sum(len(left) for left, _ in outputs)


def shares(answers: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Each part's share of the wall time; `cpu` is the engine's own Python."""
    wall = sum(answer["wall"] for answer in answers)
    names = sorted({name for answer in answers for name in answer["parts"]})
    found = {name: sum(a["parts"].get(name, 0.0) for a in answers) / wall for name in names}
    return found | {"cpu": 1 - sum(found.values())}


def table(result: dict[str, Any]) -> str:
    lines = [f"{result['threads']} threads, outputs of {result['max_new_tokens']} tokens"]
    if "plain" in result:
        memory = {name: result[name]["peak_mb"] for name in ("ours", "vllm")}
        lines += [
            "",
            "| batch | ours tokens/s | vLLM tokens/s | ours / vLLM | rounds | per CPU second |",
        ]
        lines += ["|" + "---|" * 6]
        lines += [plain_row(row) for row in result["plain"]]
        lines += [f"peak MB: ours {memory['ours']:.0f} (all schemes), vLLM {memory['vllm']:.0f}"]
    lines += [
        "",
        "| batch | scheme | tokens/s | to plain | rounds | tau | time |",
        "|" + "---|" * 7,
    ]
    lines += [
        scheme_row(part["batch"], name, row)
        for part in result["speculative"]
        for name, row in part["schemes"].items()
    ]
    if "costs" in result:
        lines += ["", f"a verified row against a decoded one, {result['costs']['cached']} cached"]
        lines += ["| batch | decoded, ms | " + " | ".join(f"k={k}" for k in range(1, 9)) + " |"]
        lines += ["|" + "---|" * 10]
        lines += [cost_row(row) for row in result["costs"]["batches"]]
    return "\n".join(lines)


def plain_row(row: dict[str, Any]) -> str:
    rates = " | ".join(f"{row['tokens_per_s'][name]:.1f}" for name in ("ours", "vllm"))
    ratio = f"{row['ratio']:.2f} | {listed(row['ratios'])} | {row['cpu_ratio']:.2f}"
    return f"| {row['batch']} | {rates} | {ratio} |"


def scheme_row(batch: int, name: str, row: dict[str, Any]) -> str:
    parts = ", ".join(f"{part} {share:.0%}" for part, share in row["shares"].items())
    return (
        f"| {batch} | {name} | {row['tokens_per_s']:.1f} | {row['ratio']:.2f} "
        f"| {listed(row['ratios'])} | {row['tau']:.2f} | {parts} |"
    )


def cost_row(row: dict[str, Any]) -> str:
    verified = " | ".join(f"{share:.2f}" for share in row["verified_row"])
    return f"| {row['batch']} | {row['target'][0] * 1000:.1f} | {verified} |"


def listed(values: Sequence[float]) -> str:
    return " ".join(f"{value:.2f}" for value in values)


def environment() -> dict[str, str]:
    """Idle sides must not spin; ours must find this checkout's package."""
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return os.environ | {"OMP_WAIT_POLICY": "PASSIVE", "PYTHONPATH": os.pathsep.join(paths)}


def _pipe(pipe: IO[str] | None) -> IO[str]:
    assert pipe is not None
    return pipe


if __name__ == "__main__":
    sys.exit(main())
