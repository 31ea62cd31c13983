"""Replies against what a template renders of them, with short templates of each shape: masks, stops, next prompts."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import own_chat_templates as own
import pytest
from chat_families import (
    ASK,
    OFF,
    RESULT,
    ROWS,
    TOOL,
    Family,
    own_families,
    reply,
    row,
    template_of,
    tokenizer_of,
    user,
)
from template_table import runs

from mtp_train.core.records import Conversation
from mtp_train.dialogue.client_messages import CALLS, UNFINISHED
from mtp_train.engine.sampling import Sampling
from mtp_train.engine.sequences import Completion, Request
from mtp_train.models.target import stop_tokens
from mtp_train.regenerate.stage import Outcome, RegenerateConfig, regenerate
from mtp_train.text import template as template_module
from mtp_train.text.served_turns import NO_CALLS_RENDERED, NO_REPLY
from mtp_train.text.template import (
    CONTEXT_ONLY,
    NO_CALLS,
    NO_ROLE,
    NO_TOOLS,
    OTHER_HEADER,
    ChatTemplate,
    Refusal,
)

CHATML = "<|im_end|>"
OWN = {family.name: family for family in own_families()}


def texts(template: ChatTemplate, chat: Conversation) -> list[list[str]]:
    """The trained texts of each record."""
    records = template.tokenize(chat)
    assert not isinstance(records, Refusal), records
    decode = template.tokenizer.decode
    return [[decode(r.tokens[a:b]) for a, b in runs(r.loss_mask)] for r in records]


def of(source: str, eos: str = CHATML, stop: tuple[str, ...] = ()) -> ChatTemplate:
    return template_of(Family("own", source, eos, stop))


# --- calls, text and other roles ------------------------------------------------------------------------------


def test_a_call_that_the_template_leaves_out_is_not_trained_as_an_end_alone() -> None:
    """A template that asks `content is none`: transformers passes no None, and an empty text has no call."""
    template = of(own.CALLS_OF_NULL)
    assert template.tokenize(row("null content")) == Refusal(NO_CALLS_RENDERED)
    chat = row("tool result")
    assert texts(template, chat) == [[f"Cold.{CHATML}"]]
    assert template.fit(chat)[1] == [NO_CALLS, NO_TOOLS]


def test_arguments_are_text_where_an_object_can_not_be_rendered() -> None:
    template = template_of(OWN["deepseek v3.1"])
    (records,) = texts(template, row("tool result"))
    assert '{"city": "Oslo"}' in records[0] and records[1].startswith("Cold.")
    context = template.tokenizer.decode(template.prompt([*ROWS["tool result"][:3]], [TOOL]))
    assert '{"city": "Oslo"}' in context, "in prompts too"


def test_each_of_several_calls_must_be_rendered() -> None:
    """A template that writes the first call alone."""
    two = reply("", city="Oslo")
    two["tool_calls"] = [*two["tool_calls"], *reply("", city="Oslo")["tool_calls"]]
    chat = Conversation("k", (ASK, two), tools=(TOOL,))
    assert of(own.HARMONY, "<|return|>").tokenize(chat) == Refusal(NO_CALLS_RENDERED)


def test_a_reply_whose_text_is_left_out_is_not_trained() -> None:
    source = own.PHI_3.replace("+ m.content +", "+ (m.content if m.role == 'user' else '') +")
    assert of(source, "<|endoftext|>").tokenize(row("plain")) == Refusal(NO_REPLY)


def test_turns_that_no_prompt_shows_are_named() -> None:
    source = own.CALLS_OF_NULL.replace(
        "in messages", "in messages if m.role in ('user', 'assistant')"
    )
    chat = Conversation("k", ({"role": "system", "content": "Be brief."}, *ROWS["plain"]))
    template = of(source)
    assert texts(template, chat) == [[f"Me.{CHATML}"]]
    assert template.fit(chat)[1] == [NO_ROLE.format("system")]


def test_a_reply_that_does_not_follow_its_header_leaves_the_others_trained() -> None:
    source = own.CALLS_OF_NULL.replace(
        "m.content -", "(m.content if m.content != 'odd' else '<|im_start|>') -"
    )
    source = source.replace("+ m.role +", "+ (m.role if m.content != 'odd' else 'bot') +")
    chat = Conversation("k", (user("Who?"), reply("odd"), *ROWS["plain"]))
    template = of(source)
    assert texts(template, chat) == [[f"Me.{CHATML}"]]
    assert template.fit(chat)[1] == [CONTEXT_ONLY + OTHER_HEADER]


# --- where a reply ends ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("stop", [(), ("<|end|>",)])
def test_what_a_template_adds_behind_its_last_turn_is_not_trained(stop: tuple[str, ...]) -> None:
    """Phi-3, whether its folder names the end of turns or the end of texts alone: one record."""
    template = of(own.PHI_3, "<|endoftext|>", stop)
    assert texts(template, row("multi-turn")) == [["Me.<|end|>", "Eleven.<|end|>"]]


def test_a_header_that_always_follows_is_not_trained() -> None:
    template = of(own.LLAMA_3_FIRST, "<|end_of_text|>")
    assert texts(template, row("multi-turn")) == [["Me.<|eot_id|>", "Eleven.<|eot_id|>"]]


NEXT_HEADER = """\
{%- for m in messages -%}{{- '<|' + m.role + '|>\\n' + m.content -}}{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|assistant|>\\n' -}}{%- endif -%}
"""


def test_a_turn_that_ends_with_the_next_header_trains_it_if_serving_stops_there() -> None:
    chat = row("multi-turn")
    stopping = of(NEXT_HEADER, "<|endoftext|>", ("<|user|>",))
    assert texts(stopping, chat) == [["Me.<|user|>", "Eleven.<|user|>"]]
    assert texts(of(NEXT_HEADER, "<|endoftext|>"), chat) == [["Me.", "Eleven."]]


def test_a_stop_token_in_a_text_is_letters() -> None:
    template = of(NEXT_HEADER, "<|endoftext|>", ("<|user|>",))
    chat = Conversation("k", (user("Say <|user|>."), reply("It is <|user|>, so.")))
    (record,) = template.tokenize(chat)  # type: ignore[misc]
    stop = template.tokenizer.convert_tokens_to_ids("<|user|>")
    assert record.tokens.count(stop) == 2, "the question's header and the reply's end"
    assert record.tokens[-1] == stop and sum(record.loss_mask) > 15


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, {2}),
        ({"config.json": {"eos_token_id": [2, 7]}}, {2, 7}),
        ({"config.json": {"eos_token_id": 7}}, {2, 7}),
        ({"config.json": {"text_config": {"eos_token_id": [7]}}}, {2, 7}),
        (
            {"config.json": {"eos_token_id": 7}, "generation_config.json": {"eos_token_id": 9}},
            {2, 9},
        ),
        ({"config.json": {"eos_token_id": 7}, "generation_config.json": {}}, {2}),
    ],
)
def test_stop_tokens_are_the_tokenizers_and_the_folders(
    tmp_path: Path, files: dict[str, Any], expected: set[int]
) -> None:
    """As transformers and vLLM read them: config.json counts where there is no generation_config.json."""
    for name, values in files.items():
        (tmp_path / name).write_text(json.dumps(values))
    tokenizer = tokenizer_of(Family("own", own.PHI_3, "<|endoftext|>"))
    end = tokenizer.eos_token_id
    named = stop_tokens(tokenizer, tmp_path)
    assert {2 if token == end else token for token in named} == expected


# --- reasoning ------------------------------------------------------------------------------------------------


def test_reasoning_follows_a_header_that_opens_it() -> None:
    template = template_of(OWN["qwq"])
    written = Conversation("k", (user("2+2?"), reply("<think>\nEasy.\n</think>\n\nIt is 4.")))
    for chat in (row("reasoning"), written):
        first = texts(template, chat)[0][0]
        assert first.startswith("Easy") and first.endswith(f"\n</think>\n\nIt is 4.{CHATML}")
    (record,) = template.tokenize(written)  # type: ignore[misc]
    prompt = template.prompt(written.messages[:1])
    assert list(record.tokens[: record.loss_mask.index(1)]) == prompt


def test_a_reply_without_the_reasoning_that_the_header_opens_says_what_to_do() -> None:
    refusal = template_of(OWN["qwq"]).tokenize(row("plain"))
    assert isinstance(refusal, Refusal) and "regenerate" in refusal.reason
    switched = replace(OWN["deepseek v3.1"], options={"thinking": True})
    refusal = template_of(switched).tokenize(row("plain"))
    assert isinstance(refusal, Refusal)
    assert refusal.reason.endswith("set target.chat_template_kwargs.thinking=false")
    mixed = Conversation("k", (*ROWS["plain"], *ROWS["reasoning"]))
    template = template_of(OWN["qwq"])
    assert len(texts(template, mixed)) == 2
    assert template.fit(mixed)[1][0].startswith(CONTEXT_ONLY)


# --- long chats -----------------------------------------------------------------------------------------------


def long_chat(random: Random, replies: int) -> Conversation:
    """Questions and replies, some of them with calls and their results."""
    messages: list[dict[str, Any]] = [{"role": "system", "content": "Be brief."}] * random.randint(
        0, 1
    )
    while sum(m["role"] == "assistant" for m in messages) < replies:
        text = random.choice(("ok", "\nNo. ", "Grüße", "<|im_start|>", "a\n\nb"))
        messages.append(user(f"{text} {len(messages)}"))
        if random.random() < 0.3:
            messages += [reply("", city=str(len(messages))), RESULT] * random.randint(1, 3)
        thought = f"Hm {len(messages)}" if random.random() < 0.3 else ""
        messages.append(reply(f"{text} {len(messages)}", thought))
    return Conversation("k", tuple(messages), tools=(TOOL,))


@pytest.mark.parametrize("name", list(OWN))
def test_windows_of_a_long_chat_give_what_its_prefixes_give(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    template, random = template_of(OWN[name]), Random(name)
    chats = [long_chat(random, random.randint(4, 14)) for _ in range(4)]
    by_prefixes = [(template.tokenize(chat), template.fit(chat)[1]) for chat in chats]
    monkeypatch.setattr(template_module, "LONG", 2)
    monkeypatch.setattr(template_module, "WINDOW", 2)
    template = template_of(OWN[name])
    assert [(template.tokenize(chat), template.fit(chat)[1]) for chat in chats] == by_prefixes


@pytest.fixture
def rendered(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """How many messages each call of the template was given."""
    counts: list[int] = []
    texts = template_module.Rendering.texts

    def counted(self: Any, chats: Sequence[Any], *given: Any, **named: Any) -> list[str]:
        counts.append(sum(map(len, chats)))
        return texts(self, chats, *given, **named)

    monkeypatch.setattr(template_module.Rendering, "texts", counted)
    yield counts


def turns(count: int) -> Conversation:
    messages = [m for n in range(count) for m in (user(f"What is {n}?"), reply(f"It is {n}."))]
    return Conversation("k", tuple(messages))


def test_a_long_chat_is_rendered_in_linear_time(rendered: list[int]) -> None:
    template = template_of(OWN["granite 3"])
    (record,) = template.tokenize(turns(2000))  # type: ignore[misc]
    assert len(runs(record.loss_mask)) == 2000
    assert sum(rendered) < 40 * 2 * 2000, "not 2000 * 2000"


def test_a_long_chat_that_each_turn_shows_otherwise_ends_at_the_longest_length(
    rendered: list[int],
) -> None:
    template = template_of(OWN["qwen3 thinking"])
    records = template.tokenize(turns(1000), longest=500)
    assert isinstance(records, list)
    fitting = [record for record in records if len(record.tokens) <= 500]
    assert 4 < len(fitting) < len(records) <= 2 * template_module.LONG
    assert sum(rendered) < 100_000


# --- the next prompt ------------------------------------------------------------------------------------------


class Scripted:
    """Answers in the order of a script; sees every prompt."""

    def __init__(self, template: ChatTemplate, script: Sequence[str]) -> None:
        self.tokenizer = template.tokenizer
        self.script = iter(script)
        self.prompts: list[str] = []

    def serve(
        self,
        source: Callable[[], Request | None],
        on_finish: Callable[[Completion], None],
        sampling: Sampling | None = None,
    ) -> None:
        while (request := source()) is not None:
            self.prompts.append(self.tokenizer.decode(request.prompt))
            tokens = self.tokenizer(next(self.script), add_special_tokens=False)["input_ids"]
            on_finish(Completion(request.key, request.prompt, tuple(tokens), "stop"))


def conversed(
    folder: Path, family: Family, script: Sequence[str], questions: int = 2
) -> tuple[list[str], Outcome]:
    """The prompts of one conversation, and how it was counted."""
    template = template_of(family)
    source = folder / "prompts.jsonl"
    asked = [user(f"Question {n}?") for n in range(questions)]
    source.write_text(json.dumps({"id": "c", "messages": asked, "tools": [TOOL]}) + "\n")
    answerer = Scripted(template, script)
    config = RegenerateConfig({"train": str(source)}, {}, max_new_tokens=99)
    stop = frozenset(template.tokenizer.convert_tokens_to_ids([family.eos, *family.stop]))
    outcome = regenerate(answerer, template, stop, config, "train", folder / "out.jsonl")
    return answerer.prompts, outcome


def test_the_next_prompt_holds_what_a_client_sends_back(tmp_path: Path) -> None:
    said = "<|channel|>analysis<|message|>Easy.<|end|><|start|>assistant<|channel|>final<|message|>4<|return|>"
    prompts, outcome = conversed(tmp_path, OWN["gpt-oss"], [said, said.replace("4", "6")])
    assert prompts[1] == (
        "<|start|>user<|message|>Question 0?<|end|>"
        "<|start|>assistant<|channel|>final<|message|>4<|end|>"
        "<|start|>user<|message|>Question 1?<|end|><|start|>assistant"
    )
    assert outcome.accounting.used == 1


def test_a_reply_without_reasoning_is_its_text(tmp_path: Path) -> None:
    said = "<|channel|>final<|message|>4<|return|>"
    prompts, _ = conversed(tmp_path, OWN["gpt-oss"], [said, said])
    assert "<|channel|>final<|message|>4<|end|><|start|>user" in prompts[1]


def test_reasoning_that_the_header_opened_is_no_part_of_the_next_prompt(tmp_path: Path) -> None:
    said = f"Easy.\n</think>\n\n4{CHATML}"
    for name in ("qwen3 thinking", "qwq"):
        prompts, _ = conversed(tmp_path, OWN[name], [said, said])
        assert f"<|im_start|>assistant\n4{CHATML}" in prompts[1]
        (tmp_path / "out.jsonl").unlink()


@pytest.mark.parametrize(
    ("name", "said", "why"),
    [
        (
            "gpt-oss",
            "<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{}<|call|>",
            CALLS,
        ),
        ("granite 3", '<|tool_call|>[{"name": "weather", "arguments": {}}]<|end_of_text|>', CALLS),
        ("llama 4", '{"name": "weather", "parameters": {"city": "Oslo"}}<|eot|>', CALLS),
        ("gpt-oss", "<|channel|>analysis<|message|>Hm.<|return|>", UNFINISHED),
        ("qwen3 thinking", f"Hm.{CHATML}", UNFINISHED),
    ],
)
def test_a_conversation_ends_where_no_client_could_go_on(
    tmp_path: Path, name: str, said: str, why: str
) -> None:
    """The reply itself is kept; the turns that can't follow it are counted."""
    prompts, outcome = conversed(tmp_path, OWN[name], [said], questions=3)
    assert len(prompts) == 1
    assert outcome.accounting.repaired == {f"ended early, the turns before are kept: {why}": 1}
    assert len((tmp_path / "out.jsonl").read_text().splitlines()) == 1
    assert conversed(tmp_path, OWN[name], [], questions=3)[1] == outcome, "the same when resumed"


def test_a_reply_that_is_no_call_goes_on(tmp_path: Path) -> None:
    said = 'Write {"name": "x"} for a name.'
    prompts, _ = conversed(tmp_path, OWN["llama 4"], [f"{said}<|eot|>", "Yes.<|eot|>"])
    assert said in prompts[1]


def test_the_header_of_no_thinking_is_a_part_of_every_prompt() -> None:
    family = replace(OWN["smollm3"], options=OFF)
    assert texts(template_of(family), row("multi-turn")) == [[f"Me.{CHATML}", f"Eleven.{CHATML}"]]
