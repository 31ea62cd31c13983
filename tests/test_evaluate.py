"""Prompt sets, acceptance figures by hand, journals that survive a kill and are shared by ranks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from children import evaluate_slowly, run
from evaluations import (
    CONFIG,
    FIRST,
    PLACEHOLDER,
    SIZES,
    STOP,
    measure,
    write_questions,
)
from toys import make_lively_target, make_tokenizer

from mtp_train.cli.sweep import evaluation_figures
from mtp_train.core.dist import Ranks
from mtp_train.core.errors import UserError
from mtp_train.dialogue.rows import completion_row, row_completion
from mtp_train.dialogue.shared import SharedJournal, gather, read_rows
from mtp_train.engine.engine import Engine
from mtp_train.engine.schemes import SchemeConfig, make_proposer
from mtp_train.engine.sequences import Completion, DraftStep, Request
from mtp_train.evaluate.acceptance import Turn, acceptance
from mtp_train.evaluate.runs import Bench, account, fitted_cache, turn_of
from mtp_train.evaluate.sets import PromptSet, chat_set, spread
from mtp_train.evaluate.stage import EvaluateConfig
from mtp_train.text.template import ChatTemplate


def completion(key: str, accepted: list[int], drafts: int = 2, prompt: int = 3) -> Completion:
    """An output whose steps accepted so many drafts."""
    tokens = 1 + sum(count + 1 for count in accepted)
    steps = tuple(DraftStep((7,) * drafts, count) for count in accepted)
    return Completion(key, (5,) * prompt, (6,) * tokens, "length", steps)


# --- figures --------------------------------------------------------------------------------------------------


def test_the_figures_by_hand() -> None:
    done = [completion("a", [2, 0, 1]), completion("b", [0])]
    found = acceptance(done, {"a": "x", "b": "y"}, 0.0, 2)
    assert (found["prompts"], found["conversations"], found["drafts"]) == (2, 2, 4)
    assert found["tokens"] == 7 + 2
    assert found["tau"] == 1 + 3 / 4
    assert found["tau_macro"] == ((1 + 3 / 3) + 1) / 2
    assert found["acceptance_rate"] == 3 / 8
    assert found["per_position"] == [2 / 4, 1 / 4]
    assert found["conditional"] == [2 / 4, 1 / 2]
    assert found["categories"]["y"]["tau"] == 1.0
    for name in ("tau", "tau_macro", "acceptance_rate"):
        low, high = found[f"{name}_ci"]
        assert low <= found[name] <= high and low < high
    for name in ("per_position", "conditional"):
        for value, (low, high) in zip(found[name], found[f"{name}_ci"], strict=True):
            assert low <= value <= high
    assert "alpha_expected" not in found


def test_tokens_per_step_count_the_steps_without_drafts() -> None:
    done = [replace(completion("a", [2, 1], drafts=2), undrafted=6)]
    found = acceptance(done, {"a": "x"}, 0.0, 2)
    assert (found["drafts"], found["steps"], found["tau"]) == (2, 8, 2.5)
    assert found["tokens_per_step"] == 1 + 3 / 8
    low, high = found["tokens_per_step_ci"]
    assert low <= 1 + 3 / 8 <= high
    chain = acceptance([completion("a", [2, 0])], {"a": "x"}, 0.0, 2)
    assert chain["tokens_per_step"] == chain["tau"] and chain["steps"] == chain["drafts"]


def test_prompt_lookup_counts_its_steps_without_drafts() -> None:
    """Every token after the first is of a step, one each where nothing was drafted."""
    target = make_lively_target()
    engine = Engine(target, make_proposer(target, None, SchemeConfig("ngram", 2)), SIZES)
    (done,) = engine.generate([Request("a", tuple(range(3, 12)), 30)])
    drafted = sum(step.accepted + 1 for step in done.steps)
    assert done.undrafted > 0
    assert 0 <= 1 + drafted + done.undrafted - len(done.tokens) <= 2
    assert row_completion({"id": "a", **completion_row(done)}).undrafted == done.undrafted
    (plain,) = Engine(target, None, SIZES).generate([Request("a", tuple(range(3, 12)), 30)])
    assert plain.undrafted == 0


def test_a_cache_is_no_larger_than_what_runs_at_once_can_fill() -> None:
    requests = [Request(str(at), (1,) * 10, 6) for at in range(9)]
    # 16 rows and two pages of slack, three at once
    assert fitted_cache(SIZES, None, requests).cache_rows == 3 * (16 + 8)
    small = replace(SIZES, cache_rows=40)
    assert fitted_cache(small, None, requests).cache_rows == 40
    engine = Engine(make_lively_target(), None, fitted_cache(SIZES, None, requests))
    assert {len(done.tokens) for done in engine.generate(requests)} == {6}
    assert engine.stats.preempted == 0


def test_a_step_belongs_where_its_first_token_stands() -> None:
    """Steps begin at tokens 1, 4, 7, ...: the 86th at 256, so that 85 of 100 belong to the first range."""
    done = [completion("a", [2] * 85 + [0] * 15, prompt=300)]
    short, longer = acceptance(done, {"a": "x"}, 0.0, 2)["by_output_position"]
    assert (short["from"], short["to"], short["drafts"], short["tokens"]) == (0, 256, 85, 256)
    assert (longer["from"], longer["to"], longer["drafts"], longer["tokens"]) == (256, 1024, 15, 15)
    assert short["tau"] == 3.0 and longer["tau"] == 1.0
    (length,) = acceptance(done, {"a": "x"}, 0.0, 2)["by_prompt_length"]
    assert (length["from"], length["to"], length["prompts"]) == (256, 1024, 1)


def test_turns_of_a_conversation_are_resampled_together() -> None:
    """With every conversation alike and turns unlike, nothing but the turns could vary."""
    done = [
        completion(f"{name}{turn}", [2, 2] if turn else [0, 0]) for name in "abc" for turn in (0, 1)
    ]
    turns = {f"{name}{turn}": Turn(name, turn + 1) for name in "abc" for turn in (0, 1)}
    categories = dict.fromkeys(turns, "x")
    together = acceptance(done, categories, 0.0, 2, turns)
    assert together["tau_ci"] == [2.0, 2.0] and together["conversations"] == 3
    assert [(row["turn"], row["prompts"], row["tau"]) for row in together["by_turn"]] == [
        (1, 3, 1.0),
        (2, 3, 3.0),
    ]
    low, high = acceptance(done, categories, 0.0, 2)["tau_ci"]
    assert low < 2 < high


def test_alpha_expected_is_the_mean_over_the_steps_that_reached_a_position() -> None:
    steps = (DraftStep((7, 7), 1, 4, (0.5, 0.25)), DraftStep((7, 7), 0, 4, (0.1,)))
    done = [Completion("a", (5,), (6, 6, 6, 6), "length", steps)]
    found = acceptance(done, {"a": "x"}, 1.0, 2)
    assert found["alpha_expected"]["per_position"] == pytest.approx([0.3, 0.25])
    assert found["alpha_expected"]["steps"] == [2, 1]
    assert found["acceptance_rate"] == 1 / 8, "of all drafted tokens, a tree's among them"


def test_a_completion_is_the_same_after_its_row() -> None:
    done = completion("a", [2, 0, 1])
    row = json.loads(json.dumps({"id": "a", **completion_row(done)}))
    assert row_completion(row) == done


def test_draws_are_part_of_larger_draws() -> None:
    items = list(range(40))
    assert set(spread(items, 5)) < set(spread(items, 17)) < set(spread(items, 40))


# --- prompt sets ----------------------------------------------------------------------------------------------


GIVEN = {"role": "user", "content": "hi"}


def talks(folder: Path, more: Any = (), longest: int = 12) -> PromptSet:
    template = ChatTemplate(make_tokenizer())
    return chat_set("talks", str(write_questions(folder, more)), template, STOP, longest)


def test_a_later_turn_goes_on_from_the_targets_own_answer(tmp_path: Path) -> None:
    """Held against a client that speaks to the target alone."""
    target, template = make_lively_target(), ChatTemplate(make_tokenizer())
    prompts = talks(tmp_path)
    done = Bench(tmp_path / "out").run("talks", prompts, lambda: Engine(target, None, SIZES), 0.0)
    assert [item.key for item in done.completions] == [
        key for unit in prompts.units for key in unit
    ]
    plain = Engine(target, None, SIZES)
    answers = iter(done.completions)
    for number, question in enumerate(FIRST):
        messages = [{"role": "user", "content": question}]
        for turn in range(1 if number % 2 else 2):
            answer = next(answers)
            assert done.turns[answer.key] == Turn(str(80 + number), turn + 1)
            assert done.questions[answer.key] == messages[-1]["content"]
            (alone,) = plain.generate([Request("x", tuple(template.prompt(messages)), 12, STOP)])
            assert (answer.prompt, answer.tokens) == (alone.prompt, alone.tokens)
            said = make_tokenizer().decode([token for token in alone.tokens if token != 2])
            after = ["and then?", "shorter."][number % 4 // 2]
            messages += [{"role": "assistant", "content": said}, {"role": "user", "content": after}]
    assert account(prompts, done).as_dict()["used"] == 6


def test_placeholders_and_long_prompts_are_refused_and_counted(tmp_path: Path) -> None:
    more = [
        {"question_id": "p", "category": "math", "sub_category": "hle", "turns": [PLACEHOLDER]},
        {"question_id": "long", "category": "one", "turns": ["why? " * 60]},
        {"question_id": "longer", "category": "one", "turns": ["why?", "why? " * 60]},
        {
            "question_id": "given",
            "messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "x"}],
        },
    ]
    engine = Engine(make_lively_target(), None, replace(SIZES, cache_rows=256))
    for make in (lambda: engine, lambda: pytest.fail("what was refused was asked again")):
        prompts = talks(tmp_path, more)
        done = Bench(tmp_path / "out").run("talks", prompts, make, 0.0)
        counts = account(prompts, done).as_dict()
        assert counts["input"] == 10 and counts["used"] == 6
        assert sum(counts["repaired"].values()) == 2 and sum(counts["refused"].values()) == 2
        assert any("placeholder" in reason for reason in counts["refused"])
        assert any("leaves no room" in reason for reason in counts["refused"])
        assert any("ended early" in rule for rule in counts["repaired"])


def test_a_set_of_placeholders_alone_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "speed.jsonl"
    path.write_text(json.dumps({"question_id": "p", "category": "math", "turns": [PLACEHOLDER]}))
    with pytest.raises(UserError, match="at least one usable row"):
        chat_set("speed", str(path), ChatTemplate(make_tokenizer()), STOP, 8)


def test_a_set_of_which_nothing_is_answered(tmp_path: Path) -> None:
    requests = (Request("a", (), 8),)
    prompts = PromptSet("empty", requests, {"a": "all"})
    engine = Engine(make_lively_target(), None, SIZES)
    done = Bench(tmp_path).run("empty", prompts, lambda: engine, 0.0)
    with pytest.raises(UserError, match="at least one prompt of empty must be answered"):
        account(prompts, done)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"sets": {"a/b": "x"}}, "letters, digits"),
        ({"sets": {"heldout": "x"}}, "must not be one of heldout, ood"),
        ({"temperatures": [-1.0]}, "temperatures must be 0 or more"),
        ({"ks": [0]}, "ks must be 1 or more"),
        ({"sampled_prompts": -1}, "sampled_prompts must be 0 or more"),
        ({"grid_prompts": 0}, "grid_prompts must be 1 or more"),
        ({"speed_rounds": 1}, "speed_rounds must be 2 or more"),
    ],
)
def test_a_wrong_configuration(change: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        EvaluateConfig(**change)


def test_without_sampled_prompts_the_sampled_run_is_left_out(tmp_path: Path) -> None:
    found = measure(tmp_path, config=replace(CONFIG, sampled_prompts=0, temperatures=[], ks=[]))
    assert {name: list(modes) for name, modes in found.sets.items()} == {
        name: ["greedy"] for name in found.sets
    }
    assert {row["temperature"] for row in found.grid} == {0.0}
    assert {figure.split("/")[1] for figure in evaluation_figures(found.sets)} == {"greedy"}


def test_turns_by_their_messages() -> None:
    said = [{"role": "user"}, {"role": "assistant"}, {"role": "user"}]
    assert turn_of("81#1", said) == Turn("81", 2)
    assert turn_of("81#1", said[:1]) == Turn("81#1", 1), "an id may hold the sign itself"


# --- the grid -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The toy head measured in one go."""
    folder = tmp_path_factory.mktemp("measured")
    found = measure(folder)
    (folder / "found.json").write_text(json.dumps({"sets": found.sets, "grid": found.grid}))
    return folder


def figures(folder: Path) -> dict[str, Any]:
    return dict(json.loads((folder / "found.json").read_text()))


def test_every_pair_of_temperature_and_drafts_is_measured_on_the_same_prompts(
    measured: Path,
) -> None:
    found = figures(measured)
    cells = [(row["set"], row["temperature"], row["k"]) for row in found["grid"]]
    assert cells == [(s, t, k) for s in ("heldout", "talks") for t in (0.0, 0.7) for k in (1, 2)]
    assert {row["prompts"] for row in found["grid"] if row["set"] == "heldout"} == {3}
    assert all(len(row["per_position"]) == row["k"] for row in found["grid"])
    assert found["sets"]["heldout"]["greedy"]["prompts"] == 5
    assert found["sets"]["heldout"]["sampled"]["prompts"] == 4
    assert found["sets"]["talks"]["greedy"]["prompts"] == 9
    assert found["sets"]["talks"]["greedy"]["conversations"] == 6
    assert 1 < found["sets"]["talks"]["greedy"]["tau"] < 3
    for mode in ("greedy", "sampled"):
        expected = found["sets"]["talks"][mode]["alpha_expected"]
        assert all(0 < value < 1 for value in expected["per_position"])
        assert expected["steps"][0] == found["sets"]["talks"][mode]["drafts"]


@pytest.mark.parametrize("scheme", ["dynamic", "fixed", "ngram"])
def test_other_schemes_than_chains(tmp_path: Path, scheme: str) -> None:
    config = replace(CONFIG, scheme=scheme, drafts=6, depth=2, top_k=3, temperatures=[], ks=[])
    found = measure(tmp_path, config=config).sets["heldout"]["greedy"]
    assert len(found["per_position"]) == (6 if scheme == "ngram" else 2)
    assert scheme == "ngram" or found["acceptance_rate"] == pytest.approx((found["tau"] - 1) / 6)


def test_the_grids_figures_are_those_of_a_run_of_that_cell_alone(
    measured: Path, tmp_path: Path
) -> None:
    """Sampled completions too depend on nothing but their own key."""
    alone = replace(CONFIG, drafts=1, temperature=0.7, sampled_prompts=3, temperatures=[], ks=[])
    found = measure(tmp_path, config=alone).sets["heldout"]["sampled"]
    row = next(
        row
        for row in figures(measured)["grid"]
        if (row["set"], row["temperature"], row["k"]) == ("heldout", 0.7, 1)
    )
    assert {name: found[name] for name in ("tau", "tokens", "drafts")} == {
        name: row[name] for name in ("tau", "tokens", "drafts")
    }
    other = measure(tmp_path / "other", config=replace(alone, seed=1))
    assert other.sets["heldout"]["sampled"] != found


def flat(value: Any, name: str = "") -> dict[str, Any]:
    """Every figure by its path: alpha is rounded as the batch's shape has it, all else must be equal."""
    if isinstance(value, dict):
        parts = list(value.items())
    elif isinstance(value, list):
        parts = list(enumerate(value))
    else:
        return {name: value}
    return {key: leaf for at, part in parts for key, leaf in flat(part, f"{name}/{at}").items()}


# --- killed, resumed, shared ----------------------------------------------------------------------------------


def lines(folder: Path) -> int:
    """Completions that are whole by now; one in two files at once is one."""
    found = set()
    for path in (folder / "completions").glob("[!.]*"):
        name = path.name.split(".rank")[0].removesuffix(".jsonl")
        with suppress(FileNotFoundError):  # gathered meanwhile
            whole = path.read_bytes().rpartition(b"\n")[0].splitlines()
            found |= {(name, line) for line in whole}
    return len(found)


def require_same_completions(folder: Path, other: Path) -> None:
    """The same files with the same completions, step by step."""
    # a killed writer's half file has a hidden name: the next start of the stage clears it away
    files = [sorted((one / "completions").glob("[!.]*")) for one in (folder, other)]
    assert [path.name for path in files[0]] == [path.name for path in files[1]]
    for pair in zip(*files, strict=True):
        found = [[completion_of(row) for row in read_rows(path)] for path in pair]
        assert found[0] == found[1] and found[0]


def completion_of(row: dict[str, Any]) -> Completion:
    """The completion of a row without alpha, the only number that is no count."""
    done = row_completion(row)
    return replace(done, steps=tuple(replace(step, alphas=()) for step in done.steps))


@pytest.mark.parametrize("after", [1, 7, 20, 33])
def test_a_killed_evaluation_goes_on_and_ends_alike(
    measured: Path, tmp_path: Path, after: int
) -> None:
    assert run(evaluate_slowly, tmp_path, kill_when=lambda: lines(tmp_path) >= after) == -9
    begun = lines(tmp_path)
    assert begun >= after
    assert run(evaluate_slowly, tmp_path) == 0
    assert flat(figures(tmp_path)) == pytest.approx(flat(figures(measured)), abs=1e-5)
    asked = int((tmp_path / "asked").read_text())
    assert asked <= lines(tmp_path) - begun + 1, "what was there is not done again"
    require_same_completions(tmp_path, measured)


def test_two_ranks_share_the_prompts_and_give_the_same_figures(
    measured: Path, tmp_path: Path
) -> None:
    script = Path(__file__).with_name("evaluate_ranks.py")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
    environment = {name: os.environ[name] for name in os.environ if not name.startswith("PYTEST_")}
    environment |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [*command, "2", str(script), str(tmp_path)],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    records = [json.loads((tmp_path / f"rank-{rank}.json").read_text()) for rank in (0, 1)]
    for record in records:
        assert (record["world"], record["backend"]) == (2, "gloo")
        found = flat({"sets": record["sets"], "grid": record["grid"]})
        assert found == pytest.approx(flat(figures(measured)), abs=1e-5)
        assert record["greedy"] == {"heldout": 5, "talks": 9}
    first, second = records[0]["shares"]
    assert len(first) > 10 and len(second) > 10 and not set(first) & set(second)
    assert len(first) + len(second) == lines(measured)
    require_same_completions(tmp_path, measured)


def test_journals_of_any_number_of_ranks_are_gathered(tmp_path: Path) -> None:
    """Three ranks were killed, one in the middle of a line and one while journals were gathered."""
    path = tmp_path / "set.jsonl"
    for rank, keys in enumerate(["ad", "b", "c"]):
        rows = [json.dumps({"id": key, "finish": "stop"}) for key in keys]
        path.with_suffix(f".rank-{rank}.journal").write_text("\n".join(rows) + "\n")
    path.write_text(json.dumps({"id": "a", "finish": "stop"}) + "\n")
    with open(path.with_suffix(".rank-2.journal"), "a") as file:
        file.write('{"id": "e", "fin')
    journal = SharedJournal(path, Ranks())
    assert all(key in journal for key in "abcd") and "e" not in journal and len(journal) == 4
    journal.append({"id": "e", "finish": "stop"})
    assert journal.row("e")["finish"] == "stop"
    journal.finish("edcba")
    assert [row["id"] for row in read_rows(path)] == list("edcba")
    assert [item.name for item in tmp_path.iterdir()] == ["set.jsonl"]
    gather(path)
    assert [row["id"] for row in read_rows(path)] == list("edcba")
