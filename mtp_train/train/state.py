"""What a run needs to go on after a kill: parameters, Adam's moments and how far it is. Written whole or not at all."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from safetensors.torch import load_file
from torch import Tensor, nn

from mtp_train.checkpoint.heads import (
    TENSORS,
    HeadCard,
    find_checkpoints,
    load_tensors,
    read_card,
    remove_checkpoint,
    save_checkpoint,
)
from mtp_train.core.errors import UserError
from mtp_train.core.keys import RESULT, STEPS, Difference, config_inputs, differences, inputs, plain
from mtp_train.core.provenance import read_json, require_files
from mtp_train.heads.base import DraftHead
from mtp_train.train.config import TrainConfig

OPTIMIZER = "optimizer.safetensors"
AVERAGE = "average.safetensors"
PROGRESS = "progress.json"


@dataclass(frozen=True)
class Progress:
    """How far a run is, and of which data.

    Attributes:
        curves: the steps so far; a row says which keys of the configuration have another value from there on.
        epoch, packs: packs of the epoch `epoch` that are done: what a resume goes on from, on any number of ranks.
        step: optimiser steps so far.
        ranks: how many ran it.
    """

    epoch: int
    packs: int
    step: int
    ranks: int
    data_digest: str
    curves: list[dict[str, Any]]


@dataclass(frozen=True)
class Saved:
    """What a checkpoint holds beside the head's tensors."""

    progress: Progress
    optimizer: dict[str, Tensor]  # `<parameter>.<moment>`, whole


def save_state(
    out: Path,
    head: DraftHead,
    card: HeadCard,
    optimizer: dict[str, Tensor],
    progress: Progress,
    average: nn.Module | None = None,
) -> None:
    """Write a resumable checkpoint; the newest two are kept.

    Args:
        head: its parameters whole, not in shards.
        optimizer: its state as `<parameter>.<moment>`, whole too.
        average: of the head's weights, with its own count of updates.
    """
    folder = out / "checkpoints"
    extra = {OPTIMIZER: optimizer}
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
        remove_checkpoint(old)


def load_state(
    out: Path,
    head: DraftHead,
    config: TrainConfig,
    data_digest: str,
    average: nn.Module | None = None,
) -> Saved | None:
    """Put the newest whole checkpoint's tensors into the head, exactly; None if there is none.

    Args:
        head: before it is wrapped for ranks.
        config: how the head is trained; a checkpoint of other data is refused, and of other values of keys that decide
            every step (core.keys.RESULT).
    """
    found = find_checkpoints(out / "checkpoints")
    if not found:
        return None
    newest = found[-1]
    card = read_card(newest)
    require_files(
        newest,
        {TENSORS: card.sha256} | card.files,
        f"delete {newest} and train again: an older one is there",
    )
    progress = Progress(**read_json(newest / PROGRESS))
    differ = changes(card.config, config)
    if (
        any(item.changes == RESULT for item in differ)
        or card.head != asdict(head.config)
        or progress.data_digest != data_digest
    ):
        raise UserError(
            "a checkpoint to resume from must have this run's configuration and data",
            newest,
            "undo the change, or train in another folder",
        )
    head.load_state_dict(load_tensors(newest / TENSORS, head.state_dict()))
    if average is not None:
        average.load_state_dict(load_file(newest / AVERAGE))
    taken = {item.name: [item.before, item.now] for item in differ if item.changes == STEPS}
    if taken:
        progress.curves.append({"step": progress.step, "changed": taken})
    return Saved(progress, load_file(newest / OPTIMIZER))


def changes(noted: dict[str, Any], config: TrainConfig) -> list[Difference]:
    """Keys of a checkpoint's configuration that have another value now; what it does not name is at its default."""
    now = config_inputs("train", config)
    known = plain(config_inputs("train", TrainConfig())) | plain(inputs({"train": noted}))
    return differences({name: value for name, value in known.items() if name in now}, now)
