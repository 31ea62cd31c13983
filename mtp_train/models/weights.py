"""A model folder's tensors by name, whether one safetensors file or shards with an index. Knows no model class."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path

from safetensors import SafetensorError, safe_open
from torch import Tensor

from mtp_train.core.errors import UserError
from mtp_train.models.folder import INDEX, require_model_folder


def find_tensors(path: str | Path) -> dict[str, Path]:
    """The file that holds each tensor of a model folder."""
    folder = require_model_folder(path)
    if (folder / INDEX).is_file():
        listed = json.loads((folder / INDEX).read_text())["weight_map"]
        return {name: folder / file for name, file in listed.items()}
    found: dict[str, Path] = {}
    for file in sorted(folder.glob("*.safetensors")):
        found |= dict.fromkeys(names_in(file), file)
    return found


def names_in(file: Path) -> list[str]:
    """The tensors that a safetensors file holds."""
    with _opened(file) as tensors:
        return list(tensors.keys())


def read_tensors(files: Mapping[str, Path], names: Iterable[str]) -> dict[str, Tensor]:
    """The named tensors, as they are stored; each file is opened once.

    Args:
        files: by `find_tensors`.
    """
    by_file = defaultdict(list)
    for name in names:
        by_file[files[name]].append(name)
    read: dict[str, Tensor] = {}
    for file, wanted in by_file.items():
        with _opened(file) as tensors:
            read |= {name: tensors.get_tensor(name) for name in wanted}
    return read


def _opened(file: Path) -> safe_open:
    try:
        return safe_open(file, framework="pt")
    except (SafetensorError, FileNotFoundError) as error:
        raise UserError(
            "a target's weights must be whole safetensors files",
            f"{file}: {error}",
            "copy the file again",
        ) from error
