"""Which packs make which optimiser step, on which rank: a function of the configuration and the number of ranks.

Knows lengths and counts only: no features, no head.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from mtp_train.batches.pack import epoch_packs
from mtp_train.losses.weights import denominator
from mtp_train.train.config import TrainConfig


@dataclass(frozen=True)
class Window:
    """One optimiser step: this rank's packs. A pack with weight 0 only keeps ranks in step."""

    packs: tuple[tuple[list[int], float], ...]
    goals: int  # of all ranks: trained tokens, or sequences with any


def epoch_windows(
    lengths: np.ndarray,
    loss_tokens: np.ndarray,
    config: TrainConfig,
    epoch: int,
    rank: int,
    world: int,
) -> list[Window]:
    """The epoch's optimiser steps of this rank; packs of a window go round robin over the ranks.

    Args:
        lengths: rows of each sequence.
        loss_tokens: trained tokens of each sequence.
    """
    packs = epoch_packs(lengths, config.rows, config.seed, epoch)
    per_step = config.accumulation * world
    windows = []
    for start in range(0, len(packs), per_step):
        members = [(pack, 1.0) for pack in packs[start : start + per_step]]
        goals = _goals([pack for pack, _ in members], loss_tokens, config.mean_over)
        members += [(members[0][0], 0.0)] * (-len(members) % world)
        windows.append(Window(tuple(members[rank::world]), goals))
    return windows


def _goals(packs: list[list[int]], loss_tokens: np.ndarray, mean_over: str) -> int:
    """The denominator of the window's mean."""
    counts = [count for pack in packs for count in loss_tokens[pack].tolist()]
    return denominator(counts, mean_over)
