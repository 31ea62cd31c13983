"""What the stages of one command share: configuration, run folder, and the target, loaded once per dtype."""

from __future__ import annotations

import gc
import logging
import os
import re
import shlex
from dataclasses import dataclass, field, fields
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase
from transformers.utils import logging as transformers_logging

from mtp_train.cli.config import load_config, section
from mtp_train.cli.run_folder import RunFolder
from mtp_train.cli.separation import require_other_files
from mtp_train.core.dist import Ranks, launched_ranks
from mtp_train.core.errors import UserError
from mtp_train.core.keys import CHANGES, NOTHING, key
from mtp_train.core.provenance import read_json
from mtp_train.engine.engine import EngineConfig
from mtp_train.evaluate.stage import EvaluateConfig
from mtp_train.export.formats import usual
from mtp_train.export.layout import Layout
from mtp_train.export.stage import ExportConfig, require_servable
from mtp_train.heads.families import family_of, positions_of
from mtp_train.models.folder import require_config_folder
from mtp_train.models.identity import Identity, folder_identity
from mtp_train.models.quantised import NONE, require_quantisation
from mtp_train.models.sizes import folder_config
from mtp_train.models.target import (
    Target,
    load_tokenizer,
    require_dtype,
    stop_tokens,
    target_hash,
)
from mtp_train.precompute.estimate import PlanConfig
from mtp_train.precompute.stage import PrecomputeConfig
from mtp_train.regenerate.stage import RegenerateConfig
from mtp_train.text.lengths import Bound
from mtp_train.text.sources import DataConfig
from mtp_train.text.template import ChatTemplate
from mtp_train.train.config import TrainConfig

PRECISIONS = {"bfloat16": "bf16", "float32": "no"}  # ours -> accelerate's
TRACKERS = ("tensorboard", "wandb")


@dataclass(frozen=True)
class TargetConfig:
    """The target and where it runs.

    Attributes:
        quantisation: of its matrices, when it is loaded (models.quantised).
        chat_template_kwargs: what serving passes to the chat template beside the messages, such as
            {enable_thinking: false}.
    """

    path: str = field(metadata={CHANGES: NOTHING})  # its content counts
    dtype: str = "bfloat16"
    quantisation: str = NONE
    device: str = key("auto", NOTHING)
    trust_remote_code: bool = key(False, NOTHING)
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        require_dtype(self.dtype)
        require_quantisation(self.quantisation)
        if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", self.device):
            raise UserError(
                "target.device must be auto, cpu, cuda or cuda:N", self.device, "choose one"
            )


@dataclass(frozen=True)
class RunConfig:
    """What belongs to no component.

    Attributes:
        restart: half-done work is set aside under a name of its own, and begun anew.
        go_on: half-done training goes on with values of keys that hold from the next step on, such as
            train.learning_rate.
    """

    run: str = field(metadata={CHANGES: NOTHING})
    threads: int = key(0, NOTHING)
    precision: str = "bfloat16"
    trackers: list[str] = key(list, NOTHING)
    restart: bool = key(False, NOTHING)
    go_on: bool = key(False, NOTHING)

    def __post_init__(self) -> None:
        if self.precision not in PRECISIONS:
            raise UserError(
                "precision must be one of " + ", ".join(PRECISIONS), self.precision, "choose one"
            )
        unknown = set(self.trackers) - set(TRACKERS)
        if unknown:
            raise UserError(
                "trackers must be among " + ", ".join(TRACKERS), sorted(unknown), "correct them"
            )
        if self.threads < 0:
            raise UserError("threads must be 0 or more", self.threads, "use 0 for torch's choice")


@dataclass(frozen=True)
class SweepConfig:
    """What belongs to a sweep as a whole.

    Attributes:
        name: the folder below `<run>/sweeps`; empty: made of the swept keys.
        metric: what the table is sorted by: a figure of the last validation or of the evaluation; empty: the stage's
            own tau.
    """

    name: str = key("", NOTHING)
    metric: str = key("", NOTHING)

    def __post_init__(self) -> None:
        if not re.fullmatch(r"([A-Za-z0-9_][A-Za-z0-9_.+-]*)?", self.name):
            raise UserError(
                "sweep.name must be a folder's name of letters, digits and _ . + -",
                self.name,
                "choose another",
            )


@dataclass
class Process:
    """What the jobs of one process share.

    Attributes:
        targets: by path, dtype, quantisation and how much of it, "whole" or "ends".
        launched: the strategy that the launcher's config file names; None before it is read, which is done once.
    """

    targets: dict[tuple[str, str, str, str], Target] = field(default_factory=dict)
    launched: str | None = None

    @cached_property
    def ranks(self) -> Ranks:
        """Made once: ranks that meet count their meetings."""
        return launched_ranks()


SECTIONS: dict[str, type[Any]] = {
    "regenerate": RegenerateConfig,
    "data": DataConfig,
    "plan": PlanConfig,
    "precompute": PrecomputeConfig,
    "train": TrainConfig,
    "engine": EngineConfig,
    "evaluate": EvaluateConfig,
    "export": ExportConfig,
    "sweep": SweepConfig,
}


class Job:
    """One configuration of a command: its only one, or one of a sweep's."""

    def __init__(self, overrides: list[str], process: Process | None = None) -> None:
        self.process = process or Process()
        self.config = load_config(overrides)
        self.command = shlex.join(["mtp-train", *overrides])
        top = {item.name for item in fields(RunConfig)}
        self.run: RunConfig = section(
            {"the run": {key: self.config[key] for key in top}}, "the run", RunConfig
        )
        self.target_config: TargetConfig = self.section("target", TargetConfig)
        self.folder = RunFolder(Path(self.run.run), self.run.restart, self.run.go_on)
        for (
            name,
            cls,
        ) in SECTIONS.items():  # a mistake in the last stage's keys shows before the first one runs
            self.section(name, cls)
        require_other_files(self.config)
        self.head_config = self._head_config()
        if self.layout and not self.layout.not_held(self.head_config):  # others are never served
            require_servable(self.folder.root, self.layout)
        transformers_logging.disable_progress_bar()
        transformers_logging.set_verbosity_error()
        logging.getLogger("accelerate.big_modeling").setLevel(logging.ERROR)  # tells of ends only
        if self.run.threads:
            torch.set_num_threads(self.run.threads)

    def section(self, name: str, cls: type[Any]) -> Any:
        return section(self.config, name, cls)

    def _head_config(self) -> Any:
        """The dataclass of the section `head`, whose key `family` says which."""
        return self.section("head", family_of(self.config["head"].get("family")).config)

    @property
    def layout(self) -> Layout | None:
        """Where the configured head is exported to; none if nothing holds its family."""
        config: ExportConfig = self.section("export", ExportConfig)
        return usual(config.format, self.head_config.family)

    @property
    def device(self) -> str:
        """Where the target runs: `auto` is a GPU if there is one."""
        wanted = self.target_config.device
        if wanted == "auto":
            local = os.environ.get("LOCAL_RANK", "0")
            return f"cuda:{local}" if torch.cuda.is_available() else "cpu"
        if wanted.startswith("cuda") and not torch.cuda.is_available():
            raise UserError("target.device must exist", wanted, "use cpu, or a machine with a GPU")
        return wanted

    def target(
        self, dtype: str | None = None, tensor_parallel: int = 1, ends: bool = False
    ) -> Target:
        """The target in the configured dtype, or in another.

        ends: its ends are enough (see models.partial); the whole one does as well where it is there already.
        """
        values, targets = self.target_config, self.process.targets
        whole = (values.path, dtype or values.dtype, values.quantisation, "whole")
        wanted = (*whole[:3], "ends") if ends and whole not in targets else whole
        if wanted not in targets:
            targets[wanted] = Target.load(
                *wanted[:2],
                device=self.device,
                trust_remote_code=values.trust_remote_code,
                tensor_parallel=tensor_parallel,
                ends=ends,
                quantisation=values.quantisation,
            )
        targets[wanted].chat_template_kwargs = values.chat_template_kwargs
        return targets[wanted]

    def forget_targets(self) -> None:
        """Let go of the targets that were loaded; whoever needs one again loads it again."""
        self.process.targets.clear()
        gc.collect()  # a model's modules refer to one another

    @property
    def training_runs_target(self) -> bool:
        """Whether training needs the whole target, rather than its ends."""
        return bool(
            self.config["precompute"]["live"] or self.config["train"]["online_eval"]["every"]
        )

    @cached_property
    def target_identity(self) -> Identity:
        """The target's config and text by field, from its files."""
        values = self.target_config
        return folder_identity(require_config_folder(values.path), values.chat_template_kwargs)

    @cached_property
    def target_inputs(self) -> dict[str, Any]:
        """What of the target a stage depends on."""
        values = self.target_config
        weights = target_hash(values.path, values.quantisation)
        return {"hash": weights, "dtype": values.dtype, **self.target_identity}

    @cached_property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        values = self.target_config
        return load_tokenizer(values.path, trust_remote_code=values.trust_remote_code)

    @cached_property
    def template(self) -> ChatTemplate:
        """The target's chat template, as serving uses it."""
        return ChatTemplate(self.tokenizer, self.target_config.chat_template_kwargs, self.stop)

    @property
    def vocabulary(self) -> int:
        """The target's vocabulary, as its config says it."""
        folder = require_config_folder(self.target_config.path)
        return int(read_json(folder / "config.json")["vocab_size"])

    @cached_property
    def bound(self) -> Bound:
        """The longest sequence that target and head have positions for."""
        values = self.target_config
        config = folder_config(
            require_config_folder(values.path), trust_remote_code=values.trust_remote_code
        )
        target = Bound(int(config.max_position_embeddings), "the target's positions")
        own = positions_of(self.head_config)
        return Bound(own, "the head's positions") if 0 < own < target.positions else target

    def features(self, name: str) -> str:
        """Where the features of a set lie: in the run folder, or at the address of precompute.out."""
        out = self.config["precompute"]["out"]
        return f"{out.rstrip('/')}/{name}" if out else str(self.folder.features(name))

    @property
    def stop(self) -> frozenset[int]:
        """Tokens that end an answer."""
        return stop_tokens(self.tokenizer, require_config_folder(self.target_config.path))

    @property
    def engine_config(self) -> EngineConfig:
        config: EngineConfig = self.section("engine", EngineConfig)
        return config
