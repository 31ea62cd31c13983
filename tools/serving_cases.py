"""The small heads that the serving check trains, exports and serves, and how. Starts no engine of others.

Each is trained on a few answers of the target: one so often that it is known, the others a few times, so that drafts
are accepted nearly always on the first, and sometimes on the others.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator

from mtp_train.core.dist import Ranks
from mtp_train.core.records import Accounting
from mtp_train.heads.base import DraftHead
from mtp_train.heads.draft_model import DraftModelConfig
from mtp_train.heads.eagle import EagleConfig
from mtp_train.heads.eagle3 import Eagle3Config
from mtp_train.heads.families import build_head
from mtp_train.heads.medusa import MedusaConfig
from mtp_train.heads.mtp import MtpConfig
from mtp_train.heads.peagle import PEagleConfig
from mtp_train.losses.terms import default_weights
from mtp_train.models.target import POST_NORM, Target
from mtp_train.precompute.sources import EngineStates
from mtp_train.precompute.stage import PrecomputeConfig, precompute
from mtp_train.store.shards import FeatureStore
from mtp_train.text.joined import join_turns
from mtp_train.text.sources import Answer
from mtp_train.train.config import TrainConfig
from mtp_train.train.loop import train

REPEATS = 10  # of the answer that is to be known, for each time that the others are seen
EPOCHS = 14
BLUR = 0.05  # of a draft model that is a copy of the target: noise over each weight's spread
EAGLE3 = Eagle3Config(draft_vocabulary=2048)
PEAGLE = PEagleConfig(  # every chain: it is to know a text after few steps
    draft_vocabulary=2048, layers=2, depths=7, depth_share=1.0, least_share=1.0
)


@dataclass(frozen=True)
class Case:
    """One head in one layout.

    Attributes:
        head: its configuration; none: a blurred copy of the target.
        method: vLLM's, as `serve_vllm.py` names it.
        beside: the method stands beside the head's path; else the layout's folder is served as the target.
        drafts: k, one start each.
        quick: part of the short check.
        may_refuse: vLLM's CPU runner may not serve the method: its message goes into the table, and fails nothing.
        plugin: vLLM needs ours.
    """

    name: str
    layout: str
    head: Any
    method: str
    drafts: tuple[int, ...] = (3,)
    quick: bool = False
    plugin: bool = False
    beside: bool = True
    may_refuse: bool = False


CASES = (
    Case("mimo", "mimo_mtp", MtpConfig(), "mtp", (3, 1)),
    Case("eagle", "eagle", EagleConfig(), "eagle", (3, 1)),
    Case("eagle3", "eagle3", EAGLE3, "eagle3", (3, 1), quick=True),
    Case("peagle", "peagle", PEAGLE, "peagle", (7, 3, 1)),
    Case(
        "plugin",
        "mtp_train_vllm",
        MtpConfig(modules=2, hnorm=False),
        "mtp",
        (3, 1),
        quick=True,
        plugin=True,
    ),
    Case("speculators", "speculators", EAGLE3, "speculators"),
    Case("stitched", "stitched", MtpConfig(), "mtp", beside=False, may_refuse=True),
    Case("medusa", "medusa", MedusaConfig(own_lm_heads=False), "medusa"),
    Case("draft_model", "draft_model", None, "draft_model"),
)


def small_head(target: Target, config: Any, known: Answer, others: Sequence[Answer]) -> DraftHead:
    """A head that knows one answer and has seen the others."""
    if config is None:
        return blurred_copy(target)
    repeated = [replace(known, key=f"known-{number}") for number in range(REPEATS)]
    sequences = [sequence for sequence, _ in join_turns([*repeated, *others])]
    counts_V = torch.bincount(
        torch.tensor([token for sequence in sequences for token in sequence.tokens]),
        minlength=target.vocab_size,
    )
    head = build_head(target, config, counts_V=counts_V)
    accelerator = Accelerator(
        mixed_precision="bf16" if target.dtype == torch.bfloat16 else "no",
        cpu=target.device.type == "cpu",
    )
    settings = TrainConfig(
        epochs=EPOCHS,
        rows=256,
        rollout_steps=head.steps or TrainConfig.rollout_steps,
        decay=1.0,
        loss=default_weights()
        | {"smooth_l1": 0.0},  # heads with an lm_head of their own have no such states
        validations=1,
        checkpoints=1,
        explode=0,
    )
    with tempfile.TemporaryDirectory() as scratch:
        features, accounting = Path(scratch) / "features", Accounting(used=len(sequences)).as_dict()
        source = EngineStates(target, tuple(dict.fromkeys((POST_NORM, *head.states))))
        precompute(source, sequences, PrecomputeConfig(), features, accounting, Ranks())
        store = FeatureStore(features)
        train(target, head, store, store, settings, accelerator, Path(scratch) / "train")
    return head


def blurred_copy(target: Target) -> DraftHead:
    """A draft model that is the target with noise on its weights."""
    head = build_head(target, DraftModelConfig(path=str(target.path)))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in head.parameters():
            noise = torch.randn(parameter.shape, generator=generator).to(parameter)
            parameter.add_(noise * parameter.std() * BLUR)
    return head
