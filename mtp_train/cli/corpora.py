"""The text of a run's sets: what `regenerate` answered and what `data.sets` names, tokenised once for all stages."""

from __future__ import annotations

from dataclasses import asdict

from mtp_train.cli.job import Job
from mtp_train.cli.separation import held_out_text
from mtp_train.core.errors import UserError
from mtp_train.core.keys import Inputs, config_inputs, inputs
from mtp_train.core.provenance import digest
from mtp_train.models.identity import TEXT
from mtp_train.precompute.corpus import make_corpus
from mtp_train.store.corpus import Corpus
from mtp_train.text.sources import DataConfig, sources_digest

SETS = ("train", "heldout")
TEXTS = ("tokenizer", *TEXT)  # of the target's identity: what its text is made with


def text_inputs(job: Job) -> Inputs:
    """What the features' text depends on, by key."""
    data: DataConfig = job.section("data", DataConfig)
    unknown = sorted(set(data.sets) - set(SETS))
    if unknown:
        raise UserError("data.sets may name train and heldout", unknown, "correct the override")
    regenerated = (
        job.folder.answers("train").parent.is_dir() and job.config["regenerate"]["prompts"]
    )
    before = job.folder.require("regenerate")["outputs"] if regenerated else None
    own = {name: sources_digest(data.sources(name)) for name in data.sets}
    lengths = {name: list(map(asdict, found)) for name, found in data.policies(job.bound).items()}
    answers = lengths.pop("")
    return config_inputs("data", data) | inputs(
        {
            "regenerate.outputs": before,
            "data.sets": own,
            "data.lengths": lengths | {"answers": answers},
        }
    )


def corpora(job: Job, planned: bool = False) -> dict[str, Corpus]:
    """The text of every set, tokenised; made where it isn't there.

    planned: to look ahead, which leaves the text of features that are there, or half done, as it is.
    """
    aside = planned and job.folder.begun("precompute")
    data: DataConfig = job.section("data", DataConfig)
    answers = {
        name: job.folder.answers(name)
        for name in job.config["regenerate"]["prompts"]
        if job.folder.answers(name).is_file()
    }
    job.folder.require_same("regenerate", *answers.values())
    held_out = held_out_text(data, answers)
    found = {}
    for name in SETS:
        answered = answers.get(name)
        if not answered and name not in data.sets:
            raise UserError(
                f"the set {name} needs text",
                "neither regenerated answers nor sources",
                f"run regenerate with regenerate.prompts.{name}, or name data.sets.{name}",
            )
        found[name] = make_corpus(
            job.folder.corpus(name),
            name,
            answered,
            data,
            job.template,
            digest([job.target_identity[name] for name in TEXTS]),
            job.vocabulary,
            held_out if name == "train" else {},
            job.bound,
            job.folder.planned_corpus(name) if aside else None,
        )
    return found
