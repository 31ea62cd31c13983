"""Which packs make which optimiser step, on which rank.

The packs of an epoch and their order are a function of (seed, epoch, rows) alone; ranks and accumulation only decide
how many of them make a window, and who computes which. So a position, packs done of an epoch, means the same on any
number of ranks. Knows lengths and counts only: no features, no head.

Shapes: B sequences.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from mtp_train.batches.pack import epoch_packs
from mtp_train.losses.weights import denominator
from mtp_train.train.config import TrainConfig

LAYER_WIDTHS = (
    16  # a head's matmuls per row, in units of hidden width x 1 row of attention or of vocabulary
)


@dataclass(frozen=True)
class Position:
    """How far a run is: packs that are done of an epoch, those before it being done."""

    epoch: int = 0
    packs: int = 0


@dataclass(frozen=True)
class Window:
    """One optimiser step: this rank's packs. A pack with weight 0 only keeps ranks in step."""

    packs: tuple[tuple[list[int], float], ...]
    goals: int  # of all ranks: trained tokens, or sequences with any
    begin: int  # packs of the run that are done before it, and after
    end: int


class Order:
    """The packs of a whole run, and how ranks go through them."""

    def __init__(
        self,
        lengths_B: np.ndarray,
        loss_tokens_B: np.ndarray,
        config: TrainConfig,
        costs_B: np.ndarray | None = None,
    ) -> None:
        """costs_B: what a sequence costs to train (`sequence_costs`); its length if left out."""
        self.loss_tokens_B, self.config = loss_tokens_B, config
        self.costs_B = lengths_B.astype(float) if costs_B is None else costs_B
        self.epochs = [
            epoch_packs(lengths_B, config.rows, config.seed, epoch)
            for epoch in range(config.epochs)
        ]
        self.total = sum(len(packs) for packs in self.epochs)

    def position(self, done: int) -> Position:
        """Where a run is after `done` packs; the end of an epoch is the beginning of the next."""
        for epoch, packs in enumerate(self.epochs):
            if done < len(packs):
                return Position(epoch, done)
            done -= len(packs)
        return Position(len(self.epochs), 0)

    def done(self, position: Position) -> int:
        """Packs of the run before `position`."""
        return sum(len(packs) for packs in self.epochs[: position.epoch]) + position.packs

    def windows(self, start: Position, rank: int, world: int) -> list[Window]:
        """This rank's steps from `start` to the end. A window never spans two epochs."""
        per_step = self.config.accumulation * world
        windows = []
        for epoch in range(start.epoch, len(self.epochs)):
            first = start.packs if epoch == start.epoch else 0
            before, packs = self.done(Position(epoch)), self.epochs[epoch]
            for begin in range(first, len(packs), per_step):
                members = packs[begin : begin + per_step]
                span = before + begin, before + begin + len(members)
                windows.append(
                    Window(self._mine(members, rank, world), self._goals(members), *span)
                )
        return windows

    def _mine(
        self, members: list[list[int]], rank: int, world: int
    ) -> tuple[tuple[list[int], float], ...]:
        costs = [float(self.costs_B[pack].sum()) for pack in members]
        shares = share_out(costs, world)
        mine = [(members[number], 1.0) for number in shares[rank]]
        cheapest = members[int(np.argmin(costs))]
        rounds = max(len(share) for share in shares)
        return tuple(mine + [(cheapest, 0.0)] * (rounds - len(mine)))

    def _goals(self, members: list[list[int]]) -> int:
        """The denominator of the window's mean."""
        counts = [count for pack in members for count in self.loss_tokens_B[pack].tolist()]
        return denominator(counts, self.config.mean_over)


def share_out(costs: Sequence[float], world: int) -> list[list[int]]:
    """Which of the items each of `world` ranks takes: no rank more than its even share, costs as equal as greedy can.

    The dearest first, each to the rank that has least so far; so rounds of the ranks are alike too.
    """
    most = -(-len(costs) // world)
    shares: list[list[int]] = [[] for _ in range(world)]
    loads = [0.0] * world
    for number in sorted(range(len(costs)), key=lambda number: -costs[number]):
        rank = min(
            (rank for rank in range(world) if len(shares[rank]) < most),
            key=lambda rank: loads[rank],
        )
        shares[rank].append(number)
        loads[rank] += costs[number]
    return shares


def sequence_costs(
    lengths_B: np.ndarray, loss_tokens_B: np.ndarray, hidden_size: int, vocab_size: int
) -> np.ndarray:
    """Cost of training each sequence, in rows of a head's matmuls [B].

    Of a head of one Llama layer, in flops of a forward: a row's matmuls take about 33 D^2 (projection 4, attention 8,
    MLP 21), its attention 2 D per row of its sequence (half of them are before it), and a goal's logits 2 V D, the
    target's once and the head's at every step. So in rows: length / (16 D), and goals V / (16 D).
    """
    unit = LAYER_WIDTHS * hidden_size
    return lengths_B + (lengths_B.astype(float) ** 2 + loss_tokens_B * float(vocab_size)) / unit
