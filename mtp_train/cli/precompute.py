"""`mtp-train precompute`: text to features. Runs under `torchrun` or `accelerate launch` on several ranks too."""

from __future__ import annotations

import sys
from contextlib import ExitStack
from dataclasses import asdict, replace
from typing import Any

from mtp_train.cli.corpora import SETS, corpora, text_inputs
from mtp_train.cli.job import Job
from mtp_train.cli.main import guarded
from mtp_train.cli.plan import announce
from mtp_train.cli.run_folder import run_stage
from mtp_train.core.dist import Ranks
from mtp_train.core.provenance import digest
from mtp_train.models.readout import Readout
from mtp_train.precompute.estimate import PlanConfig
from mtp_train.precompute.sources import EngineStates, StateSource
from mtp_train.precompute.stage import PrecomputeConfig, precompute
from mtp_train.precompute.vllm_states import VllmStates
from mtp_train.store.manifest import NAME
from mtp_train.store.places import Place


def stage(job: Job) -> None:
    config: PrecomputeConfig = job.section("precompute", PrecomputeConfig)
    ranks = job.process.ranks
    wanted = replace(config, out="", tensor_parallel=1)  # neither decides what the features are
    run_stage(
        job.folder,
        "precompute",
        [asdict(wanted), text_inputs(job), job.target_inputs],
        lambda: _work(job, config, ranks),
        ranks,
        keeps=True,  # its own contract says which shards may stay
        whole=lambda: all(Place(job.features(name)).exists(NAME) for name in SETS),
    )


def _work(job: Job, config: PrecomputeConfig, ranks: Ranks) -> Any:
    if ranks.main:
        text = corpora(job)
        announce(job, job.section("plan", PlanConfig), text, ranks.world)
    ranks.wait()
    text = corpora(job)  # made by now: mapped
    ranks = ranks.grouped(config.tensor_parallel)
    with ExitStack() as stack:
        source = _source(job, config, stack)
        for name, corpus in text.items():
            precompute(source, corpus, config, job.features(name), corpus.note.accounting, ranks)
    return {name: digest(Place(job.features(name)).read(NAME).decode()) for name in SETS}


def _source(job: Job, config: PrecomputeConfig, stack: ExitStack) -> StateSource:
    values = job.target_config
    if not config.vllm.python:
        target = job.target(tensor_parallel=config.tensor_parallel)
        return EngineStates(target, config.states)
    readout = Readout.load(values.path, values.dtype, trust_remote_code=values.trust_remote_code)
    return stack.enter_context(VllmStates(readout, config.vllm, values.dtype, config.states))


if __name__ == "__main__":
    sys.exit(guarded(lambda: stage(Job(sys.argv[1:]))))
