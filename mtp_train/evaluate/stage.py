"""Evaluate a head: acceptance greedy and sampled, losslessness, validation loss and speed, through one engine.

Knows no training code: what it measures is what an engine would do with the head. Returns plain JSON values; the
schema is documented in docs/evaluation.md.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np
from transformers import PreTrainedTokenizerBase

from mtp_train.core.errors import UserError
from mtp_train.core.progress import progress
from mtp_train.engine.chain import ChainProposer
from mtp_train.engine.engine import Engine, EngineConfig, RunStats
from mtp_train.engine.sampling import Sampling
from mtp_train.engine.sequences import Completion, Request
from mtp_train.evaluate.acceptance import acceptance
from mtp_train.evaluate.examples import example
from mtp_train.evaluate.lossless import compare, transformers_greedy
from mtp_train.evaluate.validation import engine_validation
from mtp_train.heads.base import DraftHead
from mtp_train.models.target import Target, transformers_own
from mtp_train.text.sources import Answer

T = TypeVar("T")


@dataclass(frozen=True)
class EvaluateConfig:
    """What is measured.

    Attributes:
        drafts: k, drafted tokens per step.
        max_new_tokens: longest output.
        temperature: of the sampled run beside the greedy one.
        sampled_prompts: prompts per set of the sampled run, a fixed draw from the set.
        speed_prompts: prompts of the speed run at batch 1 (a fixed draw from the first set; 0 leaves it out).
        lossless_prompts: prompts per set compared in float32 (0 leaves it out).
        lossless_tokens: longest output compared.
        reference_prompts: of these, compared with transformers' generate too.
        examples: outputs shown token by token in the report.
    """

    drafts: int = 3
    max_new_tokens: int = 128
    temperature: float = 1.0
    sampled_prompts: int = 1000
    speed_prompts: int = 6
    lossless_prompts: int = 1000
    lossless_tokens: int = 128
    reference_prompts: int = 4
    examples: int = 6
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("drafts", "max_new_tokens"):
            if getattr(self, name) < 1:
                raise UserError(
                    f"evaluate.{name} must be 1 or more", getattr(self, name), "raise it"
                )
        if self.temperature < 0:
            raise UserError("evaluate.temperature must be 0 or more", self.temperature, "raise it")


@dataclass(frozen=True)
class PromptSet:
    """Prompts of one kind, with the target's own answers where there are any."""

    name: str
    requests: tuple[Request, ...]
    categories: dict[str, str]  # key -> category
    answers: tuple[Answer, ...] = ()


def prompt_set(
    name: str, answers: Sequence[Answer], stop: frozenset[int], max_new_tokens: int
) -> PromptSet:
    """A set whose prompts are those of regenerated answers."""
    requests = tuple(
        Request(answer.key, answer.prompt_ids, max_new_tokens, stop) for answer in answers
    )
    return PromptSet(
        name, requests, {answer.key: answer.category for answer in answers}, tuple(answers)
    )


def measure_acceptance(
    target: Target,
    head: DraftHead,
    sets: Sequence[PromptSet],
    config: EvaluateConfig,
    engine_config: EngineConfig,
) -> tuple[dict[str, Any], list[Completion]]:
    """Acceptance per set, greedy and sampled; and the first set's greedy completions."""
    engine = Engine(
        target, ChainProposer(target, copy.deepcopy(head), config.drafts), engine_config
    )
    figures: dict[str, Any] = {}
    first: list[Completion] = []
    for prompts in sets:
        some = spread(prompts.requests, config.sampled_prompts)
        figures[prompts.name] = {}
        for mode, temperature, requests in (
            ("greedy", 0.0, prompts.requests),
            ("sampled", config.temperature, some),
        ):
            what = f"evaluate {prompts.name} {mode}"
            done = _run(engine, requests, Sampling(temperature, config.seed), what)
            figures[prompts.name][mode] = acceptance(
                done, prompts.categories, temperature, config.drafts
            )
            first = first or done
    return figures, first


def measure_lossless(
    target: Target,
    head: DraftHead,
    sets: Sequence[PromptSet],
    config: EvaluateConfig,
    engine_config: EngineConfig,
) -> dict[str, Any]:
    """Greedy speculative against plain decoding, and plain decoding against transformers' generate.

    `target` should be in float32: bfloat16 has ties at every step.
    """
    requests = [
        replace(
            request,
            key=f"{prompts.name}/{request.key}",
            max_new_tokens=min(request.max_new_tokens, config.lossless_tokens),
        )
        for prompts in sets
        for request in prompts.requests[: config.lossless_prompts]
    ]
    plain = _run(Engine(target, None, engine_config), requests, Sampling(), "lossless plain")
    proposer = ChainProposer(target, copy.deepcopy(head), config.drafts)
    speculative = _run(
        Engine(target, proposer, engine_config), requests, Sampling(), "lossless speculative"
    )
    result = compare(target, plain, speculative)
    if config.reference_prompts and target.path is not None:
        reference = transformers_own(target)
        some = spread(plain, config.reference_prompts)
        theirs = [
            replace(completion, tokens=transformers_greedy(target, completion, reference))
            for completion in some
        ]
        result["transformers"] = compare(target, some, theirs)
    return result


def measure_speed(
    target: Target, head: DraftHead, requests: Sequence[Request], config: EvaluateConfig
) -> dict[str, Any]:
    """Plain and speculative decoding of the same prompts, one at a time, in turn; k = 1 .. drafts."""
    small = EngineConfig(max_batch=1, cache_rows=8192)
    engines = {0: Engine(target, None, small)}
    for drafts in range(1, config.drafts + 1):
        engines[drafts] = Engine(target, ChainProposer(target, copy.deepcopy(head), drafts), small)
    stats: dict[int, list[RunStats]] = {drafts: [] for drafts in engines}
    done: dict[int, list[Completion]] = {drafts: [] for drafts in engines}
    for engine in engines.values():  # first calls pay for allocations
        engine.generate([replace(requests[0], max_new_tokens=8)])
    with progress(len(requests) * len(engines), "speed, batch 1", "run") as bar:
        for request in requests:
            for drafts, engine in engines.items():
                done[drafts] += engine.generate([request])
                stats[drafts].append(engine.stats)
                bar.update()
    plain = _speed(stats[0])
    speculative = {
        str(drafts): _speed(stats[drafts]) | {"tau": _tau(done[drafts])}
        for drafts in engines
        if drafts
    }
    for row in speculative.values():
        row["ratio"] = row["tokens_per_s"] / plain["tokens_per_s"]
    return {"batch": 1, "prompts": len(requests), "plain": plain, "speculative": speculative}


def make_examples(
    tokenizer: PreTrainedTokenizerBase,
    prompts: PromptSet,
    completions: Sequence[Completion],
    count: int,
) -> list[dict[str, Any]]:
    """Outputs with each token's origin, a fixed draw from the set."""
    messages = {answer.key: answer.messages for answer in prompts.answers}
    return [
        example(tokenizer, done, messages[done.key][-1]["content"], prompts.categories[done.key])
        for done in spread(completions, count)
    ]


def validation_figures(
    target: Target, head: DraftHead, prompts: PromptSet, training: dict[str, float]
) -> dict[str, dict[str, float]]:
    """The first draft's validation figures through the engine, beside the trainer's own."""
    served = copy.deepcopy(head).to(target.dtype).eval()
    ours = engine_validation(target, served, prompts.answers)
    return {"engine": ours, "training": {name: training[name] for name in ours if name in training}}


def spread(items: Sequence[T], count: int) -> list[T]:
    """`count` items of a sequence, in order, drawn with a fixed seed: a regular stride would meet only one of two
    categories that take turns.
    """
    chosen = np.random.default_rng(0).permutation(len(items))[:count]
    return [items[index] for index in sorted(chosen.tolist())]


def _run(
    engine: Engine, requests: Sequence[Request], sampling: Sampling, what: str
) -> list[Completion]:
    with progress(len(requests), what, "prompt") as bar:
        return engine.generate(requests, sampling, on_finish=lambda _: bar.update())


def _speed(stats: Sequence[RunStats]) -> dict[str, Any]:
    wall, tokens = sum(item.wall for item in stats), sum(item.tokens for item in stats)
    parts = sorted({part for item in stats for part in item.seconds})
    seconds = {part: sum(item.seconds.get(part, 0.0) for item in stats) for part in parts}
    return {
        "tokens_per_s": tokens / wall,
        "wall": wall,
        "tokens": tokens,
        "steps": sum(item.steps for item in stats),
        "seconds": seconds,
    }


def _tau(completions: Sequence[Completion]) -> float:
    steps = [step.accepted for completion in completions for step in completion.steps]
    return 1 + sum(steps) / max(len(steps), 1)
