"""Chats to tokens and loss masks with a real tokenizer: exactly what serving would send and the target would say."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerBase

from mtp_train.core.errors import UserError
from mtp_train.core.records import Conversation, TokenizedConversation
from mtp_train.models.target import load_tokenizer
from mtp_train.text.template import ChatTemplate, Refusal

END = "<|im_end|>"
HEADER = "<|im_start|>assistant\n"

# Renders a turn like ChatML; an older assistant turn loses what stands before its last </think> (as Qwen3 does).
DROPS_THINK = """\
{%- set last = namespace(user=0) -%}
{%- for m in messages -%}{%- if m.role == 'user' -%}{%- set last.user = loop.index0 -%}{%- endif -%}{%- endfor -%}
{%- for m in messages -%}
{%- set text = m.content -%}
{%- if m.role == 'assistant' and loop.index0 < last.user and '</think>' in text -%}
{%- set text = text.split('</think>')[-1] -%}
{%- endif -%}
{{- '<|im_start|>' + m.role + '\n' + text + '<|im_end|>\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\n' -}}{%- endif -%}
"""


@pytest.fixture(scope="module")
def tokenizer(smollm2_path: Path) -> PreTrainedTokenizerBase:
    return load_tokenizer(smollm2_path)


@pytest.fixture(scope="module")
def template(tokenizer: PreTrainedTokenizerBase) -> ChatTemplate:
    return ChatTemplate(tokenizer)


def with_template(tokenizer: PreTrainedTokenizerBase, source: str) -> ChatTemplate:
    other = copy.deepcopy(tokenizer)
    other.chat_template = source
    return ChatTemplate(other)


def chat(*contents: str, system: str = "") -> Conversation:
    """User and assistant in turn, after a system turn if there is one."""
    roles = ("user", "assistant")
    turns = [
        {"role": roles[index % 2], "content": content} for index, content in enumerate(contents)
    ]
    return Conversation("k", tuple([{"role": "system", "content": system}] * bool(system) + turns))


def records(template: ChatTemplate, conversation: Conversation) -> list[TokenizedConversation]:
    found = template.tokenize(conversation)
    assert not isinstance(found, Refusal), found
    return found


def replies(record: TokenizedConversation) -> list[tuple[int, ...]]:
    """The runs of trained tokens."""
    runs: list[list[int]] = []
    before = 0
    for token, flag in zip(record.tokens, record.loss_mask, strict=True):
        if flag and not before:
            runs.append([])
        if flag:
            runs[-1].append(token)
        before = flag
    return [tuple(run) for run in runs]


def say(tokenizer: PreTrainedTokenizerBase, text: str) -> tuple[int, ...]:
    """A reply's ids as the target utters them: the text and its end-of-turn token."""
    return tuple(tokenizer(text + END, add_special_tokens=False)["input_ids"])


# --- masks ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "contents",
    [
        ("What is 2 + 2?", "4."),
        ("ok", "ok"),
        ("Repeat after me: yes.", "yes."),
        ("How do chats look?", f"Like this:\n{HEADER}Hello!"),
        ("Quote a whole turn.", f"{HEADER}ok{END}\nThat was one."),
        (f"What does {HEADER} mean?", f"{HEADER} begins a reply."),
        ("Say it in other scripts.", "Grüße, 日本, 😀"),
    ],
    ids=["plain", "ok-ok", "repeated", "quotes header", "quotes turn", "both quote", "unicode"],
)
def test_the_mask_covers_exactly_the_reply_and_its_end(
    template: ChatTemplate, contents: tuple[str, str]
) -> None:
    """DEFECTS 8. Nothing is found by searching the text."""
    conversation = chat(*contents)
    (record,) = records(template, conversation)
    prompt = template.prompt(conversation.messages[:1])
    reply = say(template.tokenizer, contents[1])
    assert record.tokens == (*prompt, *reply)
    assert record.loss_mask == (0,) * len(prompt) + (1,) * len(reply)
    assert record.tokens[-1] == template.tokenizer.eos_token_id


def test_all_replies_of_a_chat_are_trained_and_nothing_else(template: ChatTemplate) -> None:
    conversation = chat("ok", "ok", "And now?", "ok", "ok", "Fine.", system="Be brief.")
    (record,) = records(template, conversation)
    assert replies(record) == [say(template.tokenizer, text) for text in ("ok", "ok", "Fine.")]
    for turn in (2, 4, 6):
        prompt = template.prompt(conversation.messages[:turn])
        assert list(record.tokens[: len(prompt)]) == prompt
        assert record.loss_mask[len(prompt)] == 1
        assert record.loss_mask[len(prompt) - 1] == 0


def test_a_chat_that_ends_with_the_user_trains_the_replies_before(template: ChatTemplate) -> None:
    (record,) = records(template, chat("Hi", "Hello.", "Bye"))
    assert replies(record) == [say(template.tokenizer, "Hello.")]
    assert record.loss_mask[-1] == 1, "nothing after the last reply is kept"


def test_a_chat_without_a_reply_is_refused(template: ChatTemplate) -> None:
    assert template.tokenize(chat("Hi")) == Refusal("no assistant turn")


def test_prompts_are_what_serving_sends(template: ChatTemplate) -> None:
    """Against the template rendered to text and tokenised without special tokens of its own."""
    conversation = chat("Hi", "Hello.", "Bye", system="Be brief.")
    text = template.tokenizer.apply_chat_template(
        list(conversation.messages), add_generation_prompt=True, tokenize=False
    )
    assert isinstance(text, str)
    assert text.endswith(HEADER)
    assert (
        template.prompt(conversation.messages)
        == template.tokenizer(text, add_special_tokens=False)["input_ids"]
    )


# --- beginning-of-text tokens ---------------------------------------------------------------------------------


def test_a_template_with_a_bos_token_gives_one(tokenizer: PreTrainedTokenizerBase) -> None:
    """DEFECTS 10: also where the tokenizer would add one of its own to plain text."""
    from tokenizers.processors import TemplateProcessing

    other = copy.deepcopy(tokenizer)
    bos = other.convert_tokens_to_ids("<|endoftext|>")
    other.backend_tokenizer.post_processor = TemplateProcessing(
        single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", bos)]
    )
    other.chat_template = "<|endoftext|>" + tokenizer.chat_template
    assert other("plain")["input_ids"][0] == bos, "the tokenizer adds one to plain text"
    template = ChatTemplate(other)
    conversation = chat("ok", "ok", "And now?", "Fine.")
    (record,) = records(template, conversation)
    assert record.tokens.count(bos) == 1
    assert record.tokens[0] == bos
    assert template.prompt(conversation.messages[:1]).count(bos) == 1


def test_a_template_without_a_bos_token_gives_none(template: ChatTemplate) -> None:
    (record,) = records(template, chat("ok", "ok"))
    assert template.tokenizer.convert_tokens_to_ids("<|endoftext|>") not in record.tokens
    starts = record.tokens.count(template.tokenizer.bos_token_id)
    assert starts == 3, "<|im_start|> opens the system, user and assistant turn, and no more"


# --- templates that render older turns otherwise --------------------------------------------------------------


THINKING = (
    "2 + 2?",
    "<think>two twos</think>4",
    "Times 3?",
    "<think>three fours</think>12",
    "Thanks",
    "Welcome",
)


def served(
    template: ChatTemplate, conversation: Conversation, contents: Sequence[str]
) -> list[tuple[list[int], tuple[int, ...]]]:
    """Per reply: what serving sends before it, and what the target says."""
    turns = range(1, len(contents), 2)
    return [
        (template.prompt(conversation.messages[:turn]), say(template.tokenizer, contents[turn]))
        for turn in turns
    ]


def test_per_turn_the_trained_ids_are_the_serving_prompt_and_the_reply(
    tokenizer: PreTrainedTokenizerBase,
) -> None:
    """DEFECTS 9: each reply is trained after exactly the prompt that serving would send for it."""
    template = with_template(tokenizer, DROPS_THINK)
    conversation = chat(*THINKING)
    trained = []
    for record in records(template, conversation):
        for at, flag in enumerate(record.loss_mask):
            if flag and not record.loss_mask[at - 1]:
                end = next(
                    (i for i in range(at, len(record.tokens)) if not record.loss_mask[i]),
                    len(record.tokens),
                )
                trained.append((list(record.tokens[:at]), record.tokens[at:end]))
    assert trained == served(template, conversation, THINKING)


def test_a_later_reply_starts_its_own_record_only_where_the_template_demands_it(
    tokenizer: PreTrainedTokenizerBase,
) -> None:
    template = with_template(tokenizer, DROPS_THINK)
    assert [record.key for record in records(template, chat(*THINKING))] == ["k", "k#1", "k#2"]
    plain = ("2 + 2?", "4", "Times 3?", "12", "Thanks", "Welcome")
    assert [record.key for record in records(template, chat(*plain))] == ["k"]
    mixed = ("2 + 2?", "4", "Times 3?", "<think>fours</think>12", "Thanks", "Welcome")
    assert [replies(record) for record in records(template, chat(*mixed))] == [
        [say(tokenizer, "4"), say(tokenizer, "<think>fours</think>12")],
        [say(tokenizer, "Welcome")],
    ]


def test_a_template_that_renders_replies_under_another_header_is_refused(
    tokenizer: PreTrainedTokenizerBase,
) -> None:
    source = tokenizer.chat_template.replace("<|im_start|>assistant", "<|im_start|>model")
    found = with_template(tokenizer, source).tokenize(chat("Hi", "Hello."))
    assert isinstance(found, Refusal)
    assert "generation prompt" in found.reason


def plain_roles(tokenizer: PreTrainedTokenizerBase, after_role: str) -> ChatTemplate:
    """A template without special tokens: `role:` and the text, a line each."""
    source = (
        "{% for m in messages %}{{ m.role + ':X' + m.content + '\\n' }}{% endfor %}"
        "{% if add_generation_prompt %}assistant:X{% endif %}"
    )
    return with_template(tokenizer, source.replace("X", after_role))


def test_a_template_without_an_end_token_trains_the_text(
    tokenizer: PreTrainedTokenizerBase,
) -> None:
    (record,) = records(plain_roles(tokenizer, "\n"), chat("Hi", "Hello there."))
    (reply,) = replies(record)
    assert tokenizer.decode(reply).rstrip() == "Hello there."


def test_a_reply_that_would_merge_with_its_header_is_refused(
    tokenizer: PreTrainedTokenizerBase,
) -> None:
    """`: Hello` is other tokens than `: ` and `Hello`: what serving would send has no such reply."""
    found = plain_roles(tokenizer, " ").tokenize(chat("Hi", "Hello there."))
    assert isinstance(found, Refusal)
    assert "generation prompt" in found.reason


def test_a_template_that_fails_is_the_users_error(tokenizer: PreTrainedTokenizerBase) -> None:
    source = (
        "{% if messages[0].role == 'system' %}{{ raise_exception('no system turn here') }}{% endif %}"
        + tokenizer.chat_template
    )
    template = with_template(tokenizer, source)
    assert template.prompt(chat("Hi").messages)
    with pytest.raises(UserError, match="no system turn here"):
        template.prompt(chat("Hi", system="Be brief.").messages)


def test_a_tokenizer_without_a_template_is_refused(tokenizer: PreTrainedTokenizerBase) -> None:
    other = copy.deepcopy(tokenizer)
    other.chat_template = None
    with pytest.raises(UserError, match="must have a chat template"):
        ChatTemplate(other)
