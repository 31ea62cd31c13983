"""What a step costs: seconds of target and head by rows and batch, on the caches and plans that the engine uses.

Knows no acceptance and no sequence: every batch stands at one cached length, over keys and values of zeros, which take
as long as others. Parts take turns, in a new order in every round, so that a slow minute of the machine slows all of
them alike.

A step with k drafts is made of three parts; each ends with the choice of tokens:

    target    B sequences x k + 1 rows, logits of all rows
    observe   the head over the same rows (a draft model: over the newest two), logits of one row per sequence
    draft     a head that drafts all tokens at once: its forward. Others, k - 1 times: a forward of one row per
              sequence, and its logits

Shapes: B sequences, R rows of each, T = B * R rows, D hidden width, V vocabulary.
"""

from __future__ import annotations

import copy
import random
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import numpy as np
import torch

from mtp_train.attention.paged import BatchPlan, PagedContext, PagedKV, TreeRows, plan_batch
from mtp_train.core.errors import UserError
from mtp_train.engine.sampling import best
from mtp_train.heads.base import Carry, DraftHead, Drafting
from mtp_train.models.target import Target

PAGE = 16
DRAFTS = 8  # largest k whose cost is measured
TARGET, OBSERVE, DRAFT = "target", "observe", "draft"
Part = tuple[int, str, int]  # batch, name, rows per sequence


@dataclass(frozen=True)
class BatchCost:
    """Seconds of each part for one batch size: medians, and half the interquartile range as a share of them."""

    batch: int
    target: tuple[float, ...]  # by rows per sequence: 1 .. DRAFTS + 1
    observe: tuple[float, ...]  # likewise; empty without a head
    draft: float  # 0 without a head, or with one of a single step
    noise: dict[str, float]  # of each part, the largest over its row counts
    at_once: bool = False  # one forward drafts all tokens

    def plain(self) -> float:
        """Seconds of a step of plain decoding."""
        return self.target[0]

    def step(self, drafts: int) -> float:
        """Seconds of a step with `drafts` drafts."""
        forwards = 1 if self.at_once else drafts - 1
        return self.target[drafts] + self.observe[drafts] + forwards * self.draft

    def steps(self) -> list[float]:
        """Seconds of steps with 0, 1, .. drafts, all of which the head has made: what can be saved is rows."""
        rows = zip(self.target, self.observe, strict=True)
        return [target + observe + self.draft for target, observe in rows]

    def verified_row(self, drafts: int) -> float:
        """A row of a forward that verifies `drafts` drafts, against the row of a plain one."""
        return self.target[drafts] / ((drafts + 1) * self.target[0])


@torch.inference_mode()
def measure_costs(
    target: Target,
    head: DraftHead | None,
    batches: Sequence[int],
    cached: int,
    repeats: int,
    seed: int = 0,
    notice: Callable[[], None] = lambda: None,
) -> list[BatchCost]:
    """The costs of each batch size, `cached` rows standing in every sequence's cache before the step.

    Args:
        repeats: counted rounds; one before them is not.
        notice: called after every round, `repeats + 1` times.
    """
    cached = min(cached, target.max_positions - DRAFTS - 1)
    if cached < 1 or repeats < 1 or min(batches) < 1:
        raise UserError(
            "costs need a cached row, a round and a sequence or more",
            f"cached {cached}, repeats {repeats}, batches {list(batches)}",
            "raise them",
        )
    with torch.inference_mode(
        False
    ):  # as the engine serves it: weights that are cast here are not packed
        served = None if head is None else copy.deepcopy(head).serving(target)
    work = _Work(target, served, max(batches), cached)
    parts = {part: run for batch in batches for part, run in work.parts(batch).items()}
    seconds = _in_turns(parts, repeats, random.Random(seed), target.device, notice)
    at_once = head is not None and head.at_once
    return [
        _summary(
            batch, {part: values for part, values in seconds.items() if part[0] == batch}, at_once
        )
        for batch in sorted(batches)
    ]


def costs_as_json(costs: Sequence[BatchCost], cached: int, repeats: int) -> dict[str, Any]:
    """The measured curve: seconds, and a verified row against a decoded one for k = 1 .. DRAFTS."""
    rows = [
        asdict(cost)
        | {"verified_row": [cost.verified_row(drafts) for drafts in range(1, DRAFTS + 1)]}
        for cost in costs
    ]
    return {"cached": cached, "repeats": repeats, "batches": rows}


class _Work:
    """What is run: the parts of a step, over one cache that serves every batch size in turn."""

    def __init__(self, target: Target, head: DraftHead | None, largest: int, cached: int) -> None:
        self.target = target
        self.head = head
        self.cached = cached
        self.drafts = 2 if head is None or not head.at_once else min(DRAFTS, head.steps or DRAFTS)
        room = 0 if head is None else head.ahead + head.room(self.drafts)
        self.pages = -(-(cached + max(DRAFTS, room) + 1) // PAGE)
        layers = target.layers + (head.cache_layers if head else 0)
        self.cache = PagedKV(
            layers, largest * self.pages, PAGE, dtype=target.dtype, device=target.device
        )
        self.names = tuple(dict.fromkeys((target.state, *(head.states if head else ()))))
        rows = largest * (DRAFTS + 1)
        generator = torch.Generator().manual_seed(0)
        state_TD = torch.randn(rows, target.hidden_size, generator=generator)
        token_T = torch.randint(target.vocab_size, (rows,), generator=generator)
        self.state_TD = state_TD.to(target.device, target.dtype)
        self.token_T = token_T.to(target.device)
        self.carries: dict[int, Carry] = {}

    def parts(self, batch: int) -> dict[Part, Callable[[], None]]:
        """The parts of this batch size."""
        rows = range(1, DRAFTS + 2)
        found: dict[Part, Callable[[], None]] = {
            (batch, TARGET, count): partial(self._target, batch, count) for count in rows
        }
        if self.head is None:
            return found
        found |= {(batch, OBSERVE, count): partial(self._observe, batch, count) for count in rows}
        if self.head.steps is None or self.head.steps > 1:
            self.carries[batch] = self._carry(batch, 1)
            found[batch, DRAFT, 1] = partial(self._draft, batch)
        return found

    def _target(self, batch: int, rows: int) -> None:
        plan = self._plan(batch, rows)
        states = self.target.capture(
            self.token_T[: batch * rows],
            plan.positions,
            PagedContext.of(self.cache, plan),
            self.names,
        )
        best(self.target.logits(states[self.target.state]))

    def _observe(self, batch: int, rows: int) -> None:
        assert self.head is not None
        self._carry(batch, rows)

    def _draft(self, batch: int) -> None:
        assert self.head is not None
        newest = [self.cached + self.head.ahead] * batch
        token_B = self.token_T[:batch]
        where = Drafting(
            self.cache,
            lambda starts, rows, trees: self._planned(batch, starts, rows, trees),
            newest,
            token_B.tolist(),
            lambda part: nullcontext(),
        )
        drafts = self.head.drafts(self.target, where, self.carries[batch], self.drafts)
        following = next(drafts)
        for _ in range(1, self.drafts):
            following = drafts.send(token_B)
            best(following.logits_BU)

    def _carry(self, batch: int, rows: int) -> Carry:
        assert self.head is not None
        plan = self._plan(batch, rows if self.head.ahead else 2)
        count = len(plan.positions)
        states = dict.fromkeys(self.names, self.state_TD[:count])
        seen = self.head.observe(
            self.target,
            self.cache,
            plan,
            self.token_T[:count],
            states,
            self.drafts,
            lambda part: nullcontext(),
        )
        return seen.carry(plan.last_rows())

    def _plan(self, batch: int, rows: int) -> BatchPlan:
        """Made anew for every run, as the engine does for every step."""
        return self._planned(batch, [self.cached] * batch, [rows] * batch)

    def _planned(
        self,
        batch: int,
        starts: list[int],
        rows: list[int],
        trees: list[TreeRows] | None = None,
    ) -> BatchPlan:
        pages = [list(range(b * self.pages, (b + 1) * self.pages)) for b in range(batch)]
        return plan_batch(pages, starts, rows, PAGE, self.target.device, trees)


def _in_turns(
    parts: Mapping[Part, Callable[[], None]],
    repeats: int,
    order: random.Random,
    device: torch.device,
    notice: Callable[[], None],
) -> dict[Part, list[float]]:
    """Seconds of every part in every counted round."""
    seconds: dict[Part, list[float]] = {part: [] for part in parts}
    for number in range(repeats + 1):
        for part in order.sample(list(parts), len(parts)):
            took = _timed(parts[part], device)
            if number:
                seconds[part].append(took)
        notice()
    return seconds


def _timed(run: Callable[[], None], device: torch.device) -> float:
    begin = time.perf_counter()
    run()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - begin


def _summary(
    batch: int, seconds: Mapping[Part, Sequence[float]], at_once: bool = False
) -> BatchCost:
    """Medians of one batch size, and their noise."""
    medians = {part: float(np.median(values)) for part, values in seconds.items()}
    noise: dict[str, float] = {}
    for (_, name, _), values in seconds.items():
        low, median, high = np.percentile(values, [25, 50, 75])
        noise[name] = max(noise.get(name, 0.0), float((high - low) / 2 / median))

    def by_rows(name: str) -> tuple[float, ...]:
        return tuple(medians[part] for part in sorted(medians) if part[:2] == (batch, name))

    draft = by_rows(DRAFT)
    first = draft[0] if draft else 0.0
    return BatchCost(batch, by_rows(TARGET), by_rows(OBSERVE), first, noise, at_once)
