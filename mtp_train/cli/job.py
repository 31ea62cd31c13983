"""What the stages of one command share: configuration, run folder, and the target, loaded once per dtype."""

from __future__ import annotations

import os
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase
from transformers.utils import logging as transformers_logging

from mtp_train.cli.config import load_config, section
from mtp_train.cli.run_folder import RunFolder
from mtp_train.core.errors import UserError
from mtp_train.engine.engine import EngineConfig
from mtp_train.models.target import Target, load_tokenizer, require_model_folder, target_hash


class Job:
    """One invocation."""

    def __init__(self, overrides: list[str]) -> None:
        self.config = load_config(overrides)
        self.command = " ".join(["mtp-train", *overrides])
        self.folder = RunFolder(Path(self.config["run"]))
        self._targets: dict[str, Target] = {}
        transformers_logging.disable_progress_bar()
        transformers_logging.set_verbosity_error()
        threads = int(self.config["threads"])
        if threads:
            torch.set_num_threads(threads)

    def section(self, name: str, cls: type[Any]) -> Any:
        return section(self.config, name, cls)

    @property
    def device(self) -> str:
        """Where the target runs: `auto` is a GPU if there is one."""
        wanted = str(self.config["target"]["device"])
        if wanted == "auto":
            local = os.environ.get("LOCAL_RANK", "0")
            return f"cuda:{local}" if torch.cuda.is_available() else "cpu"
        if wanted.startswith("cuda") and not torch.cuda.is_available():
            raise UserError("target.device must exist", wanted, "use cpu, or a machine with a GPU")
        return wanted

    def target(self, dtype: str | None = None) -> Target:
        """The target in the configured dtype, or in another."""
        wanted = dtype or str(self.config["target"]["dtype"])
        if wanted not in self._targets:
            values = self.config["target"]
            self._targets[wanted] = Target.load(
                values["path"],
                wanted,
                device=self.device,
                trust_remote_code=bool(values["trust_remote_code"]),
            )
        return self._targets[wanted]

    @cached_property
    def target_inputs(self) -> dict[str, Any]:
        """What of the target a stage depends on."""
        require_model_folder(self.config["target"]["path"])
        return {
            "hash": target_hash(self.config["target"]["path"]),
            "dtype": self.config["target"]["dtype"],
        }

    @cached_property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        values = self.config["target"]
        return load_tokenizer(values["path"], trust_remote_code=bool(values["trust_remote_code"]))

    @property
    def engine_config(self) -> EngineConfig:
        config: EngineConfig = self.section("engine", EngineConfig)
        return config
