"""The serving layouts by name, and which of them a head goes to unless another is asked for. Knows no run folder."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mtp_train.core.errors import UserError
from mtp_train.export.deepseek_nextn import DeepseekNextn
from mtp_train.export.draft_model import DraftModel
from mtp_train.export.eagle import Eagle, EagleSglang
from mtp_train.export.eagle3 import Eagle3
from mtp_train.export.files import tensor_names
from mtp_train.export.layout import Layout
from mtp_train.export.medusa import Medusa
from mtp_train.export.mimo import MimoMtp
from mtp_train.export.mtp_train_vllm import MtpTrainVllm
from mtp_train.export.speculators import Speculators
from mtp_train.export.stitched import Stitched

# In the order in which a folder is recognised.
ALL: tuple[Layout, ...] = (
    MimoMtp(),
    Eagle(),
    EagleSglang(),
    Eagle3(),
    Speculators(),
    DeepseekNextn(),
    Medusa(),
    MtpTrainVllm(),
    Stitched(),
    DraftModel(),  # any model is one
)
LAYOUTS: dict[str, Layout] = {layout.name: layout for layout in ALL}
AUTO = "auto"
USUAL = {  # of a head's family
    "mtp": "mimo_mtp",
    "eagle": "eagle",
    "eagle3": "eagle3",
    "medusa": "medusa",
    "draft_model": "draft_model",
}


def usual(name: str, family: str) -> Layout | None:
    """The layout of that name, or with `auto` the family's usual one; none if it has none."""
    known = USUAL.get(family, "") if name == AUTO else name
    return LAYOUTS.get(known)


def recognised(config: Mapping[str, Any], folder: Path) -> Layout:
    """The layout that a folder is of, by its config.json; by a tensor's name where that is another model's as well."""
    for layout in LAYOUTS.values():
        if layout.recognises(config) and layout.marked(tensor_names(folder)):
            return layout
    raise UserError(
        "a head to import must be in a known layout: " + ", ".join(LAYOUTS),
        f"{folder} with architectures {config.get('architectures')}",
        "see `mtp-train export --list` for the formats",
    )
