"""One rank of several that train a toy head together, by every strategy, under torchrun.

torchrun --nproc-per-node N shared_training.py FEATURES FOLDER TASK...

A task is NAME:STRATEGY, NAME:STRATEGY:STOP or NAME:STRATEGY:STOP:HEAD (of head_variants, for one epoch and nothing
measured on the way): train into FOLDER/NAME, going on from what is there, and stop in the step after STOP (0: never;
below 0: the second rank is killed there, once). Each rank leaves a record of every task that it came through. A killed
task that is launched again goes on to its end.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import time
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import InitProcessGroupKwargs
from head_variants import make_variant
from torch import distributed
from toys import make_target

from mtp_train.core.dist import leave
from mtp_train.heads.draft_model import DraftModelHead
from mtp_train.store.shards import FeatureStore
from mtp_train.train.config import TrainConfig
from mtp_train.train.loop import _Trainer
from mtp_train.train.online import OnlineConfig

# Adam's first steps have the size of the learning rate whatever the gradient: rounding alone would show. So a few
# warm-up steps, momentum and a clip that bites.
TRAINING = TrainConfig(
    epochs=2,
    rows=60,
    rollout_steps=2,
    learning_rate=1e-3,
    warmup_steps=3,
    clip=0.1,
    validations=2,
    checkpoints=100,
    ema=0.9,
    online_eval=OnlineConfig(every=5, prompts=3, drafts=2, max_new_tokens=6),
)
QUICK: dict[str, Any] = {
    "epochs": 1,
    "rows": 100,
    "loss": {"kl": 1.0},
    "validations": 1,
    "ema": 0.0,
    "online_eval": OnlineConfig(),
}


class Stopped(Exception):
    """A run was interrupted where the task wanted it."""


def main(features: Path, folder: Path, tasks: list[str]) -> None:
    torch.set_num_threads(1)
    timeout = InitProcessGroupKwargs(timeout=timedelta(seconds=60))
    accelerator = Accelerator(cpu=True, kwargs_handlers=[timeout])
    for task in tasks:
        name, *rest = task.split(":")
        path = folder / f"{task}-{distributed.get_rank()}.json"
        record = run(accelerator, FeatureStore(features), folder / name, *rest)
        path.write_text(json.dumps(record))
        accelerator.free_memory()


def run(
    accelerator: Accelerator,
    store: FeatureStore,
    out: Path,
    strategy: str,
    stop: str = "0",
    family: str = "mtp",
    **changes: Any,
) -> dict[str, Any]:
    """Train, or go on; returns what this rank saw."""
    target = make_target()
    config = replace(TRAINING, parallel=strategy, **changes)
    head = make_variant(target, family)
    if family != "mtp":
        steps = head.steps or (1 if isinstance(head, DraftModelHead) else 2)
        config = replace(config, rollout_steps=steps, **QUICK)
    trainer = _Trainer(target, head, store, store, config, accelerator, out)
    keys: list[str] = []
    begun = trainer.step
    trainer.strategy.accumulate = recording(trainer.strategy.accumulate, keys)  # type: ignore[method-assign]
    if int(stop):
        trainer.strategy.step = stopping(trainer, int(stop))  # type: ignore[method-assign]
    with contextlib.suppress(Stopped):
        trainer.run()
    world = distributed.get_world_size() if distributed.is_initialized() else 1
    names = [name for name, _ in trainer.own.named_parameters()]
    held = sum(parameter.numel() for parameter in local(trainer))
    return {
        "world": world,
        "keys": keys,
        "begun": begun,
        "strategy": type(trainer.strategy).__name__,
        "names": names,
        "optimized": sum(len(group["params"]) for group in trainer.strategy.groups),
        "held": held,
    }


def local(trainer: _Trainer) -> list[torch.Tensor]:
    """What this rank holds of the head's parameters between steps."""
    found = []
    for parameter in trainer.head.parameters():
        shard = getattr(parameter, "ds_tensor", parameter)
        found.append(shard.to_local() if hasattr(shard, "to_local") else shard)
    return found


def recording(accumulate: Any, keys: list[str]) -> Any:
    """`accumulate`, but the keys of packs that count are noted."""

    def noted(scale: float, last: bool, pack: Any, *args: Any, **kwargs: Any) -> Any:
        keys.extend(pack.keys if scale else ())
        return accumulate(scale, last, pack, *args, **kwargs)

    return noted


def stopping(trainer: _Trainer, stop: int) -> Any:
    step, killed = trainer.strategy.step, (trainer.out / "killed").exists()

    def stopped() -> None:
        if trainer.step == stop:
            raise Stopped
        if trainer.step == -stop and not killed:
            time.sleep(0 if distributed.get_rank() == 1 else 60)
            (trainer.out / "killed").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        step()

    return stopped


if __name__ == "__main__":
    try:
        main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:])
    finally:
        leave()
