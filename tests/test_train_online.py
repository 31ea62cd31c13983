"""Training's own measurements and safeguards: acceptance through the engine, the best head, noise, average, alarms."""

from __future__ import annotations

import gc
import re
import signal
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import children
import pytest
import torch
import two_ranks as ranks_script
from accelerate import Accelerator
from safetensors.torch import load_file
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from test_train import BARE, CPU, curve, fit
from toys import (
    TwoRanks,
    conversation,
    conversations,
    make_lively_target,
    make_store,
    make_target,
)

from mtp_train.attention.paged import PagedKV
from mtp_train.batches.pack import Pack, load_pack
from mtp_train.checkpoint.heads import TENSORS, find_checkpoints, load_head, read_card
from mtp_train.cli.store import _parser as store_parser
from mtp_train.cli.train import _accelerator
from mtp_train.core.dist import Ranks
from mtp_train.core.errors import UserError
from mtp_train.engine.engine import EngineConfig
from mtp_train.engine.sequences import Completion, DraftStep
from mtp_train.evaluate.acceptance import acceptance
from mtp_train.evaluate.runs import Bench
from mtp_train.evaluate.sets import PromptSet
from mtp_train.evaluate.stage import EvaluateConfig, measure_acceptance
from mtp_train.heads.medusa import MedusaConfig
from mtp_train.heads.medusa import build as build_medusa
from mtp_train.heads.mtp import MtpConfig, build
from mtp_train.losses.chunked import LossValues
from mtp_train.losses.terms import Compared, LossConfig
from mtp_train.models.target import Target
from mtp_train.store.shards import FeatureStore
from mtp_train.train import step as stepping
from mtp_train.train.average import make_average, warm_average
from mtp_train.train.config import TrainConfig
from mtp_train.train.guard import PackReport, alarm, exploded
from mtp_train.train.loop import train
from mtp_train.train.noise import noisy_states
from mtp_train.train.online import OnlineConfig, figures, held_out_requests, measure, step_counts
from mtp_train.train.order import Order, Position
from mtp_train.train.state import AVERAGE, OPTIMIZER
from mtp_train.train.step import RolloutModule

ONLINE = OnlineConfig(every=3, prompts=4, drafts=3, max_new_tokens=12)
CONFIG = replace(
    BARE, epochs=4, rows=34, accumulation=1, beta1=0.9, learning_rate=3e-3, online_eval=ONLINE
)
STOP = frozenset({2})


@pytest.fixture(scope="module")
def lively() -> Target:
    """Its answers differ, so that acceptance is neither none nor all."""
    return make_lively_target()


@pytest.fixture(scope="module")
def features(lively: Target, tmp_path_factory: pytest.TempPathFactory) -> FeatureStore:
    return make_store(tmp_path_factory.mktemp("features"), lively, conversations(10, seed=3))


def online_rows(out: Path) -> list[dict]:
    return curve(out, "online")


def live_caches() -> int:
    gc.collect()
    return sum(type(item) is PagedKV for item in gc.get_objects())


def script_taus(monkeypatch: pytest.MonkeyPatch, taus: Sequence[float]) -> list[float]:
    """Let the engine find these taus, one a measurement; returns what is left of them."""
    left = list(taus)

    def scripted(*_args: object) -> torch.Tensor:
        return torch.tensor([100.0, 100 * (left.pop(0) - 1), 0.0, 0.0], dtype=torch.float64)

    monkeypatch.setattr("mtp_train.train.loop.measure", scripted)
    return left


# --- acceptance -----------------------------------------------------------------------------------------------


def test_prompts_end_where_the_first_trained_token_stands(lively: Target, tmp_path: Path) -> None:
    chats = [
        conversation("first", [5, 6, 7], [8, 9]),
        conversation("nothing trained", [1, 2, 3], []),
        conversation("no prompt", [], [4, 4, 4]),
        conversation("last", [10], [11, 12]),
        conversation("too long", [3] * 20, [1, 2]),
    ]
    store = make_store(tmp_path / "features", lively, chats)
    found = held_out_requests(store, replace(ONLINE, prompts=9), STOP, limit=20)
    assert [request.prompt for request in found] == [(5, 6, 7), (10,)]
    assert {(request.max_new_tokens, request.stop_tokens) for request in found} == {(12, STOP)}
    some = held_out_requests(store, replace(ONLINE, prompts=2), STOP, limit=100)
    assert some == held_out_requests(store, replace(ONLINE, prompts=2), STOP, limit=100)
    assert len(some) in (1, 2), "one of those to draw from has no prompt"
    interleaved = [conversation(str(row), [row % 2], [3, 4]) for row in range(40)]
    mixed = make_store(tmp_path / "interleaved", lively, interleaved)
    drawn = held_out_requests(mixed, replace(ONLINE, prompts=8), STOP, limit=100)
    assert {request.prompt for request in drawn} == {(0,), (1,)}, "not every fifth, all of a kind"
    assert len({request.key for request in drawn}) == 8
    only = make_store(tmp_path / "only", lively, chats[2:3])
    with pytest.raises(UserError, match="sequences that begin with a prompt"):
        held_out_requests(only, ONLINE, STOP, limit=20)


def test_figures_are_those_of_the_definitions_and_of_evaluate() -> None:
    """Five steps that accepted 0, 1, 3, 2 and 0 of 3."""
    done = [
        Completion(
            str(row), (1,), (2,), "length", tuple(DraftStep((7, 7, 7), count) for count in counts)
        )
        for row, counts in enumerate([(0, 1, 3), (2, 0)])
    ]
    found = figures(step_counts(done[:1], 3) + step_counts(done[1:], 3))
    assert found == {
        "tau": pytest.approx(1 + 6 / 5),
        "per_position/1": pytest.approx(3 / 5),
        "per_position/2": pytest.approx(2 / 5),
        "per_position/3": pytest.approx(1 / 5),
        "steps": 5.0,
    }
    theirs = acceptance(done, {"0": "all", "1": "all"}, 0.0, 3)
    assert found["tau"] == pytest.approx(theirs["tau"])
    assert figures(torch.zeros(4)) == {f"per_position/{i}": 0.0 for i in (1, 2, 3)} | {
        "tau": 1.0,
        "steps": 0.0,
    }


def test_training_is_the_same_bit_for_bit_and_the_figure_is_that_of_evaluate(
    lively: Target, features: FeatureStore, tmp_path: Path
) -> None:
    plain, measured = tmp_path / "plain", tmp_path / "measured"
    fit(lively, features, replace(CONFIG, online_eval=OnlineConfig()), plain)
    head = fit(lively, features, CONFIG, measured)
    for part in (TENSORS, OPTIMIZER):
        newest = [find_checkpoints(out / "checkpoints")[-1] / part for out in (plain, measured)]
        assert newest[0].read_bytes() == newest[1].read_bytes()
    rows = online_rows(measured)
    total = curve(measured)[-1]["step"]
    assert [row["step"] for row in rows] == sorted({*range(3, total + 1, 3), total})
    assert not online_rows(plain)
    assert not (plain / "best").exists()

    requests = held_out_requests(features, ONLINE, frozenset(), lively.max_positions)
    prompts = PromptSet("heldout", tuple(requests), {item.key: "all" for item in requests})
    config = EvaluateConfig(drafts=3, max_new_tokens=12)
    bench, sizes = Bench(tmp_path / "completions"), EngineConfig(cache_rows=512)
    found = measure_acceptance(lively, head, [prompts], config, sizes, bench)
    greedy, last = found.sets["heldout"]["greedy"], rows[-1]["online"]
    assert last["tau"] == pytest.approx(greedy["tau"])
    assert [last[f"per_position/{i}"] for i in (1, 2, 3)] == pytest.approx(greedy["per_position"])
    assert last["steps"] == greedy["drafts"] > 0
    assert 1.0 < last["tau"] < 4.0
    assert read_card(measured / "head").measured == last


def test_measuring_leaves_head_and_memory_as_they_were(
    lively: Target, features: FeatureStore
) -> None:
    head = build(lively, MtpConfig()).train()
    random = torch.get_rng_state()
    before = {name: value.clone() for name, value in head.state_dict().items()}
    requests = held_out_requests(features, ONLINE, STOP, lively.max_positions)
    caches = live_caches()
    counts = measure(lively, head, requests, ONLINE)
    assert counts[0] > 0
    assert live_caches() == caches
    assert torch.equal(torch.get_rng_state(), random)
    assert head.training
    assert all(parameter.requires_grad for parameter in head.parameters())
    assert all(torch.equal(value, before[name]) for name, value in head.state_dict().items())
    parts = sum(measure(lively, head, requests[rank::3], ONLINE) for rank in range(3))
    assert torch.equal(parts, counts), "shares of ranks add up to the whole"
    assert torch.equal(measure(lively, head, [], ONLINE), torch.zeros(4))


def test_more_drafts_than_the_head_has_steps_are_refused_before_training(
    lively: Target, features: FeatureStore, tmp_path: Path
) -> None:
    head = build_medusa(lively, MedusaConfig(steps=2))
    config = replace(CONFIG, rollout_steps=2, loss={"kl": 1.0})
    with pytest.raises(UserError, match=r"online_eval\.drafts must be at most 2"):
        train(lively, head, features, features, config, Accelerator(cpu=True), tmp_path)


def test_two_ranks_share_the_prompts_and_add_their_counts(
    two_ranks: TwoRanks, tmp_path: Path
) -> None:
    """The last figure is that of the final head on all prompts, measured by one process."""
    target = make_target()
    held_out = make_store(tmp_path / "held-out", target, ranks_script.EVEN)
    config = ranks_script.TRAINING.online_eval
    requests = held_out_requests(held_out, config, frozenset(), target.max_positions)
    assert len(requests) == 3, "one rank has two"
    head, card = load_head(two_ranks.folder / "even" / "head", target)
    alone = figures(measure(target, head, requests, config))
    assert online_rows(two_ranks.folder / "even")[-1]["online"] == alone == card.measured


# --- the best head --------------------------------------------------------------------------------------------


def test_best_is_the_highest_measured_tau_the_earlier_of_equals_and_never_pruned(
    lively: Target, features: FeatureStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    taus = [1.5, 2.5, 2.5, 1.25]
    left = script_taus(monkeypatch, taus)
    steps = 4
    config = replace(
        CONFIG, rows=100, epochs=steps // 2, online_eval=replace(ONLINE, every=1), validations=1
    )
    fit(lively, features, config, tmp_path / "last")
    assert not left
    assert [row["online"]["tau"] for row in online_rows(tmp_path / "last")] == taus
    card = read_card(tmp_path / "last" / "best")
    assert (card.step, card.measured["tau"]) == (2, 2.5)
    assert read_card(tmp_path / "last" / "head").step == steps
    kept = [path.name for path in find_checkpoints(tmp_path / "last" / "checkpoints")]
    assert kept == ["step-00000003", "step-00000004"], "the best is older than any checkpoint"
    load_head(tmp_path / "last" / "best", lively)

    script_taus(monkeypatch, taus)
    fit(lively, features, replace(config, keep="best"), tmp_path / "best")
    assert (tmp_path / "best" / "head" / TENSORS).read_bytes() == (
        tmp_path / "last" / "best" / TENSORS
    ).read_bytes()
    assert read_card(tmp_path / "best" / "head") == read_card(tmp_path / "best" / "best")


def test_a_run_that_begins_anew_forgets_the_best_of_an_earlier_one(
    lively: Target, features: FeatureStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = replace(
        CONFIG, rows=100, epochs=1, checkpoints=1, online_eval=replace(ONLINE, every=1)
    )
    script_taus(monkeypatch, [3.0, 3.5])
    with monkeypatch.context() as patch:
        patch.setattr("mtp_train.train.loop._Trainer._checkpoint", lambda _self: None)
        fit(lively, features, config, tmp_path)
    assert read_card(tmp_path / "best").measured["tau"] == 3.5
    script_taus(monkeypatch, [1.5, 1.25])
    fit(lively, features, config, tmp_path)
    assert (read_card(tmp_path / "best").step, read_card(tmp_path / "best").measured["tau"]) == (
        1,
        1.5,
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"keep": "first"}, "train.keep must be one of last, best"),
        ({"keep": "best"}, "train.keep=best needs measured acceptance"),
        ({"ema": 1.0}, r"train.ema must lie in \[0, 1\)"),
        ({"feature_noise": -0.1}, "train.feature_noise must be 0 or more"),
        ({"explode": 0.5}, "train.explode must be above 1, or 0"),
    ],
)
def test_values_out_of_range_are_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(UserError, match=message):
        replace(BARE, **changes)


@pytest.mark.parametrize("name", ["every", "prompts", "drafts", "max_new_tokens"])
def test_online_values_out_of_range_are_refused(name: str) -> None:
    with pytest.raises(UserError, match=rf"train\.online_eval\.{name} must be"):
        replace(ONLINE, **{name: -1})


# --- resume with everything on --------------------------------------------------------------------------------

EVERYTHING = replace(
    children.TRAINING,
    online_eval=OnlineConfig(every=2, prompts=3, drafts=2, max_new_tokens=8),
    keep="best",
    ema=0.9,
    feature_noise=0.1,
)


def test_a_killed_run_ends_with_the_same_best_average_and_noise(tmp_path: Path) -> None:
    """DEFECTS 17: kill -9 after the first checkpoint, in the middle of writing a best, and before the end."""
    features = tmp_path / "features"
    children.make_features(features)
    unbroken, broken = tmp_path / "unbroken", tmp_path / "broken"
    logs = [tmp_path / f"log-{number}" for number in range(5)]

    def go(out: Path, log: Path, fate: str = "", **when: Callable[[], bool]) -> int | None:
        return children.run(children.train_slowly, features, out, log, fate, EVERYTHING, **when)

    assert go(unbroken, logs[0]) == 0
    kill = lambda: bool(find_checkpoints(broken / "checkpoints"))  # noqa: E731
    assert go(broken, logs[1], "", kill_when=kill) == -signal.SIGKILL
    assert go(broken, logs[2], "after a best") == -signal.SIGKILL
    assert go(broken, logs[3], "before the head") == -signal.SIGKILL
    assert go(broken, logs[4]) == 0
    for folder in ("head", "best"):
        for name in ("head.safetensors", "head.json"):
            one, other = (out / folder / name for out in (unbroken, broken))
            assert one.read_bytes() == other.read_bytes(), f"{folder}/{name}"
    newest = [find_checkpoints(out / "checkpoints")[-1] for out in (unbroken, broken)]
    for name in (TENSORS, OPTIMIZER, AVERAGE):
        assert (newest[0] / name).read_bytes() == (newest[1] / name).read_bytes(), name
    for kind in ("online", "validation"):
        assert curve(unbroken, kind) == curve(broken, kind)
    losses = [[row["loss"] for row in curve(out)] for out in (unbroken, broken)]
    assert losses[0] == losses[1]


# --- noise ----------------------------------------------------------------------------------------------------


def differences(store: FeatureStore, numbers: Sequence[int], step: int) -> dict[str, torch.Tensor]:
    """Noise per sequence."""
    pack = load_pack(store, numbers, CPU)
    noise = noisy_states(pack, 0.1, 7, step)["post_norm"] - pack.states["post_norm"]
    edges = zip(pack.offsets, pack.offsets[1:], strict=False)
    return dict(zip(pack.keys, [noise[start:stop] for start, stop in edges], strict=True))


def test_noise_is_uniform_and_belongs_to_seed_step_and_sequence(features: FeatureStore) -> None:
    one = differences(features, [0, 1, 2], 5)
    values = torch.cat([value.flatten() for value in one.values()])
    assert -0.1001 < values.min() < -0.095
    assert 0.095 < values.max() < 0.1001
    assert abs(float(values.mean())) < 0.005
    assert float(values.std()) == pytest.approx(0.2 / 12**0.5, rel=0.05)
    assert all(
        torch.equal(value, one[key]) for key, value in differences(features, [2, 0, 1], 5).items()
    )
    assert not torch.equal(differences(features, [0], 6)["chat-0"], one["chat-0"])
    rows = min(len(one["chat-0"]), len(one["chat-1"]))
    assert not torch.equal(one["chat-0"][:rows], one["chat-1"][:rows])


def test_each_sequence_of_a_step_has_the_same_noise_on_any_number_of_ranks(
    features: FeatureStore,
) -> None:
    def steps(world: int, accumulation: int) -> list[dict[str, torch.Tensor]]:
        config = replace(BARE, rows=30, accumulation=accumulation)
        order = Order(features.lengths(), features.loss_tokens(), config)
        ranks = [order.windows(Position(0), rank, world) for rank in range(world)]
        return [
            {
                key: value
                for window in windows
                for indices, _ in window.packs
                for key, value in differences(features, indices, step).items()
            }
            for step, windows in enumerate(zip(*ranks, strict=True))
        ]

    one, two = steps(1, 2), steps(2, 1)
    assert len(one) == len(two) > 1
    for mine, theirs in zip(one, two, strict=True):
        assert mine.keys() == theirs.keys()
        assert all(torch.equal(value, theirs[key]) for key, value in mine.items())


def test_noise_is_for_the_head_alone_and_never_validates(
    lively: Target, features: FeatureStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[torch.Tensor, torch.Tensor]] = []
    weighted = stepping.weighted_loss

    def watched(loss: LossConfig, of: Compared, **more: Any) -> LossValues:
        seen.append((of.student.detach().clone(), of.teacher.detach().clone()))
        return weighted(loss, of, **more)

    monkeypatch.setattr(stepping, "weighted_loss", watched)
    module = RolloutModule(build(lively, MtpConfig()), lively)
    pack = load_pack(features, [0, 1], CPU)
    module(pack, 2)
    module(pack, 2, inputs=noisy_states(pack, 0.1, 0, 0))
    (clean, teacher), (noisy, same) = seen
    assert torch.equal(teacher, same)
    assert not torch.equal(clean, noisy)

    config = replace(BARE, epochs=1, rows=100)
    for name, noise in (("without", 0.0), ("with", 0.1)):
        fit(lively, features, replace(config, feature_noise=noise), tmp_path / name)
    first = [curve(tmp_path / name, "validation")[0] for name in ("without", "with")]
    assert first[0] == first[1]
    losses = [curve(tmp_path / name)[0]["loss"] for name in ("without", "with")]
    assert losses[0] != losses[1]


# --- average --------------------------------------------------------------------------------------------------


def test_the_average_by_hand() -> None:
    """Copy first; then decays 2/11, 3/12, 4/13, ... up to the limit."""
    module = torch.nn.Linear(1, 1, bias=False)
    average = make_average(module, 0.3)  # type: ignore[arg-type]
    expected = []
    for step, value in enumerate([1.0, 2.0, 4.0, 8.0, 16.0]):
        with torch.no_grad():
            module.weight.fill_(value)
        average.update_parameters(module)
        decay = min(0.3, (1 + step) / (10 + step)) if step else 0.0
        expected.append(decay * (expected[-1] if expected else 0.0) + (1 - decay) * value)
        assert float(average.module.weight) == pytest.approx(expected[-1])
    assert expected[1] == pytest.approx(2 / 11 * 1.0 + 9 / 11 * 2.0)
    assert expected[4] == pytest.approx(0.3 * expected[3] + 0.7 * 16.0)
    assert float(module.weight.detach()) == 16.0
    assert float(warm_average(0.999, torch.tensor(1.0), torch.tensor(0.0), 10**6)) == pytest.approx(
        0.999
    )


def test_the_average_is_what_is_measured_and_kept_and_training_does_not_see_it(
    lively: Target, features: FeatureStore, tmp_path: Path
) -> None:
    config = replace(CONFIG, rows=100, epochs=2, online_eval=replace(ONLINE, every=4))
    fit(lively, features, config, tmp_path / "plain")
    head = fit(lively, features, replace(config, ema=0.5), tmp_path / "average")
    plain, averaged = (
        find_checkpoints(tmp_path / name / "checkpoints") for name in ("plain", "average")
    )
    assert (plain[-1] / TENSORS).read_bytes() == (averaged[-1] / TENSORS).read_bytes()
    before, after = (load_file(folder / AVERAGE) for folder in averaged)
    weights = load_file(averaged[-1] / TENSORS)
    assert (int(before["n_averaged"]), int(after["n_averaged"])) == (3, 4)
    decay = min(0.5, 4 / 13)
    for name, value in weights.items():
        expected = decay * before[f"module.{name}"] + (1 - decay) * value
        torch.testing.assert_close(after[f"module.{name}"], expected)
        assert after[f"module.{name}"].dtype == torch.float32
        assert torch.equal(head.state_dict()[name], after[f"module.{name}"])
    assert not torch.equal(after["module.eh_proj.weight"], weights["eh_proj.weight"])

    requests = held_out_requests(features, ONLINE, frozenset(), lively.max_positions)
    counted = figures(measure(lively, head, requests, ONLINE))
    assert online_rows(tmp_path / "average")[-1]["online"] == counted
    last = [curve(tmp_path / name, "validation")[-1] for name in ("plain", "average")]
    assert last[0] != last[1]


# --- alarms ---------------------------------------------------------------------------------------------------


def rows_of(losses: Sequence[float]) -> list[dict[str, float]]:
    return [{"step": step, "loss": loss} for step, loss in enumerate(losses)]


@pytest.mark.parametrize(
    ("past", "loss", "expected"),
    [
        ([2.0] * 30, 21.0, True),
        ([2.0] * 30, 19.0, False),  # not ten times the median
        ([2.0] * 19, 1000.0, False),  # too early to judge
        ([2.0] * 19 + [0.0] * 30, 1000.0, False),  # steps without a trained token don't count
        ([5.0] * 20 + [0.01] * 200, 0.5, False),  # fifty times the median, yet below the beginning
        ([5.0] * 20 + [0.01] * 200, 5.5, True),
        ([5.0] * 20 + [1.0] * 90 + [9.0] * 10, 9.5, False),  # bad steps don't move a median
        ([5.0] * 20 + [1.0] * 90 + [9.0] * 10, 11.0, True),
    ],
)
def test_what_counts_as_an_explosion(past: list[float], loss: float, expected: bool) -> None:
    curves = [{"step": 0, "validation": {"kl/1": 1.0}}, *rows_of(past)]
    assert exploded(loss, curves, 10.0) is expected
    assert not exploded(loss, curves, 0.0)


def spoil(
    monkeypatch: pytest.MonkeyPatch,
    key: str,
    change: Callable[[torch.Tensor], None],
    after: int = 0,
) -> None:
    """Change the states of one sequence each time training reads it, but for the first `after` times."""
    reads = 0

    def spoilt(*args: object) -> Pack:
        nonlocal reads
        pack = load_pack(*args)  # type: ignore[arg-type]
        if key in pack.keys:
            reads += 1
            place = pack.keys.index(key)
            if reads > after:
                change(pack.states["post_norm"][pack.offsets[place] : pack.offsets[place + 1]])
        return pack

    monkeypatch.setattr("mtp_train.train.loop.load_pack", spoilt)
    monkeypatch.setattr("mtp_train.train.loop._Trainer._validate", lambda _self: None)


def caught(run: Callable[[], object]) -> UserError:
    with pytest.raises(UserError) as error:
        run()
    return error.value


def test_a_state_that_is_not_finite_stops_before_the_step_and_is_named(
    lively: Target, features: FeatureStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """DEFECTS 4, where it would be trained: the second epoch meets it."""
    spoil(monkeypatch, "chat-6", lambda state: state[0].fill_(float("nan")), after=1)
    config = replace(BARE, epochs=2, rows=30)
    error = caught(lambda: fit(lively, features, config, tmp_path))
    rows = curve(tmp_path)
    step = rows[-1]["step"] + 1
    assert f"loss nan at step {step}: " in error.received
    assert "of which 'chat-6' have states that are not finite" in error.received
    assert "pack on rank 0" in error.received
    assert str(error.received).count("pack on") == 1, "the other pack of the window is not accused"
    command = re.search(r"mtp-train (store sample .* --sequence [\d ]+)", error.remedy)
    assert command
    options = store_parser().parse_args(command[1].split()[1:])
    assert 6 in options.sequence
    assert [features[number].key for number in options.sequence] == re.findall(
        r"'(chat-\d)'", str(error.received).split(", of which")[0]
    )
    newest = find_checkpoints(tmp_path / "checkpoints")[-1]
    assert read_card(newest).step == step - 1
    head, _ = load_head(newest, lively)
    assert all(parameter.isfinite().all() for parameter in head.parameters())
    assert not (tmp_path / "head").exists()


def test_an_exploding_loss_stops_and_names_the_pack(
    lively: Target, features: FeatureStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The comparison of states is a thousand times what it was."""
    spoil(monkeypatch, "chat-6", lambda state: state.mul_(1e4), after=6)
    config = replace(BARE, epochs=9, rows=30, accumulation=1, checkpoints=3)
    error = caught(lambda: fit(lively, features, config, tmp_path))
    assert error.rule == "the training loss must stay finite and must not explode"
    assert "'chat-6'" in error.received
    assert str(error.received).count("pack on") == 1
    assert "lower train.learning_rate" in error.remedy
    fit(lively, features, replace(config, explode=0.0), tmp_path / "off")


def test_a_gradient_that_is_not_finite_stops_before_the_step(
    lively: Target, features: FeatureStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Accelerator, "clip_grad_norm_", lambda *_args: torch.tensor(float("inf")))
    error = caught(lambda: fit(lively, features, BARE, tmp_path))
    assert "gradient norm inf at step 1: pack on rank 0 with loss" in error.received
    assert not find_checkpoints(tmp_path / "checkpoints")


def test_features_that_lie_nowhere_have_no_command_to_show_them() -> None:
    packs = [PackReport(0, 3.0, ("a", "b"), (4, 5), ()), PackReport(1, 2.0, ("c",), (6,), ())]
    error = alarm("loss 9 at step 3", packs, None, None)
    assert (
        error.received
        == "loss 9 at step 3: pack on rank 0 with loss 3 per goal, sequences 'a', 'b'"
    )
    assert error.remedy.endswith("; look at them")
    packs += [PackReport(2, float("nan"), (str(number),), (number,), ()) for number in range(3)]
    error = alarm("loss nan at step 3", packs, "features", Path("target"))
    assert str(error.received).count("pack on rank 2") == 2
    assert str(error.received).endswith("; and 1 more packs")
    assert error.remedy.endswith(
        "mtp-train store sample features --tokenizer target --sequence 0 1"
    )


def test_all_ranks_stop_and_know_which_of_them_it_was(two_ranks: TwoRanks) -> None:
    rows = two_ranks.records("alarm")
    assert [row["rank"] for row in rows] == [0, 1]
    for row in rows:
        assert "pack on rank 1" in row["message"]
        assert "pack on rank 0" not in row["message"]
    assert rows[0]["message"] == rows[1]["message"]


# --- trackers -------------------------------------------------------------------------------------------------


def tracked(trackers: list[str], target: Target, features: FeatureStore, out: Path) -> set[Path]:
    """Train as the command line does; the files that are not training's own."""
    run = SimpleNamespace(trackers=trackers, precision="float32")
    process = SimpleNamespace(ranks=Ranks())
    job = SimpleNamespace(run=run, process=process, device="cpu")
    accelerator = _accelerator(job, out)  # type: ignore[arg-type]
    config: TrainConfig = replace(CONFIG, rows=100, epochs=1)
    train(target, build(target, MtpConfig()), features, features, config, accelerator, out)
    accelerator.end_training()
    own = {"head", "best", "checkpoints", "curves.jsonl"}
    return {
        path
        for path in out.rglob("*")
        if path.is_file() and path.relative_to(out).parts[0] not in own
    }


def test_nothing_is_written_for_trackers_that_were_not_asked_for(
    lively: Target, features: FeatureStore, tmp_path: Path
) -> None:
    assert tracked([], lively, features, tmp_path) == set()


def test_tensorboard_gets_every_curve(
    lively: Target, features: FeatureStore, tmp_path: Path
) -> None:
    (events,) = tracked(["tensorboard"], lively, features, tmp_path)
    found = EventAccumulator(str(events.parent))
    found.Reload()
    tags = set(found.Tags()["scalars"])
    assert {"train/loss", "validation/agree/1", "online/tau", "online/per_position/3"} <= tags
    told = [(event.step, event.value) for event in found.Scalars("online/tau")]
    logged = [(row["step"], row["online"]["tau"]) for row in online_rows(tmp_path)]
    assert told == [(step, pytest.approx(value)) for step, value in logged]


def test_wandb_offline_stays_on_this_machine(
    lively: Target, features: FeatureStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    files = tracked(["wandb"], lively, features, tmp_path)
    assert any(path.suffix == ".wandb" for path in files)
