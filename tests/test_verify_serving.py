"""What the serving check makes of measurements: each verdict with data that must pass and data that must fail."""

from __future__ import annotations

import sys
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

import pytest
import torch
from toys import make_lively_target

from mtp_train.attention.packed import PackedContext
from mtp_train.engine.sampling import Sampling
from mtp_train.engine.sequences import Completion, DraftStep
from mtp_train.export.formats import LAYOUTS
from mtp_train.heads.mtp import MtpConfig, build
from mtp_train.models.target import Target

TOOLS = Path(__file__).parents[1] / "tools"
sys.path.insert(0, str(TOOLS))
import serving_figures as figures  # noqa: E402
import verify_serving  # noqa: E402

KNOWN = next(iter(figures.SAMPLING_FAULTS))


def of(drafts: int, *accepted: int) -> dict[str, Any]:
    return figures.Counters(drafts, accepted).figures()


def test_figures_are_the_engines_own_definitions() -> None:
    found = of(200, 100, 40, 10)
    assert found["tau"] == pytest.approx(1 + 150 / 200)
    assert found["per_position"] == pytest.approx([0.5, 0.2, 0.05])
    assert found["acceptance_rate"] == pytest.approx(150 / 600)
    assert of(0, 0, 0)["tau"] == 1


def test_runs_add_up() -> None:
    assert figures.Counters(10, (4, 1)).plus(figures.Counters(5, (5, 5))) == figures.Counters(
        15, (9, 6)
    )


@pytest.mark.parametrize(
    ("ours", "failures"),
    [
        (of(1000, 500, 200), 0),
        (of(1000, 520, 210), 0),  # tau off by 0.03, position 1 by 0.02
        (of(1000, 531, 200), 1),  # position 1 by 0.031
        (of(1000, 529, 229), 1),  # tau by 0.058, no position by more than 0.029
        (of(1000, 400, 100), 3),
        ({"tau": float("nan"), "per_position": [0.5, 0.2]}, 1),
    ],
)
def test_counters_that_differ_by_more_than_rounding_fail(ours: Any, failures: int) -> None:
    assert len(figures.gaps(of(1000, 500, 200), ours)) == failures


def made_up(excess: float, prompts: int = 16, tokens: int = 64) -> list[figures.Score]:
    """Scores of outputs of very different likelihoods, whose excess per token is about `excess`."""
    return [
        figures.Score(
            tokens,
            tokens * (-0.5 - 0.3 * index + excess) + (-1) ** index * 10,
            tokens * (-0.5 - 0.3 * index),
            2.5 * tokens,
        )
        for index in range(prompts)
    ]


def test_the_same_distribution_is_equal_and_another_is_different() -> None:
    found = figures.sampled(made_up(0.0))
    assert found.tokens == 1024 and found.verdict == "equal"
    assert found.error == pytest.approx((2.5 / 1024) ** 0.5)
    assert found.likelihood == pytest.approx(-0.5 - 0.3 * 7.5)
    assert figures.sampled(made_up(0.08)).verdict == "equal"  # what rounding may do
    noise = figures.sampled(made_up(-2.6))
    assert noise.excess == pytest.approx(-2.6) and noise.verdict == "different"
    assert figures.sampled(made_up(-0.3)).verdict == "different"
    # Too likely a text is no sample either: greedy text at temperature 1.
    assert figures.sampled(made_up(0.9)).verdict == "different"


def test_few_tokens_decide_nothing() -> None:
    few = figures.sampled(made_up(-0.3, prompts=2, tokens=10))
    assert few.verdict == "undecided"
    failures = figures.sampling_failures("engine", "1", figures.sampled(made_up(0.0)), few)
    assert len(failures) == 1 and "too few" in failures[0] and "with speculation" in failures[0]


@pytest.mark.parametrize(
    ("engine", "plain", "drafted", "said"),
    [
        (("mtp_train", "0"), 0.0, 0.0, ""),
        (("mtp_train", "0"), 0.0, -2.6, "not the target's distribution"),
        (("mtp_train", "0"), -2.6, 0.0, "not the target's distribution"),
        (KNOWN, 0.0, -2.6, ""),
        (KNOWN, 0.0, 0.0, "was not found"),  # a check that passes it is wrong
        (KNOWN, -2.6, -2.6, "without speculation"),  # the known fault is speculation's alone
        ((KNOWN[0], "99.0"), 0.0, -2.6, "not the target's distribution"),
        ((KNOWN[0], "99.0"), 0.0, 0.0, ""),
    ],
)
def test_a_wrong_sampler_fails_unless_it_is_known_and_a_known_one_must_be_found(
    engine: tuple[str, str], plain: float, drafted: float, said: str
) -> None:
    both = figures.sampled(made_up(plain)), figures.sampled(made_up(drafted))
    failures = figures.sampling_failures(*engine, *both)
    assert len(failures) == bool(said)
    assert all(said in failure for failure in failures)
    lines = figures.sampling_finding(*engine, *both).splitlines()
    assert ["NOT THE TARGET'S" in line for line in lines[1:]] == [plain < -1, drafted < -1]


def test_the_table_replaces_what_stood_between_its_marks() -> None:
    rows = [
        figures.Row("eagle", "vLLM", "1", "seen", 3, 1.7, 1.701),
        figures.Row("eagle3", "SGLang", "2", "read a|b"),
    ]
    text = figures.table(rows)
    assert "| `eagle` | vLLM | 1 | seen | 3 | 1.700 | 1.701 |" in text
    assert "| `eagle3` | SGLang | 2 | read a/b |  |  |  |" in text
    page = f"before\n{figures.TABLE_BEGIN}\nold\n{figures.TABLE_END}\nafter"
    made = figures.with_block(page, text)
    assert "old" not in made and made.startswith("before") and made.endswith("after")
    assert figures.with_block(made, text) == made
    with pytest.raises(ValueError, match="must have the lines"):
        figures.with_block("no marks", text)


def test_the_docs_have_the_tables_place() -> None:
    page = (TOOLS.parent / "docs" / "serving.md").read_text(encoding="utf-8")
    assert figures.with_block(page, "new") != page


def test_our_steps_are_counted_as_vllm_counts_drafts() -> None:
    steps = (DraftStep((5, 6, 7), 3), DraftStep((5, 6, 7), 1), DraftStep((5,), 0), DraftStep((), 0))
    done = [Completion("a", (1,), (2, 3), "length", steps)]
    assert verify_serving.counted(done, 3) == figures.Counters(3, (2, 1, 1))


RUN: dict[str, Any] = {
    "outputs": [{"prompt_ids": [1, 2], "output_ids": [3]}],
    "counters": {"num_drafts": 4, "num_accepted_tokens_per_pos": [3, 1]},
}


def test_a_result_holds_several_runs_and_an_older_one_is_a_run() -> None:
    about = {"vllm_version": "0.32.0", "start_up_s": 30.0}
    old = verify_serving.vllm_runs(about | RUN)
    assert len(old) == 1 and old[0].counters == figures.Counters(4, (3, 1))
    assert old[0].texts == verify_serving.Texts([(1, 2)], [(3,)])
    assert verify_serving.vllm_runs(about | {"runs": [RUN, RUN]}) == old * 2


def test_an_engines_last_error_is_what_the_table_says() -> None:
    log = """INFO loading
    NotImplementedError: no such method on CPU
    raise RuntimeError("Engine core initialization failed. See root cause above.")
    RuntimeError: Engine core initialization failed. See root cause above.
    INFO bye"""
    assert verify_serving.last_error(log) == "NotImplementedError: no such method on CPU"
    assert verify_serving.last_error("") == "no output"


def test_the_plug_in_is_found_as_if_it_were_installed(tmp_path: Path) -> None:
    folder = verify_serving.entry_points(tmp_path / "plugin")
    (found,) = distributions(path=[str(folder)])
    points = {point.name: point.value for point in found.entry_points}
    assert points == {"mtp_train": "mtp_train.serving_plugin:register"}


def record(layout: str, **values: Any) -> dict[str, Any]:
    return {"name": layout, "layout": layout, "k": 3, "version": "1", "failures": []} | values


def test_the_table_tells_seen_from_refused_and_read() -> None:
    records = [
        record("eagle", vllm=of(10, 5, 1), ours=of(10, 5, 2)),
        record("eagle3", vllm=of(10, 5, 1), ours=of(10, 1, 0), failures=["tau"]),
        record("medusa", refused="NotImplementedError: medusa"),
        {"name": "sampling", "plain": {}, "failures": []},
    ]
    rows = verify_serving.table_rows(records)
    state = {row.layout: row.state for row in rows if row.engine.startswith("vLLM")}
    assert state["eagle"].startswith("seen: counters equal ours")
    assert state["eagle3"].startswith("seen: differs")
    assert state["medusa"] == "not served: NotImplementedError: medusa"
    assert state["speculators"] == "read"
    assert {row.layout for row in rows} == {*LAYOUTS}


def test_an_outputs_likelihood_and_its_expectation_are_the_targets_own(toy_target: Target) -> None:
    prompt, output = (3, 4, 5), (6, 7)
    text = torch.tensor(prompt + output)
    state = toy_target.forward(text, torch.arange(5), PackedContext([0, 5]))
    log = toy_target.logits(state).double().log_softmax(-1)[2:4]
    mean = (log.exp() * log).sum(-1)
    spread = (log.exp() * (log - mean.unsqueeze(1)).square()).sum(-1)
    (found,) = verify_serving.Scorer(toy_target)(verify_serving.Texts([prompt], [output]))
    assert found.tokens == 2
    assert found.likelihood == pytest.approx(float(log[0, 6] + log[1, 7]), abs=1e-4)
    assert found.expected == pytest.approx(float(mean.sum()), abs=1e-4)
    assert found.variance == pytest.approx(float(spread.sum()), abs=1e-3)


def test_our_own_sampler_passes_and_others_do_not(toy_target: Target) -> None:
    """The control: the verdict on real outputs of the engine, sampled as it should be and otherwise."""
    lively = make_lively_target()
    head = build(lively, MtpConfig())
    prompts = [(seed % 50 + 1, seed % 7 + 2) for seed in range(24)]
    ours = verify_serving.Ours(lively, frozenset(), 8, 60)
    score = verify_serving.Scorer(lively)
    for drafts in (0, 2):
        assert figures.sampled(score(ours.sample(head, prompts, drafts))).verdict == "equal"
    for temperature in (0.0, 0.5, 2.0):
        done = ours.run(head, ours.requests(prompts), 2, Sampling(temperature=temperature, seed=1))
        other = verify_serving.Texts(prompts, [completion.tokens for completion in done])
        assert figures.sampled(score(other)).verdict == "different"
