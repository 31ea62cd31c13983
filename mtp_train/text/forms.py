"""The forms that rows come in, told apart by their keys, and read into turns or token ids.

A form only finds the parts of its row; what the turns themselves say is `turns.py`'s. Knows no file, no tokenizer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from mtp_train.text.json_values import parse
from mtp_train.text.refusal import RowRefused
from mtp_train.text.values import is_nan, one_of


@dataclass(frozen=True)
class Chat:
    """The turns of a row, as it spells them."""

    turns: list[Any]
    tools: Any = None


@dataclass(frozen=True)
class Ids:
    """A row that is tokens already."""

    tokens: tuple[int, ...]
    loss_mask: tuple[int, ...]


@dataclass(frozen=True)
class Form:
    """How a row of this form is known and read."""

    keys: str  # what a user is shown
    matches: Callable[[Mapping[str, Any]], bool]
    read: Callable[[Mapping[str, Any]], Chat | Ids]


PAIRS = (  # keys of a prompt and its answer
    ("prompt", "completion"),
    ("prompt", "response"),
    ("question", "answer"),
    ("query", "response"),
    ("user", "bot"),
)
QUESTIONS = ("input", "context")  # what an instruction is about
ANSWERS = ("output", "response")  # Alpaca's; GPTeacher's and Dolly's
ROLE_NAMES = ("system", "user", "human", "assistant", "gpt", "tool", "bot", "model")
PLACEHOLDER = "FULL BENCHMARK DATA SHOULD BE FETCHED"


def read_form(row: Any, form: str = "auto") -> Chat | Ids:
    """The parts of a row, in the form named or in the one its keys show.

    Raises:
        RowRefused: no form has these keys, or the row lacks what its form demands.
    """
    if not isinstance(row, dict):
        raise RowRefused(f"not a JSON object but {_kind(row)}")
    present = {key: value for key, value in row.items() if value is not None and not is_nan(value)}
    if present.get("images") or present.get("videos") or present.get("audios"):
        raise RowRefused("content that is not text (images, videos or audios)")
    if form != "auto":
        if not FORMS[form].matches(present):
            raise RowRefused(f"not of form {form} ({FORMS[form].keys})", _keys(row))
        return FORMS[form].read(present)
    for known in FORMS.values():
        if known.matches(present):
            return known.read(present)
    listed = "; ".join(f"{name}: {known.keys}" for name, known in FORMS.items())
    raise RowRefused("unknown form", f"{_keys(row)}; forms known: {listed}")


def _kind(value: Any) -> str:
    names = {str: "a string", list: "a list", int: "a number", float: "a number"}
    return names.get(type(value), "null" if value is None else type(value).__name__)


def _keys(row: Mapping[str, Any]) -> str:
    names = sorted(map(str, row))
    return "the row's keys: " + (", ".join(names[:12]) or "none") + (", ..." * (len(names) > 12))


def _has(*keys: str) -> Callable[[Mapping[str, Any]], bool]:
    return lambda row: all(key in row for key in keys)


def _pairs(row: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The keys of a prompt and its answer that a row has."""
    return [pair for pair in PAIRS if pair[0] in row and pair[1] in row]


def _has_instruction(row: Mapping[str, Any]) -> bool:
    return "instruction" in row and any(answer in row for answer in ANSWERS)


# --- readers --------------------------------------------------------------------------------------------------


def _messages(row: Mapping[str, Any]) -> Chat:
    return _chat(row, _list(row["messages"], "messages"))


def _sharegpt(row: Mapping[str, Any]) -> Chat:
    turns = one_of(row, ("conversations", "conversation"), "the conversation")
    return _chat(row, _list(turns, "conversations"))


def _history(row: Mapping[str, Any]) -> Chat:
    return _chat(row, _history_turns(row["history"]))


def _alpaca(row: Mapping[str, Any]) -> Chat:
    about = one_of(row, QUESTIONS, "the input")
    question = [part for part in (row["instruction"], about) if part not in ("", None)]
    if not all(isinstance(part, str) for part in question):
        raise RowRefused("instruction and input must be strings")
    before = _history_turns(row.get("history", []), empty=True)
    answer = _answer(one_of(row, ANSWERS, "the answer"))
    return _chat(row, [*before, _turn("user", "\n\n".join(question)), answer])


def _pair(row: Mapping[str, Any]) -> Chat:
    ((question, answer), *others) = _pairs(row)
    if any((row[q], row[a]) != (row[question], row[answer]) for q, a in others):
        raise RowRefused("two pairs of prompt and answer in one row", _keys(row))
    if row.get("label") is False:  # TRL's unpaired preferences
        raise RowRefused("an answer that its label says is not wanted")
    before = _history_turns(row.get("history", []), empty=True)
    asked = row[question] if isinstance(row[question], list) else [_turn("user", row[question])]
    said = row[answer] if isinstance(row[answer], list) else [_answer(row[answer])]
    return _chat(row, [*before, *asked, *said])


def _preference(row: Mapping[str, Any]) -> Chat:
    """The chosen answer after the turns that it answers; or the whole chat, where `chosen` holds it."""
    chosen = row["chosen"]
    said = chosen if isinstance(chosen, list) else [chosen]
    said = [_answer(turn) if isinstance(turn, str) else turn for turn in said]
    before: list[Any] = []
    for key in ("conversations", "messages", "prompt", "question", "instruction"):
        if key in row:
            before = row[key] if isinstance(row[key], list) else [_turn("user", row[key])]
            break
    if before and said[: len(before)] == before:
        before = []  # TRL's explicit form: the chosen chat repeats its prompt
    elif isinstance(chosen, list) and len(chosen) > 1 and len(before) == 1:
        before = [] if _text_of(before[0]) == _text_of(said[0]) else before
    return _chat(row, [*before, *said])


def _turns(row: Mapping[str, Any]) -> Chat:
    """Prompts of an evaluation, asked one after the other; their answers are the target's to give."""
    turns = _list(row["turns"], "turns")
    if not all(isinstance(turn, str) for turn in turns):
        return _chat(row, turns)
    if any(PLACEHOLDER in turn for turn in turns):
        raise RowRefused("a placeholder instead of the benchmark's text: fetch it from its source")
    return _chat(row, [_turn("user", turn) for turn in turns])


def _text(row: Mapping[str, Any]) -> Chat:
    raise RowRefused(
        "rendered text: which tokens are replies can't be known without searching it; give the messages"
    )


def _answered(row: Mapping[str, Any]) -> Ids:
    prompt, output = _ids(row["prompt_ids"]), _ids(row["output_ids"])
    if not output:
        raise RowRefused("empty answer")
    return Ids(prompt + output, (0,) * len(prompt) + (1,) * len(output))


def _tokens(row: Mapping[str, Any]) -> Ids:
    tokens = _ids(row["input_ids"])
    if "loss_mask" in row:
        mask = row["loss_mask"]
    elif "labels" in row:
        labels = row["labels"]
        mask = [int(label != -100) for label in labels] if isinstance(labels, list) else None
        if mask and any(m and a != b for m, a, b in zip(mask, tokens, labels, strict=False)):
            raise RowRefused("labels that are not the input ids")
    else:
        raise RowRefused("input_ids without loss_mask or labels")
    if not isinstance(mask, list) or len(mask) != len(tokens):
        raise RowRefused("a loss mask of another length than its tokens")
    if any(flag not in (0, 1) for flag in mask):
        raise RowRefused("a loss mask must hold 0 and 1")
    return Ids(tokens, tuple(int(flag) for flag in mask))


FORMS: dict[str, Form] = {
    "answers": Form("prompt_ids, output_ids", _has("prompt_ids", "output_ids"), _answered),
    "tokens": Form("input_ids, loss_mask or labels", _has("input_ids"), _tokens),
    "preference": Form("chosen [, conversations | messages | prompt]", _has("chosen"), _preference),
    "messages": Form("messages", _has("messages"), _messages),
    "sharegpt": Form(
        "conversations", lambda row: "conversations" in row or "conversation" in row, _sharegpt
    ),
    "turns": Form("turns", _has("turns"), _turns),
    "alpaca": Form(
        "instruction, output | response [, input | context, history]", _has_instruction, _alpaca
    ),
    "pair": Form(" | ".join(f"{a}, {b}" for a, b in PAIRS), lambda row: bool(_pairs(row)), _pair),
    "history": Form("history of {user, bot}", _has("history"), _history),
    "text": Form("text (refused)", lambda row: isinstance(row.get("text"), str), _text),
}


# --- parts ----------------------------------------------------------------------------------------------------


def _chat(row: Mapping[str, Any], turns: list[Any]) -> Chat:
    system = one_of(row, ("system", "system_prompt"), "the system prompt")
    if system is not None and not (isinstance(system, str) and not system.strip()):
        turns = [_turn("system", system), *turns]
    return Chat(turns, one_of(row, ("tools", "functions"), "the tools"))


def _turn(role: str, content: Any) -> dict[str, Any]:
    return {"role": role, "content": content}


def _answer(content: Any) -> dict[str, Any]:
    return _turn("assistant", content)


def _text_of(turn: Any) -> Any:
    return turn.get("content", turn.get("value")) if isinstance(turn, dict) else turn


def _history_turns(value: Any, empty: bool = False) -> list[Any]:
    """Turns of a history: two texts are a user's and the answer to it, unless the first is a role."""
    turns = _list(value, "history", empty)
    if any(_is_pair(turn) and turn[0].strip().lower() in ROLE_NAMES for turn in turns):
        raise RowRefused("a history of lists, which may be roles with texts or pairs of texts")
    return [{"user": turn[0], "bot": turn[1]} if _is_pair(turn) else turn for turn in turns]


def _is_pair(turn: Any) -> bool:
    return isinstance(turn, list) and len(turn) == 2 and all(isinstance(part, str) for part in turn)


def _list(value: Any, key: str, empty: bool = False) -> list[Any]:
    if isinstance(value, str):  # a column of JSON
        try:
            value = parse(value)
        except ValueError:
            raise RowRefused(f"`{key}` is text, not a list of turns") from None
    if not isinstance(value, list):
        raise RowRefused(f"`{key}` is {_kind(value)}, not a list of turns")
    if not value and not empty:
        raise RowRefused("no turns")
    return value


def _ids(value: Any) -> tuple[int, ...]:
    if not isinstance(value, list) or any(type(token) is not int for token in value):
        raise RowRefused("token ids must be a list of whole numbers")
    if any(token < 0 for token in value):
        raise RowRefused("a token id below 0")
    return tuple(value)
