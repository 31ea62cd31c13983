"""Sampled speculative output is distributed exactly as the target's; a broken rule is caught by the same test."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from transformers import LlamaConfig

from mtp_train.attention.packed import PackedContext
from mtp_train.engine import step as step_module
from mtp_train.engine.chain import ChainProposer
from mtp_train.engine.engine import Engine, EngineConfig
from mtp_train.engine.sampling import Sampling, draw
from mtp_train.engine.sequences import Request
from mtp_train.engine.verify import leading, verify_sampled
from mtp_train.heads.base import DraftHead
from mtp_train.heads.draft_model import DraftModelConfig
from mtp_train.heads.eagle3 import Eagle3Config
from mtp_train.heads.families import build_head
from mtp_train.heads.mtp import MtpConfig, build
from mtp_train.models.target import Target, config_values

VOCABULARY = 5
LENGTH = 4
ROUNDS = 20_000
PROMPT = (1, 3, 2)


@pytest.fixture(scope="module")
def tiny() -> Target:
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=64,
        initializer_range=0.6,
    )
    return Target.from_config(config, seed=4)


def exact(target: Target, temperature: float) -> np.ndarray:
    """Probability of every continuation of LENGTH tokens [VOCABULARY ** LENGTH], by enumeration in float64."""
    target.model.double()
    outputs = list(itertools.product(range(VOCABULARY), repeat=LENGTH))
    texts = torch.tensor([PROMPT + output for output in outputs])
    rows, length = texts.shape
    positions = torch.arange(length).repeat(rows)
    states = target.forward(
        texts.flatten(), positions, PackedContext(range(0, rows * length + 1, length))
    )
    log_p = torch.log_softmax(target.logits(states).view(rows, length, -1) / temperature, -1)
    target.model.float()
    chosen = (
        log_p[:, len(PROMPT) - 1 : -1].gather(2, texts[:, len(PROMPT) :].unsqueeze(2)).sum((1, 2))
    )
    return chosen.exp().detach().numpy()


def opinionated(target: Target, family: str) -> DraftHead:
    """A head that is sure of itself and often wrong; eagle3 can draft three of the five tokens, draft_model four."""
    if family == "draft_model":
        small = LlamaConfig(
            vocab_size=4,
            hidden_size=12,
            intermediate_size=16,
            num_hidden_layers=2,
            num_attention_heads=3,
            num_key_value_heads=3,
            max_position_embeddings=64,
            initializer_range=0.6,
        )
        return build_head(target, DraftModelConfig(model=config_values(small)), 9)
    if family == "mtp":
        head = build(target, MtpConfig(init="random"), seed=9)
        with torch.no_grad():
            head.eh_proj.weight.mul_(20)
        return head
    states = ["layer_0", "layer_1", "post_norm"]
    config = Eagle3Config(init="random", states=states, draft_vocabulary=3)
    own = build_head(target, config, 9, torch.tensor([3, 0, 5, 1, 0]))
    with torch.no_grad():
        own.get_submodule("lm_head").weight.mul_(20)
    return own


def counts(target: Target, temperature: float, seed: int, family: str = "mtp") -> np.ndarray:
    head = opinionated(target, family)
    engine = Engine(
        target,
        ChainProposer(target, head, 3),
        EngineConfig(max_batch=4000, cache_rows=4000 * 16, page_size=16, prefill_rows=10**6),
    )
    done = engine.generate(
        [Request(str(i), PROMPT, LENGTH) for i in range(ROUNDS)], Sampling(temperature, seed)
    )
    index = [int("".join(map(str, completion.tokens)), VOCABULARY) for completion in done]
    assert any(step.accepted == 3 for c in done for step in c.steps), (
        "bonus tokens are part of the test"
    )
    assert any(step.accepted == 0 for c in done for step in c.steps), (
        "rejections are part of the test"
    )
    return np.bincount(index, minlength=VOCABULARY**LENGTH)


def p_value(observed: np.ndarray, probability: np.ndarray) -> float:
    """Chi-square over cells of at least five expected counts; the rest are one cell."""
    expected = probability / probability.sum() * observed.sum()
    large = expected >= 5
    cells = (
        np.append(observed[large], observed[~large].sum()),
        np.append(expected[large], expected[~large].sum()),
    )
    return chi_square(*cells)


def chi_square(observed: np.ndarray, expected: np.ndarray) -> float:
    """Chance of a larger statistic: the upper regularised gamma function at half the degrees of freedom."""
    statistic = float(((observed - expected) ** 2 / expected).sum())
    freedom = torch.tensor((len(observed) - 1) / 2, dtype=torch.float64)
    return float(torch.special.gammaincc(freedom, torch.tensor(statistic / 2, dtype=torch.float64)))


@pytest.mark.parametrize(
    ("temperature", "family"),
    [(1.0, "mtp"), (0.6, "mtp"), (1.0, "eagle3"), (1.0, "draft_model"), (0.6, "draft_model")],
)
def test_sampled_speculation_is_distributed_as_the_target(
    tiny: Target, temperature: float, family: str
) -> None:
    observed = counts(tiny, temperature, seed=1, family=family)
    assert p_value(observed, exact(tiny, temperature)) > 1e-3


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


@pytest.mark.parametrize("family", ["mtp", "draft_model"])
@pytest.mark.parametrize("broken", [_without_residual, _accepts_twice_as_readily])
def test_the_chi_square_test_catches_a_broken_rule(
    tiny: Target, broken: object, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(step_module, "verify_sampled", broken)
    assert p_value(counts(tiny, 1.0, seed=1, family=family), exact(tiny, 1.0)) < 1e-6


def test_leading_counts_the_first_true_flags() -> None:
    flags = torch.tensor([[1, 1, 0, 1], [0, 1, 1, 1], [1, 1, 1, 1]]).bool()
    assert leading(flags).tolist() == [2, 0, 4]


def test_a_draw_follows_its_weights() -> None:
    weights = torch.tensor([0.1, 0.0, 0.6, 0.3]).expand(ROUNDS, 4)
    observed = np.bincount(draw(weights, torch.Generator().manual_seed(2)).numpy(), minlength=4)
    assert observed[1] == 0
    assert chi_square(observed[[0, 2, 3]], np.array([0.1, 0.6, 0.3]) * ROUNDS) > 1e-3
