"""Checkpoint to serving folder: write, load back, compare logits. Knows no training and no layout.

An export that can't be loaded back to the same logits is not left on disk.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from mtp_train.core.errors import UserError
from mtp_train.core.keys import END, key
from mtp_train.core.owned import Kind, replaced_folder, require_own
from mtp_train.core.provenance import (
    file_digests,
    read_json,
    sealed,
    unsealed,
    versions,
    write_json,
    write_text,
)
from mtp_train.export.card import model_card
from mtp_train.export.check import check_export
from mtp_train.export.files import CONFIG
from mtp_train.export.formats import AUTO, LAYOUTS, USUAL, recognised, usual
from mtp_train.export.layout import Layout
from mtp_train.heads.base import DraftHead
from mtp_train.models.identity import FORWARD, require_same
from mtp_train.models.target import Target

OTHER_NAME = "move it away, or name another run folder"
FORMATS = (AUTO, *LAYOUTS)
RECORD = "export.json"
EXPORT = Kind("export", {RECORD: ("layout", "target_hash", "files")}, ("README.md",))


@dataclass(frozen=True)
class ExportConfig:
    """Where a head goes.

    Attributes:
        format: one of `FORMATS`; `auto` is the usual one of the head's family.
    """

    format: str = key(AUTO, END)

    def __post_init__(self) -> None:
        if self.format not in FORMATS:
            raise UserError(
                "export.format must be one of " + ", ".join(FORMATS),
                self.format,
                "choose one of them",
            )


def layout_of(config: ExportConfig, family: str) -> Layout:
    """The layout that a head of this family is exported to."""
    layout = usual(config.format, family)
    if layout is None:
        raise UserError(
            "a layout must hold the head: families " + ", ".join(USUAL),
            f"head.family={family}",
            "use this head in mtp_train's engine",
        )
    return layout


def export_head(
    head: DraftHead,
    target: Target,
    config: ExportConfig,
    out: Path,
    figures: dict[str, Any],
    source: str = "",
) -> dict[str, float]:
    """Write `head` for serving to folder `out`; returns the check's largest differences.

    Args:
        figures: what the model card shows of the evaluation.
        source: digest of the checkpoint's tensors, for the record.
    """
    layout = layout_of(config, head.config.family)
    require_servable(out, layout)
    require_held(head, target, layout)
    with replaced_folder(out, EXPORT, OTHER_NAME) as new:
        layout.write(new, head, target)
        write_record(new, head, target, layout, source)
        write_text(new / "README.md", model_card(head.config, target, layout, figures, out))
        return check_export(head, target, layout, new)


def require_own_export(folder: Path) -> None:
    """Raise if something else than an export lies where one is to be written."""
    require_own(folder, EXPORT, OTHER_NAME)


def import_head(folder: Path, target: Target) -> tuple[Layout, DraftHead]:
    """A head folder in any of the layouts, ours or another trainer's: its layout, and a head of ours for `target`.

    Raises:
        UserError: an unknown layout, other tensors than the layout's, another target's sizes, or changed files.
    """
    try:
        require_record(folder, target)
        layout = layout_in(folder)
        tensors, config = layout.load(folder)
        head = layout.read(layout.tidied(tensors, target), config, target)
    except UserError:
        raise
    except (
        Exception
    ) as error:  # another trainer's file may say anything in place of a number or a table
        raise UserError(
            f"a head folder's {CONFIG}, {RECORD} and tensors must be those of its layout",
            f"{folder}: {type(error).__name__}: {error}",
            "compare them with what the trainer writes",
        ) from error
    return layout, head.to(target.device)


def layout_in(folder: Path) -> Layout:
    """The layout that a folder is in."""
    if not (folder / CONFIG).is_file():
        raise UserError(f"a head folder must hold {CONFIG}", folder, "name another folder")
    return recognised(read_json(folder / CONFIG), folder)


def write_record(
    folder: Path, head: DraftHead, target: Target, layout: Layout, source: str
) -> None:
    """Say beside the files that engines read what they are: no engine reads it, `import_head` does."""
    record = {
        "layout": layout.name,
        "target_hash": target.hash,
        "identity": target.identity,
        "source": source,
        "head": asdict(head.config),
        "files": file_digests(folder),
        "versions": versions(),
    }
    write_json(folder / RECORD, sealed(record))


def require_record(folder: Path, target: Target) -> None:
    """Raise unless an export of ours has the bytes that were written, and is this target's; others' have no record."""
    if not (folder / RECORD).is_file():
        return
    record = unsealed(read_json(folder / RECORD), folder / RECORD, "export the head again")
    found = file_digests(folder)
    changed = sorted(name for name, digest in record["files"].items() if found.get(name) != digest)
    if changed:
        raise UserError(
            "an export's files must be the bytes that its record names",
            f"{folder / changed[0]} changed",
            f"export the head again, or remove {RECORD} if the change is meant",
        )
    if record["target_hash"] != target.hash:
        raise UserError(
            f"a head must be used with its own target (target_hash {target.hash})",
            record["target_hash"],
            "name the target it was trained for, and warm start from it for another",
        )
    remedy = "restore the target's files, or warm start from the head for the changed target"
    require_same(record.get("identity", {}), target.identity, "an export", remedy, FORWARD)


def require_held(head: DraftHead, target: Target, layout: Layout) -> None:
    """Raise unless the layout holds the head: engines would compute something else."""
    cannot = layout.not_held(head.config, target)
    if cannot:
        raise UserError(
            f"a head must be one that the layout {layout.name} holds",
            cannot,
            "see `mtp-train export --list`, or use this head in mtp_train's engine",
        )


def require_servable(out: Path, layout: Layout) -> None:
    """Refuse a path that would make vLLM read another method from it."""
    found = [word for word in layout.forbidden if word in str(out.resolve()).lower()]
    if found:
        raise UserError(
            "a run folder's path must not contain "
            + ", ".join(layout.forbidden)
            + f" (vLLM would override the method of {layout.name})",
            out,
            "use another run folder",
        )
