"""Which keys change a result: every key of every section is classified, and changes are named."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mtp_train.cli.job import SECTIONS, RunConfig, TargetConfig
from mtp_train.core.keys import (
    EFFECTS,
    END,
    NOTHING,
    RESULT,
    SPREAD,
    STEPS,
    config_inputs,
    differences,
    effects,
    inputs,
    key,
    plain,
)
from mtp_train.heads.families import FAMILIES
from mtp_train.train.config import TrainConfig

DOCS = Path(__file__).parents[1] / "docs" / "resume.md"
# Every key whose other values do not simply give another result. A new key changes the result unless it says otherwise.
SAID = {
    STEPS: """
        train.beta1 train.beta2 train.clip train.feature_noise train.learning_rate train.warmup_steps
        train.weight_decay""",
    SPREAD: "train.accumulation",
    END: """
        engine.attention engine.max_batch engine.order engine.page_size engine.prefill_rows engine.share_prefixes
        engine.tensor_parallel evaluate.cost_batches evaluate.cost_repeats evaluate.examples evaluate.grid_prompts
        evaluate.ks evaluate.lossless_prompts evaluate.reference_prompts evaluate.sampled_prompts
        evaluate.speed_batches evaluate.speed_prompts evaluate.speed_rounds evaluate.speed_tokens
        evaluate.temperature evaluate.temperatures export.format
        precompute.gate_sequences regenerate.limits train.keep""",
    NOTHING: """
        go_on plan.allow_shortfall plan.ranks plan.stage_seconds plan.tflops plan.tokens plan.tokens_per_second
        precompute.out precompute.tensor_parallel regenerate.concurrency regenerate.key_env regenerate.retries
        regenerate.timeout restart
        run sweep.metric sweep.name target.device target.path target.trust_remote_code threads trackers
        train.checkpoints train.explode train.online_eval.drafts train.online_eval.every
        train.online_eval.max_new_tokens train.online_eval.prompts train.parallel train.validations""",
}
# Keys that point to something: what they point to stands among a stage's inputs in their place.
BY_CONTENT = "data.sets evaluate.sets regenerate.prompts regenerate.server train.warm_start"


def every_key() -> dict[str, str]:
    sections: dict[str, Any] = SECTIONS | {"target": TargetConfig}
    found = effects("", RunConfig)
    for name, cls in sections.items():
        found |= effects(f"{name}.", cls)
    for family in FAMILIES.values():
        found |= effects("head.", family.config)
    return found


def test_every_key_of_every_section_is_classified() -> None:
    found = every_key()
    assert len(found) > 100 and set(found.values()) == set(EFFECTS)
    for effect, names in SAID.items():
        told = names.split() + (BY_CONTENT.split() if effect == NOTHING else [])
        assert sorted(name for name, one in found.items() if one == effect) == sorted(told)


def test_the_documented_table_is_the_one_that_the_code_reads() -> None:
    lines = DOCS.read_text(encoding="utf-8").splitlines()
    rows = [line.split("|")[1:3] for line in lines if line.startswith("|")]
    told = {
        effect.strip(): names.replace("`", "").replace(",", " ").split() for effect, names in rows
    }
    for effect, names in SAID.items():
        assert sorted(told[effect]) == sorted(names.split())


@dataclass(frozen=True)
class Inner:
    depth: int = 1


@dataclass(frozen=True)
class Toy:
    size: int = 4
    speed: int = key(1, NOTHING)
    shown: int = key(1, END)
    weights: dict[str, float] = field(default_factory=lambda: {"a": 0.5})
    inner: Inner = field(default_factory=Inner)


def told(before: dict[str, Any], now: Any) -> list[tuple[str, str]]:
    return [(str(item), item.changes) for item in differences(before, now)]


def test_a_change_is_named_with_both_values_and_what_it_changes() -> None:
    now = config_inputs("toy", Toy(5, 2, 2, {"a": 1.0}, Inner(2))) | inputs({"data": {"x": "new"}})
    before = plain(config_inputs("toy", Toy()) | inputs({"data": {"x": "old"}}))
    assert told(before, now) == [
        ('data.x "old" -> "new"', RESULT),
        ("toy.inner.depth 1 -> 2", RESULT),
        ("toy.shown 1 -> 2", END),
        ("toy.size 4 -> 5", RESULT),
        ("toy.weights.a 0.5 -> 1.0", RESULT),
    ]


def test_a_key_that_an_earlier_version_lacked_counts_as_its_default() -> None:
    assert told({"toy.size": 4}, config_inputs("toy", Toy())) == []
    now = config_inputs("toy", Toy(shown=2, inner=Inner(3)))
    assert [one for _, one in told({"toy.size": 4}, now)] == [RESULT, END]


def test_one_more_set_changes_none_of_those_that_are_there() -> None:
    before = plain(inputs({"sets": {"a": "1"}}))
    assert told(before, inputs({"sets": {"a": "1", "b": "2"}}, new=END)) == [
        ('sets.b nothing -> "2"', END)
    ]
    for sets in ({"a": "2"}, {"b": "1"}, {}):
        assert RESULT in [one for _, one in told(before, inputs({"sets": sets}, new=END))]
    assert plain(inputs({"sets": {}})) == {}


def test_values_outlast_json() -> None:
    found = config_inputs("train", TrainConfig())
    assert differences(plain(found), found) == [] and "train.loss.kl" in found
