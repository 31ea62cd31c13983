"""Evaluate a head: acceptance greedy and sampled, losslessness, validation loss and speed, through one engine.

Knows no training code: what it measures is what an engine would do with the head. Returns plain JSON values; the
schema is documented in docs/evaluation.md.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from transformers import PreTrainedTokenizerBase

from mtp_train.core.errors import UserError
from mtp_train.core.keys import END, NOTHING, key
from mtp_train.engine.engine import Engine, EngineConfig
from mtp_train.engine.schemes import SchemeConfig, make_proposer
from mtp_train.evaluate.examples import example
from mtp_train.evaluate.grid import Acceptance, Cell, Grid, measure_grid
from mtp_train.evaluate.lossless import compare, transformers_greedy
from mtp_train.evaluate.runs import Bench, Run, fitted_cache
from mtp_train.evaluate.sets import PromptSet, require_names, spread
from mtp_train.evaluate.validation import answer_sums, names, summary
from mtp_train.heads.base import DraftHead
from mtp_train.models.target import Target, transformers_own

ANSWERED = ("heldout", "ood")  # sets of regenerated answers


@dataclass(frozen=True)
class EvaluateConfig:
    """What is measured.

    Attributes:
        sets: name -> a source or a list of them (see text.sources.SourceConfig): prompts beside the run's own, whose
            users' turns the target answers one after the other.
        scheme: how drafts are made: `chain`, an `adaptive` one, a `dynamic` or `fixed` tree, or `ngram` (see
            engine.schemes).
        drafts: drafted tokens per step: k of a chain, the size of a tree.
        depth, top_k: of a tree.
        drafts_by_batch: of an adaptive chain with a head that says no confidence: batch size -> drafts.
        step_seconds: of one with a head that does: batch size -> seconds of a step with 0, 1, .. drafts. None:
            measured.
        max_new_tokens: longest output.
        temperature: of the sampled run beside the greedy one.
        sampled_prompts: prompts per set of the sampled run, a fixed draw from the set; 0 leaves it out.
        temperatures, ks: acceptance is measured at every pair of these too, on `grid_prompts` prompts per set, a fixed
            draw. Naming one of them leaves the other at the main runs' own.
        speed_prompts: prompts of the speed run (a fixed draw from the first set, one batch at least; 0 leaves it out).
        speed_batches: sequences at once in the speed run, 1 first.
        speed_tokens: longest output of the speed run.
        speed_rounds: times that every prompt of the speed run is timed with every scheme.
        cost_batches: batch sizes whose costs are measured, for the model of speed.
        cost_repeats: rounds of the costs.
        lossless_prompts: prompts per set compared in float32 (0 leaves it out).
        lossless_tokens: longest output compared.
        reference_prompts: of these, compared with transformers' generate too.
        examples: outputs shown token by token in the report.
    """

    sets: dict[str, Any] = key(dict, NOTHING)  # their content counts
    scheme: str = "chain"
    drafts: int = 3
    depth: int = 3
    top_k: int = 4
    drafts_by_batch: dict[int, int] = field(default_factory=dict)
    step_seconds: dict[int, list[float]] = field(default_factory=dict)
    max_new_tokens: int = 128
    temperature: float = key(1.0, END)
    sampled_prompts: int = key(1000, END)
    temperatures: list[float] = key(list, END)
    ks: list[int] = key(list, END)
    grid_prompts: int = key(32, END)
    speed_prompts: int = key(4, END)
    speed_batches: list[int] = key(lambda: [1, 4, 16], END)
    speed_tokens: int = key(64, END)
    speed_rounds: int = key(3, END)
    cost_batches: list[int] = key(lambda: [1, 4, 16, 64], END)
    cost_repeats: int = key(5, END)
    lossless_prompts: int = key(1000, END)
    lossless_tokens: int = 128
    reference_prompts: int = key(4, END)
    examples: int = key(6, END)
    seed: int = 0

    def __post_init__(self) -> None:
        require_names(list(self.sets), ANSWERED)
        least = {"drafts": 1, "max_new_tokens": 1, "sampled_prompts": 0, "grid_prompts": 1}
        least |= {"speed_tokens": 8, "speed_rounds": 2}
        for name, lowest in least.items():
            if getattr(self, name) < lowest:
                raise UserError(
                    f"evaluate.{name} must be {lowest} or more", getattr(self, name), "raise it"
                )
        self.drafted(self.drafts)
        if self.temperature < 0:
            raise UserError("evaluate.temperature must be 0 or more", self.temperature, "raise it")
        if any(not 0 <= item < math.inf for item in self.temperatures):
            raise UserError(
                "evaluate.temperatures must be 0 or more", self.temperatures, "correct them"
            )
        if any(item < 1 for item in self.ks):
            raise UserError("evaluate.ks must be 1 or more", self.ks, "correct them")

    def drafted(self, drafts: int) -> SchemeConfig:
        """The scheme with so many drafts."""
        table = tuple(self.drafts_by_batch.items())
        seconds = tuple((batch, tuple(row)) for batch, row in self.step_seconds.items())
        return SchemeConfig(self.scheme, drafts, self.depth, self.top_k, table, seconds)

    @property
    def grid(self) -> Grid:
        """The runs that acceptance is measured by."""
        temperatures = self.temperatures or [0.0, self.temperature]
        ks = self.ks or [self.drafts]
        wanted = [Cell(temperature, self.drafted(k)) for temperature in temperatures for k in ks]
        return Grid(
            Cell(0.0, self.drafted(self.drafts)),
            Cell(self.temperature, self.drafted(self.drafts)),
            tuple(dict.fromkeys(wanted)) if self.temperatures or self.ks else (),
            self.sampled_prompts,
            self.grid_prompts,
        )


def measure_acceptance(
    target: Target,
    head: DraftHead,
    sets: Sequence[PromptSet],
    config: EvaluateConfig,
    engine_config: EngineConfig,
    bench: Bench,
) -> Acceptance:
    """Acceptance per set, greedy and sampled, and the grid's; what became of each set's rows is counted."""
    return measure_grid(target, head, sets, config.grid, engine_config, bench)


def measure_lossless(
    target: Target,
    head: DraftHead,
    sets: Sequence[PromptSet],
    config: EvaluateConfig,
    engine_config: EngineConfig,
    bench: Bench,
) -> dict[str, Any]:
    """Greedy speculative against plain decoding, and plain decoding against transformers' generate; of conversations,
    the first turns.

    `target` should be in float32: bfloat16 has ties at every step. Only the first unit of ranks compares.
    """
    together = _lossless_prompts(sets, config)

    def engine(scheme: SchemeConfig) -> Engine:
        proposer = make_proposer(target, copy.deepcopy(head), scheme)
        return Engine(target, proposer, fitted_cache(engine_config, proposer, together.requests))

    runs = [("plain", SchemeConfig("none")), ("speculative", config.drafted(config.drafts))]
    plain, drafted = (
        bench.run(f"lossless.{name}", together, partial(engine, scheme), 0.0).completions
        for name, scheme in runs
    )
    if bench.ranks.unit:
        return {}
    drafted_keys = {completion.key for completion in drafted}  # its drafts' rows take some room
    plain = tuple(completion for completion in plain if completion.key in drafted_keys)
    result = compare(target, plain, drafted)
    if config.reference_prompts and target.path is not None:
        reference = transformers_own(target)
        some = spread(plain, config.reference_prompts)
        theirs = [
            replace(completion, tokens=transformers_greedy(target, completion, reference))
            for completion in some
        ]
        result["transformers"] = compare(target, some, theirs)
    return result


def _lossless_prompts(sets: Sequence[PromptSet], config: EvaluateConfig) -> PromptSet:
    """The first prompts of all sets as one set."""
    requests = tuple(
        replace(
            request,
            key=f"{prompts.name}/{request.key}",
            max_new_tokens=min(request.max_new_tokens, config.lossless_tokens),
        )
        for prompts in sets
        for request in prompts.requests[: config.lossless_prompts]
    )
    return PromptSet("lossless", requests, {request.key: "all" for request in requests})


def make_examples(
    tokenizer: PreTrainedTokenizerBase, prompts: PromptSet, run: Run, count: int
) -> list[dict[str, Any]]:
    """Outputs with each token's origin, a fixed draw from the set."""
    return [
        example(tokenizer, done, run.questions.get(done.key, ""), prompts.categories[done.key])
        for done in spread(run.completions, count)
    ]


def validation_figures(
    target: Target,
    head: DraftHead,
    prompts: PromptSet,
    training: dict[str, float],
    config: EvaluateConfig,
    bench: Bench,
) -> dict[str, dict[str, float]]:
    """Each draft step's validation figures through the engine, the trainer's own, and what lies between them.

    As many steps as the trainer measured, so that both count the same chains; `drafts` of them where it has none.
    """
    depths = max((int(name[3:]) for name in training if name.startswith("kl/")), default=0)
    depths = depths or config.drafts
    served = copy.deepcopy(head).to(target.dtype).eval()
    sums = bench.sums(
        "validation", prompts.answers, lambda answer: answer_sums(target, served, answer, depths)
    )
    ours = summary(sums, depths)
    theirs = {name: training[name] for name in names(depths) if name in training}
    return {
        "engine": ours,
        "training": theirs,
        "difference": {name: ours[name] - value for name, value in theirs.items()},
    }
