"""`mtp-train precompute`: text to features. Runs under `torchrun` or `accelerate launch` on several ranks too."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from mtp_train.cli import features
from mtp_train.cli.corpora import SETS, corpora, text_inputs
from mtp_train.cli.job import Job
from mtp_train.cli.main import guarded
from mtp_train.cli.plan import announce
from mtp_train.cli.run_folder import run_stage
from mtp_train.core.dist import Ranks
from mtp_train.core.errors import UserError
from mtp_train.core.keys import config_inputs, inputs
from mtp_train.core.owned import held
from mtp_train.models.quantised import NONE
from mtp_train.models.readout import Readout
from mtp_train.models.sizes import target_sizes
from mtp_train.precompute.estimate import PlanConfig
from mtp_train.precompute.live import prepare_live
from mtp_train.precompute.sources import EngineStates, StateSource, expand_states
from mtp_train.precompute.stage import (
    PrecomputeConfig,
    precompute,
    require_own_shards,
    require_own_store,
)
from mtp_train.precompute.vllm_states import VllmStates
from mtp_train.store.corpus import Corpus
from mtp_train.store.places import Place


def stage(job: Job) -> None:
    config: PrecomputeConfig = job.section("precompute", PrecomputeConfig)
    ranks = job.process.ranks
    for name in () if config.live else SETS:  # before the stage's stamp is taken away
        place, weights = Place(job.features(name)), job.target_inputs["hash"]
        require_own_store(place)
        require_own_shards(place, weights, job.target_identity)
    run_stage(
        job.folder,
        "precompute",
        config_inputs("precompute", config)
        | text_inputs(job)
        | inputs({"target": job.target_inputs}),
        lambda: _work(job, config, ranks),
        ranks,
        whole=lambda: features.whole(job, config.live),
    )


def _work(job: Job, config: PrecomputeConfig, ranks: Ranks) -> Any:
    if ranks.main:
        text = corpora(job)
        for name in () if config.live else SETS:  # before the target is loaded
            _require_same_features(job, config, name, text[name])
        announce(job, job.section("plan", PlanConfig), text, ranks.world)
    ranks.wait()
    text = corpora(job)  # made by now: mapped
    if config.live:
        _prepare(job, config, text, ranks)
        return features.outputs(job, is_live=True)
    ranks = ranks.grouped(config.tensor_parallel)
    with ExitStack() as stack:
        if ranks.main and config.out and Place(config.out).local:
            for name in SETS:
                stack.enter_context(held(Path(job.features(name))))
        source = _source(job, config, stack)
        for name, corpus in text.items():
            precompute(source, corpus, config, job.features(name), corpus.note.accounting, ranks)
    return features.outputs(job, is_live=False)


def _require_same_features(job: Job, config: PrecomputeConfig, name: str, text: Corpus) -> None:
    """Raise if other features lie where this set's go, as far as that is known without the target."""
    values = job.target_config
    layers = target_sizes(
        values.path, values.dtype, trust_remote_code=values.trust_remote_code
    ).layers
    require_own_store(
        Place(job.features(name)),
        target_hash=job.target_inputs["hash"],
        dtype=values.dtype,
        states=list(expand_states(config.states, layers)),
        codec=config.codec,
        data_digest=text.note.digest,
        rows_per_shard=config.rows_per_shard,
        rows_per_forward=config.rows_per_forward,
    )


def _prepare(job: Job, config: PrecomputeConfig, text: Mapping[str, Corpus], ranks: Ranks) -> None:
    """Live features: the gate, and a note of what they are."""
    if ranks.main:
        for corpus in text.values():
            prepare_live(job.target(), corpus, config)
    ranks.wait()


def _source(job: Job, config: PrecomputeConfig, stack: ExitStack) -> StateSource:
    values = job.target_config
    if not config.vllm.python:
        target = job.target(tensor_parallel=config.tensor_parallel)
        return EngineStates(target, config.states)
    if values.quantisation != NONE:
        raise UserError(
            "vLLM captures a target as its folder holds it",
            f"target.quantisation={values.quantisation}",
            "leave precompute.vllm.python empty, or name a folder that is quantised already",
        )
    readout = Readout.load(values.path, values.dtype, trust_remote_code=values.trust_remote_code)
    readout.chat_template_kwargs = values.chat_template_kwargs
    return stack.enter_context(VllmStates(readout, config.vllm, values.dtype, config.states))


if __name__ == "__main__":
    sys.exit(guarded(lambda: stage(Job(sys.argv[1:]))))
