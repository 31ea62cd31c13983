"""`mtp-train train -m` and `evaluate -m`: a job for each choice of the swept values, one after another, and a table.

A job is an ordinary run folder below `<run>/sweeps/<name>`, whose text and features are the run's own, by links. What
is done is not done again and what was killed goes on, because the stages see to that themselves. On several ranks each
job runs on all of them.
"""

from __future__ import annotations

import itertools
import math
import os
import re
import sys
from dataclasses import replace
from datetime import timedelta
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from mtp_train.cli import evaluate, train
from mtp_train.cli.config import sweep_alternatives
from mtp_train.cli.features import held_states
from mtp_train.cli.job import Job, Process, SweepConfig
from mtp_train.cli.overrides import Alternatives, quoted
from mtp_train.cli.run_folder import OTHER_FOLDER, RUN, STAMP, RunFolder
from mtp_train.cli.sweep_table import DONE, FAILED, Report, Row
from mtp_train.core.dist import leave
from mtp_train.core.errors import UserError
from mtp_train.core.owned import MARK, Kind, claim
from mtp_train.core.progress import say
from mtp_train.core.provenance import digest, read_json, write_json, write_text
from mtp_train.evaluate.stage import EvaluateConfig
from mtp_train.models.sizes import target_sizes
from mtp_train.precompute.sources import expand_states
from mtp_train.train.config import TrainConfig
from mtp_train.train.metrics import ValidationSums

STAGES = ("train", "evaluate")
LINKED = ("regenerate", "precompute")
METRICS = {"train": "tau_teacher_forced", "evaluate": "heldout/greedy/tau"}
FIGURES = ("tau", "tau_macro", "acceptance_rate")
LISTS = ("per_position", "conditional")
SWEPT = (
    "head",
    "train",
    "target.dtype",
)  # other keys change the features, or mean nothing to training
LONGEST = 100  # bytes of a folder's name
PATIENCE = timedelta(minutes=1)  # ranks that meet with the same error do so at the same step


SWEEP = Kind(
    "sweep's folder",
    {MARK: ()} | {f"table{stage}.json": ("stage", "metric") for stage in ("", "-evaluate")},
)


def sweep(stage: str, overrides: list[str]) -> None:
    """Run every job of the command line; a `UserError` at the end if any failed."""
    if stage not in STAGES:
        raise UserError("-m goes with " + " or ".join(STAGES), stage, "leave it out")
    _Sweep(stage, overrides).run()


class _Sweep:
    """All jobs are composed, and checked, before the first one runs."""

    def __init__(self, stage: str, overrides: list[str]) -> None:
        choices = sweep_alternatives(overrides)
        _require_swept(choices)
        self.stage, self.process = stage, Process()
        lines = [list(line) for line in itertools.product(*(choice.lines for choice in choices))]
        self.parent = Job(lines[0], self.process)
        self.config: SweepConfig = self.parent.section("sweep", SweepConfig)
        swept = [choice for choice in choices if choice.swept]
        name = self.config.name or _short("+".join(sorted(choice.key for choice in swept)))
        self.root = self.parent.folder.root / "sweeps" / name
        self.jobs: list[Job] = []
        self.rows: list[Row] = []
        for line in lines:
            values = {
                choice.key: part.split("=", 1)[1]
                for choice, part in zip(choices, line, strict=True)
                if choice.swept
            }
            folder = job_name(values)
            self.jobs.append(Job([*line, f"run={quoted(str(self.root / folder))}"], self.process))
            self.rows.append(Row(values, folder))

    def run(self) -> None:
        require_inputs(self.parent, self.jobs)
        if self.stage == "evaluate" and not self.parent.config["evaluate"]["sets"]:
            self.parent.folder.require("regenerate")
        self.metric  # noqa: B018  # a name that is none is refused now
        ranks = self.process.ranks
        if ranks.main:
            claim(self.parent.folder.root, RUN, OTHER_FOLDER)
            claim(self.root, SWEEP, OTHER_FOLDER)
            for job in self.jobs:
                link(self.parent.folder, job.folder)
        ranks.wait()
        for number, job in enumerate(self.jobs):
            say(f"sweep: job {number + 1} of {len(self.jobs)}: {self.rows[number].folder}")
            error = self._attempt(job, self.rows[number].folder)
            self.rows[number] = self._result(self.rows[number], job, error)
            if ranks.main:
                self._write()
        leave()
        if ranks.main:
            self._show()
        self._require_done()

    def _attempt(self, job: Job, name: str) -> str:
        """Do the job's work; why it failed, if the user can do something about it.

        An error that other ranks don't share ends the sweep: they would wait for this one.
        """
        try:
            if self.stage == "train":
                train.fit(job)
            else:
                _require_trained(job)
                evaluate.stage(job)
        except (UserError, torch.OutOfMemoryError) as error:
            if not self.process.ranks.all_say(f"{name} failed", PATIENCE):
                raise
            reason = " ".join(str(error).split())
            say(f"sweep: {name} failed: {reason}")
            return reason
        return ""

    def _result(self, row: Row, job: Job, error: str) -> Row:
        if error:
            return replace(row, status=FAILED, error=error)
        found = evaluate.last_validation(job)
        seconds = math.fsum(step.get("seconds", 0.0) for step in evaluate.curves(job))
        if self.stage == "evaluate":
            found = found | evaluation_figures(read_json(job.folder.evaluation)["sets"])
            seconds = job.folder.require("evaluate")["seconds"]
        return replace(row, status=DONE, seconds=seconds, figures=found)

    @cached_property
    def metric(self) -> str:
        """The metric by its name; one that some job will not have is refused."""
        wanted = self.config.metric or METRICS[self.stage]
        by_job = [self._figures(job) for job in self.jobs]
        known = [name for name in by_job[0] if all(name in names for names in by_job)]
        if wanted not in known:
            raise UserError(
                f"sweep.metric of {self.stage} -m must be one of " + ", ".join(known),
                wanted,
                "choose a figure that all jobs have",
            )
        return wanted

    def _figures(self, job: Job) -> list[str]:
        """Names of the figures that the job will have."""
        config: TrainConfig = job.section("train", TrainConfig)
        terms = tuple(config.losses().enabled())
        names = list(ValidationSums(config.rollout_steps, terms).summary())
        if self.stage == "evaluate":
            measured: EvaluateConfig = job.section("evaluate", EvaluateConfig)
            empty = {mode: _no_figures(measured.drafts) for mode in _modes(measured)}
            sets = [*evaluate.set_names(self.parent), *measured.sets]
            names += evaluation_figures({name: empty for name in sets})
        return names

    def _report(self) -> Report:
        modes = _modes(self.parent.section("evaluate", EvaluateConfig))
        taus = [f"{name}/{mode}/tau" for name in evaluate.SETS for mode in modes]
        shown = taus if self.stage == "evaluate" else ()
        return Report(self.stage, self.metric, tuple(self.rows), tuple(shown))

    @property
    def _table(self) -> Path:
        return self.root / ("table.md" if self.stage == "train" else f"table-{self.stage}.md")

    def _write(self) -> None:
        report = self._report()
        write_text(self._table, report.markdown())
        write_json(self._table.with_suffix(".json"), report.as_dict())

    def _show(self) -> None:
        width = None if sys.stdout.isatty() else 200  # a file has no width to fit
        console = Console(markup=False, highlight=False, emoji=False, width=width)
        self._report().write(console)
        say(f"sweep: {self._table}")

    def _require_done(self) -> None:
        failed = [row.folder for row in self.rows if row.status == FAILED]
        if failed:
            raise UserError(
                "every job of a sweep must be done",
                f"{len(failed)} of {len(self.rows)} failed ({', '.join(failed)})",
                f"see {self._table}; the same command tries them again",
            )


def link(parent: RunFolder, job: RunFolder) -> None:
    """Give a job the text and the features of the run, without a copy; what is there already stays."""
    claim(job.root, RUN, OTHER_FOLDER)
    for stage in LINKED:
        place = job.stage(stage)
        if parent.stage(stage).is_dir() and not os.path.lexists(place):
            source = os.path.relpath(parent.stage(stage).resolve(), job.root.resolve())
            place.symlink_to(source, target_is_directory=True)


def require_inputs(parent: Job, jobs: list[Job]) -> None:
    """Raise unless the run's features are there, with every state that the jobs need."""
    parent.folder.require("precompute")
    target = parent.target_config
    layers = target_sizes(
        target.path, target.dtype, trust_remote_code=target.trust_remote_code
    ).layers
    wanted = tuple(dict.fromkeys(name for job in jobs for name in _states(job, layers)))
    found = held_states(parent)
    if not set(wanted) <= set(found):
        raise UserError(
            f"the features of {parent.folder.root} must hold the states {', '.join(wanted)}",
            ", ".join(found),
            "run `mtp-train precompute` with the same overrides but for the swept ones, and "
            f"precompute.states=[{','.join(wanted)}]",
        )


def _states(job: Job, layers: int) -> tuple[str, ...]:
    """The states that the job's head is fed, or those that its family has precompute store."""
    named = getattr(job.head_config, "states", ())
    return expand_states(named or job.config["precompute"]["states"], layers)


def _require_trained(job: Job) -> None:
    if not (job.folder.stage("train") / STAMP).is_file():
        raise UserError(
            "a job must be trained before it is evaluated",
            job.folder.root.name,
            "run `mtp-train train -m` with the same overrides",
        )


def _require_swept(choices: list[Alternatives]) -> None:
    """Raise unless something is swept that jobs of one run may differ in."""
    swept = [choice.key for choice in choices if choice.swept]
    if not swept:
        raise UserError("a sweep needs a key with several values", "none", "as in head=mtp,eagle")
    other = [key for key in swept if key not in SWEPT and not key.startswith(("head.", "train."))]
    if other:
        raise UserError(
            "a sweep may vary keys of head and train, and target.dtype",
            ", ".join(other),
            "give one value here (a text with a comma in it as key='\"a,b\"'), and other values in "
            "another run folder",
        )


def job_name(swept: dict[str, str]) -> str:
    """A job's folder: its values of the swept keys, in the keys' order; with a hash where that says too little."""
    return _short("+".join(f"{key}-{swept[key]}" for key in sorted(swept)))


def _short(name: str) -> str:
    safe = re.sub(r"[^A-Za-z0-9_.+-]", "_", name)
    if safe == name and len(name) <= LONGEST:
        return name
    return f"{safe[: LONGEST - 10]}-{digest(name)[:8]}"


def evaluation_figures(sets: dict[str, Any]) -> dict[str, float]:
    """An evaluation's acceptance by names such as `heldout/greedy/tau` and `ood/sampled/per_position/1`."""
    found: dict[str, float] = {}
    measured = [(name, mode) for name, modes in sets.items() for mode in modes]
    for name, mode in measured:
        record = sets[name][mode]
        found |= {f"{name}/{mode}/{figure}": record[figure] for figure in FIGURES}
        for figure in LISTS:
            values = enumerate(record[figure], start=1)
            found |= {f"{name}/{mode}/{figure}/{position}": value for position, value in values}
    return found


def _modes(config: EvaluateConfig) -> list[str]:
    """What is measured of every set."""
    return ["greedy", "sampled"] if config.sampled_prompts else ["greedy"]


def _no_figures(drafts: int) -> dict[str, Any]:
    """An acceptance record of k drafts, without its values."""
    return dict.fromkeys(FIGURES, math.nan) | dict.fromkeys(LISTS, [math.nan] * drafts)
