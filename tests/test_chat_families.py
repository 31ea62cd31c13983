"""Rows of every kind under the chat templates of many families; transformers' rendering and trl's masks as oracles."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest
import template_table
from chat_families import ROWS, Family, own_families, row, template_of, trl_templates
from template_table import Cell, cells, differences

from mtp_train.text.served_turns import NO_REASONING, NO_TEXT
from mtp_train.text.template import CLOSED_REASONING

needs_trl = pytest.mark.skipif(
    trl_templates() is None, reason="trl is not installed (make setup installs it)"
)


def cells_of(name: str) -> dict[str, Cell]:
    return {cell.kind: cell for cell in cells() if cell.family.name == name}


def said(name: str, kind: str) -> list[str]:
    return [reply.text for reply in cells_of(name)[kind].replies]


def transformers_text(
    family: Family, messages: Sequence[dict[str, Any]], tools: Sequence[Any], generate: bool
) -> str:
    """transformers' own rendering, the arguments of calls as JSON text where an object fails."""
    tokenizer: Any = template_table.tokenizer_of(family)

    def render(chat: list[dict[str, Any]]) -> str:
        options = {"add_generation_prompt": generate, "tokenize": False, **family.options}
        return str(tokenizer.apply_chat_template(chat, tools=list(tools) or None, **options))

    try:
        return render(list(messages))
    except TypeError:
        chat = json.loads(json.dumps(list(messages)))
        for call in (call for message in chat for call in message.get("tool_calls", [])):
            call["function"]["arguments"] = json.dumps(call["function"]["arguments"])
        return render(chat)


def every_reply() -> list[tuple[Cell, template_table.Reply]]:
    return [(cell, reply) for cell in cells() for reply in cell.replies]


def test_every_prompt_is_what_transformers_renders_and_encodes() -> None:
    for cell, reply in every_reply():
        chat = row(cell.kind)
        text = transformers_text(cell.family, chat.messages[: reply.message], chat.tools, True)
        tokenizer = template_table.tokenizer_of(cell.family)
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        assert tuple(ids) == reply.prompt_ids, (cell.family.name, cell.kind)


def test_every_reply_is_what_transformers_renders_behind_its_header() -> None:
    """Apart from the end token that opens the next turn, and from reasoning that the template leaves out."""
    compared = 0
    for cell, reply in every_reply():
        chat = row(cell.kind)
        messages = list(chat.messages[: reply.message + 1])
        if CLOSED_REASONING in cell.rules:
            messages[-1] = {k: v for k, v in messages[-1].items() if k != "reasoning_content"}
        whole = transformers_text(cell.family, messages, chat.tools, False)
        ends = [*cell.family.stop, cell.family.eos, ""]
        text = reply.text.removesuffix(next(end for end in ends if reply.text.endswith(end)))
        if "<think>" in reply.prompt[-10:] and text not in whole:
            text = text.partition("</think>")[2].strip()
        assert text in whole, (cell.family.name, cell.kind)
        compared += 1
    assert compared > 100


def test_what_a_message_holds_is_trained_or_a_rule_says_why_not() -> None:
    for cell, reply in every_reply():
        message = row(cell.kind).messages[reply.message]
        where = (cell.family.name, cell.kind, reply.text)
        assert message["content"] in reply.text or NO_TEXT in cell.rules, where
        thought = message.get("reasoning_content", "")
        left_out = {NO_REASONING, CLOSED_REASONING} & set(cell.rules)
        assert thought in reply.text or left_out, where
        if message.get("tool_calls"):
            assert "Oslo" in reply.text, where


def test_every_reply_ends_where_serving_stops() -> None:
    """A reply is never its end alone, and holds no second stop token."""
    for cell, reply in every_reply():
        stops = {cell.family.eos, *cell.family.stop}
        if cell.family.name == "llama 3, first template":
            stops = {"<|eot_id|>"}  # its config names another one
        ends = [stop for stop in stops if reply.text.endswith(stop)]
        assert ends, (cell.family.name, cell.kind, reply.text)
        body = reply.text.removesuffix(ends[0])
        assert body.strip() and not any(stop in body for stop in stops), (cell, reply.text)


def test_one_encoding_gives_what_every_prefix_by_itself_gives() -> None:
    for family in own_families():
        template = template_of(family)
        for kind in ROWS:
            chat = row(kind)
            assert template.tokenize(chat) == template.tokenize_by_prefixes(chat)


@needs_trl
def test_each_difference_from_trls_masks_has_a_rule() -> None:
    with_twin = [cell for cell in cells() if cell.family.twin and cell.replies]
    assert len(with_twin) > 150
    for cell in with_twin:
        names = differences(cell)
        assert names <= template_table.DIFFERENCES.keys(), (cell.family.name, cell.kind, names)


@needs_trl
def test_the_page_shows_what_becomes_of_every_row() -> None:
    assert template_table.written() == template_table.table(), "run tests/template_table.py"


# --- families in particular -----------------------------------------------------------------------------------

EOS = "<\uff5cend\u2581of\u2581sentence\uff5c>"


@needs_trl
def test_arguments_are_text_where_the_template_wants_text() -> None:
    """DeepSeek's templates splice them, so that an object is a TypeError."""
    call, answer = said("deepseekv3", "reasoned call")
    assert '```json\n{"city": "Oslo"}\n```' in call and call.endswith(EOS)
    assert call.startswith("Ask it.\n</think>\n\n")
    assert answer == f"Cold.{EOS}"


@needs_trl
def test_a_call_that_vanishes_is_no_reply() -> None:
    """R1-Distill renders calls of messages without content alone, which transformers and vLLM never pass."""
    found = cells_of("deepseek_r1_distill")
    assert "the generation prompt opens reasoning" in found["null content"].refused
    assert [reply.message for reply in found["reasoned call"].replies] == [3]


@needs_trl
def test_a_header_that_opens_the_reasoning_is_followed_by_it() -> None:
    assert said("deepseek_r1_distill", "reasoning") == [
        f"Easy sum.\n</think>\n\nIt is 4.{EOS}",
        f"Another.\n</think>\n\nIt is 6.{EOS}",
    ]
    refused = cells_of("nemotron_3_nano")["plain"].refused
    assert refused.endswith("or set target.chat_template_kwargs.enable_thinking=false")
    assert said("nemotron_3_nano, no thinking", "plain") == ["Me.<|im_end|>"]


@needs_trl
def test_turns_that_end_with_the_next_ones_header_train_it() -> None:
    call, answer = said("glm4moe", "tool result")
    assert call.endswith("</tool_call><|observation|>") and answer.endswith("Cold.<|user|>")


@needs_trl
def test_what_phi_3_writes_behind_its_last_turn_is_not_trained() -> None:
    assert said("phi3", "multi-turn") == ["Me.<|end|>", "Eleven.<|end|>"]


def test_the_end_of_turn_is_found_where_no_stop_token_is_rendered() -> None:
    """Llama 3's first template, with the end token that its config named."""
    assert said("llama 3, first template", "multi-turn") == ["Me.<|eot_id|>", "Eleven.<|eot_id|>"]


def test_reasoning_that_is_not_rendered_is_a_named_repair() -> None:
    found = cells_of("deepseek v3.1")["reasoning"]
    assert found.rules == (NO_REASONING,)
    thinking = cells_of("deepseek v3.1, thinking")["reasoning"]
    assert not thinking.rules
    assert thinking.replies[0].text == f"Easy sum.</think>It is 4.{EOS}"


@needs_trl
def test_reasoning_behind_a_header_that_closes_it_is_left_out() -> None:
    found = cells_of("qwen3_5_nothink")["reasoning"]
    assert found.rules == (CLOSED_REASONING,)
    assert [reply.text for reply in found.replies] == ["It is 4.<|im_end|>", "It is 6.<|im_end|>"]


@needs_trl
def test_reasoning_before_a_call_stands_in_the_prompt_of_the_final_reply() -> None:
    """gpt-oss leaves it out once the final reply is there, which is not what serving sent."""
    last = cells_of("gptoss")["reasoned call"].replies[-1]
    assert "analysis<|message|>Ask it.<|end|>" in last.prompt
    assert last.text.startswith("<|channel|>analysis<|message|>Tell it.<|end|>")
