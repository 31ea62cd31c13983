"""`mtp-train regenerate`: the target answers the prompts."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from mtp_train.cli.job import Job
from mtp_train.cli.run_folder import run_stage
from mtp_train.core.errors import UserError
from mtp_train.core.progress import say
from mtp_train.core.provenance import file_digest, write_json
from mtp_train.engine.engine import Engine
from mtp_train.regenerate.stage import RegenerateConfig, regenerate


def stage(job: Job) -> None:
    config: RegenerateConfig = job.section("regenerate", RegenerateConfig)
    if not config.prompts:
        raise UserError(
            "regenerate.prompts must name at least one file",
            "none",
            "add regenerate.prompts.train=FILE, or use a recipe",
        )
    for path in config.prompts.values():
        if not Path(path).is_file():
            raise UserError("a prompts file must exist", path, "correct regenerate.prompts")
    prompts = {name: file_digest(Path(path)) for name, path in config.prompts.items()}
    values = {key: value for key, value in asdict(config).items() if key != "prompts"}
    run_stage(
        job.folder,
        "regenerate",
        [values, prompts, job.target_inputs],
        lambda: _work(job, config),
        needs=[job.folder.answers(name) for name in config.prompts],
    )


def _work(job: Job, config: RegenerateConfig) -> Any:
    engine = Engine(job.target(), None, job.engine_config)
    counts: dict[str, Any] = {}
    for name in config.prompts:
        accounting = regenerate(engine, job.tokenizer, config, name, job.folder.answers(name))
        counts[name] = accounting.as_dict()
        refused = sum(accounting.refused.values())
        say(
            f"regenerate {name}: {accounting.used} answered + {refused} refused = {accounting.total}"
        )
    write_json(job.folder.stage("regenerate") / "accounting.json", counts)
    return {name: file_digest(job.folder.answers(name)) for name in config.prompts}
