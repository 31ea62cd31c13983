"""The sampling rules: probabilities as defined, draws that follow them, and controls that the same tests catch."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from distribution import exact_probabilities, p_value

from mtp_train.core.errors import UserError
from mtp_train.engine.logprobs import TokenLogprobs, token_logprobs
from mtp_train.engine.sampling import (
    Rules,
    Sampling,
    draw,
    keep_min_p,
    keep_top_k,
    keep_top_p,
    seen_tokens,
    seen_with_drafts,
)

CPU = torch.device("cpu")
DRAWS = 20_000
LOGITS = torch.tensor([1.6, -0.4, 0.9, 0.1, -1.7, 1.1, 0.6, -0.9, 2.1])
SEEN = frozenset({0, 1, 8})

SAMPLERS = {
    "temperature": Sampling(0.7),
    "hot": Sampling(1.6),
    "top_k": Sampling(1.0, top_k=4),
    "top_p": Sampling(1.6, top_p=0.7),
    "min_p": Sampling(1.6, min_p=0.3),
    "penalty": Sampling(1.0, repetition_penalty=1.5),
    "reward": Sampling(1.0, repetition_penalty=0.7),
    "top_k_top_p": Sampling(1.3, top_k=4, top_p=0.7),
    "min_p_top_p": Sampling(1.4, min_p=0.2, top_p=0.8),
    "all": Sampling(1.5, top_k=5, top_p=0.8, min_p=0.2, repetition_penalty=1.3),
}


def flags(seen: frozenset[int], vocabulary: int) -> torch.Tensor:
    return seen_tokens([sorted(seen)], vocabulary, CPU)


def draws(p_V: torch.Tensor) -> np.ndarray:
    """How often each token is drawn."""
    drawn = draw(p_V.expand(DRAWS, -1), torch.Generator().manual_seed(5))
    return np.bincount(drawn.numpy(), minlength=p_V.shape[-1])


def ours(sampling: Sampling) -> torch.Tensor:
    rules = Rules.of([sampling], CPU)
    return rules.probabilities(LOGITS.unsqueeze(0), flags(SEEN, len(LOGITS)))[0]


@pytest.mark.parametrize("name", SAMPLERS)
def test_draws_follow_the_exact_probabilities(name: str) -> None:
    want = exact_probabilities(LOGITS.numpy(), SAMPLERS[name], SEEN)
    assert p_value(draws(ours(SAMPLERS[name])), want) > 1e-3


def _top_p_before_temperature() -> torch.Tensor:
    return torch.softmax(keep_top_p(LOGITS, torch.tensor([0.7])) / 1.6, -1)


def _min_p_before_temperature() -> torch.Tensor:
    return torch.softmax(keep_min_p(LOGITS, torch.tensor([0.3])) / 1.6, -1)


def _top_p_before_top_k() -> torch.Tensor:
    kept = keep_top_p(LOGITS / 1.3, torch.tensor([0.7]))
    return torch.softmax(keep_top_k(kept, torch.tensor([4]), 4), -1)


def _divided_whatever_the_sign() -> torch.Tensor:
    seen = flags(SEEN, len(LOGITS))[0]
    return torch.softmax(torch.where(seen, LOGITS / 1.5, LOGITS), -1)


def _changed(name: str, **changes: float) -> Callable[[], torch.Tensor]:
    return lambda: ours(replace(SAMPLERS[name], **changes))


@pytest.mark.parametrize(
    ("name", "broken"),
    [
        ("temperature", _changed("temperature", temperature=0.8)),
        ("hot", _changed("hot", temperature=1.0)),
        ("top_k", _changed("top_k", top_k=5)),
        ("top_k", _changed("top_k", top_k=3)),
        ("top_p", _changed("top_p", top_p=1.0)),
        ("top_p", _top_p_before_temperature),
        ("min_p", _changed("min_p", min_p=0.0)),
        ("min_p", _min_p_before_temperature),
        ("penalty", _changed("penalty", repetition_penalty=1.0)),
        ("penalty", _divided_whatever_the_sign),
        ("reward", _changed("reward", repetition_penalty=1 / 0.7)),
        ("top_k_top_p", _top_p_before_top_k),
        ("min_p_top_p", _changed("min_p_top_p", min_p=0.0)),
        ("all", _changed("all", repetition_penalty=1.0)),
    ],
)
def test_the_same_test_catches_a_broken_sampler(
    name: str, broken: Callable[[], torch.Tensor]
) -> None:
    want = exact_probabilities(LOGITS.numpy(), SAMPLERS[name], SEEN)
    assert p_value(draws(broken()), want) < 1e-6


def mixed(generator: np.random.Generator, count: int) -> list[Sampling]:
    """Samplings with every combination of rules on and off, some greedy."""
    choices = itertools.product([0.0, 0.6, 1.7], [0, 1, 3, 40], [1.0, 0.5, 0.9], [0.0, 0.2])
    pool = [Sampling(t, top_k=k, top_p=p, min_p=m) for t, k, p, m in choices]
    picked = [pool[at] for at in generator.integers(len(pool), size=count)]
    return [replace(s, repetition_penalty=generator.choice([1.0, 1.4, 0.8])) for s in picked]


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("shape", [(), (3,), (2, 3)])
def test_a_mixed_batch_has_the_probabilities_of_each_row_alone(
    seed: int, shape: tuple[int, ...]
) -> None:
    generator = np.random.default_rng(seed)
    samplings = mixed(generator, 6)
    logits = generator.normal(0, 2, (6, *shape, 13)).astype(np.float32)
    if seed % 3 == 0:
        logits = logits.round()  # ties
    seen = generator.random(logits.shape) < 0.3
    p = Rules.of(samplings, CPU).probabilities(torch.tensor(logits), torch.tensor(seen)).numpy()
    assert p.dtype == np.float32 and p.shape == logits.shape
    for row in np.ndindex(logits.shape[:-1]):
        occur = frozenset(np.flatnonzero(seen[row]).tolist())
        want = exact_probabilities(logits[row], samplings[row[0]], occur)
        np.testing.assert_allclose(p[row], want, atol=2e-6)
        assert ((p[row] > 0) == (want > 0)).all()


@pytest.mark.parametrize("spread", [0.2, 1.0, 4.0])
def test_a_nucleus_of_any_size_is_found(spread: float) -> None:
    """Of 20,000 tokens a few, some hundreds and most: the best candidates are enough, or not by far."""
    logits = np.random.default_rng(8).normal(0, spread, (4, 20_000)).astype(np.float32)
    samplings = [Sampling(1.0, top_p=p) for p in (0.05, 0.5, 0.95, 1.0)]
    p = Rules.of(samplings, CPU).probabilities(torch.tensor(logits)).numpy()
    for row, sampling, found in zip(logits, samplings, p, strict=True):
        want = np.sort(np.exp(row.astype(np.float64)))[::-1]
        want = want / want.sum()
        kept = 1 + int((want.cumsum() < sampling.top_p).sum()) if sampling.top_p < 1 else len(row)
        assert abs(int((found > 0).sum()) - kept) <= 1 + kept // 5000  # float32 sums
        np.testing.assert_allclose(
            np.sort(found)[::-1][:kept], want[:kept] / want[:kept].sum(), 1e-3
        )


def test_drafts_know_temperature_alone() -> None:
    rules = Rules.of(
        [Sampling(0.5, top_k=1), Sampling(repetition_penalty=9.0), Sampling(2.0, min_p=0.9)], CPU
    )
    logits = LOGITS.expand(3, -1)
    q = rules.draft_probabilities(logits)
    torch.testing.assert_close(q[0], torch.softmax(LOGITS / 0.5, -1))
    assert q[1].tolist() == [0.0] * 8 + [1.0]
    torch.testing.assert_close(q[2], torch.softmax(LOGITS / 2, -1))


def test_what_has_nothing_to_do_does_nothing() -> None:
    logits = LOGITS.to(torch.bfloat16).expand(2, 3, -1)
    rules = Rules.of([Sampling(), Sampling(1.0, top_k=3)], CPU)
    assert not rules.penalised and not rules.greedy
    assert rules.logits(logits) is logits
    assert Rules.of([Sampling(), Sampling(top_p=0.3)], CPU).greedy
    assert Sampling(0.4, seed=3).plain and not Sampling(0.4, top_p=0.9).plain


def test_a_penalty_changes_greedy_choices() -> None:
    rules = Rules.of([Sampling(), Sampling(repetition_penalty=1.5)], CPU)
    seen = flags(frozenset({8}), 9).expand(2, -1)
    p = rules.probabilities(LOGITS.expand(2, -1), seen)
    assert p.argmax(-1).tolist() == [8, 0]
    assert rules.logits(LOGITS.expand(2, -1), seen).argmax(-1).tolist() == [8, 0]
    assert p.sum(-1).tolist() == [1, 1] and (p.max(-1).values == 1).all()


def test_a_draft_has_seen_what_stands_above_it() -> None:
    """Row 0 the root; draft 0 above drafts 1 and 2, draft 2 above draft 3, which repeats its sibling's token."""
    seen = seen_tokens([[4, 4, 0], []], 6, CPU)
    assert [row.nonzero().flatten().tolist() for row in seen] == [[0, 4], []]
    tokens = torch.tensor([[1, 2, 3, 2], [5, 5, 0, 1]])
    above = torch.tensor([[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 0, 1, 1]]).bool()
    rows = seen_with_drafts(seen, tokens, above.expand(2, 4, 4))
    want = [
        [[0, 4], [0, 1, 4], [0, 1, 2, 4], [0, 1, 3, 4], [0, 1, 2, 3, 4]],
        [[], [5], [5], [0, 5], [0, 1, 5]],
    ]
    assert [[row.nonzero().flatten().tolist() for row in part] for part in rows] == want


@pytest.mark.parametrize(
    ("changes", "rule"),
    [
        ({"temperature": -1.0}, "temperature"),
        ({"temperature": 1e-9}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"top_k": -1}, "top_k"),
        ({"top_p": 0.0}, "top_p"),
        ({"top_p": 1.1}, "top_p"),
        ({"min_p": -0.1}, "min_p"),
        ({"min_p": 2.0}, "min_p"),
        ({"repetition_penalty": 0.0}, "repetition_penalty"),
        ({"repetition_penalty": float("inf")}, "repetition_penalty"),
    ],
)
def test_a_rule_outside_its_range_is_refused(changes: dict[str, float], rule: str) -> None:
    with pytest.raises(UserError, match=rule):
        Sampling(**changes)  # type: ignore[arg-type]


def test_logprobs_are_those_of_the_raw_logits() -> None:
    logits = torch.stack([LOGITS, LOGITS.flip(0)]).to(torch.bfloat16)
    want = logits.double().numpy()
    want = want - np.log(np.exp(want).sum(-1, keepdims=True))
    first, second = token_logprobs(logits, torch.tensor([4, 4]), 2)
    assert (first.token, [at for at, _ in first.top]) == (4, [8, 0])
    assert (second.token, [at for at, _ in second.top]) == (4, [0, 8])
    for row, found in zip(want, (first, second), strict=True):
        assert found.logprob == pytest.approx(row[4], abs=1e-6)
        assert [value for _, value in found.top] == pytest.approx(sorted(row)[:-3:-1], abs=1e-6)


def test_logprobs_of_the_chosen_token_alone_and_of_more_than_there_are() -> None:
    (alone,) = token_logprobs(LOGITS.unsqueeze(0), torch.tensor([1]), 0)
    assert alone == TokenLogprobs(1, alone.logprob, ())
    (whole,) = token_logprobs(LOGITS.unsqueeze(0), torch.tensor([1]), 50)
    assert len(whole.top) == 9 and sum(np.exp([value for _, value in whole.top])) == pytest.approx(
        1
    )
