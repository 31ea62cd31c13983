"""What lies beside a model's weights and config: tokenizer, chat template, generation config. Knows no layout."""

from __future__ import annotations

import shutil
from pathlib import Path

PATTERNS = ("*.json", "*.jinja", "*.txt", "*.model", "*.py")
OWN = ("config.json", "model.safetensors.index.json")  # what an export writes itself


def copy_texts(source: Path, folder: Path) -> None:
    """Copy a model folder's files that are neither weights nor its config."""
    found = {path for pattern in PATTERNS for path in source.glob(pattern)}
    for path in sorted(found):
        if path.name not in OWN:
            shutil.copyfile(path, folder / path.name)
