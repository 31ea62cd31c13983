"""Answer prompts with the target, batched in the engine; each answer is kept as token ids.

Answers go to a journal as they end. A run that was killed goes on with the prompts that the journal lacks; the
finished file holds every prompt once, in the source's order: answered + refused = input.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from mtp_train.core.errors import UserError
from mtp_train.core.progress import progress, say
from mtp_train.core.provenance import write_text
from mtp_train.core.records import Accounting, Conversation
from mtp_train.engine.engine import Engine
from mtp_train.engine.sampling import Sampling
from mtp_train.engine.sequences import Completion, Request
from mtp_train.models.target import stop_tokens
from mtp_train.text.sources import read_conversations, read_rows
from mtp_train.text.template import ChatTemplate


@dataclass(frozen=True)
class RegenerateConfig:
    """How answers are made.

    Attributes:
        prompts: name of the set -> JSON-lines file.
        limits: name of the set -> use only its first rows (0 or absent: all).
        max_new_tokens: longest answer.
        temperature: 0 is greedy.
    """

    prompts: dict[str, str]
    limits: dict[str, int]
    max_new_tokens: int = 256
    temperature: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1:
            raise UserError(
                "regenerate.max_new_tokens must be 1 or more", self.max_new_tokens, "raise it"
            )
        if self.temperature < 0:
            raise UserError(
                "regenerate.temperature must be 0 or more", self.temperature, "raise it"
            )
        if any(limit < 0 for limit in self.limits.values()):
            raise UserError(
                "regenerate.limits must be 0 or more", self.limits, "use 0 for all rows"
            )


def regenerate(
    engine: Engine,
    tokenizer: PreTrainedTokenizerBase,
    config: RegenerateConfig,
    name: str,
    out: Path,
) -> Accounting:
    """Answer the prompts of set `name` into `out`; returns what became of them."""
    accounting = Accounting()
    conversations = read_conversations(config.prompts[name], accounting)
    limit = config.limits.get(name, 0) or len(conversations)
    for conversation in conversations[limit:]:
        accounting.withdraw(conversation.repairs)
        accounting.refuse(f"beyond regenerate.limits.{name}", conversation.key)
    template = ChatTemplate(tokenizer)
    prompts = _prompts(template, conversations[:limit], accounting)
    journal = out.with_suffix(".journal")
    answered = _read_journal(journal) or _read_journal(out)  # a set may be whole already
    by_key = {conversation.key: conversation for conversation, _ in prompts}
    if len(by_key) != len(prompts):
        raise UserError(
            "prompt ids must be unique", config.prompts[name], "give every row its own id"
        )
    stop = stop_tokens(tokenizer, engine.target.path)
    requests = [
        Request(conversation.key, ids, config.max_new_tokens, stop)
        for conversation, ids in prompts
        if conversation.key not in answered
    ]
    if answered:
        say(f"regenerate {name}: {len(answered)} answers found, {len(requests)} to go")
    with (
        open(journal, "a", encoding="utf-8") as file,
        progress(len(prompts), f"regenerate {name}", "prompt", initial=len(answered)) as bar,
    ):

        def keep(completion: Completion) -> None:
            row = _row(by_key[completion.key], completion)
            answered[completion.key] = row
            file.write(json.dumps(row, ensure_ascii=False) + "\n")
            file.flush()
            bar.update()

        engine.generate(requests, Sampling(config.temperature, config.seed), on_finish=keep)
    kept = []
    for conversation, _ in prompts:
        row = answered[conversation.key]
        if row["finish"].startswith("refused"):
            accounting.withdraw(conversation.repairs)
            accounting.refuse(row["finish"], conversation.key)
        else:
            kept.append(row)
    if not kept:
        raise UserError(
            "at least one prompt must be answered", accounting.refused, "mend what the reasons name"
        )
    write_text(out, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in kept))
    journal.unlink(missing_ok=True)
    return accounting


def _prompts(
    template: ChatTemplate, conversations: Sequence[Conversation], accounting: Accounting
) -> list[tuple[Conversation, tuple[int, ...]]]:
    """Each conversation up to the reply that the target is to give, and its token ids as serving sends them."""
    found: list[tuple[Conversation, tuple[int, ...]]] = []
    for conversation in conversations:
        messages = conversation.messages
        while messages and messages[-1]["role"] == "assistant":
            messages = messages[:-1]
        accounting.withdraw(conversation.repairs)
        if not messages:
            accounting.refuse("nothing to answer before the assistant's turn", conversation.key)
            continue
        try:
            ids = tuple(template.prompt(messages))
        except UserError as error:
            accounting.refuse(f"the chat template fails: {error.received}", conversation.key)
            continue
        repairs = conversation.repairs
        if messages != conversation.messages:
            repairs += ("the given last reply is dropped: the target writes its own",)
        accounting.count(repairs, conversation.key)
        found.append((replace(conversation, messages=messages, repairs=repairs), ids))
    if not found:
        raise UserError(
            "regenerate needs at least one prompt", accounting.as_dict(), "see the reasons"
        )
    return found


def _row(conversation: Conversation, completion: Completion) -> dict[str, Any]:
    return {
        "id": conversation.key,
        "category": conversation.category,
        "messages": list(conversation.messages),
        "prompt_ids": list(completion.prompt),
        "output_ids": list(completion.tokens),
        "finish": completion.finish,
    }


def _read_journal(path: Path) -> dict[str, dict[str, Any]]:
    """Answers of an earlier, killed run. A last line cut short by the kill is dropped and answered again."""
    if not path.is_file():
        return {}
    rows = [row for _, row in read_rows(path) if isinstance(row, dict)]
    write_text(path, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
    return {row["id"]: row for row in rows}
