"""Answer prompts with the target, batched in the engine; each answer is kept as token ids.

Answers go to a journal as they end. A run that was killed goes on with the prompts that the journal lacks; the
finished file holds every prompt once, in the source's order: answered + refused = input.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
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
    limit = config.limits.get(name, 0)
    if limit:
        conversations, accounting.used = conversations[:limit], min(limit, accounting.used)
    journal = out.with_suffix(".journal")
    answered = _read_journal(journal)
    template = ChatTemplate(tokenizer)
    by_key = {conversation.key: conversation for conversation in conversations}
    if len(by_key) != len(conversations):
        raise UserError(
            "prompt ids must be unique", config.prompts[name], "give every row its own id"
        )
    requests = [
        _request(template, conversation, tokenizer, config)
        for conversation in conversations
        if conversation.key not in answered
    ]
    if answered:
        say(f"regenerate {name}: {len(answered)} answers found, {len(requests)} to go")
    with (
        open(journal, "a", encoding="utf-8") as file,
        progress(len(conversations), f"regenerate {name}", "prompt", initial=len(answered)) as bar,
    ):

        def keep(completion: Completion) -> None:
            row = _row(by_key[completion.key], completion)
            answered[completion.key] = row
            file.write(json.dumps(row, ensure_ascii=False) + "\n")
            file.flush()
            bar.update()

        engine.generate(requests, Sampling(config.temperature, config.seed), on_finish=keep)
    kept = []
    for conversation in conversations:
        row = answered[conversation.key]
        if row["finish"].startswith("refused"):
            accounting.used -= 1
            accounting.refuse(row["finish"], conversation.key)
        else:
            kept.append(row)
    write_text(out, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in kept))
    journal.unlink()
    return accounting


def _request(
    template: ChatTemplate,
    conversation: Conversation,
    tokenizer: PreTrainedTokenizerBase,
    config: RegenerateConfig,
) -> Request:
    prompt = tuple(template.prompt(conversation.messages))
    return Request(conversation.key, prompt, config.max_new_tokens, stop_tokens(tokenizer))


def stop_tokens(tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """Tokens that end an answer."""
    return (
        frozenset({int(tokenizer.eos_token_id)})
        if tokenizer.eos_token_id is not None
        else frozenset()
    )


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
