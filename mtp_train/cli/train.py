"""`mtp-train train`, or `torchrun -m mtp_train.cli.train` on several ranks: features to a head."""

from __future__ import annotations

import os
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from accelerate import Accelerator

from mtp_train.checkpoint.heads import TENSORS, read_card, warm_start
from mtp_train.cli.job import PRECISIONS, Job
from mtp_train.cli.main import guarded
from mtp_train.cli.run_folder import run_stage
from mtp_train.core.dist import launched_ranks
from mtp_train.core.errors import UserError
from mtp_train.core.provenance import file_digest
from mtp_train.heads.families import build_head
from mtp_train.store.shards import FeatureStore
from mtp_train.train.config import TrainConfig
from mtp_train.train.loop import train
from mtp_train.train.parallel import launched_strategy
from mtp_train.train.state import unspread


def stage(job: Job) -> None:
    config = _launched(job.section("train", TrainConfig))
    head_config = job.head_config
    before = job.folder.require("precompute")["outputs"]
    data = [
        asdict(head_config),
        before,
        job.target_inputs,
        job.config["precision"],
        read_card(Path(config.warm_start)).sha256 if config.warm_start else "",
    ]
    ranks = launched_ranks()
    settings = asdict(config)
    whoever = unspread(settings)
    run_stage(
        job.folder,
        "train",
        [whoever | {"accumulation": config.accumulation}, *data],
        lambda: _work(job, config, head_config),
        ranks,
        whole=(job.folder.head / TENSORS).is_file,
        half=[whoever, *data],
    )


def _launched(config: TrainConfig) -> TrainConfig:
    """The configuration with the strategy of the launcher's config file, if that names one."""
    launched = launched_strategy(os.environ)
    if not launched or launched == config.parallel:
        return config
    if config.parallel != TrainConfig.parallel:
        rule = f"train.parallel must be {launched}, as the launcher's config file says"
        raise UserError(rule, config.parallel, "leave one of them out")
    return replace(config, parallel=launched)


def _work(job: Job, config: TrainConfig, head_config: Any) -> Any:
    counts_V = FeatureStore(job.features("train")).token_counts(trained=True)
    out = job.folder.stage("train")
    accelerator = _accelerator(job, out)
    target = job.target()
    head = (
        warm_start(Path(config.warm_start), target, head_config, counts_V)
        if config.warm_start
        else build_head(target, head_config, config.seed, counts_V)
    )
    states = tuple(dict.fromkeys((target.state, *head.states)))
    features, held_out = (
        FeatureStore(job.features(name), states, checked=True) for name in ("train", "heldout")
    )
    train(
        target,
        head,
        features,
        held_out,
        config,
        accelerator,
        out,
    )
    accelerator.end_training()
    return file_digest(job.folder.head / TENSORS)


def _accelerator(job: Job, out: Any) -> Accelerator:
    trackers = job.run.trackers
    accelerator = Accelerator(
        mixed_precision=PRECISIONS[job.run.precision],
        cpu=job.device == "cpu",
        log_with=trackers or None,
        project_dir=str(out),
    )
    if trackers:
        accelerator.init_trackers("mtp_train")
    return accelerator


if __name__ == "__main__":
    sys.exit(guarded(lambda: stage(Job(sys.argv[1:]))))
