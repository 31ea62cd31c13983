"""Hold a run's evaluation to the project's promises; exit 1 and say which one is broken.

Losslessness and the agreement of trainer and engine are always checked; acceptance only where a bar is given.

    python tools/check_run.py --run runs/smollm2_mtp_cpu --first 0.45 --tau 1.8
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from mtp_train.core.errors import UserError
from mtp_train.core.provenance import read_json

KL_TOLERANCE = 0.02  # relative: bfloat16 through the engine against the trainer's mixed precision
RATE_TOLERANCE = 0.01


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--run", type=Path, default=Path("runs/smollm2_mtp_cpu"))
    parser.add_argument("--first", type=float, default=0.0, help="least acceptance at position 1")
    parser.add_argument("--tau", type=float, default=0.0, help="least mean acceptance length")
    args = parser.parse_args()
    try:
        evaluation = read_json(args.run / "evaluate" / "evaluation.json")
    except UserError as error:
        print(f"check-run: error: {error}", file=sys.stderr)
        return 2
    broken = [*lossless(evaluation), *agreement(evaluation)]
    broken += bars(evaluation["sets"]["heldout"]["greedy"], args.first, args.tau)
    print("\n".join(f"check-run: BROKEN: {line}" for line in broken) or "check-run: passed")
    return 1 if broken else 0


def lossless(evaluation: dict[str, Any]) -> list[str]:
    """Speculation must not change greedy output, and plain decoding must be transformers' own."""
    result = evaluation["lossless"]
    rows = {"speculative against plain": result, "plain against generate": result["transformers"]}
    return [f"{name}: {row['different']}" for name, row in rows.items() if row["different"]]


def agreement(evaluation: dict[str, Any]) -> list[str]:
    """What the trainer reports must be what the engine gets."""
    engine, training = evaluation["validation"]["engine"], evaluation["validation"]["training"]
    found = []
    for name, theirs in training.items():
        room = KL_TOLERANCE * theirs if name.startswith("kl") else RATE_TOLERANCE
        if abs(engine[name] - theirs) > room:
            found.append(f"{name} {engine[name]:.4f} in the engine, {theirs:.4f} in training")
    return found


def bars(greedy: dict[str, Any], first: float, tau: float) -> list[str]:
    """Acceptance on the held-out prompts."""
    found = []
    if greedy["per_position"][0] < first:
        found.append(f"acceptance at position 1 {greedy['per_position'][0]:.3f}, at least {first}")
    if greedy["tau"] < tau:
        found.append(f"tau {greedy['tau']:.3f}, at least {tau}")
    return found


if __name__ == "__main__":
    sys.exit(main())
