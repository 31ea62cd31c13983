"""Train variants of a head on one run's features, over seeds, and measure each through the engine.

What a family, a norm, a loss or a schedule is worth: equal data, seeds and steps, or with `--seconds` equal processor
time of training (a probe of each variant says how many tokens that is); greedy acceptance on held-out prompts.
Differences are paired by prompt and seed; intervals are 95 % bootstrap intervals over prompts. A line per finished
(variant, seed) is appended to `--out`, and the same command goes on from there.

    python tools/compare_heads.py variants.json --run runs/short --target .cache/targets/smollm2-135m-instruct \
        --sequences 600 --seeds 0 1 2 --out norms.jsonl

variants.json: {"mtp": {"head": {"family": "mtp"}, "train": {"rollout_steps": 3}}, ...}; the first is what the others
are compared with. `"run"` in a variant names another run's features and answers to train on.
"""

from __future__ import annotations

import argparse
import copy
import gc
import json
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from torch import Tensor

from mtp_train.checkpoint.heads import load_head
from mtp_train.core.errors import UserError
from mtp_train.core.records import Accounting
from mtp_train.engine.chain import ChainProposer
from mtp_train.engine.engine import Engine, EngineConfig
from mtp_train.engine.sequences import Request
from mtp_train.evaluate.acceptance import count_steps
from mtp_train.heads.base import DraftHead
from mtp_train.heads.families import build_head, family_of
from mtp_train.heads.start import FITTED
from mtp_train.models.target import Target, load_tokenizer, stop_tokens
from mtp_train.store.shards import FeatureSequence, FeatureStore
from mtp_train.text.sources import read_answers
from mtp_train.train.config import TrainConfig
from mtp_train.train.fitted import fit_projections
from mtp_train.train.loop import CURVES, train

RESAMPLES = 2000
PROBES = (8, 32)  # packs of two short trainings, whose difference is the pace


class FirstSequences:
    """The first sequences of a store, as a store."""

    def __init__(self, store: FeatureStore, count: int) -> None:
        self.store, self.count = store, min(count or len(store), len(store))
        self.manifest = store.manifest

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> FeatureSequence:
        return self.store[index]

    def read(self, indices: Sequence[int]) -> list[FeatureSequence]:
        return self.store.read(indices)

    def lengths(self) -> np.ndarray:
        return self.store.lengths()[: self.count]

    def loss_tokens(self) -> np.ndarray:
        return self.store.loss_tokens()[: self.count]

    def token_counts(self, *, trained: bool = False) -> Tensor:
        counts = torch.zeros_like(self.store.token_counts())
        for index in range(self.count):
            sequence = self.store[index]
            tokens = torch.as_tensor(np.asarray(sequence.tokens)).long()
            if trained:
                tokens = tokens[torch.as_tensor(np.asarray(sequence.loss_mask)) > 0]
            counts += torch.bincount(tokens, minlength=len(counts))
        return counts


def main() -> int:
    args = parse_args()
    variants = json.loads(args.variants.read_text())
    target = Target.load(args.target, "bfloat16")
    requests = held_out_requests(args, target)
    done = {(row["variant"], row["seed"]) for row in rows(args.out)}
    for seed in args.seeds:
        for name, variant in variants.items():
            if (name, seed) not in done:
                row = measure(args, target, requests, name, variant, seed)
                with open(args.out, "a", encoding="utf-8") as file:
                    file.write(json.dumps(row) + "\n")
                print(
                    f"{name} seed {seed}: tau {row['tau']:.3f}, {row['train_s']:.0f} s", flush=True
                )
    print(table(list(rows(args.out)), list(variants)))
    return 0


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("variants", type=Path, help="JSON: name -> {head: {...}, train: {...}}")
    parser.add_argument("--run", type=Path, required=True, help="a run folder with features")
    parser.add_argument("--target", type=Path, required=True)
    parser.add_argument("--sequences", type=int, default=0, help="of the features; 0: all")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--prompts", type=int, default=0, help="held-out prompts; 0: all")
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument(
        "--drafts", type=int, nargs="+", default=[3], help="per step; each is measured"
    )
    parser.add_argument(
        "--seconds", type=float, default=0, help="of training; 0: as the variant says"
    )
    parser.add_argument("--max-batch", type=int, default=64)
    parser.add_argument("--cache-rows", type=int, default=32768)
    parser.add_argument("--out", type=Path, required=True, help="JSON lines; appended to")
    return parser.parse_args()


def held_out_requests(args: argparse.Namespace, target: Target) -> list[Request]:
    stop = stop_tokens(load_tokenizer(args.target), args.target)
    answers = read_answers(args.run / "regenerate" / "heldout.jsonl", Accounting())
    chosen = answers[: args.prompts or None]
    return [Request(a.key, tuple(a.prompt_ids), args.max_new_tokens, stop) for a in chosen]


def measure(
    args: argparse.Namespace,
    target: Target,
    requests: list[Request],
    name: str,
    variant: dict[str, Any],
    seed: int,
) -> dict[str, Any]:
    """Train one head and decode the held-out prompts with it."""
    run = Path(variant.get("run", args.run))
    config = TrainConfig(
        **{"validations": 4, "checkpoints": 1} | variant.get("train", {}) | {"seed": seed}
    )
    head_config = family_of(variant["head"]["family"]).config(**variant["head"])
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder)
        whole = FeatureStore(run / "precompute" / "train")
        counts_V = whole.token_counts(trained=True)
        head = build_head(target, head_config, seed, counts_V)
        features: Any = FirstSequences(whole, variant.get("sequences", args.sequences))
        if args.seconds:
            features, config = within_seconds(args.seconds, target, head, whole, config)
        held_out = FeatureStore(args.run / "precompute" / "heldout")
        accelerator = Accelerator(mixed_precision="bf16", cpu=True)
        started = time.process_time()
        failure = ""
        try:
            if getattr(head_config, "init", "") == FITTED:
                fit_projections(head, target, features)
            train(target, head, features, held_out, config, accelerator, out)
        except UserError as error:
            failure = str(error)
        took = time.process_time() - started
        curves = [json.loads(line) for line in (out / CURVES).read_text().splitlines()]
        row: dict[str, Any] = {"variant": name, "seed": seed, "train_s": took, "failure": failure}
        row |= {"sequences": len(features), "rows": int(features.lengths().sum())}
        row |= {"trained_tokens": int(features.loss_tokens().sum()), "tau": 1.0, "counts": {}}
        row |= {"parameters": sum(one.numel() for one in head.parameters() if one.requires_grad)}
        row |= {"epochs": config.epochs, "calibration": []}
        row["curve"] = [(c["step"], c["validation"]) for c in curves if "validation" in c]
        row["losses"] = [c["loss"] for c in curves if "loss" in c]
        if not failure:
            head, card = load_head(out / "head", target)
            row["calibration"] = card.calibration
            for drafts in args.drafts:
                drafts = min(drafts, head.steps or drafts)
                engine = Engine(
                    target,
                    ChainProposer(target, copy.deepcopy(head), drafts),
                    EngineConfig(max_batch=args.max_batch, cache_rows=args.cache_rows),
                )
                counts = count_steps(engine.generate(requests), drafts)
                row["tau"] = float(1 + counts[:, 1:].sum() / counts[:, 0].sum())
                row["counts"][drafts] = counts.tolist()
    gc.collect()  # engines and optimisers lie in reference cycles, with gigabytes of cache
    return row


def within_seconds(
    seconds: float, target: Target, head: DraftHead, whole: FeatureStore, config: TrainConfig
) -> tuple[FirstSequences, TrainConfig]:
    """Sequences and epochs that take so long, by the processor time of a few packs on a copy of the head."""
    took, trained = zip(
        *(probe(target, head, whole, config, packs) for packs in PROBES), strict=True
    )
    pace = (trained[1] - trained[0]) / (took[1] - took[0])  # what is not a step counts for neither
    total = whole.lengths().sum()
    epochs = max(int(np.ceil(seconds * pace / total)), 1)
    rows = min(seconds * pace / epochs, total)
    count = max(int(np.searchsorted(whole.lengths().cumsum(), rows)), 1)
    return FirstSequences(whole, count), replace(config, epochs=epochs)


def probe(
    target: Target, head: DraftHead, whole: FeatureStore, config: TrainConfig, packs: int
) -> tuple[float, float]:
    """Processor seconds of training on so many packs, and their rows."""
    last = int(np.searchsorted(whole.lengths().cumsum(), packs * config.rows))
    few: Any = FirstSequences(whole, last)
    held: Any = FirstSequences(whole, 1)
    short = replace(config, epochs=1, validations=1, checkpoints=1)
    with tempfile.TemporaryDirectory() as folder:
        accelerator = Accelerator(mixed_precision="bf16", cpu=True)
        started = time.process_time()
        train(target, copy.deepcopy(head), few, held, short, accelerator, Path(folder))
        return time.process_time() - started, float(few.lengths().sum())


def rows(path: Path) -> Iterator[dict[str, Any]]:
    if path.is_file():
        for line in path.read_text(encoding="utf-8").splitlines():
            yield json.loads(line)


def table(found: list[dict[str, Any]], names: list[str]) -> str:
    """Markdown, a table for each k: seeds pooled, intervals over prompts, differences from the first variant paired."""
    parts = []
    for drafts in sorted({int(k) for row in found for k in row["counts"]}):
        runs: dict[str, dict[int, np.ndarray]] = defaultdict(dict)
        for row in found:
            if str(drafts) in row["counts"]:
                runs[row["variant"]][row["seed"]] = np.array(row["counts"][str(drafts)])
        lines = [
            f"| variant | seeds | accepted at 1 | difference | tau, k = {drafts} | difference | held-out KL | "
            "training s | parameters |",
            "|---|---|---|---|---|---|---|---|---|",
        ]
        for name in names:
            if name in runs and names[0] in runs:
                mine = [row for row in found if row["variant"] == name]
                lines.append(line(name, mine, runs[name], runs[names[0]], first=name == names[0]))
        parts.append("\n".join(lines))
    return "\n\n".join(parts)


def line(
    name: str,
    mine: list[dict[str, Any]],
    own_runs: dict[int, np.ndarray],
    base_runs: dict[int, np.ndarray],
    *,
    first: bool,
) -> str:
    """One row of the table, over the seeds that both variants have."""
    seeds = sorted(set(own_runs) & set(base_runs))
    own, base = (np.stack([runs[seed] for seed in seeds]) for runs in (own_runs, base_runs))
    cells = []
    for column in (0, 1):

        def value(pick: np.ndarray, column: int = column) -> float:
            return ratios(own, pick)[column]

        def difference(pick: np.ndarray, column: int = column) -> float:
            return ratios(own, pick)[column] - ratios(base, pick)[column]

        low, point, high = interval(value, own.shape[1])
        cells.append(f"{point:.3f} [{low:.3f}, {high:.3f}]")
        low, point, high = interval(difference, own.shape[1])
        cells.append("" if first else f"{point:+.3f} [{low:+.3f}, {high:+.3f}]")
    kl = np.mean([row["curve"][-1][1]["kl/1"] for row in mine])
    seconds = np.mean([row["train_s"] for row in mine])
    size = f"{mine[0]['parameters'] / 1e6:.1f} M"
    return f"| {name} | {len(seeds)} | {' | '.join(cells)} | {kl:.3f} | {seconds:.0f} | {size} |"


def ratios(counts: np.ndarray, pick: np.ndarray) -> tuple[float, float]:
    """Acceptance at position 1 and tau of some prompts, seeds pooled; counts [seeds, prompts, 1 + drafts]."""
    total = counts[:, pick].sum((0, 1))
    return total[1] / total[0], 1 + total[1:].sum() / total[0]


def interval(value: Any, prompts: int) -> tuple[float, float, float]:
    rng = np.random.default_rng(0)
    drawn = [value(rng.integers(prompts, size=prompts)) for _ in range(RESAMPLES)]
    low, high = np.percentile(drawn, [2.5, 97.5])
    return float(low), float(value(np.arange(prompts))), float(high)


if __name__ == "__main__":
    sys.exit(main())
