"""What a head is trained on and what it is measured on stay apart: no file is both, and no conversation."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from mtp_train.core.errors import UserError
from mtp_train.core.progress import say
from mtp_train.core.records import Accounting
from mtp_train.text.files import same_data
from mtp_train.text.overlap import Item, distinctive, offered, offered_among, seeks
from mtp_train.text.sources import (
    DataConfig,
    SourceConfig,
    answered_conversations,
    answers,
    asked_by,
    items,
    read_sources,
)

TRAIN = "train"


def require_other_files(config: Mapping[str, Any]) -> None:
    """Raise if a file that is trained on is measured on too, whichever keys name it. Reads no row."""
    sets = _named_sets(config)
    for trained, trained_sources in sets.items():
        for measured, measured_sources in sets.items():
            if not _is_trained(trained) or _is_trained(measured):
                continue
            for one in trained_sources:
                for other in measured_sources:
                    shared = same_data(_names(one), _names(other))
                    if shared:
                        raise UserError(
                            f"{measured} must not be the data of {trained}",
                            shared,
                            "hold out whole conversations, in a file of their own",
                        )


def held_out_prompts(prompts: Mapping[str, Any]) -> dict[bytes, str]:
    """What the sets of prompts beside train offer (see text.overlap)."""
    named = {name: read_sources(value) for name, value in prompts.items() if name != TRAIN}
    return _offered((name, items(sources)) for name, sources in named.items())


def held_out_text(data: DataConfig, answered: Mapping[str, Path]) -> dict[bytes, str]:
    """What the held-out chats of one's own and the sets of answers beside train offer."""
    own = data.sources("heldout")
    sets = [("heldout", items(own))] if own else []
    sets += [(name, _asked(path)) for name, path in answered.items() if name != TRAIN]
    return _offered(sets)


def trained_among(
    sources: Sequence[SourceConfig], data: DataConfig, answered: Path
) -> dict[bytes, str]:
    """What the training data offers of what `sources` ask; files that are no longer there offer nothing."""
    sought = distinctive(items(sources), seeks)
    found = offered_among(_asked(answered), sought, TRAIN) if answered.is_file() else {}
    for source in data.sources(TRAIN):
        try:
            found |= offered_among(items([source]), sought, TRAIN)
        except UserError:
            say(f"overlap with {source.path} isn't known: it can't be read any more")
    return found


def _offered(sets: Iterable[tuple[str, Iterator[Item]]]) -> dict[bytes, str]:
    return {mark: name for name, found in sets for mark in offered(found, name)}


def _asked(path: Path) -> Iterator[Item]:
    return map(asked_by, answered_conversations(answers(path, Accounting())))


def _named_sets(config: Mapping[str, Any]) -> dict[str, list[SourceConfig]]:
    """The sources of every key that names some."""
    sets = {
        "regenerate.prompts": config["regenerate"]["prompts"],
        "data.sets": config["data"]["sets"],
        "evaluate.sets": config["evaluate"]["sets"],
    }
    return {
        f"{key}.{name}": _sources(f"{key}.{name}", value)
        for key, values in sets.items()
        for name, value in values.items()
    }


def _sources(key: str, value: Any) -> list[SourceConfig]:
    try:
        return read_sources(value or [])
    except UserError as error:
        raise UserError(f"{key}: {error.rule}", error.received, error.remedy) from error


def _is_trained(key: str) -> bool:
    return key in ("regenerate.prompts.train", "data.sets.train")


def _names(source: SourceConfig) -> tuple[str, str, str]:
    return source.path, source.split, source.name
