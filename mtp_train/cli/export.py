"""`mtp-train export`: the run's head as a folder that serving engines load; `--list` tells which ones it can be."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mtp_train.checkpoint.heads import load_head, read_card, require_own_config
from mtp_train.cli.features import tell_other_text
from mtp_train.cli.job import Job
from mtp_train.cli.run_folder import run_stage
from mtp_train.core.keys import END, config_inputs, inputs
from mtp_train.core.progress import say
from mtp_train.core.provenance import folder_digest, read_json
from mtp_train.export.files import CONFIG
from mtp_train.export.formats import LAYOUTS, USUAL
from mtp_train.export.stage import ExportConfig, export_head, layout_of, require_own_export
from mtp_train.heads.families import make_settings


def stage(job: Job) -> None:
    config: ExportConfig = job.section("export", ExportConfig)
    job.folder.require("train")
    card = read_card(job.folder.head)
    require_own_config(card, job.target_identity)
    out = job.folder.export(layout_of(config, card.family).name)
    tell_other_text(job, "export")
    require_own_export(out)
    trained = {
        "train.outputs": job.folder.require("train")["outputs"],
        "target": job.target_inputs,
    }
    evaluated = job.folder.evaluation.is_file() and job.folder.require("evaluate")["outputs"]
    run_stage(
        job.folder,
        "export",
        config_inputs("export", config)
        | inputs(trained)
        | inputs({"evaluate.outputs": evaluated}, END),
        lambda: _work(job, config, out),
        job.process.ranks,
        whole=(out / CONFIG).is_file,
        alone=True,
    )


def _work(job: Job, config: ExportConfig, out: Path) -> Any:
    target = job.target(ends=True)  # the check's forwards are the head's
    head, card = load_head(job.folder.head, target)
    figures: dict[str, Any] = {}
    if job.folder.evaluation.is_file():
        job.folder.require_same("evaluate", job.folder.evaluation)
        evaluation = read_json(job.folder.evaluation)
        if evaluation["head"]["sha256"] == card.sha256:  # never an earlier head's figures
            figures = evaluation["sets"].get("heldout", {})
    check = export_head(head, target, config, out, figures, card.sha256)
    say(f"export: {out}; loaded back, logits equal at {len(check)} points")
    return folder_digest(out)


def show(overrides: list[str]) -> None:
    """`mtp-train export --list [overrides]`: the layouts, and with a target whether the head goes there, or why not.

    The head is the run's trained one if there is one, else the one that is configured.
    """
    if not overrides:
        print(
            "\n".join(f"{name:16s} heads of family {one.family}" for name, one in LAYOUTS.items())
        )
        print("with target.path=... and run=... or head=...: whether that head goes there")
        return
    job = Job(overrides)
    trained = (job.folder.head / "head.json").is_file()
    config = job.head_config
    if trained:
        card = read_card(job.folder.head)
        config = make_settings({"family": card.family} | card.head)
    target = job.target(ends=True)
    which = str(job.folder.head) if trained else "not trained yet"
    print(f"head of family {config.family} ({which}), target {job.target_config.path}")
    for name, layout in LAYOUTS.items():
        cannot = layout.not_held(config, target)
        usual = " (the usual one)" if USUAL.get(config.family) == name else ""
        print(f"  {name:16s} {f'no: {cannot}' if cannot else f'yes{usual}'}")
