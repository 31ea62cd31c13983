"""`mtp-train evaluate`, or `torchrun -m mtp_train.cli.evaluate` on several ranks: acceptance, losslessness, validation
and speed of the run's head, through the engine.
"""

from __future__ import annotations

import json
import platform
import sys
from dataclasses import asdict
from typing import Any

import torch

from mtp_train.checkpoint.heads import CARD, HeadCard, load_head, read_card, require_own_config
from mtp_train.cli.features import tell_other_text
from mtp_train.cli.job import Job
from mtp_train.cli.main import dispatch, guarded
from mtp_train.cli.run_folder import run_stage
from mtp_train.cli.separation import trained_among
from mtp_train.core.keys import END, config_inputs, inputs
from mtp_train.core.progress import say
from mtp_train.core.provenance import file_digest, versions, write_json
from mtp_train.engine.clock import Clock
from mtp_train.evaluate import stage as measure
from mtp_train.evaluate.runs import Bench
from mtp_train.evaluate.sets import PromptSet, answered_set, chat_set, tell, within
from mtp_train.evaluate.speed import measure_speeds, measured_steps
from mtp_train.evaluate.stage import ANSWERED, EvaluateConfig
from mtp_train.heads.base import DraftHead
from mtp_train.models.target import Target
from mtp_train.text.sources import DataConfig, read_sources, sources_digest
from mtp_train.train.loop import CURVES

SETS = ANSWERED
EXACT = "float32"  # bfloat16 has ties at every step
MEASURED = ("validation", "lossless", "speed", "speed_model")  # left out where there is nothing


def stage(job: Job) -> None:
    config: EvaluateConfig = job.section("evaluate", EvaluateConfig)
    prompts = {name: sources_digest(read_sources(value)) for name, value in config.sets.items()}
    found = config_inputs("evaluate", config) | config_inputs("engine", job.engine_config)
    found |= inputs({"evaluate.sets": prompts}, new=END)
    found |= inputs({"target": job.target_inputs} | _before(job, config))
    tell_other_text(job, "evaluate")
    if (job.folder.head / CARD).is_file():  # before the stage's outputs are taken away
        require_own_config(read_card(job.folder.head), job.target_identity)
    run_stage(
        job.folder,
        "evaluate",
        found,
        lambda: _work(job, config),
        job.process.ranks,
        files=[job.folder.evaluation],
        kept="completions/*.jsonl",
    )


def _before(job: Job, config: EvaluateConfig) -> dict[str, str]:
    """Outputs of the stages before. With prompts of its own, a head that was trained elsewhere can be evaluated."""
    if not config.sets:
        own = "name prompts: evaluate.sets.NAME=FILE"
        answered = job.folder.require("regenerate", instead=own)["outputs"]
        trained = job.folder.require("train")["outputs"]
        return {"regenerate.outputs": answered, "train.outputs": trained}
    answered = job.folder.require("regenerate")["outputs"] if set_names(job) else ""
    return {"regenerate.outputs": answered, "train.head": read_card(job.folder.head).sha256}


def _work(job: Job, config: EvaluateConfig) -> Any:
    ranks = job.process.ranks.grouped(job.engine_config.tensor_parallel)
    bench = Bench(job.folder.stage("evaluate") / "completions", ranks, config.seed)
    clock = Clock()
    evaluation, head, sets, config = _as_served(job, config, bench, clock)
    if config.lossless_prompts:
        with clock("lossless"):
            evaluation["lossless"] = _lossless(job, config, head, sets, bench)
    if ranks.main:
        kept = {name: told for name, told in evaluation.items() if told or name not in MEASURED}
        write_json(job.folder.evaluation, kept)
        say(
            "evaluate: " + ", ".join(f"{part} {took:.0f} s" for part, took in clock.seconds.items())
        )
    ranks.wait()
    return file_digest(job.folder.evaluation)


def _as_served(
    job: Job, config: EvaluateConfig, bench: Bench, clock: Clock
) -> tuple[dict[str, Any], DraftHead, list[PromptSet], EvaluateConfig]:
    """The evaluation without losslessness, head, prompt sets, and the configuration with what it needs to know of
    the machine; what was not asked for, or has nothing to be measured
    on, is empty.

    The target that serves is gone when this returns: the one in float32 needs the room.
    """
    with clock("loading"):
        target = job.target(tensor_parallel=job.engine_config.tensor_parallel)
        head, card = load_head(job.folder.head, target)
        sets = [within(prompts, head.positions) for prompts in _sets(job, config)]
    with clock("costs"):
        place = bench.folder.parent / "costs.json"
        if bench.ranks.main:
            measured_steps(target, head, sets, config, place)
        bench.ranks.wait()
        config = measured_steps(target, head, sets, config, place)
    with clock("acceptance"):
        acceptance = measure.measure_acceptance(
            target, head, sets, config, job.engine_config, bench
        )
    if bench.ranks.main:
        for prompts in sets:
            tell(prompts)
    first = sets[0].name
    answered = next((prompts for prompts in sets if prompts.answers), None)
    validation: dict[str, Any] = {}
    speed: dict[str, Any] = {}
    model: dict[str, Any] = {}
    if answered:
        with clock("validation"):
            validation = measure.validation_figures(
                target, head, answered, last_validation(job), config, bench
            )
    if not bench.ranks.unit:
        accepted = acceptance.sets[first]["greedy"]["per_position"]
        with clock("speed"):
            speed, model = measure_speeds(target, head, sets[0], accepted, config)
    bench.ranks.wait()  # the others leave the machine to it
    evaluation = {
        "format": 2,
        **_provenance(job, config, target, head, card),
        "sets": acceptance.sets,
        "grid": acceptance.grid,
        "accounting": {prompts.name: prompts.accounting.as_dict() for prompts in sets},
        "validation": validation,
        "lossless": {},
        "speed": speed,
        "speed_model": model,
        "examples": measure.make_examples(
            job.tokenizer, sets[0], acceptance.greedy[first], config.examples
        ),
    }
    return evaluation, head, sets, config


def _lossless(
    job: Job, config: EvaluateConfig, head: DraftHead, sets: list[PromptSet], bench: Bench
) -> dict[str, Any]:
    """In float32; neither the target that serves nor, afterwards, this one is kept."""
    if job.target_config.dtype != EXACT:
        job.forget_targets()
    try:
        exact = job.target(EXACT, tensor_parallel=job.engine_config.tensor_parallel)
        return measure.measure_lossless(exact, head, sets, config, job.engine_config, bench)
    finally:
        if job.target_config.dtype != EXACT:
            job.forget_targets()


def _provenance(
    job: Job, config: EvaluateConfig, target: Target, head: DraftHead, card: HeadCard
) -> dict[str, Any]:
    found = {
        "target": {
            "path": str(target.path),
            "hash": target.hash,
            "quantisation": target.quantisation,
            "hidden_size": target.hidden_size,
            "vocab_size": target.vocab_size,
            "layers": target.layers,
        },
        "identity": target.identity,
        "head": {
            "family": card.family,
            "parameters": sum(p.numel() for p in head.parameters()),
            "step": card.step,
            "sha256": card.sha256,
        },
        "versions": versions(),
        "command": job.command,
        "machine": {
            "cpu": platform.processor() or platform.machine(),
            "threads": torch.get_num_threads(),
            "device": job.device,
            "ranks": job.process.ranks.world,
        },
        "scheme": asdict(config.drafted(config.drafts)),
        "k": config.drafts,
        "dtype": str(target.dtype).removeprefix("torch."),
        "max_new_tokens": config.max_new_tokens,
    }
    if job.folder.done("precompute"):
        found["data_digest"] = job.folder.require("precompute")["outputs"]
    return found


def _sets(job: Job, config: EvaluateConfig) -> list[PromptSet]:
    """The held-out prompts first, then those out of domain where the run has any, then the configured ones."""
    stop, longest = job.stop, config.max_new_tokens
    job.folder.require_same("regenerate", *(job.folder.answers(name) for name in set_names(job)))
    answered = [
        answered_set(name, job.folder.answers(name), stop, longest) for name in set_names(job)
    ]
    data: DataConfig = job.section("data", DataConfig)
    named = []
    for name, value in config.sets.items():
        trained = trained_among(read_sources(value), data, job.folder.answers("train"))
        named.append(chat_set(name, value, job.template, stop, longest, trained))
    return [*answered, *named]


def set_names(job: Job) -> list[str]:
    """The sets that have answers."""
    return [name for name in SETS if job.folder.answers(name).is_file()]


def last_validation(job: Job) -> dict[str, float]:
    """The trainer's own last figures on the held-out features."""
    rows = reversed(curves(job))
    return next((row["validation"] for row in rows if "validation" in row), {})


def curves(job: Job) -> list[dict[str, Any]]:
    """What the trainer wrote at every step and validation; nothing where the head was trained elsewhere."""
    path = job.folder.stage("train") / CURVES
    if not path.is_file():
        return []
    job.folder.require_same("train", path)
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


if __name__ == "__main__":
    sys.exit(guarded(lambda: dispatch("evaluate", sys.argv[1:])))
