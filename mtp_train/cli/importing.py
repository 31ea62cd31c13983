"""`mtp-train import FOLDER`: a head in a serving layout, ours or another trainer's, as the run's trained head.

It takes the place of the stage `train`: evaluate, report and export go on from it, and `train.warm_start` can begin
from the folder that it writes.
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from mtp_train.checkpoint.heads import TENSORS, HeadCard, require_own_checkpoint, save_checkpoint
from mtp_train.cli.job import Job
from mtp_train.cli.run_folder import run_stage
from mtp_train.core.errors import UserError
from mtp_train.core.keys import inputs
from mtp_train.core.progress import say
from mtp_train.core.provenance import file_digest, folder_digest, read_json, write_text
from mtp_train.export.files import CONFIG
from mtp_train.export.speculators import LAYER
from mtp_train.export.stage import import_head, layout_in
from mtp_train.train.loop import CURVES


def run(arguments: list[str]) -> None:
    """`mtp-train import FOLDER target.path=... run=...`."""
    folders = [item for item in arguments if "=" not in item]
    if len(folders) != 1:
        raise UserError(
            "import takes one head folder, then key=value",
            " ".join(folders) or "none",
            "mtp-train import FOLDER target.path=TARGET run=RUN",
        )
    folder = Path(folders[0])
    if not folder.is_dir():
        raise UserError(
            "a head's folder must be a local one that is there", folder, "correct the path"
        )
    family = layout_in(folder).family
    job = Job([f"head={family}", *(item for item in arguments if "=" in item)])
    imported = [folder_digest(folder, kind) for kind in ("*.safetensors", "*.json")]
    require_own_checkpoint(job.folder.head)
    run_stage(
        job.folder,
        "train",
        inputs({"train.imported": imported, "target": job.target_inputs}),
        lambda: _work(job, folder),
        job.process.ranks,
        alone=True,
        whole=(job.folder.head / TENSORS).is_file,
    )


def _work(job: Job, folder: Path) -> Any:
    target = job.target(ends=True)
    layout, head = import_head(folder, target)
    card = HeadCard(
        head.family,
        target.hash,
        target.state,
        target.hidden_size,
        target.vocab_size,
        step=0,
        quantisation=target.quantisation,
        identity=target.identity,
        config={
            "imported": str(folder.resolve()),
            "layout": layout.name,
            "max_position_embeddings": _positions(folder),
        },
        head=asdict(head.config),
    )
    save_checkpoint(job.folder.head, head, card)
    write_text(job.folder.stage("train") / CURVES, "")  # it was trained elsewhere
    layers = f", {head.cache_layers} decoder layers" if head.cache_layers else ""
    say(
        f"import: a head of family {head.family}{layers}, {layout.name} layout -> {job.folder.head}"
    )
    return file_digest(job.folder.head / TENSORS)


def _positions(folder: Path) -> int | None:
    """The positions that the folder's config.json names for the head; engines limit texts to them."""
    values = read_json(folder / CONFIG)
    found: int | None = values.get(LAYER, values).get("max_position_embeddings")
    return found
