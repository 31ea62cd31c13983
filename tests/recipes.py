"""The recipes of the checkout, and those that wait for something that the package doesn't have yet."""

from __future__ import annotations

import json
from pathlib import Path

import yaml

from mtp_train.heads.families import FAMILIES
from mtp_train.models.target import MODEL_TYPES

RECIPES = Path(__file__).parents[1] / "recipes"


def sized() -> list[str]:
    """Recipes that bring their target's dimensions: those whose target is not here."""
    return sorted(path.parents[1].name for path in RECIPES.glob("*/target/config.json"))


def dimensions(name: str) -> dict[str, object]:
    """Of a recipe's target, as published."""
    found: dict[str, object] = json.loads((RECIPES / name / "target" / "config.json").read_text())
    return found


def waiting() -> dict[str, str]:
    """Recipe -> what is missing."""
    missing = {}
    for name in sized():
        head = yaml.safe_load((RECIPES / name / "config.yaml").read_text()).get("head", "mtp")
        kind = dimensions(name)["model_type"]
        if head not in FAMILIES:
            missing[name] = f"no head family {head}"
        elif kind not in MODEL_TYPES:
            missing[name] = f"no target of type {kind}"
    return missing
