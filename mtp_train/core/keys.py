"""Which configuration keys change a stage's result: said once, beside each key, and read wherever it matters.

A dataclass field that says nothing changes the result (`RESULT`), so a new key never lets unlike work be mixed.
Knows no stage.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, Field, dataclass, field, fields, is_dataclass
from typing import Any, get_type_hints

RESULT = "result"  # work that was begun with another value is no part of this result
STEPS = "steps"  # as RESULT, but go_on=true takes the new value from the next step on
SPREAD = "spread"  # how work is spread: half-done work goes on, a finished result is another
END = "end"  # decides at the end what is kept or shown: all work goes on, finished or not
NOTHING = "nothing"  # changes no result
EFFECTS = (RESULT, STEPS, SPREAD, END, NOTHING)
CHANGES = "changes"


def key(default: Any, changes: str) -> Any:
    """A dataclass field with its default (a class or function makes it) and what another value changes."""
    assert changes in EFFECTS
    metadata = {CHANGES: changes}
    if callable(default):
        return field(default_factory=default, metadata=metadata)
    return field(default=default, metadata=metadata)


@dataclass(frozen=True)
class Value:
    """One input of a stage.

    Attributes:
        changes: what another value changes.
        new: what it changes where none was noted.
        default: what counts as noted where none was: an earlier version may not have had the key.
    """

    value: Any
    changes: str = RESULT
    new: str = RESULT
    default: Any = None


Inputs = dict[str, Value]  # dotted key -> value


def config_inputs(prefix: str, config: Any) -> Inputs:
    """Every key of a typed configuration but those that change nothing."""
    found: Inputs = {}
    for item in fields(config):
        changes = item.metadata.get(CHANGES, RESULT)
        value = getattr(config, item.name)
        if changes == NOTHING:
            continue
        if is_dataclass(value):
            found |= config_inputs(f"{prefix}.{item.name}", value)
            continue
        # A dictionary by its own keys, where each of them changes the result.
        named, usual = {f"{prefix}.{item.name}": value}, {f"{prefix}.{item.name}": _default(item)}
        parts = dict(_flat(named)) if changes == RESULT else named
        defaults = dict(_flat(usual)) if changes == RESULT else usual
        found |= {
            name: Value(one, changes, changes, defaults.get(name)) for name, one in parts.items()
        }
    return found


def effects(prefix: str, cls: Any) -> dict[str, str]:
    """What each key of a configuration's dataclass changes; of nested ones what the outer key says."""
    hints = get_type_hints(cls)
    found: dict[str, str] = {}
    for item in fields(cls):
        name, changes = f"{prefix}{item.name}", item.metadata.get(CHANGES)
        if is_dataclass(hints[item.name]):
            inner = effects(f"{name}.", hints[item.name])
            found |= dict.fromkeys(inner, changes) if changes else inner
        else:
            found[name] = changes or RESULT
    return found


def inputs(values: Mapping[str, Any], changes: str = RESULT, new: str = RESULT) -> Inputs:
    """Inputs that are no configuration, such as digests of files; dicts by their own keys.

    Args:
        new: what a value changes where none was noted, such as that of one more set.
    """
    return {name: Value(value, changes, new) for name, value in _flat(values)}


def plain(found: Inputs) -> dict[str, Any]:
    """The values as JSON gives them back."""
    read: dict[str, Any] = json.loads(
        json.dumps({name: item.value for name, item in found.items()})
    )
    return read


@dataclass(frozen=True)
class Difference:
    """A key whose value is another one now."""

    name: str
    before: Any
    now: Any
    changes: str

    def __str__(self) -> str:
        return f"{self.name} {_short(self.before)} -> {_short(self.now)}"


def differences(before: Mapping[str, Any], now: Inputs) -> list[Difference]:
    """Keys that differ from values that were noted earlier, by name."""
    current = plain(now)
    found = []
    for name in sorted({*before, *current}):
        wanted = now.get(name, Value(None))
        noted = before.get(name, wanted.default)
        if noted != current.get(name):
            changes = wanted.changes if name in before else wanted.new
            found.append(Difference(name, noted, current.get(name), changes))
    return found


def _default(item: Field[Any]) -> Any:
    if item.default_factory is not MISSING:
        return item.default_factory()
    return None if item.default is MISSING else item.default


def _flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _short(value: Any) -> str:
    text = "nothing" if value is None else json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 60 else f"{text[:57]}..."
