"""Prompts in, answers out, turn by turn: what serving would send, what a kill leaves, what becomes of each row."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from children import ANSWERING, regenerate_slowly, run
from toys import make_lively_target, make_tokenizer

from mtp_train.core.errors import UserError
from mtp_train.core.records import Accounting
from mtp_train.dialogue.client_messages import reply_text
from mtp_train.dialogue.journal import Journal
from mtp_train.dialogue.plans import DROPPED, TOOLS, split_turns
from mtp_train.dialogue.talks import request_seed
from mtp_train.engine.engine import Engine, EngineConfig
from mtp_train.engine.sequences import Batch, Request
from mtp_train.engine.step import Step
from mtp_train.evaluate.sets import chat_set
from mtp_train.models.target import Target, load_tokenizer, stop_tokens
from mtp_train.regenerate.stage import Outcome, RegenerateConfig, regenerate
from mtp_train.text.alternation import SYSTEM_FOLDED
from mtp_train.text.joined import join_turns
from mtp_train.text.sources import read_answers, read_conversations
from mtp_train.text.template import ChatTemplate

TOKENIZER = make_tokenizer()
STOP = frozenset({2})
USER = {"role": "user", "content": "Two words for rain?"}
REPLY = {"role": "assistant", "content": "Drizzle, shower."}
QUESTIONS = ["why?", "name a bird.", "say hello", "count to 3", "is it late?", "what is 2 + 2?"]
MORE = ["and then?", "shorter.", "why so?"]


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def write(path: Path, rows: list[object]) -> str:
    lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return str(path)


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def chats(folder: Path, **changes: Any) -> RegenerateConfig:
    """Conversations of 1, 2, 3, 4, 1, 2 questions, with given replies in every other one."""
    rows: list[object] = []
    for number, text in enumerate(QUESTIONS):
        asked = [user(text), *map(user, MORE[: number % 4])]
        messages = [
            m for question in asked for m in ([question, REPLY] if number % 2 else [question])
        ]
        rows.append({"id": f"c{number}", "category": f"k{number % 2}", "messages": messages})
    source = write(folder / "chats.jsonl", rows)
    return RegenerateConfig({"train": source}, {}, **({"max_new_tokens": 9} | changes))


def answer(
    config: RegenerateConfig, out: Path, target: Target, engine: EngineConfig = ANSWERING
) -> Outcome:
    return regenerate(
        Engine(target, None, engine), ChatTemplate(TOKENIZER), STOP, config, "train", out
    )


@pytest.fixture(scope="module")
def lively() -> Target:
    return make_lively_target()


# --- turns ----------------------------------------------------------------------------------------------------


def test_every_turn_is_asked_as_serving_would_ask_it(lively: Target, tmp_path: Path) -> None:
    """Held against a client that talks to the target alone, one request at a time."""
    config, out = chats(tmp_path), tmp_path / "out.jsonl"
    outcome = answer(config, out, lively)
    rows = iter(read(out))
    engine = Engine(lively, None, EngineConfig(max_batch=1, cache_rows=512, page_size=4))
    template = ChatTemplate(TOKENIZER)
    finishes = set()
    for number, text in enumerate(QUESTIONS):
        messages: list[dict[str, str]] = []
        for turn, question in enumerate([text, *MORE[: number % 4]]):
            messages.append(user(question))
            prompt = tuple(template.prompt(messages))
            (done,) = engine.generate([Request("x", prompt, config.max_new_tokens, STOP)])
            row = next(rows)
            assert row["id"] == (f"c{number}#{turn}" if turn else f"c{number}")
            assert row["category"] == f"k{number % 2}"
            assert row["messages"] == messages
            assert row["prompt_ids"] == list(prompt)
            assert row["output_ids"] == list(done.tokens) and row["finish"] == done.finish
            said = [token for token in done.tokens if token != 2]
            messages.append({"role": "assistant", "content": TOKENIZER.decode(said)})
            finishes.add((done.finish, turn > 0))
    assert next(rows, None) is None
    assert len(finishes) == 4, "answers end by stop and by length, first ones and later ones"
    assert outcome.accounting.used == 3
    assert outcome.accounting.repaired == {DROPPED: 3}


@pytest.mark.parametrize(
    "engine",
    [
        EngineConfig(max_batch=1, cache_rows=512, page_size=4),
        EngineConfig(max_batch=64, cache_rows=4096, page_size=16),
        EngineConfig(max_batch=5, cache_rows=300, page_size=1, prefill_rows=1),
    ],
)
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_answers_do_not_depend_on_the_batch(
    lively: Target, tmp_path: Path, engine: EngineConfig, temperature: float
) -> None:
    """Sampled ones neither: an answer's draws are its own."""
    config = chats(tmp_path, temperature=temperature)
    one, other = tmp_path / "one.jsonl", tmp_path / "other.jsonl"
    answer(config, one, lively)
    answer(config, other, lively, engine)
    assert one.read_bytes() == other.read_bytes()


def test_samples_differ_by_seed_and_by_key(lively: Target, tmp_path: Path) -> None:
    rows: list[object] = [{"id": str(n), "messages": [user("why?")]} for n in range(4)]
    source = {"train": write(tmp_path / "same.jsonl", rows)}
    found = []
    for seed in (0, 1):
        config = RegenerateConfig(source, {}, max_new_tokens=9, temperature=1.0, seed=seed)
        out = tmp_path / f"{seed}.jsonl"
        served = Engine(lively, None, ANSWERING)
        regenerate(served, ChatTemplate(TOKENIZER), frozenset(), config, "train", out)
        found += [tuple(row["output_ids"]) for row in read(out)]
    assert len(set(found)) == 8
    assert len({request_seed(0, "a"), request_seed(1, "a"), request_seed(0, "a#1")}) == 3
    assert all(0 <= request_seed(seed, "a") < 2**63 for seed in range(50))


def test_turns_join_the_running_batch(
    lively: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No step waits for the slowest conversation: ids tell which turns ran together."""
    together: set[frozenset[str]] = set()
    original = Step.__call__

    def step(self: Step, batch: Batch) -> None:
        together.add(frozenset(sequence.request.key for sequence in batch.all))
        original(self, batch)

    monkeypatch.setattr(Step, "__call__", step)
    answer(chats(tmp_path), tmp_path / "out.jsonl", lively)
    mixed = [keys for keys in together if {"#" in key for key in keys} == {True, False}]
    assert mixed and max(len(keys) for keys in together) == ANSWERING.max_batch


@pytest.mark.parametrize(
    ("roles", "turns", "repair"),
    [
        ("u", ["u"], ""),
        ("uau", ["u", "u"], DROPPED),
        ("suaua", ["su", "u"], DROPPED),
        ("uu", ["u", "u"], ""),
        ("auu", ["u", "u"], DROPPED),
        ("us", ["us"], ""),
        ("usau", ["u", "su"], DROPPED),
        ("uatau", ["u"], TOOLS),
        ("uauatu", ["u", "u"], TOOLS),
        ("tu", [], TOOLS),
        ("a", [], DROPPED),
        ("s", [], ""),
    ],
)
def test_where_the_target_replies(roles: str, turns: list[str], repair: str) -> None:
    names = {"s": "system", "u": "user", "a": "assistant", "t": "tool"}
    messages = [{"role": names[role], "content": str(at)} for at, role in enumerate(roles)]
    found, rule = split_turns(messages)
    assert ["".join(m["role"][0] for m in turn) for turn in found] == turns
    assert rule == repair
    kept = [int(m["content"]) for turn in found for m in turn]
    assert kept == sorted(kept)


def test_a_reply_is_the_text_that_a_client_gets(smollm2_path: Path) -> None:
    tokenizer = load_tokenizer(smollm2_path)
    prompt = ChatTemplate(tokenizer).prompt([USER])
    words = tokenizer.encode(" Grüße, 雨!", add_special_tokens=False)
    assert reply_text(tokenizer, prompt, words) == " Grüße, 雨!"
    assert reply_text(tokenizer, prompt, [*words, tokenizer.eos_token_id]) == " Grüße, 雨!"
    rain = tokenizer.encode("雨", add_special_tokens=False)
    assert len(rain) > 1 and reply_text(tokenizer, prompt, [*words, *rain[:-1]]) == " Grüße, 雨!"


# --- what is trained ------------------------------------------------------------------------------------------


def test_turns_share_a_sequence_where_the_next_prompt_goes_on_with_their_ids(
    tmp_path: Path,
) -> None:
    """A target that says only ids with a text of their own: each conversation is one sequence."""
    target, out = make_lively_target(vocab_size=len(TOKENIZER)), tmp_path / "out.jsonl"
    with torch.no_grad():
        target.model.lm_head.weight[:2] = 0  # <unk> and <s> are never the likeliest
    answer(chats(tmp_path), out, target)
    answers = read_answers(out, Accounting())
    sequences = [sequence for sequence, _ in join_turns(answers)]
    assert [item.key for item in sequences] == [f"c{n}" for n in range(6)]
    assert len(answers) == 13
    for item in sequences:
        turns = [a for a in answers if a.key.split("#")[0] == item.key]
        assert item.tokens == turns[-1].prompt_ids + turns[-1].output_ids
        trained = [
            position
            for a in turns
            for position in range(len(a.prompt_ids), len(a.prompt_ids) + len(a.output_ids))
        ]
        assert [at for at, flag in enumerate(item.loss_mask) if flag] == trained


def test_a_turn_whose_history_is_rendered_otherwise_is_a_sequence_of_its_own(
    lively: Target, tmp_path: Path
) -> None:
    """Ids without a text of their own, as a reply that the tokenizer would write with other ids."""
    out = tmp_path / "out.jsonl"
    answer(chats(tmp_path), out, lively)
    answers = read_answers(out, Accounting())
    sequences = [sequence for sequence, _ in join_turns(answers)]
    assert 6 < len(sequences) < 13, "some turns join, some do not"
    by_key = {a.key: a for a in answers}
    for item in sequences:
        assert item.tokens[: len(by_key[item.key].prompt_ids)] == by_key[item.key].prompt_ids
    trained = sum(sum(item.loss_mask) for item in sequences)
    assert trained == sum(len(a.output_ids) for a in answers), "every reply once"


# --- accounting -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def engine(smollm2_path: Path) -> Engine:
    return Engine(Target.load(smollm2_path), None, EngineConfig(max_batch=4, cache_rows=1024))


def test_every_row_is_used_repaired_or_refused(
    engine: Engine, smollm2_path: Path, tmp_path: Path
) -> None:
    prompts = write(
        tmp_path / "prompts.jsonl",
        [
            {"id": "plain", "messages": [USER]},
            {"id": "answered", "messages": [USER, REPLY]},
            {"id": "backwards", "messages": [REPLY]},
            {"id": "beyond", "messages": [USER]},
            "{broken",
        ],
    )
    config = RegenerateConfig({"train": prompts}, {"train": 2}, max_new_tokens=4)
    out = tmp_path / "train.jsonl"
    tokenizer = load_tokenizer(smollm2_path)
    stop = stop_tokens(tokenizer, smollm2_path)
    outcome = regenerate(engine, ChatTemplate(tokenizer), stop, config, "train", out)
    accounting, counts = outcome.accounting, outcome.as_dict()
    assert (accounting.used, sum(accounting.repaired.values())) == (1, 1)
    assert sum(accounting.refused.values()) == 3 and accounting.total == 5
    assert [counts[name] for name in ("input", "success", "skipped", "error")] == [5, 2, 3, 0]
    rows = read(out)
    assert [row["id"] for row in rows] == ["plain", "answered"]
    assert rows[0]["prompt_ids"] == rows[1]["prompt_ids"], (
        "the given reply is no part of the prompt"
    )
    assert rows[1]["messages"] == [USER]


def test_a_turn_that_fails_ends_its_conversation(lively: Target, tmp_path: Path) -> None:
    """The toy's 256 positions: one conversation outgrows them, one never fits, the template fails at one."""
    long = "a b c d " * 12
    rows: list[object] = [
        {"id": "fits", "messages": [user("why?"), REPLY, user("why so?")]},
        {"id": "grows", "messages": [user(long), user(long), user(long)]},
        {"id": "never", "messages": [user(long * 3), user("why?")]},
        {"id": "template", "messages": [user("why?"), user("raise")]},
    ]
    tokenizer = make_tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages if m.content == 'raise' %}{{ raise_exception('no') }}{% endfor %}"
        + str(tokenizer.chat_template)
    )
    config = RegenerateConfig({"train": write(tmp_path / "p", rows)}, {}, max_new_tokens=9)
    out = tmp_path / "out.jsonl"
    served = Engine(lively, None, ANSWERING)
    outcome = regenerate(served, ChatTemplate(tokenizer), STOP, config, "train", out)
    assert [row["id"] for row in read(out)] == ["fits", "fits#1", "grows", "grows#1", "template"]
    full = f"the prompt leaves no room below {lively.max_positions} positions"
    ended = "ended early, the turns before are kept: "
    assert outcome.accounting.refused == {full: 1}
    repaired = outcome.accounting.repaired
    assert repaired[DROPPED] == repaired[ended + full] == 1 and len(repaired) == 3
    (template,) = set(repaired) - {DROPPED, ended + full}
    assert template.startswith(f"{ended}the chat template fails: TemplateError: no")
    counts = outcome.as_dict()
    assert (counts["input"], counts["success"], counts["skipped"]) == (4, 3, 1)
    assert sum(outcome.answers.values()) == 5
    before = out.read_bytes()
    assert regenerate(served, ChatTemplate(tokenizer), STOP, config, "train", out) == outcome
    assert out.read_bytes() == before, "the same again from the finished file"


def test_a_system_prompt_that_the_template_takes_not_is_asked_as_a_client_would(
    lively: Target, tmp_path: Path
) -> None:
    """Before the first question, in training prompts and in prompt sets; counted by its rule."""
    system = {"role": "system", "content": "be brief."}
    rows: list[object] = [
        {"id": "a", "messages": [system, user("why?"), user("why so?")]},
        {"id": "b", "messages": [user("why?")]},
    ]
    tokenizer = make_tokenizer()
    tokenizer.chat_template = (
        "{% if messages[0].role == 'system' %}{{ raise_exception('no system turn') }}{% endif %}"
        + str(tokenizer.chat_template)
    )
    template = ChatTemplate(tokenizer)
    path = write(tmp_path / "p", rows)
    config = RegenerateConfig({"train": path}, {}, max_new_tokens=9)
    out = tmp_path / "out.jsonl"
    outcome = regenerate(Engine(lively, None, ANSWERING), template, STOP, config, "train", out)
    assert [row["id"] for row in read(out)] == ["a", "a#1", "b"]
    assert read(out)[0]["messages"] == [user("be brief.\n\nwhy?")]
    assert outcome.accounting.repaired == {SYSTEM_FOLDED: 1}
    assert outcome.accounting.used == 1
    prompts = chat_set("mine", path, template, STOP, 9)
    assert prompts.requests[0].prompt == tuple(read(out)[0]["prompt_ids"])


def test_nothing_answered_is_an_error(lively: Target, tmp_path: Path) -> None:
    rows: list[object] = [{"id": "never", "messages": [user("a b c d " * 40)]}]
    config = RegenerateConfig({"train": write(tmp_path / "p", rows)}, {})
    with pytest.raises(UserError, match=r"at least one prompt must be answered.*no room"):
        answer(config, tmp_path / "out.jsonl", lively)


@pytest.mark.parametrize("ids", [["a", "a#1"], ["a#1", "a"]])
def test_answers_need_keys_of_their_own(lively: Target, tmp_path: Path, ids: list[str]) -> None:
    rows: list[object] = [{"id": key, "messages": [user("why?"), user("why so?")]} for key in ids]
    config = RegenerateConfig({"train": write(tmp_path / "p", rows)}, {})
    with pytest.raises(UserError, match="unique"):
        answer(config, tmp_path / "out.jsonl", lively)


# --- killed and resumed ---------------------------------------------------------------------------------------


def test_a_finished_set_is_not_answered_again(
    lively: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, out = chats(tmp_path), tmp_path / "train.jsonl"
    first = answer(config, out, lively)
    before = out.read_bytes()
    monkeypatch.setattr(lively, "forward", lambda *_: pytest.fail("the target was asked"))
    assert answer(config, out, lively) == first
    assert out.read_bytes() == before and not out.with_suffix(".journal").exists()


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_killed_at_any_moment_and_resumed_is_the_unbroken_run(
    lively: Target, tmp_path: Path, temperature: float
) -> None:
    config = chats(tmp_path, temperature=temperature)
    whole, out = tmp_path / "whole.jsonl", tmp_path / "out.jsonl"
    unbroken = answer(config, whole, lively)
    journal = out.with_suffix(".journal")
    kills = 0
    for lines in (1, 4, 6, 9, 12):
        status = run(
            regenerate_slowly,
            config,
            out,
            kill_when=lambda lines=lines: (
                journal.is_file() and journal.read_bytes().count(b"\n") >= lines
            ),
        )
        kills += status == -9
        if out.is_file():
            break
    assert kills >= 4
    assert answer(config, out, lively) == unbroken
    assert out.read_bytes() == whole.read_bytes()


@pytest.mark.parametrize(
    "fate", ["half a line", "before the answers are whole", "before the journal goes"]
)
def test_killed_while_writing(lively: Target, tmp_path: Path, fate: str) -> None:
    config = chats(tmp_path)
    whole, out = tmp_path / "whole.jsonl", tmp_path / "out.jsonl"
    unbroken = answer(config, whole, lively)
    assert run(regenerate_slowly, config, out, fate) == -9
    assert answer(config, out, lively) == unbroken
    assert out.read_bytes() == whole.read_bytes()
    assert not out.with_suffix(".journal").exists()


def test_a_journal_holds_offsets_and_drops_what_is_damaged(tmp_path: Path) -> None:
    path, done = tmp_path / "a.journal", tmp_path / "a.jsonl"
    journal = Journal(path, done)
    rows = [{"id": f"é{n}", "finish": "stop", "text": "雨" * n} for n in range(5)]
    for row in rows:
        journal.append(row)
    assert [journal.row(row["id"]) for row in reversed(rows)] == rows[::-1]
    journal.close()
    lines = path.read_bytes().splitlines(keepends=True)
    lines[1] = b'{"id": "\xff"}\n'
    lines[2] = b"[3]\n"
    path.write_bytes(b"".join(lines) + b'{"id": "e9", "fin')
    journal = Journal(path, done)
    assert [row["id"] in journal for row in rows] == [True, False, False, True, True]
    journal.append(rows[1])
    assert [journal.row(rows[n]["id"]) for n in (0, 1, 3, 4)] == [rows[n] for n in (0, 1, 3, 4)]
    assert journal.finishes == {"stop": 4}
    journal.close()
    assert path.read_bytes().count(b"\n") == 6 and path.read_bytes().endswith(b"\n")


def test_a_changed_byte_of_a_valid_line_is_no_answer(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every place of a line that stays JSON with its bit flipped; a line without a checksum is an earlier version's."""
    path = tmp_path / "a.journal"
    row = {"id": "a", "finish": "stop", "output_ids": [17, 4, 205], "text": "yes, 12"}
    journal = Journal(path)
    journal.append(row)
    journal.close()
    whole = path.read_bytes()
    body = whole.index(b', "check"')
    taken, damaged = 0, 0
    for place in range(body):
        changed = bytearray(whole)
        changed[place] ^= 1
        path.write_bytes(bytes(changed))
        journal = Journal(path)
        damaged += not len(journal)
        taken += len(journal)
        journal.close()
    assert (taken, damaged) == (0, body)
    assert "1 damaged lines; what they held is made again" in capsys.readouterr().err
    path.write_bytes(json.dumps(row).encode() + b"\n")
    journal = Journal(path)
    assert journal.row("a") == row
    journal.close()


@pytest.mark.parametrize("damaged", range(12))
def test_an_answer_whose_byte_changed_is_given_again(
    lively: Target, tmp_path: Path, damaged: int
) -> None:
    """Also a middle turn of a conversation whose later turns are there."""
    config = chats(tmp_path)
    whole, out = tmp_path / "whole.jsonl", tmp_path / "out.jsonl"
    unbroken = answer(config, whole, lively)
    lines = whole.read_bytes().splitlines(keepends=True)
    digit = re.search(rb'"output_ids": \[(\d)', lines[damaged])
    assert digit
    at = digit.start(1)
    lines[damaged] = (
        lines[damaged][:at] + (b"1" if digit[1] != b"1" else b"2") + lines[damaged][at + 1 :]
    )
    out.with_suffix(".journal").write_bytes(b"".join(lines[:-1]))
    again = answer(config, out, lively)
    assert out.read_bytes() == whole.read_bytes()
    assert again == unbroken


def test_lines_beyond_python_are_refused_not_raised(tmp_path: Path) -> None:
    path = write(
        tmp_path / "odd.jsonl",
        [
            {"messages": [USER]},
            '{"messages": ' + "9" * 5000 + "}",
            "[" * 100_000,
            {"messages": [{"role": "user", "content": "half \ud800"}]},
            {"messages": [USER], "tools": [{"type": "function"}]},
            {"id": None, "messages": [USER]},
        ],
    )
    accounting = Accounting()
    found = read_conversations(path, accounting)
    assert [conversation.key for conversation in found] == [
        "odd.jsonl:1",
        "odd.jsonl:6",
    ]
    assert accounting.used == 2 and accounting.total == 6
