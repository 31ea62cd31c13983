"""Prompts answered and kept: each completion is in a journal as it ends, and ranks share the prompts.

A run that was killed goes on with what its journal lacks, on as many ranks as it is started with. Knows no figures.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import takewhile
from pathlib import Path
from typing import Any

from mtp_train.core.dist import Ranks
from mtp_train.core.errors import UserError
from mtp_train.core.progress import progress, say
from mtp_train.core.records import Accounting
from mtp_train.dialogue.listed import Listed
from mtp_train.dialogue.plans import count_plan
from mtp_train.dialogue.rows import row_completion
from mtp_train.dialogue.shared import SharedJournal, read_rows
from mtp_train.dialogue.talks import Dialogue
from mtp_train.engine.engine import Engine, EngineConfig
from mtp_train.engine.propose import Proposer
from mtp_train.engine.sampling import Sampling
from mtp_train.engine.sequences import Completion, Request
from mtp_train.evaluate.acceptance import Turn
from mtp_train.evaluate.sets import PromptSet
from mtp_train.text.sources import Answer

REFUSED = "refused: "


@dataclass(frozen=True)
class Run:
    """The completions of one set under one setting, in the set's order."""

    completions: tuple[Completion, ...]
    turns: Mapping[str, Turn]
    questions: Mapping[str, str]  # key -> the user's last words
    refused: Mapping[str, str]  # key of the turn that could not be answered -> why

    def of(self, prompts: PromptSet) -> Run:
        """What of it belongs to a smaller draw of the set."""
        keys = {key for unit in prompts.units for key in unit}
        kept = tuple(item for item in self.completions if item.key in keys)
        return Run(kept, self.turns, self.questions, self.refused)


@dataclass(frozen=True)
class Bench:
    """Where completions are kept and who shares the work.

    Args:
        folder: a file per run in it, `<name>.jsonl`.
        ranks: all of them call the same methods in the same order.
        seed: of sampled completions.
    """

    folder: Path
    ranks: Ranks = field(default_factory=Ranks)
    seed: int = 0

    def run(
        self, name: str, prompts: PromptSet, engine: Callable[[], Engine], temperature: float
    ) -> Run:
        """Complete every prompt of the set that no journal has; all ranks get all completions.

        Args:
            name: of the file and of the progress bar.
            engine: makes it where there is work.
        """
        path = self.folder / f"{name}.jsonl"
        journal = SharedJournal(path, self.ranks)
        try:
            self._work(name, prompts, engine, temperature, journal)
        finally:
            journal.close()
        journal.finish(key for unit in prompts.units for key in unit)
        return read_run(path)

    def _work(
        self,
        name: str,
        prompts: PromptSet,
        engine: Callable[[], Engine],
        temperature: float,
        journal: SharedJournal,
    ) -> None:
        todo = [at for at, unit in enumerate(prompts.units) if not _done(unit, journal)]
        mine = self.ranks.mine(todo)
        missing = sum(key not in journal for at in mine for key in prompts.units[at])
        found = len(journal.before)
        if found and todo and self.ranks.main:
            say(f"evaluate {name}: {found} completions found, {len(todo)} prompts to go on with")
        if not mine:
            return
        total, shown = found + missing, self.ranks.main
        with progress(total, f"evaluate {name}", "prompt", initial=found, shown=shown) as bar:
            source = _source(prompts, mine, journal, bar, self.seed)
            engine().serve(source.next, source.finish, Sampling(temperature, seed=self.seed))

    def sums(
        self, name: str, answers: Sequence[Answer], work: Callable[[Answer], list[float]]
    ) -> list[list[float]]:
        """`work` of every answer, shared and kept as completions are."""
        path = self.folder / f"{name}.jsonl"
        journal = SharedJournal(path, self.ranks)
        mine = self.ranks.mine([item for item in answers if item.key not in journal.before])
        found, shown = len(journal), self.ranks.main
        total = found + len(mine)
        with progress(total, f"evaluate {name}", "answer", initial=found, shown=shown) as bar:
            for answer in mine:
                journal.append({"id": answer.key, "finish": "measured", "sums": work(answer)})
                bar.update()
        journal.finish(answer.key for answer in answers)
        return [row["sums"] for row in read_rows(path)]


def fitted_cache(
    config: EngineConfig, proposer: Proposer | None, requests: Sequence[Request]
) -> EngineConfig:
    """`config` with a cache no larger than so many of these requests can fill as run at once."""
    spare = (proposer.room if proposer else 0) + 2 * config.page_size
    longest = sorted((len(one.prompt) + one.max_new_tokens for one in requests), reverse=True)
    pages = [-(-(length + spare) // config.page_size) for length in longest[: config.max_batch]]
    rows = max(sum(pages), 1) * config.page_size
    return replace(config, cache_rows=min(config.cache_rows, rows))


def cache_for(
    config: EngineConfig, proposer: Proposer | None, sets: Sequence[PromptSet]
) -> EngineConfig:
    """`fitted_cache` of the sets' prompts; conversations grow to a length that nobody knows."""
    if any(prompts.chats is not None for prompts in sets):
        return config
    return fitted_cache(config, proposer, [one for prompts in sets for one in prompts.requests])


def read_run(path: Path) -> Run:
    """The completions of a finished file."""
    rows = list(read_rows(path))
    answered = [row for row in rows if "output_ids" in row]
    return Run(
        tuple(row_completion(row) for row in answered),
        {row["id"]: turn_of(row["id"], row["messages"]) for row in answered},
        {row["id"]: row["messages"][-1]["content"] for row in answered if row["messages"]},
        {row["id"]: row["finish"].removeprefix(REFUSED) for row in rows if "output_ids" not in row},
    )


def turn_of(key: str, messages: Sequence[Mapping[str, Any]]) -> Turn:
    """Where an answer to `messages` stands: later turns have the key `<conversation>#<turns before>`."""
    before = sum(message["role"] == "assistant" for message in messages)
    return Turn(key.removesuffix(f"#{before}") if before else key, before + 1)


def account(prompts: PromptSet, run: Run) -> Accounting:
    """Count the set's prompts, now that they are answered or refused; a set without any is an error."""
    accounting = prompts.accounting
    answered = {completion.key for completion in run.completions}
    for index, unit in enumerate(prompts.units):
        failure = next((run.refused[key] for key in unit if key in run.refused), "")
        if prompts.chats is not None:
            count_plan(prompts.chats.plans[index], unit[0] in answered, failure, accounting)
        elif failure:
            accounting.refuse(failure, unit[0])
        else:
            accounting.used += 1
    if not answered:
        raise UserError(
            f"at least one prompt of {prompts.name} must be answered",
            accounting.as_dict(),
            "mend what the reasons name",
        )
    return accounting


def _done(unit: Sequence[str], journal: SharedJournal) -> bool:
    """Whether every turn is there, or those up to one that was refused."""
    known = list(takewhile(lambda key: key in journal.before, unit))
    if not known or len(known) == len(unit):
        return bool(known)
    return "output_ids" not in journal.before.row(known[-1])


def _source(
    prompts: PromptSet, mine: Sequence[int], journal: SharedJournal, bar: Any, seed: int
) -> Dialogue | Listed:
    """This rank's share of the set, as an engine asks for it."""
    chats = prompts.chats
    if chats is None:
        requests = [prompts.requests[at] for at in mine]
        return Listed(requests, prompts.said, journal, bar, seed)
    return Dialogue(
        chats.template,
        [chats.plans[at] for at in mine],
        journal,
        bar,
        max_new_tokens=chats.max_new_tokens,
        stop=chats.stop,
        seed=seed,
        keep_refusals=True,
    )
