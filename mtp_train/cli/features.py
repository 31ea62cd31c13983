"""The features that `precompute` left or prepared for training: from a store, or live."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from mtp_train.batches.pack import Features
from mtp_train.cli.corpora import SETS, text_inputs
from mtp_train.cli.job import Job
from mtp_train.core.errors import UserError
from mtp_train.core.keys import Difference, differences
from mtp_train.core.progress import say
from mtp_train.core.provenance import digest, file_digest
from mtp_train.models.identity import require_same
from mtp_train.models.target import Target
from mtp_train.precompute import live
from mtp_train.precompute.live import LiveFeatures, LiveManifest
from mtp_train.precompute.stage import PrecomputeConfig
from mtp_train.store import manifest
from mtp_train.store.corpus import Corpus
from mtp_train.store.places import Place
from mtp_train.store.shards import FeatureStore

TEXT_KEYS = ("data.", "regenerate.")  # of precompute's inputs


def whole(job: Job, is_live: bool) -> bool:
    """Whether the features of all sets are there: stored, or prepared to be computed live."""
    if is_live:
        return all((job.folder.corpus(name) / live.NAME).is_file() for name in SETS)
    return all(Place(job.features(name)).exists(manifest.NAME) for name in SETS)


def outputs(job: Job, is_live: bool) -> Any:
    """What precompute's stamp records: each set's manifest."""
    if is_live:
        return {name: file_digest(job.folder.corpus(name) / live.NAME) for name in SETS}
    return {
        name: digest(Place(job.features(name)).read(manifest.NAME).decode(errors="replace"))
        for name in SETS
    }


def trained_counts(job: Job) -> Tensor:
    """How often each token of the training set is trained: int64 [vocabulary]. Loads no target."""
    if not config_of(job).live:
        return FeatureStore(job.features("train"), checked=True).token_counts(trained=True)
    folder = job.folder.corpus("train")
    size = LiveManifest.load(folder).contract.vocab_size
    corpus = Corpus(folder)
    corpus.require_same()
    return torch.from_numpy(corpus.token_counts(size, trained=True))


def held_states(job: Job) -> tuple[str, ...]:
    """The states that the run's features hold. Loads no target."""
    if not config_of(job).live:
        return FeatureStore(job.features("train")).states
    return LiveManifest.load(job.folder.corpus("train")).contract.states


def open_features(job: Job, name: str, target: Target, states: Sequence[str]) -> Features:
    """One set's features with these states. Live ones pass a small gate here too: it is this process's target."""
    config = config_of(job)
    if not config.live:
        return FeatureStore(job.features(name), states, checked=True)
    folder = job.folder.corpus(name)
    corpus = Corpus(folder)
    corpus.require_same()
    features = LiveFeatures(target, corpus, LiveManifest.load(folder), states)
    features.gate(config, config.gate_sequences)
    return features


def require_current(job: Job, recorded: str) -> None:
    """Raise if the features of this configuration are not those that precompute's stamp recorded.

    Where none are left at all, a finished head still counts as trained on them.
    """
    is_live = config_of(job).live
    same = whole(job, is_live) and recorded == digest(outputs(job, is_live))
    if not same and any(whole(job, kind) for kind in (True, False)):
        raise UserError(
            "training needs the features of this run's last precompute",
            f"another {job.features('*')}/{manifest.NAME} than it wrote, with "
            f"precompute.live={str(is_live).lower()}",
            "give it the same precompute keys, or run precompute again with these",
        )


def require_same_text(job: Job) -> None:
    """Raise if the run's features were made of other data, or of data fitted otherwise, than is configured."""
    changed = _other_text(job)
    if changed:
        raise UserError(
            "training needs features that were made of the configured text",
            "; ".join(map(str, changed)),
            "restore what changed, or run precompute again",
        )


def tell_other_text(job: Job, stage: str) -> None:
    """Say if the features that a head was trained on were made of other text than is configured, or of lost files."""
    if not job.process.ranks.main:
        return
    try:
        changed = "; ".join(map(str, _other_text(job)))
    except UserError as error:
        changed = str(error)
    if changed:
        say(f"{stage}: the features of this run were made of other text: {changed}")


def _other_text(job: Job) -> list[Difference]:
    """What of the text is not as precompute noted it.

    Keys that are not given now are not held against it: features can be used where their data is not at hand.
    """
    made = job.folder.noted_inputs("precompute")
    noted = {name: value for name, value in made.items() if name.startswith(TEXT_KEYS)}
    if not noted:  # of an earlier version, or there are no features
        return []
    return [item for item in differences(noted, text_inputs(job)) if item.now is not None]


def require_same_target(job: Job) -> None:
    """Raise, before a target is loaded, if the features there are of another config or text."""
    is_live = config_of(job).live
    for name in SETS if whole(job, is_live) else ():
        contract = (
            LiveManifest.load(job.folder.corpus(name)).contract
            if is_live
            else manifest.load_manifest(job.features(name)).contract
        )
        if contract.identity:
            remedy = "restore the target's files, or run precompute again in another run folder"
            require_same(contract.identity, job.target_identity, f"features of {name}", remedy)


def config_of(job: Job) -> PrecomputeConfig:
    config: PrecomputeConfig = job.section("precompute", PrecomputeConfig)
    return config
