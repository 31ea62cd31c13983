"""A model folder's files: which safetensors it consists of, what their headers say, and a digest of their bytes.

Knows no model class and reads no weights but for the digest.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from safetensors import SafetensorError, safe_open

from mtp_train.core.errors import UserError
from mtp_train.core.provenance import digest, file_digest, read_json

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
ADAPTER = "adapter_config.json"
SECOND_FORM = "consolidated"  # Mistral publishes the same weights a second time under such names
COPY = "copy the folder's files again"
Stamp = tuple[str, int, int, int]  # name, size, time of change, inode
Fingerprint = tuple[Stamp, ...]


@dataclass(frozen=True)
class TensorHeader:
    """What a safetensors header says of a tensor. `dtype` by safetensors' names: BF16, F8_E4M3, ..."""

    file: Path
    dtype: str
    shape: tuple[int, ...]


def require_config_folder(path: str | Path) -> Path:
    """The folder, if it holds a config: enough for dimensions and text, for which no weights need be there."""
    folder = Path(path)
    if not (folder / "config.json").is_file():
        raise UserError(
            "target.path must be a model folder with config.json",
            folder,
            "download the target there or name another folder",
        )
    return folder


def require_model_folder(path: str | Path) -> Path:
    """The folder, if it holds a config and safetensors; else a `UserError` that says what is missing."""
    folder = require_config_folder(path)
    if not any(folder.glob("*.safetensors")):
        raise UserError(
            "a target's weights must be safetensors",
            f"{folder} without any",
            "convert the checkpoint to safetensors",
        )
    return folder


def read_headers(folder: Path) -> dict[str, TensorHeader]:
    """Every tensor of a model folder, by name, from the headers of the files that loaders read.

    Raises:
        UserError: an adapter lies there, a file is missing, cut short or not the model's, a tensor stands in two files,
            or the index names another place for it.
    """
    if (folder / ADAPTER).is_file():
        raise UserError(
            "a model folder must hold no adapter: engines would leave it out",
            folder / ADAPTER,
            "merge the adapter into the weights, or move its files elsewhere",
        )
    listed = _listed(folder)
    files = sorted(set(listed.values())) if listed is not None else [SINGLE]
    _require_files(folder, files)
    found: dict[str, TensorHeader] = {}
    for name in files:
        headers = _headers_in(folder / name)
        twice = sorted(found.keys() & headers.keys())
        if twice:
            raise UserError(
                "a model folder must hold each tensor once",
                f"{some(twice)} in {found[twice[0]].file.name} and {name}",
                "remove the file that does not belong",
            )
        found |= headers
    if listed is not None:
        _require_listed(folder, listed, found)
    return found


def fingerprint(folder: Path) -> Fingerprint:
    """Stamps of the files that a model is made of: equal while nobody touches them."""
    names = {"config.json", INDEX, ADAPTER, *(path.name for path in folder.glob("*.safetensors"))}
    return tuple(stamp(folder / name) for name in sorted(names) if (folder / name).is_file())


def weights_digest(folder: Path) -> str:
    """Digest of the names and bytes of a folder's safetensors; each file is read once per process."""
    return digest({path.name: _digest_of(path) for path in sorted(folder.glob("*.safetensors"))})


def _digest_of(path: Path) -> str:
    return _digest(path.resolve(), stamp(path))


@cache
def _digest(path: Path, _stamp: Stamp) -> str:
    return file_digest(path)


def stamp(path: Path) -> Stamp:
    """What tells a file from the same one touched."""
    status = os.stat(path)
    return path.name, status.st_size, status.st_mtime_ns, status.st_ino


def _listed(folder: Path) -> dict[str, str] | None:
    """The index's file of each tensor; none for a folder of one file."""
    if not (folder / INDEX).is_file():
        return None
    listed = read_json(folder / INDEX)
    listed = listed.get("weight_map") if isinstance(listed, dict) else None
    if not isinstance(listed, dict) or not all(isinstance(one, str) for one in listed.values()):
        raise UserError("an index must hold a weight_map of file names", folder / INDEX, COPY)
    return listed


def _require_files(folder: Path, files: list[str]) -> None:
    there = {path.name for path in folder.glob("*.safetensors")}
    missing = sorted(set(files) - there)
    if missing:
        said = f"{INDEX} names {some(missing)}, not there" if SINGLE not in files else ""
        raise UserError(
            f"a model folder must hold {SINGLE}, or the files that {INDEX} names",
            said or f"{folder} with {some(sorted(there))} alone",
            COPY,
        )
    others = sorted(name for name in there - set(files) if not name.startswith(SECOND_FORM))
    if others:
        raise UserError(
            "a model folder must hold no safetensors but the model's: engines differ in what they read",
            f"{folder} with {some(others)}",
            "move the files that do not belong elsewhere, or copy the index again",
        )


def _require_listed(
    folder: Path, listed: Mapping[str, str], found: Mapping[str, TensorHeader]
) -> None:
    """Raise unless each tensor lies where the index says, and the index knows each."""
    by_file: dict[str, list[str]] = defaultdict(list)
    for name, file in listed.items():
        if name not in found or found[name].file.name != file:
            by_file[file].append(name)
    if by_file:
        file, names = sorted(by_file.items())[0]
        raise UserError(
            "a model's files must hold the tensors that its index names",
            f"{folder / file} without {some(sorted(names))}",
            COPY,
        )
    unknown = sorted(found.keys() - listed.keys())
    if unknown:
        raise UserError(
            "a model's index must name every tensor of its files",
            f"{found[unknown[0]].file} with {some(unknown)}",
            COPY,
        )


def _headers_in(file: Path) -> dict[str, TensorHeader]:
    try:
        with safe_open(file, framework="pt") as tensors:
            slices = {name: tensors.get_slice(name) for name in tensors.keys()}  # noqa: SIM118
            return {
                name: TensorHeader(file, str(one.get_dtype()), tuple(one.get_shape()))
                for name, one in slices.items()
            }
    except (SafetensorError, OSError) as error:
        raise UserError(
            "a target's weights must be whole safetensors files",
            f"{file}: {error}",
            "copy the file again",
        ) from error


def some(names: Iterable[str]) -> str:
    """The first names, and how many more."""
    names = list(names)
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more
