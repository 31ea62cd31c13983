"""Costs, the model of speed and its check: arithmetic on made-up costs, and the real measurement on a toy target."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from head_variants import VARIANTS, make_variant
from toys import make_target, toy_config

from mtp_train.core.errors import UserError
from mtp_train.engine.engine import Engine, EngineConfig, RunStats
from mtp_train.engine.schemes import SchemeConfig
from mtp_train.engine.sequences import Completion, Request
from mtp_train.evaluate.costs import DRAFTS, BatchCost, costs_as_json, measure_costs
from mtp_train.evaluate.speed import (
    SpeedModel,
    compared,
    extended,
    measure_speed,
    measure_speeds,
    on_line,
    whole_batches,
)
from mtp_train.evaluate.stage import EvaluateConfig, PromptSet
from mtp_train.evaluate.timings import Timed, summed
from mtp_train.heads.medusa import MedusaConfig
from mtp_train.heads.medusa import build as build_medusa
from mtp_train.heads.mtp import MtpConfig, build
from mtp_train.models import packed
from mtp_train.models.packed import PackedLinear
from mtp_train.models.target import Target


def made_up(batch: int, first: float, row: float, observe: float, draft: float) -> BatchCost:
    """A target forward of `first` seconds, and `row` for each row more."""
    rows = range(DRAFTS + 1)
    return BatchCost(
        batch, tuple(first + row * r for r in rows), (observe,) * (DRAFTS + 1), draft, {}
    )


FREE = made_up(1, 10.0, 0.0, 0.0, 0.0)
DEAR = made_up(16, 10.0, 10.0, 0.0, 0.0)


def test_a_step_is_the_target_the_head_and_its_drafts() -> None:
    cost = made_up(1, 10.0, 2.0, 3.0, 1.0)
    assert cost.plain() == 10.0
    assert cost.step(1) == 12.0 + 3.0
    assert cost.step(4) == 18.0 + 3.0 + 3 * 1.0
    assert cost.verified_row(4) == 18.0 / (5 * 10.0)


def test_speed_up_is_tau_times_the_ratio_of_steps() -> None:
    model = SpeedModel([made_up(1, 10.0, 2.0, 3.0, 1.0)], [0.5, 0.25])
    assert model.tau(2) == 1.75
    assert model.speedup(1, 1) == pytest.approx(1.5 * 10 / 15)
    assert model.speedup(1, 2) == pytest.approx(1.75 * 10 / 18)
    assert model.speedup(1, 2, tau=3.0) == pytest.approx(3.0 * 10 / 18)


def test_acceptance_goes_on_by_the_last_conditional_rate_and_says_so() -> None:
    assert extended([0.5, 0.2], 4) == pytest.approx([0.5, 0.2, 0.08, 0.032])
    assert extended([0.5, 0.2], 1) == [0.5]
    assert extended([0.5], 2) == [0.5, 0.25], "position 1 is given that the step began"
    assert extended([0.5, 0.0], 3) == [0.5, 0.0, 0.0]
    assert extended([0.0, 0.0], 3) == [0.0, 0.0, 0.0]
    predicted = SpeedModel([FREE], [0.5, 0.2]).predictions([1])
    assert [row.extrapolated for row in predicted] == [False] * 2 + [True] * 6
    assert [row.k for row in predicted] == list(range(1, 9))


def test_costs_between_batches_lie_on_a_line_and_past_the_last_on_its_end() -> None:
    points = [(1.0, 10.0), (4.0, 16.0), (16.0, 28.0)]
    assert [on_line(points, at) for at in (1, 2, 4, 10, 16, 32)] == [10, 12, 16, 22, 28, 44]
    assert on_line(points, 0.5) == 10.0
    assert on_line(points[:1], 64) == 10.0
    model = SpeedModel([replace(FREE, batch=2), DEAR], [0.5])
    flags = {row.batch: row.extrapolated for row in model.predictions() if row.k == 1}
    assert flags == {1: True, 2: False, 4: False, 8: False, 16: False, 32: True, 64: True}


def test_the_recommended_k_follows_the_costs() -> None:
    # Free rows: the longest draft. Rows that cost a step each: every k loses, plain decoding is best.
    model = SpeedModel([FREE, DEAR], [0.5, 0.25])
    best = model.recommended()
    assert best["1"] == DRAFTS and best["16"] == 0
    assert best["2"] >= best["4"] >= best["8"]
    assert SpeedModel([FREE], [0.5, 0.25], steps=3).recommended() == dict.fromkeys(best, 3)


def test_measured_points_stand_beside_the_model_at_the_batch_that_ran() -> None:
    model = SpeedModel([made_up(1, 10, 0, 2, 0), made_up(3, 20, 0, 4, 0)], [0.5])
    run = {"ratio": 1.2, "ratio_ci": [1.1, 1.3], "warnings": [], "tau": 1.4, "running": 2.0}
    (row,) = compared(model, {"batch": 3, "speculative": {"1": run}})
    assert (row["batch"], row["k"], row["speedup"], row["tau"]) == (3, 1, 1.2, 1.4)
    assert row["predicted"] == pytest.approx(1.5 * 15 / 18)
    assert row["predicted_own_tau"] == pytest.approx(1.4 * 15 / 18)


@pytest.mark.parametrize(
    ("prompts", "batch", "wanted", "found"),
    [(24, 1, 6, 6), (24, 4, 6, 4), (24, 16, 6, 16), (24, 4, 9, 8), (3, 1, 6, 3), (3, 4, 6, 0)],
)
def test_batches_are_full(prompts: int, batch: int, wanted: int, found: int) -> None:
    assert whole_batches(prompts, batch, wanted) == found


def test_every_part_of_a_step_is_measured() -> None:
    target = make_target()
    rounds: list[int] = []
    costs = measure_costs(
        target, build(target, MtpConfig()), (1, 3), 20, 2, notice=lambda: rounds.append(1)
    )
    assert len(rounds) == 3, "one round is not counted"
    for cost, batch in zip(costs, (1, 3), strict=True):
        assert cost.batch == batch
        assert len(cost.target) == len(cost.observe) == DRAFTS + 1
        assert min(*cost.target, *cost.observe, cost.draft) > 0
        assert set(cost.noise) == {"target", "observe", "draft"}
        assert cost.step(2) == cost.target[2] + cost.observe[2] + cost.draft
    told = json.loads(json.dumps(costs_as_json(costs, 20, 2)))
    assert told["cached"] == 20 and len(told["batches"][1]["verified_row"]) == DRAFTS


def test_the_weights_of_a_measured_head_are_packed_as_a_served_ones_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = toy_config(hidden_size=128, intermediate_size=256)
    target = Target.from_config(config, dtype=torch.bfloat16)
    seen: list[PackedLinear] = []
    forward = PackedLinear.forward

    def watched(layer: PackedLinear, rows: torch.Tensor) -> torch.Tensor:
        seen.append(layer)
        return forward(layer, rows)

    monkeypatch.setattr(PackedLinear, "forward", watched)
    (cost,) = measure_costs(target, build(target, MtpConfig()), (2,), 5, 1)
    assert cost.draft > 0
    assert not any(layer.weight.is_inference() for layer in seen)
    assert bool(seen) == packed._has_kernels()


def test_costs_without_a_head_and_of_a_head_of_one_step() -> None:
    target = make_target()
    (plain,) = measure_costs(target, None, (2,), 5, 1)
    assert plain.observe == () and plain.draft == 0 and plain.plain() > 0
    (single,) = measure_costs(target, build_medusa(target, MedusaConfig(steps=1)), (1,), 5, 1)
    assert single.draft == 0 and len(single.observe) == DRAFTS + 1


@pytest.mark.parametrize("bad", [{"cached": 0}, {"repeats": 0}, {"batches": (0,)}])
def test_nothing_to_measure_is_refused(bad: dict[str, object]) -> None:
    usual: dict[str, object] = {"batches": (1,), "cached": 4, "repeats": 1}
    with pytest.raises(UserError, match="cached"):
        measure_costs(make_target(), None, **(usual | bad))  # type: ignore[arg-type]


def prompt_set(count: int) -> PromptSet:
    requests = tuple(Request(str(i), (1, 2 + i, 3), 6) for i in range(count))
    return PromptSet("heldout", requests, {request.key: "" for request in requests})


def test_speed_and_model_are_measured_at_every_batch_there_are_prompts_for() -> None:
    target = make_target()
    head = build(target, MtpConfig())
    config = EvaluateConfig(
        drafts=2,
        max_new_tokens=6,
        speed_prompts=2,
        speed_batches=[1, 3, 16],
        cost_batches=[1, 3],
        cost_repeats=1,
    )
    speed, model = measure_speeds(target, head, prompt_set(4), [0.5, 0.2], config)
    assert speed["batch"] == 1 and speed["prompts"] == 2
    points = [(row["batch"], row["k"]) for row in model["measured"]]
    assert points == [(1, 1), (1, 2), (3, 1), (3, 2)], "16 prompts are not there"
    assert {row["running"] for row in model["measured"] if row["batch"] == 1} == {1.0}
    assert all(1 < row["running"] <= 3 for row in model["measured"] if row["batch"] == 3)
    assert model["costs"]["cached"] == 3 + 3
    assert len(model["predicted"]) == 7 * 8 and set(model["recommended"]) == {
        *("1", "2", "4", "8", "16", "32", "64")
    }
    assert measure_speeds(target, head, prompt_set(4), [0.5], replace(config, speed_prompts=0)) == (
        {},
        {},
    )


@pytest.mark.parametrize("scheme", ["dynamic", "fixed", "ngram"])
def test_another_scheme_than_a_chain_is_timed_at_its_size_alone(scheme: str) -> None:
    target = make_target()
    config = EvaluateConfig(
        scheme=scheme, drafts=6, depth=2, top_k=3, max_new_tokens=6, speed_prompts=1
    )
    head = build(target, MtpConfig())
    speed, model = measure_speeds(target, head, prompt_set(2), [0.5, 0.2], config)
    assert list(speed["speculative"]) == ["6"] and not model


def test_batched_and_single_runs_say_the_same_number_of_tokens() -> None:
    target = make_target()
    head = build(target, MtpConfig())
    requests = prompt_set(4).requests
    for batch in (1, 4):
        speed = measure_speed(
            target, head, requests, {k: SchemeConfig(drafts=k) for k in (1, 2)}, batch
        )
        runs = [speed["plain"], *speed["speculative"].values()]
        assert [run["tokens"] for run in runs] == [3 * 24] * 3
        assert [set(run) >= {"ratio", "tau", "running"} for run in runs] == [False, True, True]


def timed_run(
    number: int, wall: float, steps: int, cpu: float | None = None, accepted: int = 0
) -> Timed:
    """16 tokens in so much time."""
    stats = RunStats(wall, {"target": wall / 2}, 16, steps)
    return Timed(number, 0, stats, wall if cpu is None else cpu, steps, accepted, steps)


def against(*timed: Timed, plain: Sequence[Timed] | None = None) -> dict[str, Any]:
    """What is told of runs beside plain decoding of a second a round."""
    usual = [timed_run(one.number, 1.0, 15) for one in timed]
    found = summed({0: plain or usual, 2: timed}, "cpu")["speculative"]["2"]
    assert isinstance(found, dict)
    return found


def test_a_believable_ratio_has_no_warning_and_a_slow_round_does_not_move_the_median() -> None:
    even = against(*(timed_run(n, 0.75, 10, accepted=5) for n in range(3)))
    assert even["ratio"] == pytest.approx(4 / 3) and even["warnings"] == []
    assert even["tau"] == even["tokens_per_step"] == 1.5
    slow = against(*(timed_run(n, 0.75 if n else 3.0, 10, accepted=5) for n in range(3)))
    assert slow["ratio"] == pytest.approx(4 / 3)
    assert slow["rounds"] == pytest.approx([1 / 3, 4 / 3, 4 / 3])
    assert ["rounds disagree" in text for text in slow["warnings"]] == [True]
    low, high = slow["ratio_ci"]
    assert low <= slow["ratio"] <= high and low < high


def test_a_ratio_above_the_tokens_per_step_is_warned_of() -> None:
    found = against(*(timed_run(n, 0.5, 10, accepted=5) for n in range(3)))
    assert found["ratio"] == 2.0 and found["tokens_per_step"] == 1.5
    (text,) = found["warnings"]
    assert "exceeds the 1.50 tokens per step" in text


def test_wall_time_that_parts_from_processor_time_is_warned_of() -> None:
    plain = [timed_run(n, 1.4, 15, cpu=1.0) for n in range(3)]
    found = against(*(timed_run(n, 1.0, 12, cpu=1.0, accepted=6) for n in range(3)), plain=plain)
    assert found["ratio"] == pytest.approx(1.4) and found["cpu_ratio"] == pytest.approx(1.0)
    assert ["processor time 1.00" in text for text in found["warnings"]] == [True]
    starved = [timed_run(n, 1.0, 15, cpu=0.4) for n in range(3)]
    found = against(*(timed_run(n, 0.8, 10, cpu=0.32, accepted=5) for n in range(3)), plain=starved)
    assert ["for 40% of the wall time" in text for text in found["warnings"]] == [True]


def test_every_round_times_every_scheme_in_an_order_of_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    target = make_target()
    seen: list[int] = []
    generate = Engine.generate

    def noted(engine: Engine, requests: Sequence[Request], **more: Any) -> list[Completion]:
        seen.append(engine.proposer.drafts)
        return generate(engine, requests, **more)

    monkeypatch.setattr(Engine, "generate", noted)
    schemes = {k: SchemeConfig(drafts=k) for k in (1, 2)}
    head = build(target, MtpConfig())
    speed = measure_speed(target, head, prompt_set(2).requests, schemes, 1, rounds=4)
    rounds = [seen[3 + 6 * at : 9 + 6 * at] for at in range(4)]
    assert [sorted(one) for one in rounds] == [[0, 0, 1, 1, 2, 2]] * 4
    assert len({tuple(one) for one in rounds}) > 1
    assert [len(run["rounds"]) for run in speed["speculative"].values()] == [4, 4]
    assert speed["plain"]["cpu"] > 0


def test_the_model_promises_no_more_than_tau() -> None:
    """A step with drafts that is measured as cheaper than a plain one is noise."""
    noisy = made_up(1, 10.0, -0.5, 0.0, 0.0)
    assert SpeedModel([noisy], [0.5, 0.25]).speedup(1, 2) == 1.75


def test_the_engines_of_a_speed_run_have_caches_of_their_prompts_size(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rows: list[int] = []
    made = Engine.__init__

    def noted(engine: Engine, target: Target, proposer: Any, config: EngineConfig) -> None:
        rows.append(config.cache_rows)
        made(engine, target, proposer, config)

    monkeypatch.setattr(Engine, "__init__", noted)
    target = make_target()
    requests = prompt_set(4).requests
    measure_speed(target, build(target, MtpConfig()), requests, {1: SchemeConfig(drafts=1)}, 2)
    # 3 + 6 tokens, the draft and two pages of slack, for two at once
    assert rows == [2 * 48, 2 * 48]


@pytest.mark.parametrize("name", list(VARIANTS))
def test_every_head_has_its_costs(name: str) -> None:
    target = make_target(num_hidden_layers=4)
    (cost,) = measure_costs(target, make_variant(target, name), (2,), 6, 1)
    assert cost.step(1) > cost.observe[1] > 0
