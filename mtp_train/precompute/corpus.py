"""A set's text as precompute reads it: regenerated answers and sources of the user's own, tokenised once.

The tokens lie in a corpus beside the features, made by one rank for all. Knows no target, only its tokenizer.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path

from mtp_train.core.errors import UserError
from mtp_train.core.progress import progress, say
from mtp_train.core.provenance import digest, file_digest
from mtp_train.core.records import Accounting, TokenizedConversation
from mtp_train.store.corpus import Corpus, found_corpus, write_corpus
from mtp_train.text.joined import join_turns
from mtp_train.text.lengths import Bound, LengthPolicy
from mtp_train.text.overlap import overlap, require_few
from mtp_train.text.refusal import Refusal
from mtp_train.text.sources import (
    Answer,
    DataConfig,
    answered_conversations,
    answers,
    asked_by,
    fit_lengths,
    sources_digest,
    tokenized,
)
from mtp_train.text.template import ChatTemplate


def make_corpus(
    folder: Path,
    name: str,
    answered: Path | None,
    config: DataConfig,
    template: ChatTemplate,
    tokenizer_digest: str,
    vocab_size: int,
    held_out: Mapping[bytes, str] | None = None,
    bound: Bound | None = None,
    instead: Path | None = None,
) -> Corpus:
    """The corpus of set `name` in `folder`: the one that is there, if it was made from the same inputs.

    Args:
        answered: what `regenerate` wrote for the set, if anything.
        tokenizer_digest: of the files that decide tokens and template.
        held_out: what sets offer beside which this one's conversations are refused where they overlap (text.overlap).
        bound: the longest sequence that the models of the run read, whatever `config` says.
        instead: where it is made if `folder` must stay as it is.
    """
    sources, policy = config.sources(name), config.policy.within(bound)
    policies = [source.policy.within(bound) for source in sources]
    inputs = digest(
        {
            "answers": answered and file_digest(answered),
            "sources": sources and sources_digest(sources),
            "fit": [config.strict, config.seed, vocab_size, *map(asdict, [policy, *policies])],
            "tokenizer": tokenizer_digest,
            "held out": sorted(mark.hex() for mark in held_out or {}),
        }
    )
    for place in filter(None, (folder, instead)):
        found = found_corpus(place, inputs)
        if found is not None:
            return found
    accounting = Accounting()
    with progress(None, f"tokenise {name}", "sequence") as bar:

        def sequences() -> Iterator[TokenizedConversation]:
            if answered:
                for sequence in joined_answers(answered, policy, accounting, held_out):
                    bar.update()
                    yield sequence
            if sources:
                for sequence in tokenized(
                    sources,
                    template,
                    accounting,
                    strict=config.strict,
                    vocab_size=vocab_size,
                    seed=config.seed,
                    others=held_out,
                    bound=bound,
                ):
                    bar.update()
                    yield sequence

        corpus = write_corpus(instead or folder, sequences(), inputs, accounting)
    require_few(accounting, name)
    if not len(corpus):
        raise UserError(
            f"the set {name} must hold at least one sequence",
            accounting.as_dict(),
            "mend what the reasons name, or change data.length and data.max_tokens",
        )
    tell(name, accounting)
    return corpus


def joined_answers(
    path: Path,
    policy: LengthPolicy,
    accounting: Accounting,
    held_out: Mapping[bytes, str] | None = None,
) -> Iterator[TokenizedConversation]:
    """The target's answers as sequences: turns of a conversation share one where their tokens allow it.

    Counted by answers: what the policy does to a sequence, or an overlap to a conversation, it does to all of its
    answers.
    """
    for sequence, count in join_turns(_apart(path, accounting, held_out or {})):
        outcome = fit_lengths([sequence], policy, [])
        if isinstance(outcome, Refusal):
            accounting.used -= count
            for _ in range(count):
                accounting.refuse(outcome.reason, sequence.key)
            continue
        records, rules, notes = outcome
        if rules:
            accounting.used -= count
            for _ in range(count):
                accounting.repair("; ".join(rules), sequence.key)
        for what, number in notes.items():
            accounting.note(what, number)
        yield from records


def _apart(path: Path, accounting: Accounting, held_out: Mapping[bytes, str]) -> Iterator[Answer]:
    """The answers of conversations that overlap with none of the held-out ones."""
    for talk in answered_conversations(answers(path, accounting)):
        reason = overlap(asked_by(talk), held_out)
        if not reason:
            yield from talk
            continue
        accounting.used -= len(talk)
        for answer in talk:
            accounting.refuse(reason, answer.key)


def tell(name: str, accounting: Accounting) -> None:
    """What became of the set's rows, in a few lines."""
    say(
        f"{name}: {accounting.total} rows = {accounting.used} used + "
        f"{sum(accounting.repaired.values())} repaired + {sum(accounting.refused.values())} refused"
    )
    for kind, counts in (("repaired", accounting.repaired), ("refused", accounting.refused)):
        for reason, rows in sorted(counts.items(), key=lambda item: -item[1]):
            example = accounting.examples.get(reason)
            say(f"  {kind} {rows}: {reason}" + (f" (first: {example})" if example else ""))
    for what, count in accounting.notes.items():
        say(f"  {count} {what}")
