"""MTP modules as targets are published with them: read to begin an `mtp` head, and written for engines.

They lie beside the target's own weights, in one of three layouts. With E the embedding of x[p+1] and H the state:

    deepseek     eh_proj([enorm(E) | hnorm(H)])                          model.layers.{L + k}.*, L the target's layers
    mimo         input_proj([hidden_layernorm(H) | token_layernorm(E)])  model.mtp_layers.{k}.*
    qwen3_next   fc([pre_fc_norm_embedding(E) | pre_fc_norm_hidden(H)])  mtp.*, the block in mtp.layers.{k}.*

`deepseek` is DeepSeek-V3/R1's, also GLM-4.5's; `qwen3_next` also Qwen3.5's: its norms multiply by 1 + weight, and its
modules share all but their blocks. (vLLM: deepseek_mtp.py, mimo_mtp.py, qwen3_next_mtp.py.) The block's tensors have
the names of the target's own decoder layer, one matrix per expert, in fp8 with block scales where the target is.

Knows names and equations, no file that is written and no other head.

Shapes: D hidden width, E experts, I their intermediate width.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from mtp_train.core.errors import UserError
from mtp_train.core.progress import say
from mtp_train.heads.block import adds_one
from mtp_train.models.quantised import scale_block, times_scales
from mtp_train.models.target import Target
from mtp_train.models.weights import find_tensors, read_tensors

SCALE = "_scale_inv"  # of an fp8 matrix, behind its name
EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(gate|up|down)_proj\.weight")
LATER = (
    "later.",
    "later_blocks.",
)  # a head's later modules inside its first, and a module's later layers
NOT_WEIGHTS = ("rotary_emb.inv_freq",)


@dataclass(frozen=True)
class Layout:
    """Where a layout has a module's parts.

    Attributes:
        mark: a tensor of module k that no other layout has, of the target's layers L and k.
        block: prefix of module k's block.
        parts: name, {block} standing for that prefix -> name in `MtpHead`.
        shared: likewise, copies of the target's embedding and lm_head.
        hidden_first: the projection's halves are [hidden | embedding].
        one_plus: norms multiply by 1 + weight.
    """

    mark: str
    block: str
    parts: dict[str, str]
    shared: dict[str, str]
    hidden_first: bool = False
    one_plus: bool = False


LAYOUTS = {
    "deepseek": Layout(
        mark="{block}eh_proj.weight",
        block="model.layers.{layer}.",
        parts={
            "{block}enorm.weight": "enorm.weight",
            "{block}hnorm.weight": "hnorm.weight",
            "{block}eh_proj.weight": "eh_proj.weight",
            "{block}shared_head.norm.weight": "final_norm.weight",
        },
        shared={
            "{block}embed_tokens.weight": "embedding",
            "{block}shared_head.head.weight": "lm_head",
        },
    ),
    "mimo": Layout(
        mark="{block}input_proj.weight",
        block="model.mtp_layers.{depth}.",
        parts={
            "{block}token_layernorm.weight": "enorm.weight",
            "{block}hidden_layernorm.weight": "hnorm.weight",
            "{block}input_proj.weight": "eh_proj.weight",
            "{block}final_layernorm.weight": "final_norm.weight",
        },
        shared={},
        hidden_first=True,
    ),
    "qwen3_next": Layout(
        mark="{block}input_layernorm.weight",
        block="mtp.layers.{depth}.",
        parts={
            "mtp.pre_fc_norm_embedding.weight": "enorm.weight",
            "mtp.pre_fc_norm_hidden.weight": "hnorm.weight",
            "mtp.fc.weight": "eh_proj.weight",
            "mtp.norm.weight": "final_norm.weight",
        },
        shared={"mtp.embed_tokens.weight": "embedding", "mtp.lm_head.weight": "lm_head"},
        one_plus=True,
    ),
}


def begin_as_native(target: Target, modules: list[Any]) -> None:
    """Set `MtpHead` modules, in order of their depth, to those in the target's folder.

    Raises:
        UserError: no known layout there, fewer modules, other tensors than the head's, or an embedding or lm_head of
            their own that is not the target's.
    """
    files = find_tensors(_folder(target))
    name, layout = _layout(target, files)
    found = _count(target, files, layout)
    if len(modules) > found:
        raise UserError(
            f"head.init=native needs as many modules as the target has: {found}",
            len(modules),
            "lower head.modules, or begin with fewer and warm start from them",
        )
    for depth, module in enumerate(modules):
        _begin(target, files, layout, depth, module)
    say(f"head: begins as the target's own, {len(modules)} of {found} modules, {name} layout")


@torch.no_grad()
def _begin(
    target: Target, files: Mapping[str, Path], layout: Layout, depth: int, module: Any
) -> None:
    names = [name for name in files if belongs(name, layout, target, depth)]
    set_module(target, read_tensors(files, names), layout, depth, module)


def belongs(name: str, layout: Layout, target: Target, depth: int) -> bool:
    """Whether a tensor is one of module `depth`'s."""
    own = {_at(key, layout, target, depth) for key in layout.parts | layout.shared}
    in_block = name.startswith(_at(layout.block, layout, target, depth))
    return (in_block or name in own) and not name.endswith(NOT_WEIGHTS)


@torch.no_grad()
def set_module(
    target: Target, tensors: dict[str, Tensor], layout: Layout, depth: int, module: Any
) -> None:
    """Set an `MtpHead` module to a layout's tensors of module `depth`, complete."""
    block = _at(layout.block, layout, target, depth)
    parts = {_at(key, layout, target, depth): name for key, name in layout.parts.items()}
    shared = {_at(key, layout, target, depth): name for key, name in layout.shared.items()}
    tensors = dict(tensors)
    _require_shared(
        target, {name: tensors.pop(key) for key, name in shared.items() if key in tensors}
    )
    ours = {
        parts.get(name, f"block.{name.removeprefix(block)}"): value.float()
        for name, value in whole(tensors, scale_block(target.path)).items()
    }
    ours = stack_experts(ours)
    if layout.hidden_first and "eh_proj.weight" in ours:
        ours["eh_proj.weight"] = swap_halves(ours["eh_proj.weight"])
    load(module, ours, one_plus=layout.one_plus)


@torch.no_grad()
def module_tensors(
    target: Target, layout: Layout, depth: int, module: Any, dtype: torch.dtype
) -> dict[str, Tensor]:
    """An `MtpHead` module's tensors by a layout's names, all of them: what `set_module` reads.

    The embedding and lm_head are the target's and not among them.
    """
    block = _at(layout.block, layout, target, depth)
    names = {name: _at(key, layout, target, depth) for key, name in layout.parts.items()}
    ours = {
        name: value.detach().float().cpu()
        for name, value in module.state_dict().items()
        if not name.startswith(LATER) and name != "vocabulary"
    }
    for name, norm in module.named_modules():
        if type(norm).__name__.endswith("RMSNorm") and not name.startswith(LATER):
            ours[f"{name}.weight"] = (
                ours[f"{name}.weight"] + int(adds_one(norm)) - int(layout.one_plus)
            )
    if layout.hidden_first:
        ours["eh_proj.weight"] = swap_halves(ours["eh_proj.weight"])
    return {
        names.get(name, f"{block}{name.removeprefix('block.')}"): value.to(dtype)
        .contiguous()
        .clone()  # slices of a stack share its memory, which a file can't
        for name, value in split_experts(ours).items()
    }


@torch.no_grad()
def load(module: nn.Module, tensors: dict[str, Tensor], *, one_plus: bool) -> None:
    """Load a module's tensors, complete; zero biases of matrices that have none here are dropped.

    one_plus: the tensors' norms multiply by 1 + weight; the module's may or may not.
    """
    state = module.state_dict()
    expected = {name: value for name, value in state.items() if not name.startswith(LATER)}
    tensors = {
        name: value
        for name, value in tensors.items()
        if name in expected or not name.endswith(".bias") or bool(value.any())
    }
    wrong = sorted(set(tensors) ^ set(expected)) or [
        f"{name} {tuple(value.shape)} for {tuple(expected[name].shape)}"
        for name, value in tensors.items()
        if value.shape != expected[name].shape
    ]
    if wrong:
        raise UserError(
            "MTP modules must have the tensors of a head with all norms and the target's own block",
            f"other {', '.join(wrong[:8])}",
            "use their own target; for head.init=native check head.block and head's norms, or choose another init",
        )
    for name, norm in module.named_modules():
        if type(norm).__name__.endswith("RMSNorm") and not name.startswith(LATER):
            tensors[f"{name}.weight"] += int(one_plus) - int(adds_one(norm))
    module.load_state_dict(tensors, strict=False)  # later modules and layers are not among them


def swap_halves(weight: Tensor) -> Tensor:
    """[embedding | hidden] columns to [hidden | embedding] and back."""
    return torch.cat(weight.chunk(2, dim=1)[::-1], dim=1)


def stack_experts(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """One matrix per expert, as published, to transformers' stacks: gate_up_proj [E, 2I, D], down_proj [E, D, I]."""
    stacked = {name: value for name, value in tensors.items() if not EXPERT.fullmatch(name)}
    found: dict[str, dict[tuple[str, int], Tensor]] = {}
    for name, value in tensors.items():
        if match := EXPERT.fullmatch(name):
            found.setdefault(match[1], {})[match[3], int(match[2])] = value
    for prefix, experts in found.items():
        count = 1 + max(index for _, index in experts)
        kinds = ("gate", "up", "down")
        gone = [(kind, at) for kind in kinds for at in range(count) if (kind, at) not in experts]
        if gone:
            raise UserError(
                "a layer with experts must have three matrices of each",
                f"none named {prefix.removeprefix('block.')}.{gone[0][1]}.{gone[0][0]}_proj.weight",
                "copy the files again, or use another checkpoint",
            )
        gate, up, down = (
            torch.stack([experts[kind, index] for index in range(count)]) for kind in kinds
        )
        stacked[f"{prefix}.gate_up_proj"] = torch.cat([gate, up], dim=1)
        stacked[f"{prefix}.down_proj"] = down
    return stacked


def split_experts(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """transformers' stacks to one matrix per expert, as published: the inverse of `stack_experts`."""
    split: dict[str, Tensor] = {}
    for name, value in tensors.items():
        prefix, _, stack = name.rpartition(".")
        if stack == "gate_up_proj" and value.ndim == 3:
            for kind, half in zip(("gate", "up"), value.chunk(2, dim=1), strict=True):
                split |= {f"{prefix}.{at}.{kind}_proj.weight": one for at, one in enumerate(half)}
        elif stack == "down_proj" and value.ndim == 3:
            split |= {f"{prefix}.{at}.down_proj.weight": one for at, one in enumerate(value)}
        else:
            split[name] = value
    return split


def whole(tensors: dict[str, Tensor], block: tuple[int, int]) -> dict[str, Tensor]:
    """fp8 matrices times their block scales (DeepSeek-V3: weight_scale_inv, one for `block` rows and columns)."""
    made = {}
    for name, value in tensors.items():
        if name.endswith(SCALE):
            continue
        scale = tensors.get(name + SCALE)
        if scale is not None:
            value = times_scales(value, scale, block)
        elif value.element_size() < 2:
            raise UserError(
                "an fp8 matrix and its scales must come together",
                f"{name} {value.dtype} without {name}{SCALE}",
                "copy the files again, or use another checkpoint",
            )
        made[name] = value
    return made


def _folder(target: Target) -> Path:
    if target.path is None:
        raise UserError("head.init=native needs a target's folder", "none", "name target.path")
    return target.path


def _layout(target: Target, files: Mapping[str, Path]) -> tuple[str, Layout]:
    for name, layout in LAYOUTS.items():
        if _count(target, files, layout):
            return name, layout
    raise UserError(
        "head.init=native needs a target with MTP weights in a layout that is read: "
        + ", ".join(LAYOUTS),
        f"{target.path} without",
        "choose another head.init",
    )


def _count(target: Target, files: Mapping[str, Path], layout: Layout) -> int:
    """Modules that the folder holds."""
    depth = 0
    while _at(layout.mark, layout, target, depth) in files:
        depth += 1
    return depth


def _at(pattern: str, layout: Layout, target: Target, depth: int) -> str:
    block = layout.block.format(layer=target.layers + depth, depth=depth)
    return pattern.format(block=block, layer=target.layers + depth, depth=depth)


def _require_shared(target: Target, copies: dict[str, Tensor]) -> None:
    """Raise unless copies of the target's embedding and lm_head are what they copy: a head here reads the target's."""
    own: dict[str, Callable[[], Tensor]] = {
        "embedding": lambda: target.base.get_input_embeddings().weight,
        "lm_head": lambda: target.lm_head.weight,
    }
    for name, copy in copies.items():
        theirs = own[name]()
        if copy.shape != theirs.shape or not torch.equal(copy.to(theirs), theirs):
            raise UserError(
                "a native head's embedding and lm_head must be the target's",
                f"another {name}",
                "choose another head.init",
            )
