"""Whether outputs are distributed as they should be: exact chances by enumeration, and a chi-square test against them.

The chances are float64 numpy, one row at a time by the rules' definitions: slow, and independent of the engine's.

    toy = make_toy()
    engine = make_engine(toy, ChainProposer(toy.target, head, 2))
    assert check(toy, engine, Sampling(1.3, top_p=0.8)).p_value > 1e-4
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
import torch
from transformers import LlamaConfig

from mtp_train.attention.packed import PackedContext
from mtp_train.engine.engine import Engine, EngineConfig
from mtp_train.engine.propose import Proposer
from mtp_train.engine.sampling import Sampling
from mtp_train.engine.sequences import Completion, Request
from mtp_train.models.target import Target

ROUNDS = 3000  # enough for the controls to fail by far

# Rules that differ much from each other on the toy target.
SAMPLERS = {
    "plain": Sampling(1.0),
    "cold": Sampling(0.6),
    "top_k": Sampling(1.0, top_k=3),
    "top_p": Sampling(1.3, top_p=0.8),
    "min_p": Sampling(1.3, min_p=0.3),
    "penalty": Sampling(1.0, repetition_penalty=2.5),
    "all": Sampling(1.3, top_k=5, top_p=0.9, min_p=0.1, repetition_penalty=1.4),
}


@dataclass(frozen=True)
class Toy:
    """A target that is small enough to enumerate, and a prompt.

    Attributes:
        depth: tokens of an output.
        logits: after every beginning of an output [V], from a forward in float64.
    """

    target: Target
    prompt: tuple[int, ...]
    depth: int
    logits: Mapping[tuple[int, ...], np.ndarray]

    def exact(self, sampling: Sampling) -> np.ndarray:
        """The chance of every output [V ** depth], the last token running fastest."""
        joint = np.ones(1)
        for length in range(self.depth):
            joint = np.concatenate(
                [
                    chance * self._following(begin, sampling)
                    for chance, begin in zip(joint, self._begins(length), strict=True)
                ]
            )
        return joint

    def _begins(self, length: int) -> itertools.product[tuple[int, ...]]:
        return itertools.product(range(self.target.vocab_size), repeat=length)

    def _following(self, begin: tuple[int, ...], sampling: Sampling) -> np.ndarray:
        return exact_probabilities(self.logits[begin], sampling, {*self.prompt, *begin})


@dataclass(frozen=True)
class Checked:
    """What came of a check: the p-value, and what happened on the way.

    Attributes:
        accepted: how many drafts steps had accepted; {0, ...} with more in it says that all rules were at work.
    """

    p_value: float
    accepted: frozenset[int]


def make_toy(
    vocabulary: int = 7, depth: int = 3, prompt: tuple[int, ...] = (1, 3, 2), seed: int = 4
) -> Toy:
    """A one-layer Llama with random weights, whose choices depend much on what it has read."""
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=64,
        initializer_range=0.6,
    )
    target = Target.from_config(config, seed=seed)
    return Toy(target, prompt, depth, _logits(target, prompt, depth))


@torch.no_grad()
def _logits(
    target: Target, prompt: tuple[int, ...], depth: int
) -> dict[tuple[int, ...], np.ndarray]:
    outputs = list(itertools.product(range(target.vocab_size), repeat=depth - 1))
    texts = torch.tensor([prompt + output for output in outputs])
    rows, length = texts.shape
    target.model.double()
    context = PackedContext(range(0, rows * length + 1, length))
    states = target.forward(texts.flatten(), torch.arange(length).repeat(rows), context)
    logits = target.logits(states).view(rows, length, -1)[:, len(prompt) - 1 :].numpy()
    target.model.float()
    return {
        output[:at]: row[at]
        for output, row in zip(outputs, logits, strict=True)
        for at in range(depth)
    }


def make_engine(toy: Toy, proposer: Proposer | None, **changes: object) -> Engine:
    """An engine that has room for all of a check's requests at once."""
    sizes = {"max_batch": ROUNDS, "cache_rows": ROUNDS * 16, "prefill_rows": 10**6}
    return Engine(toy.target, proposer, EngineConfig(**(sizes | changes)))  # type: ignore[arg-type]


def check(
    toy: Toy, engine: Engine, sampling: Sampling, rounds: int = ROUNDS, seeded: bool = False
) -> Checked:
    """Outputs to one prompt under one set of rules, in batches.

    seeded: every request has a seed and so a generator of its own.
    """
    requests = [
        Request(str(at), toy.prompt, toy.depth, seed=at if seeded else None) for at in range(rounds)
    ]
    return _checked(toy, engine.generate(requests, replace(sampling, seed=1)), sampling)


def check_mixed(
    toy: Toy, engine: Engine, samplers: Mapping[str, Sampling], rounds: int = ROUNDS
) -> dict[str, Checked]:
    """`rounds` outputs under each of several sets of rules, every batch a mixture of all."""
    requests = [
        Request(f"{name} {at}", toy.prompt, toy.depth, sampling=sampling)  # type: ignore[call-arg]
        for at in range(rounds)
        for name, sampling in samplers.items()
    ]
    done = engine.generate(requests, Sampling(seed=1))
    return {
        name: _checked(toy, done[at :: len(samplers)], sampling)
        for at, (name, sampling) in enumerate(samplers.items())
    }


def _checked(toy: Toy, done: list[Completion], sampling: Sampling) -> Checked:
    vocabulary = toy.target.vocab_size
    outputs = np.array([completion.tokens for completion in done])
    assert outputs.shape == (len(done), toy.depth), {completion.finish for completion in done}
    index = outputs @ vocabulary ** np.arange(toy.depth)[::-1]
    observed = np.bincount(index, minlength=vocabulary**toy.depth)
    accepted = {step.accepted for completion in done for step in completion.steps}
    return Checked(p_value(observed, toy.exact(sampling)), frozenset(accepted))


def exact_probabilities(
    logits_V: np.ndarray, sampling: Sampling, seen: set[int] | frozenset[int] = frozenset()
) -> np.ndarray:
    """The chance of each token under the rules [V], by their definitions: penalty, temperature, min-p, top-k, top-p."""
    logits = np.array(logits_V, dtype=np.float64)
    for token in seen:
        penalty = sampling.repetition_penalty
        logits[token] *= 1 / penalty if logits[token] > 0 else penalty
    if sampling.temperature == 0:
        return np.eye(len(logits))[int(np.argmax(logits))]
    p = _softmax(logits / sampling.temperature)
    p[p < sampling.min_p * p.max()] = 0
    if 0 < sampling.top_k < len(p):
        p[p < np.sort(p)[-sampling.top_k]] = 0
    if sampling.top_p < 1:
        p = _nucleus(p / p.sum(), sampling.top_p)
    return p / p.sum()


def _softmax(logits: np.ndarray) -> np.ndarray:
    weights = np.exp(logits - logits.max())
    return weights / weights.sum()


def _nucleus(p: np.ndarray, top_p: float) -> np.ndarray:
    """What no more likely tokens have enough chance without."""
    return np.array([chance if p[p > chance].sum() < top_p else 0.0 for chance in p])


def p_value(observed: np.ndarray, probability: np.ndarray) -> float:
    """Chance of counts at least as far off. Cells of fewer than five expected counts are one; 0 for the impossible."""
    if observed[probability == 0].any():
        return 0.0
    expected = probability / probability.sum() * observed.sum()
    large = expected >= 5
    cells = np.append(observed[large], observed[~large].sum())
    means = np.append(expected[large], expected[~large].sum())
    present = means > 0
    return chi_square(cells[present], means[present])


def chi_square(observed: np.ndarray, expected: np.ndarray) -> float:
    """Chance of a larger statistic: the upper regularised gamma function at half the degrees of freedom."""
    if len(observed) == 1:
        return 1.0  # nothing could have been different
    statistic = float(((observed - expected) ** 2 / expected).sum())
    freedom = torch.tensor((len(observed) - 1) / 2, dtype=torch.float64)
    return float(torch.special.gammaincc(freedom, torch.tensor(statistic / 2, dtype=torch.float64)))
