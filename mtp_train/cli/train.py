"""`mtp-train train`, or `torchrun -m mtp_train.cli.train` on several ranks: features to a head."""

from __future__ import annotations

import os
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from torch import distributed

from mtp_train.checkpoint.heads import (
    CARD,
    TENSORS,
    find_checkpoints,
    read_card,
    require_own_checkpoint,
    warm_start,
)
from mtp_train.cli.features import (
    open_features,
    require_current,
    require_same_target,
    require_same_text,
    trained_counts,
)
from mtp_train.cli.job import PRECISIONS, Job, Process
from mtp_train.cli.main import dispatch, guarded
from mtp_train.cli.run_folder import outlook, run_stage
from mtp_train.core.dist import leave
from mtp_train.core.errors import UserError
from mtp_train.core.keys import SPREAD, Inputs, config_inputs, inputs, plain
from mtp_train.core.provenance import file_digest
from mtp_train.heads.families import build_head
from mtp_train.heads.start import FITTED
from mtp_train.models.target import target_hash
from mtp_train.train.best import BEST
from mtp_train.train.config import TrainConfig
from mtp_train.train.fitted import fit_projections
from mtp_train.train.loop import CURVES, train
from mtp_train.train.parallel import launched_strategy, require_library
from mtp_train.train.state import noted_values


def stage(job: Job) -> None:
    fit(job)
    leave()


def fit(job: Job) -> None:
    """The stage, one of several of a process: their process group stays."""
    config = _launched(job.section("train", TrainConfig), job.process)
    if job.process.ranks.world > 1:
        require_library(config.parallel)
    head_config = job.head_config
    before = job.folder.require("precompute")["outputs"]
    require_current(job, before)
    require_same_target(job)
    require_same_text(job)
    out = job.folder.stage("train")
    for place in (job.folder.head, out / BEST):
        require_own_checkpoint(place)
    wanted = _inputs(job, config, before)
    run_stage(
        job.folder,
        "train",
        wanted,
        lambda: _work(job, config, head_config),
        job.process.ranks,
        whole=(job.folder.head / TENSORS).is_file,
        files=[job.folder.head / CARD, out / CURVES],
        earlier=lambda: _inputs_of_newest(job, wanted),
    )


def foretold(job: Job) -> str:
    """What `mtp-train train` would do with what lies in the run folder; precompute must be done."""
    config = _launched(job.section("train", TrainConfig), job.process)
    wanted = _inputs(job, config, job.folder.require("precompute")["outputs"])
    return outlook(job.folder, "train", wanted, lambda: _inputs_of_newest(job, wanted))


def _inputs_of_newest(job: Job, wanted: Inputs) -> dict[str, Any] | None:
    """What the newest checkpoint was made with; of data and target, training itself looks at what it resumes from."""
    found = find_checkpoints(job.folder.stage("train") / "checkpoints")
    return plain(wanted) | noted_values(read_card(found[-1])) if found else None


def _inputs(job: Job, config: TrainConfig, features: str) -> Inputs:
    """What the head depends on, by key.

    Args:
        features: digest of precompute's outputs.
    """
    head_config = job.head_config
    found = config_inputs("train", config) | config_inputs("head", head_config)
    best_by = list(asdict(config.online_eval).values()) if config.keep == "best" else []
    found |= inputs({"train.best_by": best_by}, SPREAD)
    return found | inputs(
        {
            "precompute.outputs": features,
            "target": job.target_inputs,
            "precision": job.run.precision,
            "train.warm_start": read_card(Path(config.warm_start)).sha256
            if config.warm_start
            else "",
            "head.begun_from": begun_from(head_config),
        }
    )


def begun_from(head_config: Any) -> list[str]:
    """The digest of the model that a head begins as, if there is one."""
    path = getattr(head_config, "path", "")
    return [target_hash(path)] if path else []


def _launched(config: TrainConfig, process: Process) -> TrainConfig:
    """The configuration with the strategy of the launcher's config file, if that names one."""
    if process.launched is None:
        process.launched = launched_strategy(os.environ)
    launched = process.launched
    if not launched or launched == config.parallel:
        return config
    if config.parallel != TrainConfig.parallel:
        rule = f"train.parallel must be {launched}, as the launcher's config file says"
        raise UserError(rule, config.parallel, "leave one of them out")
    return replace(config, parallel=launched)


def _work(job: Job, config: TrainConfig, head_config: Any) -> Any:
    counts_V = trained_counts(job)
    out = job.folder.stage("train")
    accelerator = _accelerator(job, out)
    target = job.target(ends=not job.training_runs_target)
    head = (
        warm_start(Path(config.warm_start), target, head_config, counts_V)
        if config.warm_start
        else build_head(target, head_config, config.seed, counts_V)
    )
    states = tuple(dict.fromkeys((target.state, *head.states)))
    features, held_out = (open_features(job, name, target, states) for name in ("train", "heldout"))
    goes_on = bool(find_checkpoints(out / "checkpoints"))
    if getattr(head_config, "init", "") == FITTED and not config.warm_start and not goes_on:
        fit_projections(head, target, features)
    try:
        train(target, head, features, held_out, config, accelerator, out, job.stop)
    finally:
        for tracker in accelerator.trackers:
            tracker.finish()
        accelerator.free_memory()
    return file_digest(job.folder.head / TENSORS)


def _accelerator(job: Job, out: Any) -> Accelerator:
    trackers, ranks = job.run.trackers, job.process.ranks
    if ranks.world > 1 and not distributed.is_initialized():
        ranks.join("gloo" if job.device == "cpu" else "nccl")
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
    sys.exit(guarded(lambda: dispatch("train", sys.argv[1:])))
