"""A head folder's tensors, whoever wrote them: one safetensors file, or shards with an index. Knows no layout."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from safetensors import SafetensorError, safe_open
from torch import Tensor

from mtp_train.core.errors import UserError
from mtp_train.core.provenance import read_json

T = TypeVar("T")
CONFIG = "config.json"
TENSORS = "model.safetensors"
INDEX = "model.safetensors.index.json"
PICKLED = ("*.bin", "*.pt", "*.pth", "*.ckpt")


def read_weights(folder: Path) -> dict[str, Tensor]:
    """Every tensor of a head folder.

    Raises:
        UserError: no safetensors there, a shard is missing or damaged, or two files hold the same name.
    """
    found: dict[str, Tensor] = {}
    for path in _files(folder):
        tensors = _load(path)
        twice = sorted(set(found) & set(tensors))
        if twice:
            raise UserError(
                "a head folder must hold each tensor once",
                f"{twice[0]} in {path.name} again",
                "remove the older file",
            )
        found |= tensors
    return found


def tensor_names(folder: Path) -> set[str]:
    """Names of a head folder's tensors, from the files' headers."""
    return {name for path in _files(folder) for name in _opened(path, lambda file: file.keys())}


def _files(folder: Path) -> list[Path]:
    files = sorted(folder.glob("*.safetensors"))
    if (folder / INDEX).is_file():
        index = read_json(folder / INDEX)
        named = [folder / name for name in sorted(set(index["weight_map"].values()))]
        # Some tools leave the whole model's index beside a head in one file of another name.
        if not files or not set(named).isdisjoint(files):
            return named
    if not files:
        pickled = [path.name for pattern in PICKLED for path in sorted(folder.glob(pattern))]
        raise UserError(
            "a head's weights must be safetensors",
            f"{folder} with {pickled[0]}" if pickled else f"{folder} without any",
            "convert them: safetensors.torch.save_file(torch.load(FILE, weights_only=True), "
            "'model.safetensors')",
        )
    return files


def _load(path: Path) -> dict[str, Tensor]:
    return _opened(path, lambda file: {name: file.get_tensor(name) for name in file.keys()})  # noqa: SIM118


def _opened(path: Path, work: Callable[[Any], T]) -> T:
    """What `work` makes of an open file; a damaged or missing one is an error that names it."""
    try:
        with safe_open(path, framework="pt") as file:
            return work(file)
    except (SafetensorError, OSError) as error:
        raise UserError(
            "a head folder must hold whole safetensors files",
            f"{path}: {error}",
            "copy the file again",
        ) from error
