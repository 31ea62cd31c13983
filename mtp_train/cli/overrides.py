"""What an override of the command line says: the one place that reads `key=value`.

The rule, by what the key holds:

    a text          what follows the first `=`, character by character; a text in quotes loses them
    a source        (an entry of data.sets, evaluate.sets, regenerate.prompts) likewise, but for a [list] or {mapping}
    anything else   Hydra's grammar; what that can't parse is YAML if it is a [list] or {mapping}, else a text

With `-m`, several values in Hydra's grammar are a sweep, whatever the key holds. Knows no key by its name.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import yaml  # type: ignore[import-untyped]
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import (
    ChoiceSweep,
    Override,
    Quote,
    QuotedString,
    Transformer,
)
from hydra.errors import HydraException
from omegaconf._utils import get_yaml_loader

from mtp_train.core.errors import UserError

TEXT, SOURCE, OTHER = "text", "source", "other"  # what a key holds


@dataclasses.dataclass(frozen=True)
class Assignment:
    """An override, as it was typed. `+key` and `++key` are `key`.

    Attributes:
        text: after the first `=`; None where the key is to be taken away (`~key`).
    """

    key: str
    text: str | None


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


def read_override(item: str) -> Assignment:
    """Split an override at its first `=`."""
    key, equals, text = item.partition("=")
    if key.startswith("~") and not equals:
        return Assignment(key[1:], None)
    if not equals or not key.lstrip("+") or key.startswith("~"):
        raise UserError(
            "overrides must be key=value, or ~key to take a key away", item, "correct it"
        )
    return Assignment(key.lstrip("+"), text)


def read_value(key: str, text: str, holds: str) -> Any:
    """The value that a text stands for, where the key holds TEXT, SOURCE or OTHER."""
    parsed = _parsed(text)
    swept = parsed is not None and parsed.is_sweep_override()
    if holds == TEXT:
        return parsed.value() if parsed and _in_quotes(text) and not swept else text
    if parsed is None:
        return _structure(text)
    if swept:
        if holds == SOURCE:
            return text
        raise UserError(
            "several values for a key are a sweep",
            f"{key}={text}",
            "add -m, or write a list as key=[a,b] and a text as key='\"a,b\"'",
        )
    value = parsed.value()
    return value if holds == OTHER or isinstance(value, list | dict) or _in_quotes(text) else text


def quoted(text: str) -> str:
    """A value that is read as this very text, whatever is in it and whatever the key holds."""
    return QuotedString(text, Quote.double).with_quotes()


def alternatives(overrides: list[str], is_text: Callable[[str], bool]) -> list[Alternatives]:
    """A sweep's command line in Hydra's grammar: `head=mtp,eagle`, `train.seed=range(0,3)`, `head=glob(e*)`.

    Of overrides of the same key the last one counts. Hydra must be initialised.

    Args:
        is_text: whether a key holds a text, whose values are then kept as they were typed.
    """
    parser = OverridesParser.create(GlobalHydra.instance().config_loader())
    found: dict[str, Alternatives] = {}
    for item in overrides:
        key = read_override(item).key
        found.pop(key, None)
        found[key] = _alternatives(parser, key, item, is_text(key))
    return list(found.values())


def _alternatives(parser: OverridesParser, key: str, item: str, text: bool) -> Alternatives:
    try:
        (override,) = parser.parse_overrides([item])
    except HydraException:
        override = None
    if override is None or not override.is_sweep_override():
        return Alternatives(key, (item,), swept=False)
    try:
        values = [_typed(value) for value in override.sweep_iterator()]
    except HydraException as error:  # an interval
        raise UserError(
            "a sweep must have values to list", f"{item} ({error})", "name them"
        ) from error
    choice = override.value()
    if text and isinstance(choice, ChoiceSweep) and choice.simple_form:
        parts = item.partition("=")[2].split(",")
        values = [part.strip() for part in parts] if len(parts) == len(values) else values
    if not values:
        raise UserError("a sweep must have values", item, "correct the override")
    prefix = item.partition("=")[0]
    lines = tuple(dict.fromkeys(f"{prefix}={value}" for value in values))
    return Alternatives(key, lines, swept=True)


def _typed(value: Any) -> str:
    """A value of a sweep, as it would be typed alone."""
    return value if isinstance(value, str) else Transformer.str(value)


def _parsed(text: str) -> Override | None:
    """A value by Hydra's grammar; None if that can't parse it."""
    try:
        return OverridesParser.create().parse_override(f"key={text}")
    except HydraException:
        return None


def _in_quotes(text: str) -> bool:
    return len(text) > 1 and text[0] == text[-1] and text[0] in "\"'"


def _structure(text: str) -> Any:
    """A list or a mapping as YAML writes it, with letters that Hydra's grammar has not; else the text."""
    if text[:1] not in ("[", "{"):
        return text
    try:
        return parse_yaml(text)
    except ValueError:
        return text


def parse_yaml(text: str) -> Any:
    """A YAML document, by OmegaConf's loader: no key twice, 1e-3 is a number and a date a text; else `ValueError`."""
    try:
        return yaml.load(text, Loader=get_yaml_loader())
    except yaml.YAMLError as error:
        raise ValueError(str(error)) from error
