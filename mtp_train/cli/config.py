"""Hydra composes, recipes overlay, dataclasses check. Nothing below `cli/` sees a config object.

A recipe is `recipes/<name>/config.yaml`: values that stand between the defaults of `conf/` and the command line.
Mappings merge, anything else replaces what was there, and values are what YAML says: nothing is interpolated.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from functools import cache
from pathlib import Path
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from mtp_train.cli import overrides as grammar
from mtp_train.cli.overrides import OTHER, SOURCE, TEXT, Alternatives, read_override, read_value
from mtp_train.core.errors import UserError, did_you_mean, nearest

T = TypeVar("T")
SOURCES = ("data.sets", "evaluate.sets", "regenerate.prompts")  # hold sources by name
PACKAGE = Path(__file__).resolve().parents[1]


def load_config(overrides: list[str]) -> dict[str, Any]:
    """The resolved configuration of a command line such as `recipe=smollm2_mtp_cpu train.epochs=2`."""
    lines = [read_override(item) for item in overrides]
    name = next((line.text or "" for line in reversed(lines) if line.key == "recipe"), "")
    recipe = load_recipe(name) if name else {}
    known = groups()
    chosen = {key: value for key, value in recipe.items() if key in known and type(value) is str}
    values = {key: value for key, value in recipe.items() if key not in chosen}
    typed = {line.key: line.text for line in lines if line.key in known and line.text is not None}
    chosen |= {key: read_value(key, text, OTHER) for key, text in typed.items()}
    config = Composition(chosen)
    for key, value in values.items():
        config.set(_parts(key), value, f" (in recipe {name})")
    for line in lines:
        if line.key not in (*known, "recipe"):
            config.override(line.key, line.text)
    return config.resolved() | {"recipe": name}


class Composition:
    """The defaults of `conf/`, and what is put in their place.

    Keys are those of the defaults. A mapping that is empty there (`data.sets`, `head.layer`) takes any name.
    """

    def __init__(self, chosen: Mapping[str, Any]) -> None:
        """chosen: of groups of `conf/`, an option each: {"head": "eagle"}."""
        for group, option in chosen.items():
            if option not in groups()[group]:
                rule = f"{group} must be one of " + ", ".join(groups()[group])
                remedy = f"choose one; a key of it is written {group}.KEY=VALUE"
                raise UserError(rule, option, did_you_mean(option, groups()[group], remedy))
        self.defaults, self.needed = _defaults(tuple(sorted(chosen.items())))
        self.free = frozenset(_free_keys(self.defaults))
        self.config = deepcopy(self.defaults)

    def override(self, key: str, text: str | None) -> None:
        """Put an override of the command line in place; None takes the key away."""
        parts = _parts(key)
        if text is not None:
            self.set(parts, read_value(key, text, self.holds(parts)))
            return
        place = self._place(parts, "")
        if not self._free(parts) or parts[-1] not in place:
            rule = "~ takes away a name that a recipe has given, as in ~regenerate.prompts.ood"
            raise UserError(rule, key, "give a key of conf/ another value instead")
        del place[parts[-1]]

    def set(self, parts: list[str], value: Any, where: str = "") -> None:
        """Put a value in place; mappings merge, but for a source, which is one thing.

        where: it comes from, for messages.
        """
        key = ".".join(parts)
        place, last = self._place(parts, where), parts[-1]
        if last not in place and not self._free(parts):
            raise self._unknown(key, where)
        held = place.get(last)
        if isinstance(held, dict) and isinstance(value, dict) and not _is_source(parts):
            for name, item in value.items():
                self.set(
                    [*parts, *([str(name)] if self._any_name(key) else _parts(name))], item, where
                )
        elif isinstance(held, dict) and not isinstance(value, dict) and not self._free(parts):
            example = f"{key}.{next(iter(held), 'NAME')}=VALUE"
            raise UserError(f"{key} holds keys of its own", f"{value!r}{where}", f"write {example}")
        else:
            place[last] = value

    def holds(self, parts: list[str]) -> str:
        """What a key holds, for the grammar of the command line."""
        if _is_source(parts):
            return SOURCE
        held: Any = self.defaults
        for part in parts:
            held = held.get(part) if isinstance(held, dict) else None
        return TEXT if isinstance(held, str) or ".".join(parts) in self.needed else OTHER

    def resolved(self) -> dict[str, Any]:
        """The configuration; a key that was needed and not given is an error."""
        for key in self.needed:
            if self._place(_parts(key), "").get(_parts(key)[-1]) is None:
                raise UserError(f"{key} is needed", "nothing", f"add {key}=VALUE")
        return self.config

    def _place(self, parts: list[str], where: str) -> dict[str, Any]:
        """The mapping that holds a key; made where names are free."""
        place = self.config
        for depth, part in enumerate(parts[:-1], start=1):
            if part not in place and self._free(parts[:depth]):
                place[part] = {}
            if part not in place:
                raise self._unknown(".".join(parts), where)
            place = place[part]
            if not isinstance(place, dict):
                rule = f"{'.'.join(parts[:depth])} is a value without keys"
                raise UserError(
                    rule, f"{'.'.join(parts)}{where}", "give it as a mapping, {key: value}"
                )
        return place

    def _free(self, parts: list[str]) -> bool:
        """Whether a key lies where any name may be given."""
        return any(self._any_name(".".join(parts[:depth])) for depth in range(1, len(parts)))

    def _any_name(self, key: str) -> bool:
        return key in self.free

    def _unknown(self, key: str, where: str) -> UserError:
        """An error that names the key that was meant, as far as that can be told."""
        parts, level, depth = _parts(key), self.defaults, 0
        while isinstance(level.get(parts[depth]), dict):
            level, depth = level[parts[depth]], depth + 1
        near = nearest(parts[depth], level)
        elsewhere = [name for name in _keys(self.defaults) if _parts(name)[-1] == parts[-1]]
        if near and not (elsewhere and len(parts) == 1):
            remedy = f"did you mean {'.'.join([*parts[:depth], near, *parts[depth + 1 :]])}?"
        elif elsewhere:
            remedy = f"did you mean {' or '.join(elsewhere)}?"
        else:
            remedy = (
                f"choose one of {', '.join('.'.join([*parts[:depth], name]) for name in level)}"
            )
        return UserError("a key must be one of the configuration's", f"{key}{where}", remedy)


def sweep_alternatives(overrides: list[str]) -> list[Alternatives]:
    """Every override of a sweep's command line with its alternatives."""
    heads = [Composition({"head": family}) for family in groups()["head"]]

    def is_text(key: str) -> bool:
        return any(head.holds(_parts(key)) == TEXT for head in heads)

    with _hydra():
        return grammar.alternatives(overrides, is_text)


def groups() -> dict[str, list[str]]:
    """The groups of `conf/`, each with its options."""
    found: dict[str, list[str]] = {}
    for path in sorted(conf_folder().glob("*/*.yaml")):
        found.setdefault(path.parent.name, []).append(path.stem)
    return found


@cache
def _defaults(chosen: tuple[tuple[str, str], ...]) -> tuple[dict[str, Any], frozenset[str]]:
    """What `conf/` says with these options, and the keys that it leaves to the user; those are None."""
    with _hydra():
        composed = compose("config", overrides=[f"{group}={option}" for group, option in chosen])
    needed = OmegaConf.missing_keys(composed)
    for key in needed:
        OmegaConf.update(composed, key, None)
    values = OmegaConf.to_container(composed, resolve=True)
    assert isinstance(values, dict)
    return {str(key): value for key, value in values.items()}, frozenset(needed)


@contextmanager
def _hydra() -> Iterator[None]:
    with initialize_config_dir(str(conf_folder()), version_base="1.3"):
        yield


def _parts(key: Any) -> list[str]:
    return str(key).split(".")


def _is_source(parts: list[str]) -> bool:
    return ".".join(parts[:-1]) in SOURCES


def _keys(values: Any, prefix: str = "") -> list[str]:
    """The keys that hold a value, in dotted form; `NAME` where any name may be given."""
    if not isinstance(values, dict):
        return [prefix.removesuffix(".")]
    if not values:
        return [f"{prefix}NAME"]
    return [key for name, value in values.items() for key in _keys(value, f"{prefix}{name}.")]


def _free_keys(values: Any) -> list[str]:
    return [key.removesuffix(".NAME") for key in _keys(values) if key.endswith(".NAME")]


def conf_folder() -> Path:
    """The configuration: inside the installed package, or beside it in a checkout."""
    return next(folder for folder in (PACKAGE / "conf", PACKAGE.parent / "conf") if folder.is_dir())


def load_recipe(name: str) -> dict[str, Any]:
    """A recipe's values; `{recipe}` in a text stands for its folder."""
    found = recipe_folder(name) / "config.yaml"
    try:
        values = grammar.parse_yaml(found.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError("a recipe must be YAML", f"{found} ({error})", "correct it") from error
    if not isinstance(values, dict):
        raise UserError("a recipe must be a mapping of keys", f"{found}: {values!r}", "correct it")
    placed = _placed(values, str(found.parent))
    return {str(key): value for key, value in placed.items()}


def recipe_folder(name: str) -> Path:
    """The folder of a recipe: below `recipes/` here, or in the checkout."""
    folders = [Path("recipes"), PACKAGE.parent / "recipes"]
    for folder in folders:
        if (folder / name / "config.yaml").is_file():
            return folder / name
    known = sorted(
        {path.parent.name for folder in folders for path in folder.glob("*/config.yaml")}
    )
    rule = "a recipe must be one of " + (", ".join(known) or "recipes/*/config.yaml")
    raise UserError(rule, name, did_you_mean(name, known))


def _placed(value: Any, folder: str) -> Any:
    if isinstance(value, str):
        return value.replace("{recipe}", folder)
    if isinstance(value, list):
        return [_placed(item, folder) for item in value]
    if isinstance(value, dict):
        return {key: _placed(item, folder) for key, item in value.items()}
    return value


def section(config: dict[str, Any], name: str, cls: type[T]) -> T:
    """The dataclass of a config section; an unknown key or a wrong type is an error that lists the known keys."""
    values = config[name]
    hints = get_type_hints(cls)
    known = {item.name for item in dataclasses.fields(cls)}  # type: ignore[arg-type]
    unknown = sorted(set(values) - known)
    if unknown:
        raise UserError(
            f"keys of {name} must be among " + ", ".join(sorted(known)),
            ", ".join(unknown),
            did_you_mean(unknown[0], known, "correct it"),
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
        raise UserError(f"{name} must be of type {of.__name__}", repr(value), "correct it")
    if of is dict:
        return {key: _typed(f"{name}.{key}", item, parts[1]) for key, item in value.items()}
    if of is list:
        return [_typed(f"an item of {name}", item, parts[0]) for item in value]
    return value
