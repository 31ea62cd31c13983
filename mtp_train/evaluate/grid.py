"""Acceptance of one head: the two main runs of every prompt set, and a grid of temperatures and drafts.

Knows no command line and no other measurement.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from mtp_train.engine.engine import Engine, EngineConfig
from mtp_train.engine.schemes import SchemeConfig, make_proposer
from mtp_train.evaluate.acceptance import acceptance
from mtp_train.evaluate.runs import Bench, Run, account, cache_for
from mtp_train.evaluate.sets import PromptSet
from mtp_train.heads.base import DraftHead
from mtp_train.models.target import Target

ALL = 1 << 60  # prompts: more than any set has
SHORT = ("prompts", "tokens", "drafts", "tau", "tau_ci", "per_position", "per_position_ci")


@dataclass(frozen=True)
class Cell:
    """A temperature and how drafts are made."""

    temperature: float
    scheme: SchemeConfig

    @property
    def k(self) -> int:
        return self.scheme.drafts

    def file(self, name: str) -> str:
        """The name that the set's completions are kept under."""
        return f"{name}.t{self.temperature:g}.k{self.k}"


@dataclass(frozen=True)
class Grid:
    """What is measured of every set.

    Attributes:
        greedy, sampled: the main runs.
        cells: of the grid, all on the same `prompts`; none: the main runs stand for it.
        sampled_prompts, prompts: how many prompts, a fixed draw. Without sampled_prompts there is no sampled run.
    """

    greedy: Cell
    sampled: Cell
    cells: tuple[Cell, ...]
    sampled_prompts: int
    prompts: int

    @property
    def counts(self) -> dict[Cell, int]:
        """Prompts of every cell that is run; a smaller draw is part of a larger one."""
        found = dict.fromkeys(self.cells, self.prompts)
        if self.sampled_prompts:
            found[self.sampled] = max(self.sampled_prompts, found.get(self.sampled, 0))
        found[self.greedy] = ALL
        return dict(sorted(found.items(), key=lambda item: (item[0].k, item[0].temperature)))


@dataclass(frozen=True)
class Acceptance:
    """Acceptance records by set and mode, the grid, and the greedy completions of each set."""

    sets: dict[str, dict[str, Any]]
    grid: list[dict[str, Any]]
    greedy: dict[str, Run]


def measure_grid(
    target: Target,
    head: DraftHead,
    sets: Sequence[PromptSet],
    grid: Grid,
    engine_config: EngineConfig,
    bench: Bench,
) -> Acceptance:
    """Run every cell on every set; the rows of the sets are accounted for."""
    runs = _runs(target, head, sets, grid, engine_config, bench)
    for prompts in sets:
        account(prompts, runs[prompts.name, grid.greedy])
    return Acceptance(
        {prompts.name: _modes(prompts, grid, runs) for prompts in sets},
        [row for prompts in sets for row in _cells(prompts, grid, runs)],
        {prompts.name: runs[prompts.name, grid.greedy] for prompts in sets},
    )


def _runs(
    target: Target,
    head: DraftHead,
    sets: Sequence[PromptSet],
    grid: Grid,
    engine_config: EngineConfig,
    bench: Bench,
) -> dict[tuple[str, Cell], Run]:
    runs: dict[tuple[str, Cell], Run] = {}
    engines: dict[SchemeConfig, Engine] = {}

    def engine(scheme: SchemeConfig) -> Engine:
        if scheme not in engines:
            engines.clear()  # a cache of keys and values is large
            proposer = make_proposer(target, copy.deepcopy(head), scheme)
            fitted = cache_for(engine_config, proposer, sets)
            engines[scheme] = Engine(target, proposer, replace(fitted, alphas=True))
        return engines[scheme]

    for cell, count in grid.counts.items():
        for prompts in sets:
            name, drawn = cell.file(prompts.name), prompts.drawn(count)
            made = partial(engine, cell.scheme)
            runs[prompts.name, cell] = bench.run(name, drawn, made, cell.temperature)
    return runs


def _modes(prompts: PromptSet, grid: Grid, runs: Mapping[tuple[str, Cell], Run]) -> dict[str, Any]:
    found = {"greedy": _record(prompts, prompts, grid.greedy, runs)}
    if grid.sampled_prompts:
        some = prompts.drawn(grid.sampled_prompts)
        found["sampled"] = _record(prompts, some, grid.sampled, runs)
    return found


def _cells(
    prompts: PromptSet, grid: Grid, runs: Mapping[tuple[str, Cell], Run]
) -> list[dict[str, Any]]:
    main = {grid.sampled: grid.sampled_prompts} if grid.sampled_prompts else {}
    draws = {cell: grid.prompts for cell in grid.cells} or {grid.greedy: ALL, **main}
    found = []
    for cell, count in draws.items():
        record = _record(prompts, prompts.drawn(count), cell, runs)
        named = {"set": prompts.name, "temperature": cell.temperature, "k": cell.k}
        found.append(named | {name: record[name] for name in SHORT})
    return found


def _record(
    prompts: PromptSet, drawn: PromptSet, cell: Cell, runs: Mapping[tuple[str, Cell], Run]
) -> dict[str, Any]:
    run = runs[prompts.name, cell].of(drawn)
    positions = cell.scheme.positions
    return acceptance(run.completions, prompts.categories, cell.temperature, positions, run.turns)
