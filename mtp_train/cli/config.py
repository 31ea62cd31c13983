"""Hydra composes, recipes overlay, dataclasses check. Nothing below `cli/` sees a config object.

A recipe is `recipes/<name>/config.yaml`: values that stand between the defaults of `conf/` and the command line.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import re
from pathlib import Path
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, Quote, QuotedString
from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from mtp_train.core.errors import UserError

T = TypeVar("T")
FREE = (
    "regenerate.prompts",
    "regenerate.limits",
    "data.sets",
    "evaluate.sets",
    "precompute.vllm.engine",
    "target.chat_template_kwargs",
    "head.layer",
)
PACKAGE = Path(__file__).resolve().parents[1]


def load_config(overrides: list[str]) -> dict[str, Any]:
    """The resolved configuration of a command line such as `recipe=smollm2_mtp_cpu train.epochs=2`."""
    name = next(
        (item.split("=", 1)[1] for item in reversed(overrides) if item.startswith("recipe=")), ""
    )
    rest = [_free(item) for item in overrides if not item.startswith("recipe=")]
    recipe = recipe_overrides(name) if name else []
    try:
        with initialize_config_dir(str(conf_folder()), version_base="1.3"):
            composed = compose("config", overrides=[*recipe, *rest])
            resolved = OmegaConf.to_container(composed, resolve=True, throw_on_missing=True)
    except (HydraException, OmegaConfBaseException) as error:
        raise _explained(str(error), rest) from error
    assert isinstance(resolved, dict)
    return {str(key): value for key, value in resolved.items()} | {"recipe": name}


@dataclasses.dataclass(frozen=True)
class Alternatives:
    """An override of a command line, and those that a sweep makes of it.

    Attributes:
        key: without Hydra's prefixes.
        lines: the overrides `key=value` that stand in its place; one if it is no sweep.
        swept: whether Hydra's grammar says that it is a sweep, be it of one value.
    """

    key: str
    lines: tuple[str, ...]
    swept: bool


def alternatives(overrides: list[str]) -> list[Alternatives]:
    """A sweep's command line in Hydra's grammar: `head=mtp,eagle`, `train.seed=range(0,3)`, `head=glob(e*)`.

    Of overrides of the same key the last one counts.
    """
    found: dict[str, Alternatives] = {}
    try:
        with initialize_config_dir(str(conf_folder()), version_base="1.3"):
            parser = OverridesParser.create(GlobalHydra.instance().config_loader())
            for override in parser.parse_overrides(overrides):
                found[override.get_key_element()] = _alternatives(override)
    except HydraException as error:
        raise _explained(str(error), overrides) from error
    return list(found.values())


def quoted(text: str) -> str:
    """A value that Hydra reads as this very text, whatever is in it."""
    return QuotedString(text, Quote.double).with_quotes()


def _alternatives(override: Override) -> Alternatives:
    key, line = override.get_key_element(), str(override.input_line)
    if not override.is_sweep_override():
        return Alternatives(key.lstrip("+~"), (line,), swept=False)
    lines = tuple(dict.fromkeys(f"{key}={value}" for value in override.sweep_string_iterator()))
    if not lines:
        raise UserError("a sweep must have values", line, "correct the override")
    return Alternatives(key.lstrip("+~"), lines, swept=True)


def _free(override: str) -> str:
    """Sets of prompts are named freely: such keys are set whether or not the defaults have them."""
    return f"++{override}" if override.startswith(FREE) else override


def _explained(reason: str, overrides: list[str]) -> UserError:
    """Hydra's complaint in terms of our keys."""
    missing = re.search(r"full_key: (\S+)", reason)
    if "Missing mandatory value" in reason and missing:
        return UserError(f"{missing[1]} is needed", "nothing", f"add {missing[1]}=VALUE")
    if "--multirun" in reason:
        several = re.search(r"argument '(.+?)'\s", reason)
        return UserError(
            "several values for a key are a sweep",
            several[1] if several else " ".join(overrides),
            "add -m, or write a list as key=[a,b] and a text as key='\"a,b\"'",
        )
    unknown = re.search(r"Could not override '([^']+)'", reason)
    if unknown:
        with initialize_config_dir(str(conf_folder()), version_base="1.3"):
            known = _keys(OmegaConf.to_container(compose("config")))
        close = difflib.get_close_matches(unknown[1], known, n=1)
        remedy = f"did you mean {close[0]}?" if close else "see conf/ for the keys"
        return UserError("an override must name a key of the configuration", unknown[1], remedy)
    received = f"{' '.join(overrides)} ({' '.join(reason.split())})"
    return UserError("overrides must be key=value", received, "see conf/ for the keys")


def _keys(values: Any, prefix: str = "") -> list[str]:
    if not isinstance(values, dict):
        return [prefix.removesuffix(".")]
    return [key for name, value in values.items() for key in _keys(value, f"{prefix}{name}.")]


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
            text = json.dumps(value, ensure_ascii=False)
            rows.append((_free(f"{prefix}{key}"), text.replace("{recipe}", folder)))
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
    if kind is Any:
        return value
    of, parts = get_origin(kind) or kind, get_args(kind)
    if isinstance(of, type) and dataclasses.is_dataclass(of) and isinstance(value, dict):
        return section({name: value}, name, of)
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
