"""Answer prompts with the target, turn by turn; each answer is kept as token ids, in a row of its own.

Answers go to a journal as they end. A run that was killed goes on with the turns that the journal lacks; the finished
file holds the answers in the source's order. Of every conversation: success + skipped + error = input.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from mtp_train.core.errors import UserError
from mtp_train.core.keys import CHANGES, END, NOTHING, key
from mtp_train.core.owned import atomic_path, remove_file
from mtp_train.core.progress import progress, say
from mtp_train.core.records import Accounting
from mtp_train.dialogue.journal import Journal
from mtp_train.dialogue.plans import Plan, count_plan, read_plans
from mtp_train.dialogue.talks import Dialogue, renderable
from mtp_train.engine.sampling import Sampling
from mtp_train.engine.sequences import Completion, Request
from mtp_train.text.sources import read_sources
from mtp_train.text.template import ChatTemplate


@dataclass(frozen=True)
class RegenerateConfig:
    """How answers are made.

    Attributes:
        prompts: name of the set -> a source or a list of them (see text.sources.SourceConfig).
        limits: name of the set -> use only its first usable conversations (0 or absent: all).
        max_new_tokens: longest answer.
        temperature: 0 is greedy.
        seed: of sampled answers.
        server: address of an OpenAI-compatible server that answers in our engine's place; empty for our engine.
        model: its name there; empty if the server has one model.
        key_env: name of the environment variable that holds the key that the server asks for; empty for none.
        concurrency: requests in flight at the server.
        timeout: seconds for one of its answers.
        retries: further attempts at a request that failed there.
    """

    prompts: dict[str, Any] = field(metadata={CHANGES: NOTHING})  # their content counts
    limits: dict[str, int] = field(metadata={CHANGES: END})
    max_new_tokens: int = 256
    temperature: float = 0.0
    seed: int = 0
    server: str = key("", NOTHING)  # whether there is one counts
    model: str = ""
    key_env: str = key("", NOTHING)
    concurrency: int = key(32, NOTHING)
    timeout: float = key(600.0, NOTHING)
    retries: int = key(5, NOTHING)

    def __post_init__(self) -> None:
        for name, least in (("max_new_tokens", 1), ("concurrency", 1), ("retries", 0)):
            if getattr(self, name) < least:
                raise UserError(
                    f"regenerate.{name} must be {least} or more", getattr(self, name), "raise it"
                )
        if self.temperature < 0:
            raise UserError(
                "regenerate.temperature must be 0 or more", self.temperature, "raise it"
            )
        if self.timeout <= 0:
            raise UserError("regenerate.timeout must be above 0", self.timeout, "raise it")
        if self.server and not self.server.startswith(("http://", "https://")):
            raise UserError(
                "regenerate.server must begin with http:// or https://",
                self.server,
                "write it as http://host:8000/v1",
            )
        if not re.fullmatch(r"([A-Z_][A-Z0-9_]*)?", self.key_env):
            raise UserError(  # which may be the key itself: it is not shown
                "regenerate.key_env must be the name of an environment variable, in capitals",
                "something else",
                "export the key, and name the variable: regenerate.key_env=OPENAI_API_KEY",
            )
        if any(limit < 0 for limit in self.limits.values()):
            raise UserError(
                "regenerate.limits must be 0 or more", self.limits, "use 0 for all rows"
            )


class Answerer(Protocol):
    """Our engine, or a server."""

    def serve(
        self,
        source: Callable[[], Request | None],
        on_finish: Callable[[Completion], None],
        sampling: Sampling | None = None,
    ) -> None: ...


@dataclass
class Outcome:
    """What became of a set's conversations: used and repaired ones are a success, refused ones are skipped."""

    accounting: Accounting = field(default_factory=Accounting)
    errors: dict[str, int] = field(default_factory=dict)  # reason -> conversations
    answers: dict[str, int] = field(default_factory=dict)  # how answers ended -> answers

    def as_dict(self) -> dict[str, object]:
        skipped, error = sum(self.accounting.refused.values()), sum(self.errors.values())
        counts = {
            "input": self.accounting.total + error,
            "success": self.accounting.total - skipped,
            "skipped": skipped,
            "error": error,
            "answers": dict(self.answers),
            "errors": dict(self.errors),
        }
        return counts | {
            key: value for key, value in self.accounting.as_dict().items() if key not in counts
        }


def regenerate(
    answerer: Answerer,
    template: ChatTemplate,
    stop: frozenset[int],
    config: RegenerateConfig,
    name: str,
    out: Path,
    others: Mapping[bytes, str] | None = None,
) -> Outcome:
    """Answer the prompts of set `name` into `out`; returns what became of them.

    Args:
        stop: tokens that end an answer.
        others: what sets offer beside which a conversation that overlaps is skipped (see text.overlap).
    """
    outcome = Outcome()
    limit_name = f"regenerate.limits.{name}"
    plans = read_plans(
        read_sources(config.prompts[name]),
        config.limits.get(name, 0),
        limit_name,
        outcome.accounting,
        others,
    )
    if not plans:
        raise UserError(
            "regenerate needs at least one prompt", outcome.as_dict(), "see the reasons"
        )
    plans = renderable(template, plans)
    journal = Journal(out.with_suffix(".journal"), out)
    try:
        failed = _converse(answerer, template, stop, config, name, plans, journal)
        for plan in plans:
            _count(plan, journal, failed.get(plan.conversation.key, ""), outcome)
        outcome.answers = dict(sorted(journal.finishes.items()))
        if not len(journal):
            raise UserError(
                "at least one prompt must be answered",
                outcome.as_dict(),
                "mend what the reasons name",
            )
        _write(out, plans, journal)
    finally:
        journal.close()
    asked = {plan.key(turn) for plan in plans for turn in range(len(plan.turns))}
    if set(journal) <= asked:  # answers beyond the limit are kept for a higher one
        remove_file(journal.path)
    return outcome


def _converse(
    answerer: Answerer,
    template: ChatTemplate,
    stop: frozenset[int],
    config: RegenerateConfig,
    name: str,
    plans: Sequence[Plan],
    journal: Journal,
) -> dict[str, str]:
    """Hold the conversations that the journal lacks; returns why some ended early."""
    total = sum(len(plan.turns) for plan in plans)
    if len(journal):
        say(f"regenerate {name}: {len(journal)} answers found, {total - len(journal)} to go")
    with progress(total, f"regenerate {name}", "answer", initial=len(journal)) as bar:
        dialogue = Dialogue(
            template,
            plans,
            journal,
            bar,
            max_new_tokens=config.max_new_tokens,
            stop=stop,
            seed=config.seed,
        )
        answerer.serve(
            dialogue.next, dialogue.finish, Sampling(config.temperature, seed=config.seed)
        )
    return dialogue.failed


def _count(plan: Plan, journal: Journal, failure: str, outcome: Outcome) -> None:
    """Account for a conversation, once."""
    kind, _, reason = failure.partition(": ")
    answered = plan.key(0) in journal
    if kind == "error" and not answered:
        outcome.errors[reason] = outcome.errors.get(reason, 0) + 1
        outcome.accounting.examples.setdefault(reason, plan.conversation.key)
    else:
        count_plan(plan, answered, reason, outcome.accounting)


def _write(out: Path, plans: Sequence[Plan], journal: Journal) -> None:
    """The answers in the source's order."""
    with atomic_path(out) as temporary, open(temporary, "wb") as file:
        for plan in plans:
            for turn in range(len(plan.turns)):
                if plan.key(turn) not in journal:
                    break
                file.write(journal.line(plan.key(turn)))
