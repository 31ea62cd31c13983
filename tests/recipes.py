"""The recipes of the checkout."""

from __future__ import annotations

import json
from pathlib import Path

RECIPES = Path(__file__).parents[1] / "recipes"


def sized() -> list[str]:
    """Recipes that bring their target's dimensions: those whose target is not here."""
    return sorted(path.parents[1].name for path in RECIPES.glob("*/target/config.json"))


def dimensions(name: str) -> dict[str, object]:
    """Of a recipe's target, as published."""
    found: dict[str, object] = json.loads((RECIPES / name / "target" / "config.json").read_text())
    return found
