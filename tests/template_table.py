"""The table of docs/masks.md: what becomes of each kind of row under each family's template.

`python tests/template_table.py` writes it into the page.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from chat_families import (
    ROWS,
    Family,
    own_families,
    published_families,
    row,
    template_of,
    tokenizer_of,
)

from mtp_train.core.records import Conversation
from mtp_train.text.refusal import Refusal
from mtp_train.text.template import ChatTemplate

PAGE = Path(__file__).parents[1] / "docs" / "masks.md"
BEGIN, END = "<!-- table of templates -->\n", "<!-- end of the table -->\n"

# How trl's mask differs from ours, and the rule by which ours stays.
DIFFERENCES = {
    "header": "it trains the end of the header, which serving sends",
    "after": "it trains what the template writes after the end-of-turn token, which the target never says",
    "closed": "it trains reasoning although the generation prompt closes it",
    "history": "it shows an older reply as later prompts do: without its reasoning, or with another end token",
    "reasoning": "it leaves the reasoning out, though the generation prompt opens it",
    "end": "it leaves out the token at which serving ends the reply",
}


@dataclass(frozen=True)
class Reply:
    """A trained reply as text."""

    message: int
    prompt: str
    prompt_ids: tuple[int, ...]
    text: str


@dataclass(frozen=True)
class Cell:
    """What becomes of one row under one template."""

    family: Family
    kind: str
    refused: str = ""
    rules: tuple[str, ...] = ()
    replies: tuple[Reply, ...] = ()


def cell(family: Family, template: ChatTemplate, kind: str) -> Cell:
    chat = row(kind)
    records = template.tokenize(chat)
    if isinstance(records, Refusal):
        return Cell(family, kind, refused=records.reason)
    fitted, rules = template.fit(chat)
    trained = [
        i
        for i, message in enumerate(fitted.messages)
        if message["role"] == "assistant" and i not in fitted.untrained
    ]
    spans = [(record, *span) for record in records for span in runs(record.loss_mask)]
    decode = template.tokenizer.decode
    replies = [
        Reply(index, decode(r.tokens[:a]), r.tokens[:a], decode(r.tokens[a:b]))
        for index, (r, a, b) in zip(trained, spans, strict=True)
    ]
    return Cell(family, kind, "", tuple(rules), tuple(replies))


def runs(mask: Sequence[int]) -> list[tuple[int, int]]:
    """Where the trained tokens begin and end."""
    edges = [at for at in range(len(mask) + 1) if _flag(mask, at) != _flag(mask, at - 1)]
    return list(zip(edges[::2], edges[1::2], strict=True))


def _flag(mask: Sequence[int], at: int) -> int:
    return mask[at] if 0 <= at < len(mask) else 0


@cache
def cells() -> tuple[Cell, ...]:
    found = []
    for family in [*published_families(), *own_families()]:
        template = template_of(family)
        found += [cell(family, template, kind) for kind in ROWS]
    return tuple(found)


# --- trl's masks ----------------------------------------------------------------------------------------------


def twin_replies(family: Family, chat: Conversation) -> list[str]:
    """What trl's mask marks, a text per reply."""
    tokenizer: Any = tokenizer_of(family)
    tokenizer.chat_template = family.twin
    out = tokenizer.apply_chat_template(
        list(chat.messages),
        tools=list(chat.tools) or None,
        return_assistant_tokens_mask=True,
        return_dict=True,
        **family.options,
    )
    ids = out["input_ids"]
    return [tokenizer.decode(ids[a:b]) for a, b in runs(out["assistant_masks"])]


def differences(found: Cell) -> set[str]:
    """How trl's mask of a row differs from ours; "unexplained" for what no rule says."""
    chat = row(found.kind)
    theirs = twin_replies(found.family, chat)
    said = [i for i, message in enumerate(chat.messages) if message["role"] == "assistant"]
    names: set[str] = set()
    for reply in found.replies:
        last = reply.message == said[-1]
        marked = theirs[said.index(reply.message)]
        names |= _difference(reply, marked, chat.messages[reply.message], last, found.family.eos)
    return names


def _difference(
    reply: Reply, theirs: str, message: dict[str, Any], last: bool, eos: str
) -> set[str]:
    thought = message.get("reasoning_content", "")
    lead, same, tail = theirs.partition(reply.text)
    if same:
        tail_explained = tail.strip() in ("", eos)
        lead_name = "header" if reply.prompt.endswith(lead) else "closed"
        if not tail_explained or (lead_name == "closed" and thought not in lead):
            return {"unexplained"}
        return {name for name, part in ((lead_name, lead), ("after", tail)) if part}
    if reply.text.startswith(theirs):
        return {"end"}
    if message["content"] not in theirs:
        return {"unexplained"}
    if not last:
        return {"history"}
    return {"reasoning"} if thought and thought not in theirs else {"unexplained"}


# --- the page -------------------------------------------------------------------------------------------------


class _Notes:
    """Texts that cells name by a letter or a number."""

    def __init__(self, names: Sequence[str]) -> None:
        self.names = names
        self.texts: dict[str, str] = {}

    def name(self, text: str) -> str:
        return self.texts.setdefault(text, self.names[len(self.texts)])

    def lines(self) -> list[str]:
        return [f"- **{name}** {text}" for text, name in self.texts.items()]


def table() -> str:
    """The table in Markdown, with what its marks mean."""
    rules, reasons = _Notes("abcdefghijklmnopqrstuvwxyz"), _Notes([str(n) for n in range(1, 40)])
    kinds = list(ROWS)
    lines = [
        f"| template | {' | '.join(kinds)} | trl's mask |",
        "|---" * (len(kinds) + 2) + "|",
    ]
    found = cells()
    for at in range(0, len(found), len(kinds)):
        some = found[at : at + len(kinds)]
        marks = [_mark(item, rules, reasons) for item in some]
        lines.append(f"| {some[0].family.name} | {' | '.join(marks)} | {_twin(some)} |")
    meanings = [f"- **{name}**: {text}" for name, text in DIFFERENCES.items()]
    parts = [
        lines,
        ["`+`: trained as served. Letters: repaired, and trained:"],
        rules.lines(),
        ["Numbers: refused:"],
        reasons.lines(),
        ["trl's mask: `=` where it marks the same text; else"],
        meanings,
    ]
    return "\n\n".join("\n".join(part) for part in parts) + "\n"


def _mark(found: Cell, rules: _Notes, reasons: _Notes) -> str:
    if found.refused:
        return reasons.name(found.refused)
    return " ".join(rules.name(rule) for rule in found.rules) or "+"


def _twin(some: Sequence[Cell]) -> str:
    if not some[0].family.twin:
        return ""
    trained = [found for found in some if found.replies]
    names = set().union(*map(differences, trained))
    return ", ".join(name for name in DIFFERENCES if name in names) or ("=" if trained else "")


def written() -> str:
    """The table that the page holds."""
    return PAGE.read_text(encoding="utf-8").partition(BEGIN)[2].partition(END)[0]


def write() -> None:
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    after = rest.partition(END)[2]
    PAGE.write_text(f"{before}{BEGIN}{table()}{END}{after}", encoding="utf-8")


if __name__ == "__main__":
    write()
