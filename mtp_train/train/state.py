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
from mtp_train.core.keys import (
    NOTHING,
    RESULT,
    STEPS,
    config_inputs,
    differences,
    effects,
    inputs,
    plain,
)
from mtp_train.core.provenance import read_json, require_files
from mtp_train.heads.base import DraftHead
from mtp_train.heads.families import family_of
from mtp_train.train.config import TrainConfig

OPTIMIZER = "optimizer.safetensors"
AVERAGE = "average.safetensors"
PROGRESS = "progress.json"
BEGINNINGS = {"train.warm_start", "head.path"}


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
    wanted = config_inputs("train", config) | config_inputs("head", head.config)
    wanted |= inputs({"data": data_digest})
    noted = plain(wanted) | noted_values(card) | {"data": progress.data_digest}
    differ = differences(noted, wanted)
    refused = [item for item in differ if item.changes == RESULT]
    if refused:
        raise UserError(
            "a checkpoint to resume from must have this run's configuration and data",
            f"{newest}: {', '.join(map(str, refused))}",
            "undo the change, or train in another folder",
        )
    head.load_state_dict(load_tensors(newest / TENSORS, head.state_dict()))
    if average is not None:
        average.load_state_dict(load_file(newest / AVERAGE))
    taken = {item.name: [item.before, item.now] for item in differ if item.changes == STEPS}
    if taken:
        progress.curves.append({"step": progress.step, "changed": taken})
    return Saved(progress, load_file(newest / OPTIMIZER))


def noted_values(card: HeadCard) -> dict[str, Any]:
    """What a card says of how its head is made and trained, by key; not what only began it, of no use to a resume."""
    noted = plain(inputs({"train": card.config, "head": card.head}))
    known = effects("train.", TrainConfig) | effects("head.", family_of(card.family).config)
    kept = {name for name, changes in known.items() if changes != NOTHING} - BEGINNINGS
    return {
        name: value
        for name, value in noted.items()
        if any(name == one or name.startswith(f"{one}.") for one in kept)
    }
