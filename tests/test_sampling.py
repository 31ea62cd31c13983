"""Sampled speculative output is distributed exactly as the target's; a broken rule is caught by the same test."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from distribution import (
    SAMPLERS,
    Toy,
    check,
    check_mixed,
    chi_square,
    make_engine,
    make_toy,
    p_value,
)
from transformers import LlamaConfig

from mtp_train.engine import step as step_module
from mtp_train.engine.adaptive import AdaptiveProposer, StepCosts
from mtp_train.engine.branch import TreeConfig, TreeProposer
from mtp_train.engine.chain import ChainProposer
from mtp_train.engine.ngram import NgramProposer
from mtp_train.engine.propose import Proposer
from mtp_train.engine.sampling import Rules, Sampling, draw
from mtp_train.engine.verify import leading, verify_sampled, verify_tree
from mtp_train.heads.base import DraftHead
from mtp_train.heads.draft_model import DraftModelConfig
from mtp_train.heads.dspark import DSparkConfig
from mtp_train.heads.eagle3 import Eagle3Config
from mtp_train.heads.families import build_head
from mtp_train.heads.medusa import MedusaConfig
from mtp_train.heads.mtp import MtpConfig, build
from mtp_train.heads.peagle import PEagleConfig
from mtp_train.models.target import Target, config_values


@pytest.fixture(scope="module")
def toy() -> Toy:
    return make_toy()


def opinionated(target: Target, family: str) -> DraftHead:
    """A head that is sure of itself and often wrong.

    eagle3 and mtp_part can draft five of the seven tokens, draft_model six.
    """
    if family == "draft_model":
        small = LlamaConfig(
            vocab_size=6,
            hidden_size=12,
            intermediate_size=16,
            num_hidden_layers=2,
            num_attention_heads=3,
            num_key_value_heads=3,
            max_position_embeddings=64,
            initializer_range=0.6,
        )
        return build_head(target, DraftModelConfig(model=config_values(small)), 9)
    if family in ("mtp", "mtp_part"):
        config = MtpConfig(init="random", draft_vocabulary=0 if family == "mtp" else 5)
        head = build(target, config, 9, torch.tensor([3, 0, 5, 1, 0, 4, 2]))
        with torch.no_grad():
            head.eh_proj.weight.mul_(20)
        return head
    if family == "dspark":
        spark = build_head(
            target, DSparkConfig(layers=1, block_size=2, target_states=1, markov_rank=4), 9
        )
        with torch.no_grad():
            for parameter in spark.parameters():
                parameter.normal_(generator=torch.Generator().manual_seed(3))
        return spark
    if family == "medusa":
        medusa = build_head(target, MedusaConfig(steps=2), 9)
        with torch.no_grad():
            for parameter in medusa.parameters():
                parameter.normal_(generator=torch.Generator().manual_seed(4))
        return medusa
    states = ["layer_0", "layer_1", "post_norm"]
    made = PEagleConfig if family == "peagle" else Eagle3Config
    options = made(init="random", states=states, draft_vocabulary=5)
    own = build_head(target, options, 9, torch.tensor([3, 0, 5, 1, 0, 4, 2]))
    with torch.no_grad():
        own.get_submodule("lm_head").weight.mul_(20)
    return own


def tree(family: str, kind: str) -> Callable[[Target], Proposer]:
    config = TreeConfig(kind, drafts=5, depth=2, top_k=3)
    return lambda target: TreeProposer(target, opinionated(target, family), config)


def chain(family: str, drafts: int) -> Callable[[Target], Proposer]:
    return lambda target: ChainProposer(target, opinionated(target, family), drafts)


# Name -> a proposer for the toy target. One draft reaches the bonus token, two reach past a rejection.
SCHEMES: dict[str, Callable[[Target], Proposer | None]] = {
    "none": lambda target: None,
    "mtp": chain("mtp", 1),
    "mtp_chain": chain("mtp", 2),
    "mtp_part": chain("mtp_part", 2),
    "mtp_part_dynamic": tree("mtp_part", "dynamic"),
    "eagle3_chain": chain("eagle3", 2),
    "peagle": chain("peagle", 2),
    "draft_target": chain("draft_model", 2),
    "dspark": chain("dspark", 2),
    "dspark_adaptive": lambda target: AdaptiveProposer(
        target, opinionated(target, "dspark"), 2, StepCosts({1: (1.0, 1.3, 1.55)})
    ),
    "mtp_fixed": tree("mtp", "fixed"),
    "mtp_dynamic": tree("mtp", "dynamic"),
    "eagle3_dynamic": tree("eagle3", "dynamic"),
    "draft_target_dynamic": tree("draft_model", "dynamic"),
    "medusa_chain": chain("medusa", 2),
    "medusa_fixed": tree("medusa", "fixed"),
    "ngram": lambda target: NgramProposer(2, longest=1, shortest=1),
}


@pytest.mark.parametrize("sampler", ["plain", "cold"])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_sampled_output_is_distributed_as_the_target(toy: Toy, scheme: str, sampler: str) -> None:
    engine = make_engine(toy, SCHEMES[scheme](toy.target))
    checked = check(toy, engine, SAMPLERS[sampler])
    assert checked.p_value > 1e-4
    if engine.proposer.drafts and sampler == "plain":
        assert {0, engine.proposer.depth} <= checked.accepted or "adaptive" in scheme


def test_requests_with_seeds_of_their_own_are_distributed_so_too(toy: Toy) -> None:
    engine = make_engine(toy, SCHEMES["mtp_chain"](toy.target))
    assert check(toy, engine, SAMPLERS["plain"], seeded=True).p_value > 1e-4


@pytest.mark.parametrize("sampler", ["plain", "all"])
@pytest.mark.parametrize("scheme", ["mtp_chain", "eagle3_chain", "draft_target"])
def test_the_best_drafts_of_a_head_leave_the_distribution_too(
    toy: Toy, scheme: str, sampler: str
) -> None:
    engine = make_engine(toy, SCHEMES[scheme](toy.target), verification="one_hot")
    assert check(toy, engine, SAMPLERS[sampler]).p_value > 1e-4


@pytest.mark.parametrize("scheme", ["medusa_fixed", "mtp_dynamic"])
def test_typical_acceptance_changes_the_distribution(toy: Toy, scheme: str) -> None:
    engine = make_engine(toy, SCHEMES[scheme](toy.target), verification="typical")
    assert not engine.config.lossless
    assert check(toy, engine, SAMPLERS["plain"]).p_value < 1e-6


def _takes_any_first_child(
    draft_BN: torch.Tensor, choice_BR: torch.Tensor, parent_BN: torch.Tensor, seen: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """As if a likely draft were right in one case of five more than it is."""
    lucky = torch.arange(len(draft_BN)) % 5 == 0
    choice_BR = choice_BR.clone()
    choice_BR[lucky, 0] = draft_BN[lucky, 0]
    return verify_tree(draft_BN, choice_BR, parent_BN, seen)


@pytest.mark.parametrize("scheme", ["mtp_fixed", "eagle3_dynamic", "draft_target_dynamic"])
def test_the_same_test_catches_a_broken_tree(
    toy: Toy, scheme: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(step_module, "verify_tree", _takes_any_first_child)
    engine = make_engine(toy, SCHEMES[scheme](toy.target))
    assert check(toy, engine, SAMPLERS["plain"]).p_value < 1e-6


def _without_residual(
    draft_BK: torch.Tensor,
    draft_p: torch.Tensor,
    target_p: torch.Tensor,
    generator: torch.Generator,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The classical mistake: after a rejection, draw from p instead of max(p - q, 0)."""
    accepted, _ = verify_sampled(draft_BK, draft_p, target_p, generator)
    return accepted, draw(target_p[torch.arange(len(accepted)), accepted], generator)


def _accepts_twice_as_readily(
    draft_BK: torch.Tensor,
    draft_p: torch.Tensor,
    target_p: torch.Tensor,
    generator: torch.Generator,
) -> tuple[torch.Tensor, torch.Tensor]:
    return verify_sampled(draft_BK, draft_p / 2, target_p, generator)


@pytest.mark.parametrize("scheme", ["mtp", "mtp_chain", "draft_target"])
@pytest.mark.parametrize("broken", [_without_residual, _accepts_twice_as_readily])
def test_the_same_test_catches_a_broken_verification(
    toy: Toy, broken: object, scheme: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(step_module, "verify_sampled", broken)
    assert check(toy, make_engine(toy, SCHEMES[scheme](toy.target)), SAMPLERS["plain"]).p_value < (
        1e-6
    )


GREEDY = {"greedy": Sampling(), "greedy_penalty": Sampling(repetition_penalty=2.5)}


@pytest.mark.parametrize("scheme", SCHEMES)
def test_every_sampler_is_exact_in_batches_of_all(toy: Toy, scheme: str) -> None:
    samplers = SAMPLERS | GREEDY
    found = check_mixed(toy, make_engine(toy, SCHEMES[scheme](toy.target)), samplers, rounds=1500)
    assert len(found) == len(samplers)
    assert {name: one for name, one in found.items() if one.p_value <= 1e-4} == {}


@pytest.mark.parametrize("sampler", ["top_p", "all"])
def test_a_sampler_is_exact_in_batches_of_its_own(toy: Toy, sampler: str) -> None:
    engine = make_engine(toy, SCHEMES["mtp_chain"](toy.target))
    assert check(toy, engine, SAMPLERS[sampler]).p_value > 1e-4


PROBABILITIES = Rules.probabilities


def _without_penalty(
    rules: Rules, logits: torch.Tensor, seen: torch.Tensor | None = None
) -> torch.Tensor:
    plain = [replace(sampling, repetition_penalty=1.0) for sampling in rules.samplings]
    return PROBABILITIES(Rules.of(plain, logits.device), logits)


def _drafts_unseen(
    rules: Rules, logits: torch.Tensor, seen: torch.Tensor | None = None
) -> torch.Tensor:
    """Every row penalised as the root is: drafts above it are forgotten."""
    if seen is not None and seen.dim() == 3:
        seen = seen[:, :1].expand_as(seen)
    return PROBABILITIES(rules, logits, seen)


def _filters_before_temperature(
    rules: Rules, logits: torch.Tensor, seen: torch.Tensor | None = None
) -> torch.Tensor:
    warm = [replace(sampling, temperature=1.0) for sampling in rules.samplings]
    kept = PROBABILITIES(Rules.of(warm, logits.device), logits, seen) > 0
    p = torch.softmax(logits / rules.samplings[0].temperature, -1) * kept
    return p / p.sum(-1, keepdim=True)


@pytest.mark.parametrize(
    ("sampler", "broken"),
    [
        ("penalty", _without_penalty),
        ("penalty", _drafts_unseen),
        ("all", _without_penalty),
        ("top_p", _filters_before_temperature),
        ("min_p", _filters_before_temperature),
    ],
)
@pytest.mark.parametrize("scheme", ["mtp_chain", "draft_target", "mtp_dynamic"])
def test_the_same_test_catches_broken_rules(
    toy: Toy, scheme: str, sampler: str, broken: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Rules, "probabilities", broken)
    engine = make_engine(toy, SCHEMES[scheme](toy.target))
    assert check(toy, engine, SAMPLERS[sampler]).p_value < 1e-6


@pytest.mark.parametrize("name", SAMPLERS)
def test_outputs_under_other_rules_are_told_apart(toy: Toy, name: str) -> None:
    """Each of the samplers is far enough from every other that a check of one fails on outputs of another."""
    rng = np.random.default_rng(3)
    for other, sampling in SAMPLERS.items():
        wrong = toy.exact(sampling)
        observed = rng.multinomial(4000, wrong / wrong.sum())
        chance = p_value(observed, toy.exact(SAMPLERS[name]))
        assert chance > 1e-4 if other == name else chance < 1e-6, other


def test_leading_counts_the_first_true_flags() -> None:
    flags = torch.tensor([[1, 1, 0, 1], [0, 1, 1, 1], [1, 1, 1, 1]]).bool()
    assert leading(flags).tolist() == [2, 0, 4]


def test_a_draw_follows_its_weights() -> None:
    weights = torch.tensor([0.1, 0.0, 0.6, 0.3]).expand(20_000, 4)
    observed = np.bincount(draw(weights, torch.Generator().manual_seed(2)).numpy(), minlength=4)
    assert observed[1] == 0
    assert chi_square(observed[[0, 2, 3]], np.array([0.1, 0.6, 0.3]) * 20_000) > 1e-3
