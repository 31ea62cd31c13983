"""Rows of any form from any source, mixed, each one accounted for.

`conversations` gives chats and prompts, for the target to answer; `tokenized` gives sequences with their loss masks,
for the target to read. Both stream: what is held is the row at hand and the keys seen.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from mtp_train.core.errors import UserError
from mtp_train.core.keys import NOTHING, key
from mtp_train.core.provenance import digest
from mtp_train.core.records import Accounting, Conversation, TokenizedConversation, printable
from mtp_train.text.alternation import served_otherwise
from mtp_train.text.files import content_digest, read_rows, read_source
from mtp_train.text.forms import FORMS, Ids, read_form
from mtp_train.text.lengths import Bound, LengthPolicy, apply_length, count_windows
from mtp_train.text.mix import mix
from mtp_train.text.overlap import overlap
from mtp_train.text.oversize import oversize
from mtp_train.text.refusal import Refusal, RowRefused
from mtp_train.text.rows import Fault, Row
from mtp_train.text.template import ChatTemplate
from mtp_train.text.turns import read_tools, read_turns
from mtp_train.text.values import read_label, without_nan

__all__ = [
    "Answer",
    "DataConfig",
    "SourceConfig",
    "answers",
    "asked",
    "conversations",
    "read_answers",
    "read_conversations",
    "read_rows",
    "read_sources",
    "sources_digest",
    "tokenized",
]

ANSWER_KEYS = {"id", "category", "messages", "prompt_ids", "output_ids", "finish"}
KEYS = ("id", "key", "conversation_id", "question_id")
NEEDS_REPAIR = "needs a repair: "
LEFT_OUT = "left out by mixing weights"
TOO_LONG_IN_PART = "replies beyond the longest length left out"


@dataclass(frozen=True)
class SourceConfig:
    """One data set.

    Attributes:
        path: a file, a glob, a folder, a data set saved to disk, or `hub:NAME`.
        form: `auto` (told by each row's keys) or a name of `forms.FORMS`.
        weight: share of the mix, in rows; the shares of all sources are scaled to 1. None for every source: all rows.
        limit: use only the first rows (0: all).
        category: of rows that name none.
        split, name: of a hub's data set.
        length, max_tokens, context: see `lengths.LengthPolicy`.
    """

    path: str
    form: str = "auto"
    weight: float | None = None
    limit: int = 0
    category: str = "all"
    split: str = "train"
    name: str = ""
    length: str = "refuse"
    max_tokens: int = 4096
    context: int = 512

    def __post_init__(self) -> None:
        if self.form != "auto" and self.form not in FORMS:
            raise UserError("a form must be known", self.form, f"use auto or one of {list(FORMS)}")
        if self.weight is not None and not 0 < self.weight < float("inf"):
            raise UserError("a source's weight must be more than 0", self.weight, "correct it")
        if self.limit < 0:
            raise UserError("a source's limit must be 0 or more", self.limit, "use 0 for all rows")
        LengthPolicy(self.length, self.max_tokens, self.context)

    @property
    def policy(self) -> LengthPolicy:
        return LengthPolicy(self.length, self.max_tokens, self.context)


@dataclass(frozen=True)
class DataConfig:
    """Data whose own replies are trained, and how all text is fitted.

    Attributes:
        sets: name of the set (train, heldout) -> a source or a list of them; a source is a path or the fields of
            `SourceConfig`. What `regenerate` wrote for the set comes first.
        strict: refuse rows that would be repaired.
        seed: of the mix of weighted sources.
        length, max_tokens, context: of regenerated answers, and of sources that don't say it themselves.
    """

    sets: dict[str, Any] = key(dict, NOTHING)  # their content counts
    strict: bool = False
    seed: int = 0
    length: str = "refuse"
    max_tokens: int = 4096
    context: int = 512

    def __post_init__(self) -> None:
        for name in self.sets:
            self.sources(name)

    @property
    def policy(self) -> LengthPolicy:
        return LengthPolicy(self.length, self.max_tokens, self.context)

    def policies(self, bound: Bound | None) -> dict[str, list[LengthPolicy]]:
        """What becomes of long sequences of each set's sources, and of answers, on a model of so many positions."""
        own = {name: self.sources(name) for name in self.sets}
        found = {name: [source.policy.within(bound) for source in own[name]] for name in own}
        return found | {"": [self.policy.within(bound)]}

    def sources(self, name: str) -> list[SourceConfig]:
        """The set's sources; none if it isn't named."""
        defaults = {"length": self.length, "max_tokens": self.max_tokens, "context": self.context}
        return read_sources(self.sets.get(name) or [], defaults)


def read_sources(value: Any, defaults: dict[str, Any] | None = None) -> list[SourceConfig]:
    """Sources from configuration: a path, the fields of one, or a list of either."""
    listed = value if isinstance(value, list) else [value]
    known = {item.name for item in fields(SourceConfig)}
    found = []
    for item in listed:
        named = {"path": item} if isinstance(item, str) else item
        if not isinstance(named, dict) or "path" not in named or not set(named) <= known:
            raise UserError(
                "a source must be a path or fields among " + ", ".join(sorted(known)),
                item,
                "name at least its path",
            )
        found.append(SourceConfig(**(defaults or {}) | named))
    return found


def sources_digest(sources: Sequence[SourceConfig]) -> str:
    """Digest of the sources' content and settings, whatever the files are called and wherever they lie."""
    settings = [asdict(source) | {"path": content_digest(source.path)} for source in sources]
    return digest(settings)


@dataclass(frozen=True)
class Parsed:
    """A row that was read: a chat or token ids."""

    item: Conversation | TokenizedConversation
    place: str
    source: int  # index
    repairs: tuple[str, ...]


def conversations(
    sources: Sequence[SourceConfig],
    accounting: Accounting,
    *,
    strict: bool = False,
    seed: int = 0,
) -> Iterator[Conversation]:
    """The chats and prompts of `sources`, with unique keys. Rows of token ids are refused: they hold no messages.

    Raises:
        UserError: a source is not there, or has no usable row.
    """
    for conversation, place in asked(sources, accounting, strict=strict, seed=seed):
        accounting.count(conversation.repairs, place)
        yield conversation


def asked(
    sources: Sequence[SourceConfig],
    accounting: Accounting,
    *,
    strict: bool = False,
    seed: int = 0,
    others: Mapping[bytes, str] | None = None,
) -> Iterator[tuple[Conversation, str]]:
    """Like `conversations`, each with its place, for a caller who counts what becomes of it: only refusals are
    counted here.

    Args:
        others: what sets offer beside which a conversation that overlaps is refused (see `overlap`).
    """
    found = [0] * len(sources)
    for parsed in _parse(sources, accounting, seed, others, prompts=True):
        if isinstance(parsed.item, TokenizedConversation):
            accounting.refuse("token ids without messages", parsed.place)
        elif strict and parsed.item.repairs:
            accounting.refuse(NEEDS_REPAIR + "; ".join(parsed.item.repairs), parsed.place)
        else:
            found[parsed.source] += 1
            yield parsed.item, parsed.place
    _require_any(found, sources, accounting, "row")


def tokenized(
    sources: Sequence[SourceConfig],
    template: ChatTemplate,
    accounting: Accounting,
    *,
    strict: bool = False,
    vocab_size: int = 0,
    seed: int = 0,
    others: Mapping[bytes, str] | None = None,
    bound: Bound | None = None,
) -> Iterator[TokenizedConversation]:
    """The sequences of `sources` as the target sees them, with unique keys; a row may give several.

    Args:
        strict: refuse what would be repaired.
        others: what sets offer beside which a conversation that overlaps is refused (see `overlap`).
        vocab_size: token ids from there on are refused (0: the tokenizer's size).
        bound: the longest sequence that the model reads, whatever the sources say.

    Raises:
        UserError: a source is not there, or has no row with a token to train.
    """
    keys = _Keys()
    found = [0] * len(sources)
    size = vocab_size or len(template.tokenizer)
    policies = [source.policy.within(bound) for source in sources]
    for parsed in _parse(sources, accounting, seed, others):
        outcome = _tokenize(parsed, template, size, policies[parsed.source])
        if isinstance(outcome, Refusal):
            accounting.refuse(outcome.reason, parsed.place)
            continue
        records, rules, notes = outcome
        if not _account(accounting, parsed.place, rules, strict):
            continue
        for what, count in notes.items():
            accounting.note(what, count)
        for record in records:
            found[parsed.source] += 1
            yield replace(record, key=keys.unique(record.key))
    _require_any(found, sources, accounting, "row with tokens to train")


def _account(accounting: Accounting, place: str, rules: Sequence[str], strict: bool) -> bool:
    """Count a readable row; False where strictness refuses it."""
    if rules and strict:
        accounting.refuse(NEEDS_REPAIR + "; ".join(rules), place)
        return False
    accounting.count(rules, place)
    return True


def _require_any(
    found: Sequence[int], sources: Sequence[SourceConfig], accounting: Accounting, what: str
) -> None:
    """A data set that gives nothing is a mistake, whatever the others give."""
    empty = [source.path for source, count in zip(sources, found, strict=True) if not count]
    if empty or not sources:
        raise UserError(
            f"a data set must hold at least one usable {what}",
            f"{', '.join(empty) or 'no source'}: {accounting.as_dict()}",
            "see the reasons for the refused rows",
        )


class _Keys:
    """Makes keys unique: a key that was seen gets ~2, ~3, ..., in the order of the rows."""

    def __init__(self) -> None:
        self.seen: dict[str, int] = {}

    def unique(self, key: str) -> str:
        count = self.seen.get(key, 0) + 1
        self.seen[key] = count
        return key if count == 1 else self.unique(f"{key}~{count}")


# --- one row --------------------------------------------------------------------------------------------------


def items(sources: Sequence[SourceConfig]) -> Iterator[Conversation | TokenizedConversation]:
    """All that can be read in `sources`, to compare with other sets; nothing is counted."""
    for parsed in _parse(sources, Accounting(), 0, prompts=True):
        yield parsed.item


def _parse(
    sources: Sequence[SourceConfig],
    accounting: Accounting,
    seed: int,
    others: Mapping[bytes, str] | None = None,
    prompts: bool = False,
) -> Iterator[Parsed]:
    """Rows in the order of the mix; those that can't be read, that the mix leaves out or that overlap with another set
    are counted here.
    """
    keys = _Keys()
    openers = [partial(_rows, source) for source in sources]
    for index, row, kept in mix(openers, [source.weight for source in sources], seed):
        if not kept:
            accounting.refuse(LEFT_OUT, row.place)
            continue
        try:
            item, repairs = _read(row, sources[index], prompts)
        except RecursionError:  # two values of that depth were compared
            accounting.refuse("values that are nested too deeply", row.place)
            continue
        except RowRefused as error:
            place = f"{row.place} ({error.detail})" if error.detail else row.place
            of_file = isinstance(row.value, Fault) and row.value.of_file
            accounting.refuse(error.reason, place, every=of_file)
            continue
        if others and (reason := overlap(_asks(item, row, sources[index]), others)):
            accounting.refuse(reason, row.place)
            continue
        item = replace(item, key=keys.unique(item.key))
        yield Parsed(item, row.place, index, repairs)


def _asks(
    item: Conversation | TokenizedConversation, row: Row, source: SourceConfig
) -> Conversation | TokenizedConversation:
    """What a row asks: its messages, where it holds them beside token ids."""
    if isinstance(item, Conversation) or not row.value.get("messages"):
        return item
    try:
        return _read(row, source, prompts=True)[0]
    except RowRefused:
        return item


def _rows(source: SourceConfig) -> Iterator[Row]:
    rows = read_source(source.path, source.split, source.name)
    return islice(rows, source.limit or None)


def _read(
    row: Row, source: SourceConfig, prompts: bool
) -> tuple[Conversation | TokenizedConversation, tuple[str, ...]]:
    """What a row holds, and the rules that it was repaired by."""
    if isinstance(row.value, Fault):
        raise RowRefused(row.value.reason)
    if not isinstance(row.value, dict):
        read_form(row.value)  # says what it is
    rules: dict[str, None] = {}
    value = without_nan(row.value, rules.setdefault)
    parts = read_form(value, source.form)
    if isinstance(parts, Ids) and prompts and value.get("messages"):
        parts = read_form(value, "messages")  # an answer's prompt
    labels = (read_label(value.get(key), rules.setdefault) for key in KEYS)
    key = next(filter(None, labels), printable(Path(row.place).name))
    category = read_label(value.get("category"), rules.setdefault) or source.category
    if isinstance(parts, Ids):
        item = TokenizedConversation(key, parts.tokens, parts.loss_mask, category)
        return item, tuple(rules)
    found = read_turns(parts, prompts)
    repairs = (*rules, *found.rules)
    messages, tools = tuple(found.messages), read_tools(parts.tools)
    untrained = frozenset(found.untrained)
    return Conversation(key, messages, category, tools, untrained, repairs), repairs


def _tokenize(
    parsed: Parsed, template: ChatTemplate, vocab_size: int, policy: LengthPolicy
) -> tuple[list[TokenizedConversation], list[str], dict[str, int]] | Refusal:
    """The records of a row, the repairs that they took, and what else is to be counted."""
    rules = list(parsed.repairs)
    if isinstance(parsed.item, TokenizedConversation):
        fault = _ids_fault(parsed.item, vocab_size)
        if fault:
            return Refusal(fault)
        records = [parsed.item]
    else:
        refusal = oversize(parsed.item, template.tokenizer, policy)
        longest = 0 if policy.rule == "split" else policy.max_tokens
        outcome, more = (refusal, []) if refusal else _rendered(parsed.item, template, longest)
        if isinstance(outcome, Refusal):
            return outcome
        records, rules = outcome, rules + more
    return fit_lengths(records, policy, rules)


def _ids_fault(record: TokenizedConversation, vocab_size: int) -> str:
    if any(token >= vocab_size for token in record.tokens):
        return f"a token id beyond the vocabulary of {vocab_size}: data of another tokenizer"
    return "" if any(record.loss_mask) else "no trained token"


def _rendered(
    chat: Conversation, template: ChatTemplate, longest: int
) -> tuple[list[TokenizedConversation] | Refusal, list[str]]:
    """The records of a chat, and the rules that the template asks for: the order of roles is changed at need."""
    refusal = template.tokenize(chat, longest)
    if not isinstance(refusal, Refusal):
        return refusal, template.fit(chat)[1]
    for other, rules in served_otherwise(chat):
        records = template.tokenize(other, longest)
        if not isinstance(records, Refusal):
            return records, [*rules, *template.fit(other)[1]]
    return refusal, []


def fit_lengths(
    records: list[TokenizedConversation], policy: LengthPolicy, rules: list[str]
) -> tuple[list[TokenizedConversation], list[str], dict[str, int]] | Refusal:
    kept: list[TokenizedConversation] = []
    refusals: list[Refusal] = []
    notes: dict[str, int] = {}
    for record in records:
        outcome = apply_length(record, policy)
        if isinstance(outcome, Refusal):
            refusals.append(outcome)
            continue
        kept += outcome
        if len(record.tokens) > policy.max_tokens and policy.rule == "split":
            windows = count_windows(len(record.tokens), policy)
            _count(notes, "sequences split into windows", 1)
            _count(notes, "windows", len(outcome))
            _count(notes, "windows without a trained token, left out", windows - len(outcome))
        elif len(record.tokens) > policy.max_tokens:
            cut = f"cut to {policy.longest}"
            rules = rules if cut in rules else [*rules, cut]
    if not kept:
        return refusals[0]
    return kept, [*rules, TOO_LONG_IN_PART] if refusals else rules, notes


def _count(notes: dict[str, int], what: str, count: int) -> None:
    if count:
        notes[what] = notes.get(what, 0) + count


# --- whole files ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Answer:
    """A prompt and the target's own answer, as token ids."""

    key: str
    category: str
    messages: tuple[dict[str, Any], ...]
    prompt_ids: tuple[int, ...]
    output_ids: tuple[int, ...]
    finish: str


def read_conversations(path: str | Path, accounting: Accounting) -> list[Conversation]:
    """All chats and prompts of one source."""
    return list(conversations([SourceConfig(str(path))], accounting))


def answered_conversations(answered: Iterable[Answer]) -> Iterator[list[Answer]]:
    """The answers of each conversation, which follow each other as `<id>`, `<id>#1`, ..."""
    talk: list[Answer] = []
    for answer in answered:
        if talk and answer.key != f"{talk[0].key}#{len(talk)}":
            yield talk
            talk = []
        talk.append(answer)
    if talk:
        yield talk


def asked_by(talk: Sequence[Answer]) -> Conversation:
    """What a conversation that was answered asks: its last answer holds all turns before it."""
    return Conversation(talk[0].key, talk[-1].messages)


def answers(path: str | Path, accounting: Accounting) -> Iterator[Answer]:
    """The target's answers that `regenerate` wrote, in their order."""
    found = 0
    for number, row in read_rows(path):
        if not _is_answer(row):
            accounting.refuse("not a regenerated answer", f"{path}:{number}")
            continue
        if not row["output_ids"]:
            accounting.refuse("empty answer", f"{path}:{number}")
            continue
        ids = tuple(row["prompt_ids"]), tuple(row["output_ids"])
        found += 1
        accounting.used += 1
        yield Answer(row["id"], row["category"], tuple(row["messages"]), *ids, row["finish"])
    _require_any([found], [SourceConfig(str(path))], accounting, "answer")


def _is_answer(row: Any) -> bool:
    """Whether a row is one that `regenerate` writes, value by value."""
    if not isinstance(row, dict) or not set(row) >= ANSWER_KEYS:
        return False
    texts = [row[key] for key in ("id", "category", "finish")]
    ids = [row[key] for key in ("prompt_ids", "output_ids")]
    said = row["messages"]
    return (
        all(isinstance(text, str) and printable(text) == text for text in texts)
        and all(isinstance(part, list) and all(type(i) is int for i in part) for part in ids)
        and isinstance(said, list)
        and all(
            isinstance(message, dict)
            and isinstance(message.get("role"), str)
            and isinstance(message.get("content"), str)
            for message in said
        )
    )


def read_answers(path: str | Path, accounting: Accounting) -> list[Answer]:
    """All of them."""
    return list(answers(path, accounting))
