"""Versions, digests and JSON files: what makes an artifact say where it came from.

Knows nothing of the content it stamps.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import platform
from pathlib import Path
from typing import Any

from mtp_train import __version__
from mtp_train.core.errors import UserError
from mtp_train.core.owned import atomic_path

SEAL = "seal"
LIBRARIES = ("torch", "transformers", "accelerate", "datasets", "safetensors", "zstandard")


def versions() -> dict[str, str]:
    """Versions of this package, Python and the libraries that shape its numbers."""
    found = {"mtp_train": __version__, "python": platform.python_version()}
    return found | {name: importlib.metadata.version(name) for name in LIBRARIES}


def digest(value: Any) -> str:
    """SHA-256 (first 16 hex digits) of a JSON-serialisable value; key order does not matter."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def sealed(value: dict[str, Any]) -> dict[str, Any]:
    """A JSON object with a digest of itself in it, which `unsealed` verifies."""
    return value | {
        SEAL: digest(json.loads(json.dumps(value)))
    }  # as it will be read: keys are text


def unsealed(value: Any, path: Path | str, remedy: str) -> Any:
    """A sealed object as it was; anything else is returned as it is.

    Raises:
        UserError: something in it is not what was written.
    """
    if not isinstance(value, dict) or SEAL not in value:
        return value
    rest = {key: item for key, item in value.items() if key != SEAL}
    if digest(rest) != value[SEAL]:
        raise UserError(
            "a file must say what was written to it", f"{path} with other values", remedy
        )
    return rest


def file_digests(folder: Path) -> dict[str, str]:
    """SHA-256 of every file in `folder`, by name."""
    return {path.name: file_digest(path) for path in sorted(folder.iterdir()) if path.is_file()}


def require_files(folder: Path, digests: dict[str, str], remedy: str) -> None:
    """Raise unless these files of `folder` have the bytes that were noted of them."""
    for name, noted in digests.items():
        path = folder / name
        if not path.is_file() or file_digest(path) != noted:
            what = "has other bytes" if path.is_file() else "is gone"
            raise UserError(
                "a file must have the bytes that were noted of it", f"{path} {what}", remedy
            )


def file_digest(path: Path) -> str:
    """SHA-256 (64 hex digits) of a file's bytes."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def folder_digest(folder: Path, pattern: str = "*.safetensors") -> str:
    """Digest of the names and bytes of the files in `folder` that match `pattern`."""
    return digest({path.name: file_digest(path) for path in sorted(folder.glob(pattern))})


def write_text(path: Path, text: str) -> None:
    """Write `text` to `path` atomically, as UTF-8."""
    with atomic_path(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def write_json(path: Path, value: Any) -> None:
    """Write `value` to `path` atomically, as indented JSON."""
    write_text(path, json.dumps(value, indent=2, ensure_ascii=False) + "\n")


def read_json(path: Path) -> Any:
    """Read a JSON file; a missing or damaged one is a `UserError` that names it."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise UserError(
            "a file that the run needs must exist", path, "run the stage that writes it"
        ) from error
    except ValueError as error:  # no UTF-8, or no JSON
        raise UserError(
            "a JSON file must be well-formed",
            f"{path}: {error}",
            "delete it and run its stage again",
        ) from error
