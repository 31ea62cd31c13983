"""What a run needs to go on after a kill: parameters, Adam's moments and how far it is. Written whole or not at all."""

from __future__ import annotations

import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import nn

from mtp_train.checkpoint.heads import (
    TENSORS,
    HeadCard,
    find_checkpoints,
    load_tensors,
    read_card,
    save_checkpoint,
)
from mtp_train.core.errors import UserError
from mtp_train.core.provenance import read_json
from mtp_train.heads.base import DraftHead
from mtp_train.train.optim import load_optimizer, optimizer_tensors

OPTIMIZER = "optimizer.safetensors"
AVERAGE = "average.safetensors"
PROGRESS = "progress.json"


@dataclass(frozen=True)
class Progress:
    """How far a run is, and of which data."""

    step: int
    total: int
    data_digest: str
    curves: list[dict[str, Any]]


def save_state(
    out: Path,
    head: DraftHead,
    card: HeadCard,
    optimizer: torch.optim.Optimizer,
    progress: Progress,
    average: nn.Module | None = None,
) -> None:
    """Write a resumable checkpoint; the newest two are kept.

    average: of the head's weights, with its own count of updates.
    """
    folder = out / "checkpoints"
    extra = {OPTIMIZER: optimizer_tensors(optimizer, head)}
    if average is not None:
        extra[AVERAGE] = average.state_dict()
    save_checkpoint(
        folder / f"step-{progress.step:08d}",
        head,
        card,
        extra=extra,
        notes={PROGRESS: asdict(progress)},
    )
    for old in find_checkpoints(folder)[:-2]:
        shutil.rmtree(old)


def load_state(
    out: Path,
    head: DraftHead,
    config: dict[str, Any],
    optimizer: torch.optim.Optimizer,
    run: Progress,
    average: nn.Module | None = None,
) -> Progress | None:
    """Put the newest whole checkpoint back, exactly; None if there is none.

    Args:
        config: how the head is trained.
        run: of the run that wants to go on; a checkpoint of another configuration or other data is refused.
    """
    found = find_checkpoints(out / "checkpoints")
    if not found:
        return None
    newest = found[-1]
    card, progress = read_card(newest), Progress(**read_json(newest / PROGRESS))
    if (
        (card.config, card.head) != (config, asdict(head.config))
        or progress.data_digest != run.data_digest
        or progress.total != run.total
    ):
        raise UserError(
            "a checkpoint to resume from must have this run's configuration and data",
            newest,
            "delete the run's train folder, or undo the change",
        )
    head.load_state_dict(load_tensors(newest / TENSORS, head.state_dict()))
    load_optimizer(optimizer, head, load_file(newest / OPTIMIZER))
    if average is not None:
        average.load_state_dict(load_file(newest / AVERAGE))
    return progress
