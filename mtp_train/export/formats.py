"""The serving layouts by name, and which of them a head goes to unless another is asked for. Knows no run folder."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from mtp_train.core.errors import UserError
from mtp_train.export.deepseek_nextn import DeepseekNextn
from mtp_train.export.dflash import DFlash, DSpark
from mtp_train.export.draft_model import DraftModel
from mtp_train.export.eagle import Eagle, EagleSglang
from mtp_train.export.eagle3 import Eagle3
from mtp_train.export.files import tensor_names
from mtp_train.export.layout import Layout
from mtp_train.export.medusa import Medusa
from mtp_train.export.mimo import MimoMtp
from mtp_train.export.mtp_train_vllm import MtpTrainVllm
from mtp_train.export.peagle import PEagle
from mtp_train.export.speculators import Speculators
from mtp_train.export.stitched import Stitched

# In the order in which a folder is recognised.
ALL: tuple[Layout, ...] = (
    MimoMtp(),
    Eagle(),
    EagleSglang(),
    Eagle3(),
    PEagle(),
    Speculators(),
    DeepseekNextn(),
    Medusa(),
    DFlash(),
    DSpark(),
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
    "peagle": "peagle",
    "medusa": "medusa",
    "dflash": "dflash",
    "dspark": "dspark",
    "draft_model": "draft_model",
}


def usual(name: str, family: str) -> Layout | None:
    """The layout of that name, or with `auto` the family's usual one; none if it has none."""
    known = USUAL.get(family, "") if name == AUTO else name
    return LAYOUTS.get(known)


# Published heads of kinds that no family here is: patterns of tensor names that only they have.
NOT_READ = {
    "a Domino head": ("prefix_gru.*",),
    "an EAGLE head with parallel Medusa heads": ("parallel_draft_heads.*",),
    "a HASS head, or one of EAGLE-1 with norms before fc": (
        "embedding_layernorm.weight",
        "hidden_states_layernorm.weight",
        "pre_lm_head_layernorm.weight",
    ),
    "an EAGLE-3 head with latent attention": (
        "midlayer.self_attn.kv_a_proj_with_mqa.weight",
        "layers.0.hidden_norm.weight&layers.0.self_attn.kv_a_proj_with_mqa.weight",
    ),
    "an EAGLE-3 head whose later layers are SGLang's": ("additional_layers.*",),
    "Qwen3-Next's MTP layers (begin a head as them: head.init=native, with their target)": (
        "mtp.fc.weight",
    ),
}


def recognised(config: Mapping[str, Any], folder: Path) -> Layout:
    """The layout that a folder is of, by its tensors' names; by its config.json where several have such names."""
    names = {name.removeprefix("model.") for name in tensor_names(folder)}
    _require_read(names, folder)
    found = [layout for layout in ALL if not difference(layout, names)]
    named = [layout for layout in found if layout.recognises(config)]
    if found:
        return (named or found)[0]
    tried = "; ".join(f"{layout.name}: {difference(layout, names)}" for layout in ALL)
    raise UserError(
        "a head to import must have the tensors of a known layout",
        f"{folder} with architectures {config.get('architectures')} ({tried})",
        "compare its tensors with those in docs/exports.md",
    )


def difference(layout: Layout, names: Collection[str]) -> str:
    """The first tensor by which a folder is not of a layout; empty if there is none."""
    for needed in layout.needs:
        if not any(_matching(one, names) for one in needed.split("|")):
            return f"no {needed.split('|')[0]}"
    odd = [name for pattern in layout.never for name in _matching(pattern, names)]
    return f"{odd[0]} is there" if odd else ""


def _require_read(names: Collection[str], folder: Path) -> None:
    """Raise if the tensors are those of a published kind of head that is not read."""
    for kind, signs in NOT_READ.items():
        for sign in signs:
            found = [_matching(part, names) for part in sign.split("&")]
            if all(found):
                raise UserError(
                    "a head to import must be of a family that is trained here",
                    f"{folder} with {found[-1][0]}: {kind}: not supported yet",
                    "import another head; docs/heads.md lists the families",
                )


def _matching(pattern: str, names: Collection[str]) -> list[str]:
    return sorted(name for name in names if fnmatchcase(name, pattern))
