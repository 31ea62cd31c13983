"""Hydra composes, recipes overlay, dataclasses check. Nothing below `cli/` sees a config object.

A recipe is `recipes/<name>/config.yaml`: values that stand between the defaults of `conf/` and the command line.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from hydra import compose, initialize_config_dir
from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from mtp_train.core.errors import UserError

T = TypeVar("T")
PACKAGE = Path(__file__).resolve().parents[1]


def load_config(overrides: list[str]) -> dict[str, Any]:
    """The resolved configuration of a command line such as `recipe=smollm2_mtp_cpu train.epochs=2`."""
    name = next(
        (item.split("=", 1)[1] for item in reversed(overrides) if item.startswith("recipe=")), ""
    )
    rest = [item for item in overrides if not item.startswith("recipe=")]
    recipe = recipe_overrides(name) if name else []
    try:
        with initialize_config_dir(str(conf_folder()), version_base="1.3"):
            composed = compose("config", overrides=[*recipe, *rest])
            resolved = OmegaConf.to_container(composed, resolve=True, throw_on_missing=True)
    except (HydraException, OmegaConfBaseException) as error:
        reason = " ".join(str(error).split())
        raise UserError(
            "overrides must name keys of the configuration",
            f"{' '.join(rest) or name} ({reason})",
            "see conf/ for the keys",
        ) from error
    assert isinstance(resolved, dict)
    return {str(key): value for key, value in resolved.items()} | {"recipe": name}


def conf_folder() -> Path:
    """The configuration: inside the installed package, or beside it in a checkout."""
    return next(folder for folder in (PACKAGE / "conf", PACKAGE.parent / "conf") if folder.is_dir())


def recipe_overrides(name: str) -> list[str]:
    """A recipe's values as overrides: `train: {epochs: 2}` is `train.epochs=2`."""
    folders = [Path("recipes"), PACKAGE.parent / "recipes"]
    found = next(
        (
            folder / name / "config.yaml"
            for folder in folders
            if (folder / name / "config.yaml").is_file()
        ),
        None,
    )
    if found is None:
        known = sorted(
            {path.parent.name for folder in folders for path in folder.glob("*/config.yaml")}
        )
        raise UserError(
            "a recipe must be one of " + (", ".join(known) or "recipes/*/config.yaml"),
            name,
            "choose one of them",
        )
    values = OmegaConf.to_container(OmegaConf.load(found))
    assert isinstance(values, dict)
    return [f"{key}={value}" for key, value in _flatten(values, str(found.parent))]


def _flatten(values: dict[Any, Any], folder: str, prefix: str = "") -> list[tuple[str, str]]:
    rows: list[tuple[str, str]] = []
    for key, value in values.items():
        if isinstance(value, dict):
            rows += _flatten(value, folder, f"{prefix}{key}.")
        else:
            text = value.replace("{recipe}", folder) if isinstance(value, str) else value
            # `++` sets a key whether or not the defaults have it: sets of prompts are named freely.
            force = "++" if prefix.startswith(("regenerate.prompts", "regenerate.limits")) else ""
            rows.append((f"{force}{prefix}{key}", json.dumps(text, ensure_ascii=False)))
    return rows


def section(config: dict[str, Any], name: str, cls: type[T]) -> T:
    """The dataclass of a config section; an unknown key or a wrong type is an error that lists the known keys."""
    values = config[name]
    hints = get_type_hints(cls)
    known = {item.name for item in dataclasses.fields(cls)}  # type: ignore[arg-type]
    unknown = set(values) - known
    if unknown:
        raise UserError(
            f"keys of {name} must be among " + ", ".join(sorted(known)),
            ", ".join(sorted(unknown)),
            "correct the override",
        )
    return cls(**{key: _typed(f"{name}.{key}", value, hints[key]) for key, value in values.items()})


def _typed(name: str, value: Any, kind: Any) -> Any:
    of, parts = get_origin(kind) or kind, get_args(kind)
    if of is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if type(value) is not of:
        raise UserError(
            f"{name} must be of type {of.__name__}", repr(value), "correct the override"
        )
    if of is dict:
        return {key: _typed(f"{name}.{key}", item, parts[1]) for key, item in value.items()}
    if of is list:
        return [_typed(f"an item of {name}", item, parts[0]) for item in value]
    return value
