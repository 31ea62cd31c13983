"""The head families by name. Knows no training and no engine.

Shapes: V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from mtp_train.core.errors import UserError, did_you_mean
from mtp_train.heads import dflash, draft_model, dspark, eagle, eagle3, medusa, mtp, peagle
from mtp_train.heads.base import DraftHead
from mtp_train.heads.block import POSITIONS
from mtp_train.models.target import Target


@dataclass(frozen=True)
class Family:
    """A family's configuration, its module (target, config), and a fresh head (target, config, seed, counts)."""

    config: type[Any]
    head: Callable[[Target, Any], DraftHead]
    build: Callable[[Target, Any, int, Tensor | None], DraftHead]


FAMILIES = {
    "mtp": Family(mtp.MtpConfig, mtp.MtpHead, mtp.build),
    "eagle": Family(eagle.EagleConfig, eagle.EagleHead, eagle.build),
    "eagle3": Family(eagle3.Eagle3Config, eagle3.Eagle3Head, eagle3.build),
    "peagle": Family(peagle.PEagleConfig, peagle.PEagleHead, peagle.build),
    "medusa": Family(
        medusa.MedusaConfig,
        medusa.MedusaHead,
        lambda target, config, _seed, counts_V: medusa.build(target, config, counts_V),
    ),
    "dflash": Family(dflash.DFlashConfig, dflash.DFlashHead, dflash.build),
    "dspark": Family(dspark.DSparkConfig, dspark.DSparkHead, dspark.build),
    "draft_model": Family(
        draft_model.DraftModelConfig,
        draft_model.DraftModelHead,
        lambda target, config, seed, _counts: draft_model.build(target, config, seed),
    ),
}


def family_of(name: Any) -> Family:
    """The family of that name; an unknown name is an error that lists those known."""
    if name not in FAMILIES:
        rule = "head.family must be one of " + ", ".join(FAMILIES)
        raise UserError(rule, name, did_you_mean(name, FAMILIES))
    return FAMILIES[name]


def build_head(
    target: Target, config: Any, seed: int = 0, counts_V: Tensor | None = None
) -> DraftHead:
    """A fresh head of the config's family, in float32 on the target's device.

    Args:
        config: a family's dataclass.
        counts_V: how often each token is trained; a draft vocabulary is chosen by it.
    """
    return family_of(config.family).build(target, config, seed, counts_V)


def make_settings(settings: dict[str, Any]) -> Any:
    """A family's dataclass from the settings that a head was saved with: `asdict(head.config)`."""
    family = family_of(settings["family"])
    known = {item.name for item in fields(family.config)}
    if not set(settings) <= known:
        raise UserError(
            f"a head of family {settings['family']} has the settings " + ", ".join(sorted(known)),
            ", ".join(sorted(set(settings) - known)),
            "update mtp_train, or use another checkpoint",
        )
    return family.config(**settings)


def make_head(target: Target, settings: dict[str, Any]) -> DraftHead:
    """A head with its tensors unset, on the CPU, of the settings that it was saved with."""
    return family_of(settings["family"]).head(target, make_settings(settings))


def positions_of(config: Any) -> int:
    """The longest sequence that a head of this config was made for; 0: as long as its target's. Loads no weights."""
    if isinstance(config, draft_model.DraftModelConfig):
        return draft_model.positions(draft_model.settle(config))
    return int(getattr(config, "layer", {}).get(POSITIONS, 0))


def outline_head(target: Target, config: Any) -> DraftHead:
    """A head without storage, for a target without: shapes alone. A draft vocabulary is as large as it may be."""
    drafted = getattr(config, "draft_vocabulary", 0)
    if drafted > target.vocab_size:
        config = replace(config, draft_vocabulary=target.vocab_size)
    if isinstance(config, eagle3.Eagle3Config):
        config = eagle3.settle(config, target, config.draft_vocabulary)
    if isinstance(config, peagle.PEagleConfig):
        config = peagle.settle(config, target, None)
    if isinstance(config, dflash.DFlashConfig):
        config = dflash.settle(config, target, None)
    if isinstance(config, draft_model.DraftModelConfig):
        config = draft_model.settle(config)
    with torch.device("meta"):
        return family_of(config.family).head(target, config)
