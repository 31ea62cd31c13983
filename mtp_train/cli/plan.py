"""`mtp-train plan`: disk, memory and hours of a configuration, before the target is loaded."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from functools import cached_property
from pathlib import Path

from rich.console import Console
from rich.table import Table

from mtp_train.cli.config import load_config, recipe_folder
from mtp_train.cli.corpora import corpora
from mtp_train.cli.job import Job
from mtp_train.cli.regenerate import asked_tokens
from mtp_train.core.errors import UserError
from mtp_train.core.progress import say
from mtp_train.core.records import Sizes
from mtp_train.heads.base import DraftHead
from mtp_train.heads.families import outline_head
from mtp_train.models.sizes import outline, target_sizes
from mtp_train.models.target import Target
from mtp_train.precompute import estimate
from mtp_train.precompute.estimate import CODEC_RATIO, PlanConfig, Workload, readable
from mtp_train.precompute.live import CODEC
from mtp_train.precompute.sources import expand_states
from mtp_train.precompute.stage import SPEED, PrecomputeConfig
from mtp_train.store.corpus import Corpus
from mtp_train.store.places import Place
from mtp_train.train.config import TrainConfig
from mtp_train.train.cost import train_bytes, train_flops


def stage(job: Job) -> None:
    plan: PlanConfig = job.section("plan", PlanConfig)
    if plan.tokens:
        take_published(job)
    require_files(job)
    if plan.tokens:
        loads = [Workload("train", 0, plan.tokens)]
    else:
        with job.folder.held("plan" if job.folder.begun("precompute") else "precompute"):
            loads = workloads(job)
    outlook = Outlook(job, plan, loads, plan.ranks)
    outlook.show(Console())
    if job.folder.done("precompute") and job.folder.begun("train"):
        from mtp_train.cli.train import (
            foretold,
        )  # with accelerate, which the rest does not wait for

        say(f"plan: train: {foretold(job)}")
    outlook.require_disk()


def take_published(job: Job) -> None:
    """Plan by the dimensions that a recipe publishes of its own models, where their folders aren't here yet."""
    recipe = job.config["recipe"]
    if not recipe:
        return
    target, head = job.target_config, job.head_config
    usual = load_config([f"recipe={recipe}"])
    if target.path == usual["target"]["path"]:
        job.target_config = replace(target, path=_published(recipe, "target", target.path))
    if getattr(head, "path", "") and head.path == usual["head"].get("path"):
        job.head_config = replace(head, path=_published(recipe, "draft", head.path))


def _published(recipe: str, name: str, path: str) -> str:
    """The folder of a model, or the recipe's own with its published config where that isn't there."""
    own = recipe_folder(recipe) / name
    if Path(path).exists() or not (own / "config.json").is_file():
        return path
    say(f"plan: {path} isn't there yet; its dimensions are those that the recipe publishes, {own}")
    return str(own)


def require_files(job: Job) -> None:
    """Raise unless the target's folder holds what a plan reads of it."""
    folder = Path(job.target_config.path)
    if not (folder / "config.json").is_file():
        raise UserError(
            "a plan needs the target's config.json, and its tokenizer (tokenizer.json, "
            "tokenizer_config.json) unless plan.tokens says how many tokens",
            f"{folder} without config.json",
            "download these files there; the weights can wait",
        )


def announce(job: Job, plan: PlanConfig, text: Mapping[str, Corpus], ranks: int) -> None:
    """The estimate in a line, and the check, before the target is loaded."""
    loads = [Workload(name, len(corpus), corpus.note.tokens) for name, corpus in text.items()]
    outlook = Outlook(job, plan, loads, ranks)
    time = None if outlook.config.live else outlook.hours()
    say(
        f"plan: {sum(load.tokens for load in loads)} tokens, {readable(outlook.need)} of features "
        f"({outlook.kept}), {outlook.free_text}"
        + (f", about {duration(time)}" if time is not None else "")
    )
    outlook.require_disk()


def workloads(job: Job) -> list[Workload]:
    """The sets' text, tokenised if need be. Answers that the target has yet to write count as long as they may be."""
    if job.config["regenerate"]["prompts"] and not job.folder.answers("train").is_file():
        return [
            Workload(name, sequences, tokens, bound=True)
            for name, (sequences, tokens) in asked_tokens(job).items()
        ]
    return [
        Workload(name, len(corpus), corpus.note.tokens)
        for name, corpus in corpora(job, planned=True).items()
    ]


class Outlook:
    """The figures of one configuration."""

    def __init__(self, job: Job, plan: PlanConfig, loads: list[Workload], ranks: int) -> None:
        self.job, self.plan, self.loads = job, plan, loads
        self.config: PrecomputeConfig = job.section("precompute", PrecomputeConfig)
        self.sizes: Sizes = target_sizes(job.target_config.path, job.target_config.dtype)
        self.states = expand_states(self.config.states, self.sizes.layers)
        self.train: TrainConfig = job.section("train", TrainConfig)
        self.units = max(ranks // self.config.tensor_parallel, 1)
        self.places = [job.features(load.name) for load in loads]

    @property
    def need(self) -> int:
        """Bytes of features that are not there yet."""
        if self.config.live:
            return 0
        stored = estimate.stored_bytes([Path(p) for p in self.places if Place(p).local])
        return max(self.disk(self.config.codec) - stored, 0)

    @property
    def kept(self) -> str:
        """How features are written: the codec, or not at all."""
        return CODEC if self.config.live else self.config.codec

    @property
    def free(self) -> int | None:
        """Bytes free where the features go; None where that can't be known."""
        place = self.places[0]
        return estimate.free_bytes(Path(place)) if Place(place).local else None

    @property
    def free_text(self) -> str:
        return "free space unknown" if self.free is None else f"{readable(self.free)} free"

    def disk(self, codec: str) -> int:
        count = len(self.states)
        return sum(estimate.disk_bytes(load, self.sizes, count, codec) for load in self.loads)

    def hours(self) -> float | None:
        speed = self.speed()
        tokens = sum(load.tokens for load in self.loads)
        return estimate.hours(tokens, speed, self.units) if speed else None

    def speed(self) -> float:
        """Tokens per second of one unit: as configured, or as measured by this run's last precompute; 0 if neither."""
        place = Place(self.places[0])
        if not self.plan.tokens_per_second and place.exists(SPEED):
            with suppress(ValueError, KeyError, TypeError):  # a damaged note: nothing is known
                return float(json.loads(place.read(SPEED))["tokens_per_second"])
        return self.plan.tokens_per_second

    def require_disk(self) -> None:
        if self.free is not None:
            place = Path(self.places[0])
            estimate.require_disk(self.need, self.free, place, self.plan.allow_shortfall)

    def show(self, console: Console) -> None:
        console.print(self._text_table())
        console.print(self._disk_table())
        console.print(self._memory_table())
        console.print(self._time_lines(), soft_wrap=True)

    def _text_table(self) -> Table:
        table = _table("text", "set", "sequences", "tokens")
        for load in self.loads:
            most = "at most " if load.bound else ""
            table.add_row(load.name, f"{load.sequences:,}", f"{most}{load.tokens:,}")
        return table

    def _disk_table(self) -> Table:
        title = f"disk: {', '.join(self.states)} of width {self.sizes.hidden}; {self.free_text}"
        table = _table(title, "codec", "bytes", "per token", "")
        tokens = max(sum(load.tokens for load in self.loads), 1)
        for codec in (*CODEC_RATIO, CODEC):
            size = 0 if codec == CODEC else self.disk(codec)
            chosen = "chosen" if codec == self.kept else ""
            table.add_row(codec, readable(size), readable(size / tokens), chosen)
        return table

    def _memory_table(self) -> Table:
        title = f"memory per rank, computed (beside the process's own); {self.plan.ranks} ranks"
        table = _table(title, "stage", "part", "bytes")
        for name, values in self.memory().items():
            for part, size in values.items():
                table.add_row(name, part, readable(size))
            table.add_row("", "sum", readable(sum(values.values())), end_section=True)
        return table

    def memory(self) -> dict[str, dict[str, int]]:
        """Bytes by stage and part."""
        return {
            "precompute": estimate.precompute_bytes(
                self.sizes,
                len(self.states),
                self.config.rows_per_forward,
                self.config.rows_per_shard,
                self.config.tensor_parallel,
            ),
            f"train, packs of {self.train.rows} rows": train_bytes(
                *self._shapes,
                self.train,
                ranks=self.plan.ranks,
                autocast=self.job.run.precision == "bfloat16",
                whole=self.job.training_runs_target,
            ),
        }

    @cached_property
    def _shapes(self) -> tuple[Target, DraftHead]:
        """Target and head without storage."""
        values = self.job.target_config
        target = outline(values.path, values.dtype)
        return target, outline_head(target, self.job.head_config)

    def assumed_hours(self) -> dict[str, float]:
        """Of precompute and training, by arithmetic at the speed that is assumed of a rank."""
        tokens = sum(load.tokens for load in self.loads)
        per_rank = self.plan.tflops * 1e12
        return {
            "precompute": estimate.hours(
                tokens * estimate.precompute_flops(self.sizes), per_rank, self.plan.ranks
            ),
            "training": estimate.hours(
                tokens * self.train.epochs * train_flops(*self._shapes, self.train),
                per_rank,
                self.plan.ranks,
            ),
        }

    def _time_lines(self) -> str:
        lines = [self._precompute_time()]
        if self.plan.tflops:
            hours = {name: duration(time) for name, time in self.assumed_hours().items()}
            lines.append(
                f"by arithmetic, if each of {self.plan.ranks} ranks does {self.plan.tflops:g} TFLOP/s "
                f"(assumed): precompute {hours['precompute']}, training {hours['training']}"
            )
        return "\n".join(lines)

    def _precompute_time(self) -> str:
        if self.config.live:
            return "the target's time: at every epoch anew, in training (precompute.live=true)"
        hours = self.hours()
        if hours is None:
            return (
                "precompute's time: unknown; give plan.tokens_per_second, or precompute a small set "
                "in this run folder first"
            )
        speed = f"{self.speed():,.0f} tokens/s measured per unit, {self.units} units"
        return f"precompute's time: about {duration(hours)} ({speed})"


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left")
    for column in columns:
        right = column in ("sequences", "tokens", "bytes", "per token")
        table.add_column(column, justify="right" if right else "left")
    return table


def duration(hours: float) -> str:
    """Hours, or minutes where they are few."""
    return f"{hours:.1f} hours" if hours >= 1 else f"{hours * 60:.0f} minutes"
