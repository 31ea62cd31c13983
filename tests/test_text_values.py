"""Values of other types than a row should have, in every place: repaired by a named rule or refused, never guessed at,
never a crash, and never at the cost of another row.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import pyarrow
import pytest
from pyarrow import parquet
from toys import make_tokenizer

from mtp_train.core.records import Accounting, Conversation, TokenizedConversation
from mtp_train.dialogue.journal import Journal
from mtp_train.dialogue.plans import read_plans
from mtp_train.precompute.corpus import make_corpus
from mtp_train.text import alternation, turns, values
from mtp_train.text.files import read_source
from mtp_train.text.sources import (
    DataConfig,
    SourceConfig,
    answers,
    conversations,
    read_sources,
    tokenized,
)
from mtp_train.text.template import ChatTemplate

HALF = "\ud800"  # of a surrogate pair
NAN = float("nan")
SERVED = (  # a toy template with all that a chat may hold
    "{% for m in messages %}{{ '<s>' + m.role + '\n' + m.content }}"
    "{% for call in m.tool_calls or [] %}{{ call.function.name ~ call.function.arguments | tojson }}{% endfor %}"
    "{{ '</s>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<s>assistant\n' }}{% endif %}"
)
USED = {"id": "used", "prompt": "hi", "completion": "hello."}
ASKED = {"role": "user", "content": "ping"}
SAID = {"role": "assistant", "content": "pong"}
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": {"x": 1}}}
CALLING = {"role": "assistant", "content": "", "tool_calls": [CALL]}
RESULT = {"role": "tool", "content": "4", "tool_call_id": "c", "name": "f"}
CALLED = "f<unk><unk>x<unk>: 1<unk>"  # as the toy tokenizer, which has no braces, gives it back
TOOL = {"type": "function", "function": {"name": "f", "description": "d"}}


def template(source: str = SERVED) -> ChatTemplate:
    tokenizer = make_tokenizer()
    tokenizer.chat_template = source
    return ChatTemplate(tokenizer)


TEMPLATE = template()


def write(path: Path, rows: list[Any]) -> SourceConfig:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return SourceConfig(str(path))


@dataclass(frozen=True)
class Outcome:
    """What became of a row that stands before a usable one."""

    kind: str  # used, repaired or refused
    reason: str
    trained: str  # letters of its trained tokens
    context: str  # of the others


def outcome(folder: Path, row: Any, served: ChatTemplate = TEMPLATE) -> Outcome:
    accounting = Accounting()
    source = write(folder / "rows.jsonl", [row, USED])
    *records, other = tokenized([source], served, accounting)
    assert other.key == "used" and accounting.total == 2
    kinds = [*("repaired" for _ in accounting.repaired), *("refused" for _ in accounting.refused)]
    reasons = [*accounting.repaired, *accounting.refused]
    kind, reason = (*kinds, "used")[0], (*reasons, "")[0]
    assert bool(records) == (kind != "refused")
    parts = [_letters(served, records, flag) for flag in (1, 0)]
    return Outcome(kind, reason, *parts)


def _letters(served: ChatTemplate, records: list[TokenizedConversation], flag: int) -> str:
    return "|".join(
        str(served.tokenizer.decode([t for t, f in zip(r.tokens, r.loss_mask, strict=True) if f == flag]))
        for r in records
    )  # fmt: skip


def chat(*messages: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"messages": list(messages), **more}


def reply(content: Any, **more: Any) -> dict[str, Any]:
    return chat(ASKED, {"role": "assistant", "content": content, **more})


# --- one value ------------------------------------------------------------------------------------------------

REPAIRED: dict[str, tuple[dict[str, Any], str, str]] = {
    "text parts": (reply([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]), values.PARTS, "a\nb"),
    "a whole number": (reply(42), values.NUMBER, "42"),
    "a weight as text": (chat(ASKED, {**SAID, "weight": "0"}, ASKED, SAID), values.WEIGHT_TEXT, "pong"),
    "a weight of 1 as text": (chat(ASKED, {**SAID, "weight": "1.0"}), values.WEIGHT_TEXT, "pong"),
    "a fraction": (chat(ASKED, {**SAID, "weight": 0.5}), values.WEIGHTS, "pong"),
    "an id of letters that no file holds": ({**chat(ASKED, SAID), "id": HALF}, values.LABEL_LETTERS, "pong"),
    "an id of another type": ({**chat(ASKED, SAID), "id": [1]}, values.LABEL, "pong"),
    "a boolean id": ({**chat(ASKED, SAID), "id": True}, values.LABEL, "pong"),
    "a category of another type": ({**chat(ASKED, SAID), "category": ["a"]}, values.LABEL, "pong"),
    "NaN where nothing is": ({"instruction": "ping", "input": NAN, "output": "pong"}, values.NOT_A_NUMBER, "pong"),
    "a call's id as a number": (chat(ASKED, {**CALLING, "tool_calls": [{**CALL, "id": 7}]}), values.NUMBER, CALLED),
    "reasoning that breaks off": (chat(ASKED, {**SAID, "content": "<think>\nso"}, ASKED, SAID), turns.UNCLOSED, "pong"),
    "parts of two weights": (
        {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"},
                           {"from": "function_call", "value": json.dumps(CALL["function"]), "weight": 0},
                           {"from": "observation", "value": "4"}, {"from": "gpt", "value": "pong"}]},
        turns.PART_WEIGHTS, "pong",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("row", "rule", "trained"), REPAIRED.values(), ids=REPAIRED)
def test_a_repair_is_named(tmp_path: Path, row: Any, rule: str, trained: str) -> None:
    found = outcome(tmp_path, row)
    assert (found.kind, found.reason) == ("repaired", rule)
    assert found.trained == f"{trained}</s>"


def test_strings_in_a_list_are_parts(tmp_path: Path) -> None:
    found = outcome(tmp_path, reply(["1", "2"]))
    assert found.reason == f"{values.STRINGS}; {values.PARTS}"
    assert found.trained == "1\n2</s>"


REFUSED = {
    "two texts": (reply("pong", value="pang"), "two values of a turn's text"),
    "two texts, one called text": (reply("pong", text="pang"), "two values of a turn's text"),
    "two roles": (chat(ASKED, {**SAID, "from": "human"}), "two values of a turn's role"),
    "two reasonings": (reply("pong", reasoning="a", thinking="b"), "two values of a turn's reasoning"),
    "two kinds of call": (reply("", tool_calls=[CALL], function_call={"name": "g"}), "two values of a turn's calls"),
    "two weights": (reply("pong", weight=0, train=1), "two weights in one turn"),
    "two conversations": ({"conversations": [ASKED, SAID], "conversation": [ASKED]}, "two values of the conversation"),
    "two answers": ({"instruction": "a", "output": "b", "response": "c"}, "two values of the answer"),
    "two pairs": ({"prompt": "a", "response": "b", "question": "c", "answer": "d"}, "two pairs of prompt and answer"),
    "an answer that is not wanted": ({"prompt": "a", "completion": "b", "label": False}, "an answer that its label"),
    "two system prompts": ({**chat(ASKED, SAID), "system": "a", "system_prompt": "b"}, "two values of the system"),
    "a reply that is NaN": (reply(NAN), "no reply with text"),
    "a question that is NaN": (chat({"role": "user", "content": NAN}, SAID), "a user turn without content"),
    "a number with a point": (reply(1.5), "a content that is a number with a point"),
    "an infinite number": (reply(math.inf), "a content that is a number with a point"),
    "a system prompt of another type": ({**chat(ASKED, SAID), "system": {"a": 1}}, "a content that is no text"),
    "a weight in words": (reply("pong", weight="no"), "a weight that is no number"),
    "a weight that is NaN": (reply("pong", weight=NAN), "a weight that is no number"),
    "a weight below 0": (reply("pong", weight=-1), "a weight that is no number of 0 or more"),
    "reasoning of another type": (reply("pong", reasoning_content=["a"]), "a reasoning that is no text"),
    "a call's arguments with NaN": (reply("", tool_calls=[{"function": {"name": "f", "arguments": {"x": NAN}}}]),
                                    "a tool call with NaN"),
    "arguments that say a key twice": (
        reply("", tool_calls=[{"function": {"name": "f", "arguments": '{"x": 1, "x": 2}'}}]),
        "tool call arguments are not valid JSON"),
    "a call of no function": (reply("", tool_calls=[{**CALL, "type": "custom"}]), "a tool call that is of no function"),
    "calls of another type": (reply("pong", tool_calls=False), "tool calls must be a list"),
    "a user's call": (chat({**ASKED, "tool_calls": [CALL]}, SAID), "a user turn with tool calls"),
    "a result without a call": (chat(ASKED, RESULT, SAID), "a tool's result without a call before it"),
    "a result after a reply": (chat(ASKED, SAID, RESULT, SAID), "a tool's result without a call before it"),
    "a history of roles": ({"history": [["user", "ping"], ["assistant", "pong"]]}, "a history of lists, which may"),
    "two strings for a turn": ({"conversations": [["human", "ping"], ["gpt", "pong"]]}, "a turn that is no object"),
    "a pair and a content": ({"conversations": [{"user": "a", "bot": "b", "content": "c"}]}, "a turn without a role"),
    "nothing chosen": ({"chosen": []}, "no turns"),
    "nothing asked": ({"prompt": [], "completion": []}, "no turns"),
}  # fmt: skip


@pytest.mark.parametrize(("row", "reason"), REFUSED.values(), ids=REFUSED)
def test_what_has_no_one_meaning_is_refused(tmp_path: Path, row: Any, reason: str) -> None:
    found = outcome(tmp_path, row)
    assert found.kind == "refused"
    assert found.reason.startswith(reason)


@pytest.mark.parametrize("depth", [60, 70, 600])
def test_depth_costs_the_row_alone(tmp_path: Path, depth: int) -> None:
    """Deeper than templates, journals and comparisons can follow."""
    nested: Any = 1
    for _ in range(depth):
        nested = [nested]
    call = {"function": {"name": "f", "arguments": {"x": nested}}}
    kinds = [
        outcome(tmp_path, row).kind
        for row in (
            reply("", tool_calls=[call]),
            chat(ASKED, SAID, tools=[{"name": "f", "parameters": nested}]),
            {"conversations": nested, "conversation": [nested]},
        )
    ]
    assert [kind == "refused" for kind in kinds] == [depth > 60, depth > 60, True]


def test_reasoning_that_breaks_off_alone_is_nothing_to_train(tmp_path: Path) -> None:
    assert outcome(tmp_path, reply("<think>\nso")).reason == "no assistant turn to train"
    for whole in ("<think>so</think>yes", "the tag <think> opens a thought"):
        assert outcome(tmp_path, reply(whole)).kind == "used"


def test_a_table_may_hold_what_json_lacks(tmp_path: Path) -> None:
    import datetime

    call = {"function": {"name": "f", "arguments": {"at": datetime.datetime(2026, 1, 1)}}}
    rows = [
        chat(ASKED, {"role": "assistant", "content": "", "tool_calls": [call]}),
        chat(ASKED, {**SAID, "tool_calls": None}),
    ]
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "t.parquet")
    accounting = Accounting()
    found = list(conversations(read_sources(str(tmp_path / "t.parquet")), accounting))
    assert [item.key for item in found] == ["t.parquet[1]"]
    assert accounting.refused == {"a tool call with a value that JSON lacks (datetime)": 1}


# --- letters that no file holds -------------------------------------------------------------------------------

BROKEN = {
    "id": {**chat(ASKED, SAID), "id": f"a{HALF}"},
    "category": {**chat(ASKED, SAID), "category": HALF},
    "reply": reply(f"pong{HALF}"),
    "reasoning": reply("pong", reasoning_content=HALF),
    "call's name": reply("", tool_calls=[{"function": {"name": HALF, "arguments": {}}}]),
    "call's arguments": reply("", tool_calls=[{"function": {"name": "f", "arguments": {"x": [HALF]}}}]),
    "arguments as text": reply("", tool_calls=[{"function": {"name": "f", "arguments": '{"x": "\\ud800"}'}}]),
    "argument's name": reply("", tool_calls=[{"function": {"name": "f", "arguments": {HALF: 1}}}]),
    "call's id": reply("", tool_calls=[{**CALL, "id": HALF}]),
    "tool": {**chat(ASKED, SAID), "tools": [{"name": "f", "description": HALF}]},
    "result's name": chat(ASKED, CALLING, {**RESULT, "name": HALF}, SAID),
    "key": {HALF: 1},
    "part's kind": reply([{"type": HALF}]),
    "role": chat(ASKED, {"role": HALF, "content": "x"}, {"role": "b", "content": "x"}),
}  # fmt: skip


@pytest.fixture
def broken(tmp_path: Path) -> list[SourceConfig]:
    """One of each, between usable rows, in a file whose own name no file of text can hold."""
    rows = [USED, *BROKEN.values(), {**USED, "id": "last"}]
    return [write(tmp_path / "r\udcff.jsonl", rows)]


def test_half_a_surrogate_pair_costs_its_row_alone(
    tmp_path: Path, broken: list[SourceConfig]
) -> None:
    """Features, prompts and their journal, and a prompt set: everything can be written as UTF-8."""
    config = DataConfig({"train": broken[0].path})
    corpus = make_corpus(tmp_path / "c", "train", None, config, TEMPLATE, "t", 61)
    accounting = corpus.note.accounting
    assert [item.key for item in corpus if item.key in ("used", "last")] == ["used", "last"]
    assert accounting["input"] == len(BROKEN) + 2
    assert accounting["used"] == 2
    assert accounting["repaired"] == {values.LABEL_LETTERS: 2}
    counted = Accounting()
    plans = read_plans(broken, 0, "", counted)
    assert len(plans) + sum(counted.refused.values()) == len(BROKEN) + 2
    journal = Journal(tmp_path / "journal")
    for plan in plans:
        row = {
            "id": plan.conversation.key,
            "category": plan.conversation.category,
            "finish": "stop",
        }
        journal.append({**row, "messages": list(plan.turns[0])})
    journal.close()
    json.dumps(counted.as_dict(), ensure_ascii=False).encode()


def test_answers_that_another_tool_changed_are_refused_one_by_one(tmp_path: Path) -> None:
    ids = {"prompt_ids": [1], "output_ids": [2]}
    good = {"id": "a", "category": "c", "messages": [ASKED], "finish": "stop", **ids}
    wrong: dict[str, list[Any]] = {
        "id": [HALF, 3, None], "category": [None, HALF], "messages": [None, "hi", ["hi"], [{"role": "user"}]],
        "prompt_ids": [None, ["1"], [True]], "output_ids": [5, [1.5]], "finish": [None],
    }  # fmt: skip
    rows = [good, *({**good, key: value} for key, found in wrong.items() for value in found)]
    write(tmp_path / "answers.jsonl", rows)
    accounting = Accounting()
    assert [item.key for item in answers(tmp_path / "answers.jsonl", accounting)] == ["a"]
    assert accounting.refused == {"not a regenerated answer": len(rows) - 1}


# --- files ----------------------------------------------------------------------------------------------------


def test_every_broken_file_is_named(tmp_path: Path) -> None:
    for name in "abc":
        (tmp_path / f"{name}.jsonl").write_text("version https://git-lfs.github.com/spec/v1\n")
        (tmp_path / f"{name}.json").write_text('[{"id": 1}, {"id"')
    write(tmp_path / "good.jsonl", [USED])
    accounting = Accounting()
    list(conversations(read_sources(str(tmp_path)), accounting))
    for reason, names in accounting.examples.items():
        if reason != "unknown form":
            assert all(str(tmp_path / name) in names for name in "abc"), reason
    assert accounting.total == 10


@pytest.mark.parametrize("indent", [None, 1])
@pytest.mark.parametrize("first", ["train", "validation"])
def test_a_second_list_of_rows_in_a_file_is_counted(
    tmp_path: Path, first: str, indent: int | None
) -> None:
    sets = {"train": [USED], "validation": [{**USED, "id": str(i)} for i in range(3)]}
    whole = {first: sets.pop(first), **sets, "version": [1, 2]}
    path = tmp_path / "rows.json"
    path.write_text(json.dumps(whole, indent=indent))
    accounting = Accounting()
    found = list(conversations(read_sources(str(path)), accounting))
    assert [item.key for item in found] == ["used"]
    assert accounting.refused == {"in a list beside `train`, which alone is read: `validation`": 3}
    places = [row.place for row in read_source(str(path))]
    assert all(place.startswith(f"{path}:") for place in places)


# --- the order of roles ---------------------------------------------------------------------------------------

ALTERNATING = (
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}"
    "{{ '<s>' + m.role + '\n' + m.content + '</s>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<s>assistant\n' }}{% endif %}"
)
MARKED_LAST = (  # the last reply is rendered otherwise than earlier ones, as reasoning models' templates do
    "{% for m in messages %}{{ '<s>' + m.role + '\n' + ('- ' if loop.last and m.role == 'assistant' else '') }}"
    "{{ m.content + '</s>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<s>assistant\n' }}{% endif %}"
)
SYSTEM = {"role": "system", "content": "be brief"}
ORDERS: dict[str, tuple[str, dict[str, Any], list[str], str, str]] = {
    "system": (ALTERNATING, chat(SYSTEM, ASKED, SAID), [alternation.SYSTEM_FOLDED], "pong</s>", "be brief\n\nping"),
    "two questions": (ALTERNATING, chat(ASKED, ASKED, SAID), [alternation.USERS_JOINED], "pong</s>", "ping\n\nping"),
    "both": (ALTERNATING, chat(SYSTEM, ASKED, ASKED, SAID),
             [alternation.USERS_JOINED, alternation.SYSTEM_FOLDED], "pong</s>", "be brief\n\nping\n\nping"),
    "two replies": (ALTERNATING, chat(ASKED, SAID, SAID, ASKED, SAID), [alternation.CUT], "pong</s>", "ping"),
    "replies rendered otherwise": (MARKED_LAST, chat(ASKED, SAID, {**SAID, "content": "pang"}, ASKED, SAID),
                                   [alternation.SECOND_REPLY], "- pong</s>|- pong</s>", "pang"),
    "weights stay with their turns": (ALTERNATING, chat(SYSTEM, ASKED, ASKED, {**SAID, "weight": 0}, ASKED, SAID),
                                      [alternation.USERS_JOINED, alternation.SYSTEM_FOLDED], "pong</s>", "pong"),
}  # fmt: skip


@pytest.mark.parametrize(("source", "row", "rules", "trained", "context"), ORDERS.values(), ids=ORDERS)  # fmt: skip
def test_an_order_that_a_template_refuses_is_put_as_a_client_would(
    tmp_path: Path, source: str, row: Any, rules: list[str], trained: str, context: str
) -> None:
    found = outcome(tmp_path, row, template(source))
    assert (found.kind, found.reason) == ("repaired", "; ".join(rules))
    assert found.trained == trained
    assert context in found.context
    plain = outcome(tmp_path, row)
    assert plain.kind == "used", "a template that takes the chat as it is gets it so"


def test_an_order_that_no_rule_saves_is_refused(tmp_path: Path) -> None:
    row = chat(ASKED, SAID, SYSTEM, ASKED, SAID)
    assert outcome(tmp_path, row, template(ALTERNATING)).reason.startswith(
        "the chat template fails"
    )


# --- size -----------------------------------------------------------------------------------------------------


def test_a_prompt_far_too_long_is_refused_by_its_beginning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is encoded is bounded by max_tokens, not by the row: 20 MB took 5 GB."""
    encoded = 0
    tokenizer = type(TEMPLATE.tokenizer)
    plain = tokenizer.__call__

    def counted(self: Any, text: str, *args: Any, **kwargs: Any) -> Any:
        nonlocal encoded
        encoded += len(text)
        return plain(self, text, *args, **kwargs)

    monkeypatch.setattr(tokenizer, "__call__", counted)
    row = {"prompt": "a b " * 50_000, "completion": "x"}
    for rule, reason in (("refuse", "longer than 64"), ("truncate", "no trained token within 64")):
        accounting = Accounting()
        source = write(tmp_path / "rows.jsonl", [row, USED])
        source = SourceConfig(source.path, length=rule, max_tokens=64)
        assert [item.key for item in tokenized([source], TEMPLATE, accounting)] == ["used"]
        assert accounting.refused == {f"{reason} tokens": 1}
    accounting = Accounting()
    source = write(tmp_path / "rows.jsonl", [{"prompt": "x", "completion": row["prompt"]}, USED])
    source = SourceConfig(source.path, max_tokens=64)
    assert [item.key for item in tokenized([source], TEMPLATE, accounting)] == ["used"]
    assert accounting.refused == {"longer than 64 tokens": 1}
    assert 0 < encoded < 30_000
    source = write(tmp_path / "rows.jsonl", [row, USED])
    accounting = Accounting()
    split = SourceConfig(source.path, length="split", max_tokens=64, context=8)
    assert len(list(tokenized([split], TEMPLATE, accounting))) == 2


# --- anything anywhere ----------------------------------------------------------------------------------------

SEEDS: list[dict[str, Any]] = [
    chat(SYSTEM, ASKED, {**CALLING, "weight": 1}, RESULT, {**SAID, "reasoning_content": "so"}, id="a", tools=[TOOL]),
    {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}], "system": "s", "category": "c"},
    {"instruction": "a", "input": "b", "output": "c", "history": [["d", "e"]]},
    {"instruction": "a", "context": "b", "response": "c", "category": "qa"},
    {"prompt": "a", "completion": "b"},
    {"history": [{"user": "a", "bot": "b"}]},
    {"chosen": [ASKED, SAID], "rejected": [SAID], "prompt": "ping"},
    {"turns": ["a", "b"], "question_id": 3},
    {"input_ids": [3, 4], "loss_mask": [0, 1], "id": "t"},
    {"input_ids": [3, 4], "labels": [-100, 4]},
    {"prompt_ids": [3], "output_ids": [4], "messages": [ASKED], "id": "o", "category": "c", "finish": "stop"},
    {"conversations": [{"from": "human", "value": "a"}, {"from": "function_call", "value": '{"name": "f"}'},
                       {"from": "observation", "value": "4"}, {"from": "gpt", "value": "b"}], "tools": [TOOL]},
]  # fmt: skip
OTHERS: list[Any] = [
    None, True, False, 0, 1, -3, 10**30, 1.5, NAN, math.inf, "", " ", "zz", "0", HALF, "null", "[]", "{}", [], {}, [[]],
    [None], [{}], {"a": 1}, ["q", "r"], [1, 2], {"role": "user", "content": "hi"}, [{"type": "text", "text": "x"}],
]  # fmt: skip


def places(value: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    if at:
        yield at
    parts: Any = value.items() if isinstance(value, dict) else ()
    parts = enumerate(value) if isinstance(value, list) else parts
    for key, part in parts:
        yield from places(part, (*at, key))


def changed(value: Any, at: tuple[Any, ...], new: Any) -> Any:
    if not at:
        return new
    copy = dict(value) if isinstance(value, dict) else list(value)
    copy[at[0]] = changed(value[at[0]], at[1:], new)
    return copy


def mutants() -> list[Any]:
    """Every value of every form replaced by every other kind of value, and 600 rows with two such places."""
    random = Random(0)
    once = [changed(row, at, new) for row in SEEDS for at in places(row) for new in OTHERS]
    twice = [
        changed(row, random.choice(list(places(row))), random.choice(OTHERS))
        for row in random.sample(once, 600)
        if isinstance(row, dict) and row
    ]
    return [*once, *twice]


def strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for part in value.values() if isinstance(value, dict) else value:
            yield from strings(part)


@pytest.mark.parametrize("prompts", [False, True], ids=["text", "prompts"])
def test_any_value_in_any_place_is_used_repaired_or_refused(tmp_path: Path, prompts: bool) -> None:
    """No crash, no row uncounted, every record sound, and no text that the row does not hold."""
    rows = mutants()
    assert len(rows) > 3000
    accounting = Accounting()
    source = write(tmp_path / "rows.jsonl", [*rows, USED])
    found: list[Any] = list(
        conversations([source], accounting)
        if prompts
        else tokenized([source], TEMPLATE, accounting, vocab_size=61)
    )
    assert accounting.total == len(rows) + 1
    assert len({item.key for item in found}) == len(found)
    assert found[-1].key == "used"
    json.dumps(accounting.as_dict(), ensure_ascii=False).encode()
    by_place = {item.key: item for item in found if item.key.startswith("rows.jsonl:")}
    assert len(by_place) > 500
    for key, item in by_place.items():
        row = rows[int(key.split(":")[1].split("#")[0]) - 1]
        if isinstance(item, Conversation):
            json.dumps([item.messages, item.tools], ensure_ascii=False, allow_nan=False).encode()
            known = "\n".join([*strings(row), *map(str, _numbers(row))])
            said = [message["content"] for message in item.messages if message["role"] != "system"]
            assert all(part in known for text in said for part in text.split("\n")), (row, said)
        else:
            assert any(item.loss_mask) and len(item.tokens) == len(item.loss_mask)


def _numbers(value: Any) -> Iterator[int]:
    if type(value) is int:
        yield value
    elif isinstance(value, dict | list):
        for part in value.values() if isinstance(value, dict) else value:
            yield from _numbers(part)
