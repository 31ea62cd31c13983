"""What a head is worth in seconds: a model of speed from measured costs and acceptance, and measured speed beside it.

    speed-up(batch, k) = tau(k) * plain step(batch) / step(batch, k)
    tau(k)             = 1 + sum of P(i), i = 1 .. k

P(i) is the measured chance that drafts 1 .. i of a step are all accepted (per position, unconditional). Past the
measured positions P(i) = P(i - 1) * c, with the last measured conditional rate c: marked `extrapolated`. Costs between
two measured batch sizes lie on the straight line between theirs, past the largest on the line of the last two: marked
likewise. Prompts are read in the same time with and without drafts and are no part of the model.

Knows no training code and no report.
"""

from __future__ import annotations

import copy
import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from mtp_train.core.progress import progress
from mtp_train.core.provenance import read_json, write_json
from mtp_train.engine.engine import Engine, EngineConfig
from mtp_train.engine.schemes import SchemeConfig, make_proposer
from mtp_train.engine.sequences import Request
from mtp_train.evaluate.costs import DRAFTS, BatchCost, costs_as_json, measure_costs
from mtp_train.evaluate.runs import fitted_cache
from mtp_train.evaluate.sets import PromptSet, spread
from mtp_train.evaluate.stage import EvaluateConfig
from mtp_train.evaluate.timings import Timed, summed
from mtp_train.heads.base import DraftHead
from mtp_train.models.target import Target

Schemes = Mapping[int, SchemeConfig]  # by number of drafts

BATCHES = (1, 2, 4, 8, 16, 32, 64)  # that speed-ups are predicted for


@dataclass(frozen=True)
class Prediction:
    """The model's answer for one batch size and k."""

    batch: int
    k: int
    speedup: float
    extrapolated: bool


class SpeedModel:
    """Expected speed-ups.

    Args:
        costs: of one batch size or more, in rising order.
        per_position: P(1) .. P(K), unconditional.
        steps: draft steps that the head has; None is any number.
    """

    def __init__(
        self, costs: Sequence[BatchCost], per_position: Sequence[float], steps: int | None = None
    ) -> None:
        self.costs = list(costs)
        self.measured = len(per_position)
        self.largest = min(DRAFTS, steps or DRAFTS)
        self.per_position = extended(per_position, self.largest)

    def tau(self, drafts: int) -> float:
        """Expected tokens per step."""
        return 1 + sum(self.per_position[:drafts])

    def speedup(self, batch: float, drafts: int, tau: float | None = None) -> float:
        """Against plain decoding; with another tau than the expected one where it is known.

        Never more than tau: a step with drafts that was measured as cheaper than a plain one was measured badly.
        """
        plain = self._seconds(batch, 0)
        share = plain / max(self._seconds(batch, drafts), plain)
        return (self.tau(drafts) if tau is None else tau) * share

    def predictions(self, batches: Sequence[int] = BATCHES) -> list[Prediction]:
        ks = range(1, self.largest + 1)
        return [
            Prediction(batch, k, self.speedup(batch, k), self._extrapolated(batch, k))
            for batch in batches
            for k in ks
        ]

    def recommended(self, batches: Sequence[int] = BATCHES) -> dict[str, int]:
        """The best k of each batch size; 0 where plain decoding is."""
        return {str(batch): self._best(batch) for batch in batches}

    def _best(self, batch: int) -> int:
        speedups = {k: self.speedup(batch, k) for k in range(1, self.largest + 1)}
        k = max(speedups, key=speedups.__getitem__)
        return k if speedups[k] > 1 else 0

    def _extrapolated(self, batch: int, drafts: int) -> bool:
        inside = self.costs[0].batch <= batch <= self.costs[-1].batch
        return drafts > self.measured or not inside

    def _seconds(self, batch: float, drafts: int) -> float:
        """Of a step with `drafts` drafts; none is plain decoding."""
        points = [
            (cost.batch, cost.step(drafts) if drafts else cost.plain()) for cost in self.costs
        ]
        return on_line(points, batch)


def extended(per_position: Sequence[float], positions: int) -> list[float]:
    """Unconditional acceptance at `positions` positions, past the measured ones by the last conditional rate."""
    known = list(per_position[:positions])
    before = [1.0, *per_position]
    rate = before[-1] / before[-2] if len(before) > 1 and before[-2] > 0 else 0.0
    while len(known) < positions:
        known.append((known[-1] if known else 1.0) * rate)
    return known


def on_line(points: Sequence[tuple[float, float]], at: float) -> float:
    """Piecewise linear through `points` of rising x, its last piece drawn on; one point is a constant.

    Before the first point its value stands: a smaller batch is taken to be no cheaper.
    """
    if len(points) == 1 or at <= points[0][0]:
        return points[0][1]
    pieces = list(pairwise(points))
    (x0, y0), (x1, y1) = next((piece for piece in pieces if at <= piece[1][0]), pieces[-1])
    return y0 + (y1 - y0) * (at - x0) / (x1 - x0)


def measure_speeds(
    target: Target,
    head: DraftHead,
    prompts: PromptSet,
    per_position: Sequence[float],
    config: EvaluateConfig,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Measured speed at batch 1, and the model of speed checked at every batch size; both empty without prompts.

    A batch size that there are too few prompts for is left out.

    Args:
        per_position: unconditional acceptance, greedy, over the whole set.
    """
    if not (config.speed_prompts and prompts.requests):
        return {}, {}
    ks = range(1, config.drafts + 1) if config.scheme == "chain" else [config.drafts]
    schemes = {k: config.drafted(k) for k in ks}
    counts = {
        batch: whole_batches(len(prompts.requests), batch, config.speed_prompts)
        for batch in sorted({1, *config.speed_batches})
    }
    requests = [
        replace(one, max_new_tokens=min(one.max_new_tokens, config.speed_tokens))
        for one in prompts.requests
    ]
    speeds = [
        measure_speed(
            target, head, spread(requests, count), schemes, batch, config.speed_rounds, config.seed
        )
        for batch, count in counts.items()
        if count
    ]
    if config.scheme != "chain":
        return speeds[0], {}  # the model is of chains
    lengths = [len(request.prompt) + config.max_new_tokens // 2 for request in prompts.requests]
    cached = round(sum(lengths) / len(lengths))
    with progress(config.cost_repeats + 1, "costs by batch and rows", "round") as bar:
        costs = measure_costs(
            target, head, config.cost_batches, cached, config.cost_repeats, notice=bar.update
        )
    model = SpeedModel(costs, per_position, head.steps)
    return speeds[0], {
        "costs": costs_as_json(costs, cached, config.cost_repeats),
        "predicted": [asdict(prediction) for prediction in model.predictions()],
        "measured": [row for speed in speeds for row in compared(model, speed)],
        "recommended": model.recommended(),
    }


def measured_steps(
    target: Target, head: DraftHead, sets: Sequence[PromptSet], config: EvaluateConfig, path: Path
) -> EvaluateConfig:
    """The configuration with what an adaptive scheme must know of this machine; measured once, kept in `path`.

    A file that is there is read: a run that goes on stops its drafts where it did before.
    """
    if config.scheme != "adaptive" or head.temperatures is None or config.step_seconds:
        return config
    if not path.is_file():
        lengths = [len(one.prompt) for prompts in sets for one in prompts.requests]
        cached = round(sum(lengths) / len(lengths)) + config.max_new_tokens // 2
        with progress(config.cost_repeats + 1, "costs by batch and rows", "round") as bar:
            costs = measure_costs(
                target, head, config.cost_batches, cached, config.cost_repeats, notice=bar.update
            )
        write_json(path, {str(cost.batch): cost.steps() for cost in costs})
    found = read_json(path)
    return replace(config, step_seconds={int(batch): row for batch, row in found.items()})


def compared(model: SpeedModel, speed: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Measured speed-ups beside the model's, at the mean number of sequences that ran at once.

    `predicted` is by the expected tau, `predicted_own_tau` by that of the timed prompts: what is left between it and
    the measured one is the fault of the costs.
    """
    return [
        {
            "batch": speed["batch"],
            "k": int(k),
            "speedup": run["ratio"],
            "speedup_ci": run["ratio_ci"],
            "warnings": run["warnings"],
            "predicted": model.speedup(run["running"], int(k)),
            "predicted_own_tau": model.speedup(run["running"], int(k), run["tau"]),
            "tau": run["tau"],
            "running": run["running"],
        }
        for k, run in speed["speculative"].items()
    ]


def measure_speed(
    target: Target,
    head: DraftHead,
    requests: Sequence[Request],
    schemes: Schemes,
    batch: int = 1,
    rounds: int = 3,
    seed: int = 0,
) -> dict[str, Any]:
    """Plain and speculative decoding of the same prompts, `batch` at a time, for every scheme.

    Every round times every scheme on every group of prompts, in an order of its own, so that a slow minute of the
    machine does not fall on one scheme alone.
    """
    engines = _engines(target, head, requests, schemes, batch)
    groups = [requests[at : at + batch] for at in range(0, len(requests), batch)]
    runs: dict[int, list[Timed]] = {k: [] for k in engines}
    for engine in engines.values():  # first calls pay for allocations
        engine.generate([replace(request, max_new_tokens=4) for request in groups[0]])
    order = random.Random(seed)
    with progress(rounds * len(groups) * len(engines), f"speed, batch {batch}", "run") as bar:
        for number in range(rounds):
            turns = [(k, at) for k in engines for at in range(len(groups))]
            for k, at in order.sample(turns, len(turns)):
                runs[k].append(_timed(engines[k], groups[at], number, at))
                bar.update()
    told = summed(runs, target.device.type)
    return {"batch": batch, "prompts": len(requests), "rounds": rounds, **told}


def _timed(engine: Engine, group: Sequence[Request], number: int, at: int) -> Timed:
    begin = time.process_time()
    done = engine.generate(group)
    cpu = time.process_time() - begin
    drafted = [step.accepted for completion in done for step in completion.steps]
    steps = len(drafted) + sum(completion.undrafted for completion in done)
    return Timed(number, at, engine.stats, cpu, len(drafted), sum(drafted), steps)


def whole_batches(prompts: int, batch: int, wanted: int) -> int:
    """How many of the prompts to time at this batch size: about `wanted`, every batch full; 0 if there are too few."""
    count = min(max(wanted, batch), prompts)
    return count - count % batch


def _engines(
    target: Target, head: DraftHead, requests: Sequence[Request], schemes: Schemes, batch: int
) -> dict[int, Engine]:
    """An engine for each k, 0 for plain decoding."""
    # What one round has read the next would find: every run reads its prompts.
    config = EngineConfig(max_batch=batch, share_prefixes=False)
    drafted = {
        k: make_proposer(target, copy.deepcopy(head), scheme) for k, scheme in schemes.items()
    }
    return {
        k: Engine(target, proposer, fitted_cache(config, proposer, requests))
        for k, proposer in {0: None, **drafted}.items()
    }
