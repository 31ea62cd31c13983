"""A head's projection is fitted to the features: the map of (x[p+1], H[p]) to H[p+1] with the final norm undone."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from toys import VOCABULARY, conversations, make_store, make_target

from mtp_train.core.errors import UserError
from mtp_train.heads.base import DraftHead
from mtp_train.heads.eagle import EagleConfig
from mtp_train.heads.families import FAMILIES, build_head
from mtp_train.heads.mtp import MtpConfig
from mtp_train.heads.start import usual_lengths
from mtp_train.models.target import Target
from mtp_train.store.shards import FeatureSequence
from mtp_train.train.fitted import fit_projections

CONFIGS = {
    "mtp": MtpConfig(init="fitted"),
    "mtp of two layers": MtpConfig(init="fitted", layers=2),
    "mtp without norms": MtpConfig(init="fitted", enorm=False, hnorm=False, final_norm=False),
    "mtp of two modules": MtpConfig(init="fitted", modules=2),
    "eagle": EagleConfig(init="fitted"),
}


@dataclass
class Recurrent:
    """Features in which each state is a linear map of what the head reads in the row before it."""

    sequences: list[FeatureSequence]

    def lengths(self) -> np.ndarray:
        return np.asarray([len(one.tokens) for one in self.sequences])

    def read(self, indices: list[int]) -> list[FeatureSequence]:
        return [self.sequences[index] for index in indices]


@pytest.fixture(scope="module")
def lively() -> Target:
    """A target whose embeddings weigh as much as its states."""
    return make_target(initializer_range=1.0)


def recurrent(target: Target, head: DraftHead, matrix_XD: torch.Tensor) -> Recurrent:
    """Forty texts of 30 tokens; state p + 1 is `matrix` applied to what the projection reads at row p."""
    generator = torch.Generator().manual_seed(1)
    (projection, *_) = head.projections()
    made = []
    for number in range(40):
        tokens = torch.randint(VOCABULARY, (30,), generator=generator)
        states = [torch.randn(target.hidden_size, generator=generator)]
        for token in tokens[1:]:
            read = projection.reads(target.embed(token.view(1)), states[-1].view(1, -1))
            states.append((read @ matrix_XD)[0] + 0.3 * torch.randn(32, generator=generator))
        mask = torch.ones_like(tokens)
        made.append(FeatureSequence(str(number), tokens, mask, {"post_norm": torch.stack(states)}))
    return Recurrent(made)


@pytest.mark.parametrize("name", CONFIGS)
@torch.no_grad()
def test_the_map_that_made_the_features_is_found(name: str, lively: Target) -> None:
    head = build_head(lively, CONFIGS[name])
    generator = torch.Generator().manual_seed(2)
    matrix_XD = torch.randn(64, 32, generator=generator) / 64**0.5
    fit_projections(head, lively, recurrent(lively, head, matrix_XD))  # type: ignore[arg-type]
    usual, weight_D = usual_lengths(lively), lively.base.norm.weight
    scale = usual.before / weight_D
    if name in ("eagle", "mtp without norms"):  # no final norm
        scale = scale * weight_D / usual.applied
    for projection in head.projections():
        token_N = torch.randint(VOCABULARY, (50,), generator=generator)
        read_NX = projection.reads(lively.embed(token_N), torch.randn(50, 32, generator=generator))
        expected_ND = read_NX @ matrix_XD
        error = (projection.linear(read_NX) / scale - expected_ND).norm() / expected_ND.norm()
        assert error < 0.3, "a shift by one row, or another norm, leaves nothing of it (error 1)"


def test_a_fitted_head_begins_nearer(tmp_path: Any) -> None:
    """On a target's own features: the first loss of training is lower than from the last layer alone."""
    from mtp_train.train.config import TrainConfig
    from mtp_train.train.loop import train

    target = make_target(initializer_range=0.3)
    store = make_store(tmp_path / "features", target, conversations(120, seed=3))
    losses = {}
    for init in ("last_layer", "fitted"):
        head = build_head(target, MtpConfig(init=init))
        if init == "fitted":
            fit_projections(head, target, store)
        out = tmp_path / init
        config = TrainConfig(epochs=1, rows=64, validations=1, learning_rate=1e-9)
        train(target, head, store, store, config, Accelerator(cpu=True), out)
        first = (out / "curves.jsonl").read_text().splitlines()[0]
        losses[init] = json.loads(first)["validation"]["kl/1"]
    assert losses["fitted"] < 0.9 * losses["last_layer"]


def test_families_without_such_a_projection_are_refused(toy_target: Target) -> None:
    head = build_head(toy_target, FAMILIES["medusa"].config())
    with pytest.raises(UserError, match=r"head\.init=fitted needs a head that projects.*medusa"):
        fit_projections(head, toy_target, None)  # type: ignore[arg-type]
