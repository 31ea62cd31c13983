"""`mtp-train evaluate`: acceptance, losslessness, validation and speed of the run's head, through the engine."""

from __future__ import annotations

import json
import platform
import sys
from dataclasses import asdict
from typing import Any

import torch

from mtp_train.checkpoint.heads import load_head
from mtp_train.cli.job import Job
from mtp_train.cli.main import guarded
from mtp_train.cli.run_folder import run_stage
from mtp_train.core.dist import Ranks
from mtp_train.core.errors import UserError
from mtp_train.core.provenance import file_digest, versions, write_json
from mtp_train.core.records import Accounting
from mtp_train.evaluate import stage as measure
from mtp_train.evaluate.stage import EvaluateConfig, PromptSet, prompt_set
from mtp_train.text.sources import read_answers
from mtp_train.train.loop import CURVES

SETS = ("heldout", "ood")


def stage(job: Job) -> None:
    config: EvaluateConfig = job.section("evaluate", EvaluateConfig)
    before = [job.folder.require(name)["outputs"] for name in ("regenerate", "train")]
    inputs = [asdict(config), asdict(job.engine_config), before, job.target_inputs]
    run_stage(
        job.folder,
        "evaluate",
        inputs,
        lambda: _work(job, config),
        job.process.ranks,
        whole=job.folder.evaluation.is_file,
    )


def _work(job: Job, config: EvaluateConfig) -> Any:
    size = job.engine_config.tensor_parallel
    ranks = require_together(job.process.ranks, size).grouped(size)
    target = job.target(tensor_parallel=size)
    head, card = load_head(job.folder.head, target)
    sets = _sets(job, config)
    figures, completions = measure.measure_acceptance(target, head, sets, config, job.engine_config)
    requests = measure.spread(sets[0].requests, config.speed_prompts)
    speed = measure.measure_speed(target, head, requests, config) if requests else {}
    lossless = (
        measure.measure_lossless(
            job.target("float32", tensor_parallel=size), head, sets, config, job.engine_config
        )
        if config.lossless_prompts
        else {}
    )
    evaluation = {
        "format": 1,
        "target": {
            "path": str(target.path),
            "hash": target.hash,
            "quantisation": target.quantisation,
            "hidden_size": target.hidden_size,
            "vocab_size": target.vocab_size,
            "layers": target.layers,
        },
        "head": {
            "family": card.family,
            "parameters": sum(p.numel() for p in head.parameters()),
            "step": card.step,
            "sha256": card.sha256,
        },
        "versions": versions(),
        "data_digest": job.folder.require("precompute")["outputs"],
        "command": job.command,
        "machine": {
            "cpu": platform.processor() or platform.machine(),
            "threads": torch.get_num_threads(),
            "device": job.device,
            "ranks": ranks.world,
        },
        "k": config.drafts,
        "dtype": str(target.dtype).removeprefix("torch."),
        "max_new_tokens": config.max_new_tokens,
        "sets": figures,
        "validation": measure.validation_figures(target, head, sets[0], last_validation(job)),
        "lossless": lossless,
        "speed": speed,
        "examples": measure.make_examples(job.tokenizer, sets[0], completions, config.examples),
    }
    left_out = {
        "lossless": lossless,
        "speed": speed,
    }  # by evaluate.lossless_prompts=0, speed_prompts=0
    for name in [name for name, figures in left_out.items() if not figures]:
        del evaluation[name]
    if ranks.main:
        write_json(job.folder.evaluation, evaluation)
    ranks.wait()
    return file_digest(job.folder.evaluation)


def require_together(ranks: Ranks, size: int) -> Ranks:
    """The ranks, if they hold one target together."""
    if ranks.world != size:
        raise UserError(
            "evaluate runs on as many ranks as hold the target together, engine.tensor_parallel",
            f"{ranks.world} ranks, engine.tensor_parallel={size}",
            f"launch with torchrun --nproc-per-node {size} -m mtp_train.cli.evaluate ...",
        )
    return ranks


def _sets(job: Job, config: EvaluateConfig) -> list[PromptSet]:
    """The held-out prompts first, then those out of domain where the run has any."""
    stop = job.stop
    return [
        prompt_set(
            name, read_answers(job.folder.answers(name), Accounting()), stop, config.max_new_tokens
        )
        for name in set_names(job)
    ]


def set_names(job: Job) -> list[str]:
    """The sets that have answers."""
    return [name for name in SETS if job.folder.answers(name).is_file()]


def last_validation(job: Job) -> dict[str, float]:
    """The trainer's own last figures on the held-out features."""
    rows = reversed(curves(job))
    return next((row["validation"] for row in rows if "validation" in row), {})


def curves(job: Job) -> list[dict[str, Any]]:
    """What the trainer wrote at every step and validation."""
    text = (job.folder.stage("train") / CURVES).read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines()]


if __name__ == "__main__":
    sys.exit(guarded(lambda: stage(Job(sys.argv[1:]))))
