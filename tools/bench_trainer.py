"""A training step of the `mtp` head against speculators' MTP trainer: tokens per second and peak memory, in one run.

    tools/setup_peer.sh
    python tools/bench_trainer.py --target FOLDER --out runs/bench_trainer.json

Every side is a process of its own. They make their steps in turns, so that a slow minute of the machine slows all of
them; those of `llama`, too large to stay up together, one side after the other. The first step of each is not counted:
memory is allocated in it. A step is forward, loss, backward, clipping and AdamW, in
bfloat16 autocast, of the same documents, states, dimensions and draft steps, every token trained:

    peer      hard cross-entropy on the labels (its only loss for MTP), step weights .51, .31, .18
    hard_ce   ours, the same loss and weights
    kl        ours, the default: KL to the target's distribution + 0.1 smooth L1 of states, weights .46, .32, .22; the
              target's logits are computed from its states, which the peer does not do

The peer's block is Qwen3's: two norms over the width of a head more than ours. Its chains attend to the rows of one
step only; ours to those of all steps so far, as in the engine. Shapes: `smollm2` with the target's own weights and
states; `llama` with the dimensions of Llama-3.1-8B and random weights.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

ROOT = Path(__file__).resolve().parents[1]
SIDES = ROOT / "tools" / "sides"
PEER, OURS = "peer", ("kl", "hard_ce")
DOCUMENTS = {"one": (1.0,), "several": (0.30, 0.05, 0.25, 0.15, 0.25)}  # shares of the rows
LLAMA = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 128256,
    "num_hidden_layers": 1,  # the target's layers take no part in a step
    "max_position_embeddings": 8192,
    "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}


@dataclass(frozen=True)
class Case:
    """What all sides are given."""

    shape: str
    target: Path | None  # None: random weights
    config: dict[str, Any]
    documents: tuple[int, ...]  # lengths
    steps: int
    pairs: int  # counted steps of each side
    together: bool  # all sides up at once, in turns; else one after the other


def main() -> int:
    args = parse()
    result: dict[str, Any] = {"threads": args.threads, "peer": versions(args.peer_python)}
    result |= {"ours": versions(Path(sys.executable)), "cases": []}
    args.out.parent.mkdir(parents=True, exist_ok=True)
    for case in cases(args):
        result["cases"].append(compare(case, args.threads, args.peer_python))
        args.out.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
        print(table(result["cases"][-1]), flush=True)
    return 0


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--target", type=Path, help="folder of SmolLM2; without it, llama alone")
    parser.add_argument("--out", type=Path, required=True, help="JSON file to write")
    parser.add_argument("--peer-python", type=Path, default=ROOT / ".venv-peer" / "bin" / "python")
    parser.add_argument("--rows", type=int, default=2048)
    parser.add_argument("--steps", type=int, default=3, help="draft steps")
    parser.add_argument("--pairs", type=counted, default=3, help="counted steps of each side")
    parser.add_argument("--documents", nargs="+", choices=DOCUMENTS, default=list(DOCUMENTS))
    parser.add_argument("--llama-rows", type=int, default=256, help="0 leaves this shape out")
    parser.add_argument("--llama-steps", type=int, default=1)
    parser.add_argument("--llama-pairs", type=int, default=2, help="0 leaves this shape out")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    return parser.parse_args()


def counted(text: str) -> int:
    """A number of steps that there are figures of."""
    if not text.isdigit() or not int(text):
        raise argparse.ArgumentTypeError(f"must be 1 or more, not {text}")
    return int(text)


def cases(args: argparse.Namespace) -> list[Case]:
    found = []
    if args.target:
        config = json.loads((args.target / "config.json").read_text(encoding="utf-8"))
        for name in args.documents:
            documents = split(args.rows, DOCUMENTS[name])
            found.append(
                Case("smollm2", args.target, config, documents, args.steps, args.pairs, True)
            )
    if args.llama_rows and args.llama_pairs > 0:
        documents = split(args.llama_rows, DOCUMENTS["several"])
        found.append(
            Case("llama", None, LLAMA, documents, args.llama_steps, args.llama_pairs, False)
        )
    return found


def compare(case: Case, threads: int, peer_python: Path) -> dict[str, Any]:
    """All sides on one batch: their figures, and how ours stand to the peer's."""
    with tempfile.TemporaryDirectory() as scratch:
        spec = write_spec(case, threads, Path(scratch))
        ours = [sys.executable, str(SIDES / "ours.py"), str(spec)]
        subprocess.run([*ours, "rows"], check=True, env=environment())
        commands = {PEER: [str(peer_python), str(SIDES / "speculators_mtp.py"), str(spec)]}
        commands |= {name: [*ours, name] for name in OURS}
        groups = [list(commands)] if case.together else [[name] for name in commands]
        figures: dict[str, dict[str, Any]] = {}
        for names in groups:
            sides = {name: Side(commands[name]) for name in names}
            take_turns(sides, case.pairs + 1)
            figures |= {name: side.figures(sum(case.documents)) for name, side in sides.items()}
    sizes = {"shape": case.shape, "documents": case.documents, "steps": case.steps}
    return sizes | {"sides": figures, "ours_to_peer": ratios(figures)}


def take_turns(sides: dict[str, Side], rounds: int) -> None:
    """A step of each side in every round; who begins changes."""
    for number in range(rounds):
        first = number % len(sides)
        for name in [*sides, *sides][first : first + len(sides)]:
            sides[name].step()


def write_spec(case: Case, threads: int, folder: Path) -> Path:
    """The file that tells a side what to train."""
    spec = {
        "target": None if case.target is None else str(case.target),
        "config": case.config,
        "documents": case.documents,
        "steps": case.steps,
        "rows": str(folder / "rows.safetensors"),
        "threads": threads,
        "learning_rate": 1e-4,
    }
    path = folder / "spec.json"
    path.write_text(json.dumps(spec), encoding="utf-8")
    return path


class Side:
    """A process that makes one training step whenever it is told to."""

    def __init__(self, command: Sequence[str]) -> None:
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment()
        )
        self.steps: list[dict[str, float]] = []
        self._answer("ready")

    def step(self) -> None:
        stdin = _pipe(self.process.stdin)
        stdin.write("step\n")
        stdin.flush()
        self.steps.append(self._answer("seconds"))

    def figures(self, rows: int) -> dict[str, Any]:
        """End the process; its rate is the fastest step's, the first left out."""
        _pipe(self.process.stdin).close()
        memory = self._answer("peak_mb")
        self.process.wait()
        seconds = [answer["seconds"] for answer in self.steps[1:]]
        return {
            "seconds": [round(value, 3) for value in seconds],
            "tokens_per_second": rows / min(seconds),
            "losses": [answer["loss"] for answer in self.steps],
        } | memory

    def _answer(self, key: str) -> dict[str, float]:
        """The next answer; libraries may print other lines."""
        for line in _pipe(self.process.stdout):
            if line.startswith(f'{{"{key}"'):
                answer: dict[str, float] = json.loads(line)
                return answer
        raise SystemExit(f"error: {self.process.args} ended before its work was done, see above")


def ratios(figures: dict[str, dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Per loss of ours: times the peer's tokens/s, shares of its peak memory and of its growth, and of its work."""
    peer = figures[PEER]

    def growth(side: dict[str, Any]) -> float:
        return float(side["peak_mb"] - side["held_mb"])

    return {
        name: {
            "times_tokens_per_second": round(
                figures[name]["tokens_per_second"] / peer["tokens_per_second"], 2
            ),
            "share_of_peak_memory": round(figures[name]["peak_mb"] / peer["peak_mb"], 3),
            "share_of_growth": round(growth(figures[name]) / growth(peer), 3),
            "share_of_trained_predictions": round(figures[name]["trained"] / peer["trained"], 4),
        }
        for name in OURS
    }


def table(case: dict[str, Any]) -> str:
    lines = [
        f"{case['shape']}, documents of {case['documents']}, {case['steps']} steps",
        "| side | seconds | tokens/s | peak MB | of that held before | times tokens/s | share of peak |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, side in case["sides"].items():
        to_peer = case["ours_to_peer"].get(name, {})
        rate, share = (
            to_peer.get(key, "") for key in ("times_tokens_per_second", "share_of_peak_memory")
        )
        seconds = ", ".join(f"{value:.2f}" for value in side["seconds"])
        lines.append(
            f"| {name} | {seconds} | {side['tokens_per_second']:.0f} | {side['peak_mb']:.0f} "
            f"| {side['held_mb']:.0f} | {rate} | {share} |"
        )
    return "\n".join(lines)


def split(rows: int, shares: Sequence[float]) -> tuple[int, ...]:
    """Document lengths of sum `rows`."""
    lengths = [int(rows * share) for share in shares[1:]]
    return (rows - sum(lengths), *lengths)


def versions(python: Path) -> dict[str, str]:
    """Of what decides the figures, in an environment."""
    names = ("torch", "transformers", "speculators", "mtp-train")
    code = (
        "import importlib.metadata as m, json;"
        f"print(json.dumps({{d.name: d.version for d in m.distributions() if d.name in {names}}}))"
    )
    done = subprocess.run([str(python), "-c", code], check=True, capture_output=True, text=True)
    found: dict[str, str] = json.loads(done.stdout)
    return found


def environment() -> dict[str, str]:
    """Idle sides must not spin; ours must find this checkout's package."""
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return os.environ | {"OMP_WAIT_POLICY": "PASSIVE", "PYTHONPATH": os.pathsep.join(paths)}


def _pipe(pipe: IO[str] | None) -> IO[str]:
    assert pipe is not None
    return pipe


if __name__ == "__main__":
    sys.exit(main())
