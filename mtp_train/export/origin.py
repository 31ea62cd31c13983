"""What an export says of where it comes from, beside the files that engines read: its head, its target, its bytes.

Engines ignore `mtp_train.json`. A folder without it is somebody else's and taken as it is. Knows no layout.
"""

from __future__ import annotations

from pathlib import Path

from mtp_train.core.errors import UserError
from mtp_train.core.provenance import (
    file_digests,
    read_json,
    require_files,
    sealed,
    unsealed,
    versions,
    write_json,
)
from mtp_train.models.target import Target

NAME = "mtp_train.json"
AGAIN = "export the head again"


def write_origin(folder: Path, layout: str, family: str, target: Target) -> None:
    """Note what a finished folder is."""
    digests = file_digests(folder)
    digests.pop(NAME, None)
    note = {
        "layout": layout,
        "family": family,
        "target_hash": target.hash,
        "state": target.state,
        "hidden_size": target.hidden_size,
        "vocab_size": target.vocab_size,
        "versions": versions(),
        "files": digests,
    }
    write_json(folder / NAME, sealed(note))


def require_origin(folder: Path, target: Target) -> None:
    """Raise unless a folder that has a note has the bytes it names, and was made for this target."""
    path = folder / NAME
    if not path.is_file():
        return
    note = unsealed(read_json(path), path, AGAIN)
    if not isinstance(note, dict) or "files" not in note:
        raise UserError("an export's note must say its files", path, AGAIN)
    for name, expected in (
        ("hidden_size", target.hidden_size),
        ("vocab_size", target.vocab_size),
        ("state", target.state),
        ("target_hash", target.hash),
    ):
        if note.get(name) != expected:
            raise UserError(
                f"a head must be used with its own target ({name} {expected})",
                note.get(name),
                "name the target it was trained for",
            )
    require_files(folder, note["files"], AGAIN)
