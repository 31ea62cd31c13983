"""`mtp-train regenerate`: the target answers the prompts."""

from __future__ import annotations

import os
import re
from typing import Any

from mtp_train.cli.job import Job
from mtp_train.cli.run_folder import run_stage
from mtp_train.cli.separation import held_out_prompts
from mtp_train.core.errors import UserError
from mtp_train.core.keys import END, config_inputs, inputs
from mtp_train.core.progress import say
from mtp_train.core.provenance import file_digest, write_json
from mtp_train.core.records import Accounting
from mtp_train.dialogue.plans import read_plans
from mtp_train.engine.engine import Engine
from mtp_train.regenerate.server import Server
from mtp_train.regenerate.stage import Answerer, Outcome, RegenerateConfig, regenerate
from mtp_train.text.overlap import require_few
from mtp_train.text.sources import asked, read_sources, sources_digest

SETS = ("train", "heldout", "ood")


def stage(job: Job) -> None:
    config: RegenerateConfig = job.section("regenerate", RegenerateConfig)
    missing = [name for name in ("train", "heldout") if name not in config.prompts]
    unknown = sorted({*config.prompts, *config.limits} - set(SETS))
    if missing or unknown:
        raise UserError(
            "regenerate.prompts must name train and heldout, and may name ood",
            f"missing {missing}, unknown {unknown}",
            "add regenerate.prompts.NAME=FILE, or use a recipe",
        )
    prompts = {name: sources_digest(read_sources(value)) for name, value in config.prompts.items()}
    found = inputs({"regenerate.prompts": prompts}, new=END) | inputs(
        {
            "regenerate.by_server": bool(config.server),
            "target": job.target_inputs,
        }
    )
    run_stage(
        job.folder,
        "regenerate",
        config_inputs("regenerate", config) | found,
        lambda: _work(job, config),
        job.process.ranks,
        alone=True,
        files=[job.folder.answers(name) for name in config.prompts],
    )


def asked_tokens(job: Job) -> dict[str, tuple[int, int]]:
    """Answers to be written per set, and the most tokens that prompts and answers can have."""
    config: RegenerateConfig = job.section("regenerate", RegenerateConfig)
    template = job.template
    found = {}
    for name, value in config.prompts.items():
        plans = read_plans(read_sources(value), config.limits.get(name, 0), name, Accounting())
        tokens = answers = 0
        for plan in plans:
            said = [message for turn in plan.turns for message in turn]
            tokens += len(template.prompt(said, plan.conversation.tools))
            answers += len(plan.turns)
        found[name] = (answers, tokens + answers * config.max_new_tokens)
    return found


def _work(job: Job, config: RegenerateConfig) -> Any:
    held_out = _held_out(config)
    answerer = _answerer(job, config)
    counts: dict[str, Any] = {}
    for name in config.prompts:
        out = job.folder.answers(name)
        others = held_out if name == "train" else {}
        outcome = regenerate(answerer, job.template, job.stop, config, name, out, others)
        counts[name] = outcome.as_dict()
        _tell(name, outcome)
    write_json(job.folder.stage("regenerate") / "accounting.json", counts)
    return {name: file_digest(job.folder.answers(name)) for name in config.prompts}


def _answerer(job: Job, config: RegenerateConfig) -> Answerer:
    if not config.server:
        return Engine(job.target(), None, job.engine_config)
    server = Server(
        config.server,
        model=config.model,
        key=_key(config.key_env),
        concurrency=config.concurrency,
        timeout=config.timeout,
        retries=config.retries,
    )
    server.connect(job.tokenizer)
    return server


def _key(name: str) -> str:
    """The server's key, which is never shown."""
    key = os.environ.get(name, "").strip() if name else ""
    if name and not re.fullmatch(r"[!-~]+", key):
        raise UserError(
            "the variable that regenerate.key_env names must hold the server's key",
            f"{name} that is " + ("no key" if key else "empty or not exported"),
            "export it before the command",
        )
    return key


def _tell(name: str, outcome: Outcome) -> None:
    """One line of counts, one per reason."""
    accounting, counts = outcome.accounting, outcome.as_dict()
    parts = " + ".join(f"{counts[kind]} {kind}" for kind in ("success", "skipped", "error"))
    ends = ", ".join(f"{count} by {finish}" for finish, count in outcome.answers.items())
    say(f"regenerate {name}: {parts} = {counts['input']} conversations; answers ended: {ends}")
    for rule, rows in accounting.repaired.items():
        say(f"  repaired {rows}: {rule}")
    for reason, rows in accounting.refused.items():
        say(f"  skipped {rows}: {reason} (first: {accounting.examples[reason]})")
    for reason, rows in outcome.errors.items():
        say(f"  error {rows}: {reason} (first: {accounting.examples[reason]})")


def _held_out(config: RegenerateConfig) -> dict[bytes, str]:
    """What the sets beside train ask. Raises, before a model is loaded, if most of train asks it too."""
    held_out = held_out_prompts(config.prompts)
    accounting = Accounting()
    accounting.used = sum(
        1 for _ in asked(read_sources(config.prompts["train"]), accounting, others=held_out)
    )
    require_few(accounting, "train")
    return held_out
