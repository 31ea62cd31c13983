"""`mtp-train precompute`: answers to features. Runs under `accelerate launch` or `torchrun` on several ranks too."""

from __future__ import annotations

import sys
from dataclasses import asdict
from typing import Any

from mtp_train.cli.job import Job
from mtp_train.cli.main import guarded
from mtp_train.cli.run_folder import run_stage
from mtp_train.core.dist import Ranks, current_ranks
from mtp_train.core.provenance import file_digest
from mtp_train.core.records import Accounting
from mtp_train.precompute.stage import PrecomputeConfig, from_answers, precompute
from mtp_train.store.manifest import NAME
from mtp_train.text.sources import read_answers

SETS = ("train", "heldout")


def stage(job: Job) -> None:
    config: PrecomputeConfig = job.section("precompute", PrecomputeConfig)
    before = job.folder.require("regenerate")["outputs"]
    ranks = current_ranks(job.device == "cpu")
    run_stage(
        job.folder,
        "precompute",
        [asdict(config), before, job.target_inputs],
        lambda: _work(job, config, ranks),
        ranks,
        keeps=True,  # its own contract says which shards may stay
        needs=[job.folder.features(name) / NAME for name in SETS],
    )


def _work(job: Job, config: PrecomputeConfig, ranks: Ranks) -> Any:
    for name in SETS:
        accounting = Accounting()
        sequences = from_answers(
            read_answers(job.folder.answers(name), accounting), config, accounting
        )
        precompute(job.target(), sequences, config, job.folder.features(name), accounting, ranks)
    return {name: file_digest(job.folder.features(name) / NAME) for name in SETS}


if __name__ == "__main__":
    sys.exit(guarded(lambda: stage(Job(sys.argv[1:]))))
