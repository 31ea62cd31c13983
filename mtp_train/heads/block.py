"""A head's block, its place in a paged cache, its RoPE, its norms: the target's own classes, or a plain Llama's.

Knows no head family.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from mtp_train.attention.interface import AttentionContext
from mtp_train.core.errors import UserError
from mtp_train.models import plain
from mtp_train.models.quantised import as_numbers
from mtp_train.models.target import Target, by_layer_type

HEAD_NORMS = ("self_attn.q_norm.weight", "self_attn.k_norm.weight")
BLOCKS = ("target", "llama")  # head.block: whose classes block, RoPE and norms are of
POSITIONS = "max_position_embeddings"
SIZES = ("intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim")
OWN = (
    *SIZES,
    "rms_norm_eps",
    "rope_parameters",
    POSITIONS,  # fewer than the target's: longer sequences are neither trained nor drafted
)  # that a Llama block may have for itself
Layer = Mapping[str, Any]  # some of `OWN`


class Rotary(nn.Module):
    """The block's RoPE. Its frequencies stay float32 when a head is cast, as in training and in serving engines.

    In bfloat16 the angle at distance 1,000 would be wrong by more than a radian.
    """

    def __init__(self, target: Target, kind: str = "target", layer: Layer | None = None) -> None:
        super().__init__()
        made = plain.Rotary if kind == "llama" else type(target.base.rotary_emb)
        config = head_config(target, kind=kind, layer=layer)
        self.inner = made(config)
        self.options = {"layer_type": config.layer_types[-1]} if by_layer_type(config) else {}

    def forward(self, rows: Tensor, position_ids: Tensor, **options: Any) -> Any:
        """What the block's attention takes as its position embeddings: each class has its own form."""
        return self.inner(rows, position_ids=position_ids, **(options or self.options))

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Rotary:
        kept = dict(self.inner.named_buffers())
        super()._apply(fn, recurse)
        for name, value in kept.items():
            setattr(self.inner, name, value.to(fn(value).device))
        return self


def make_block(
    target: Target,
    *,
    input_norm: bool = True,
    depth: int = 0,
    kind: str = "target",
    layer: Layer | None = None,
) -> nn.Module:
    """A decoder layer of the target's class or a Llama's; the layer's first norm can be left out.

    Its keys and values are those of layer `depth` after the target's.
    """
    made = plain.Layer if kind == "llama" else type(target.base.layers[-1])
    config = head_config(target, depth, kind, layer)
    block: Any = made(config, layer_idx=target.layers + depth)
    if not input_norm:
        block.input_layernorm = nn.Identity()
    whole: nn.Module = block
    return whole


def run_block(
    block: nn.Module,
    rotary: nn.Module,
    rows_TD: Tensor,
    position_T: Tensor,
    context: AttentionContext,
) -> Tensor:
    """The block's output [T, D]."""
    rows, position = rows_TD.unsqueeze(0), position_T.unsqueeze(0)
    out: Tensor = block(
        rows,
        attention_mask=None,
        position_ids=position,
        position_embeddings=rotary(rows, position),
        attention_context=context,
    )
    return out.squeeze(0)


def run_attention(
    attention: nn.Module,
    rotary: nn.Module,
    rows_TD: Tensor,
    position_T: Tensor,
    context: AttentionContext,
) -> Tensor:
    """The output [T, D] of a layer's attention alone; its rows may be wider than D."""
    rows, position = rows_TD.unsqueeze(0), position_T.unsqueeze(0)
    out, _ = attention(
        hidden_states=rows,
        attention_mask=None,
        position_embeddings=rotary(rows, position),
        attention_context=context,
    )
    attended: Tensor = out.squeeze(0)
    return attended


def make_norm(
    target: Target,
    wanted: bool = True,
    kind: str = "target",
    layer: Layer | None = None,
    parts: int = 1,
) -> nn.Module:
    """A norm of the target's class or a Llama's, of so many states side by side; the identity where none is wanted."""
    norm = target.base.norm
    if not wanted:
        return nn.Identity()
    norm_class: Any = plain.Norm if kind == "llama" else type(norm)
    epsilon = (layer or {}).get("rms_norm_eps", _epsilon(norm))
    made: nn.Module = norm_class(parts * target.hidden_size, eps=epsilon)
    return made


def head_config(
    target: Target, depth: int = 0, kind: str = "target", layer: Layer | None = None
) -> Any:
    """The config of a block that stands `depth` layers after the target's last one, and is of its type.

    Where layer types differ in RoPE and window, the weights that a block begins with fit the last layer's alone; a
    window of hundreds of tokens is wide for a draft, and costs less.
    """
    if kind == "llama":
        return plain.plain_config(target, layer)
    config = copy.deepcopy(target.config)
    config._attn_implementation = target.config._attn_implementation
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types + [config.layer_types[-1]] * (depth + 1)
    return config


def require_block(kind: str) -> None:
    if kind not in BLOCKS:
        raise UserError("head.block must be one of " + ", ".join(BLOCKS), kind, "choose one")


def require_layer(layer: Layer, kind: str, init: str) -> None:
    """Raise unless a block may have these keys of its own."""
    unknown = sorted(set(layer) - set(OWN))
    if unknown:
        raise UserError("keys of head.layer must be among " + ", ".join(OWN), unknown, "remove it")
    if layer and kind != "llama":
        raise UserError("head.layer needs head.block=llama", f"head.block={kind}", "set it")
    sized = sorted(set(layer) & set(SIZES))
    if sized and init == "last_layer":
        rule = "a block that begins as the target's last layer must have its sizes"
        raise UserError(rule, f"head.layer with {', '.join(sized)}", "set head.init=random")


def require_window(window: int) -> None:
    if window < 0:
        raise UserError("head.window must be 0 or more", window, "use 0 for none")


def require_layers(layers: int) -> None:
    if layers < 1:
        raise UserError("head.layers must be 1 or more", layers, "raise it")


def make_later_blocks(
    target: Target, layers: int, kind: str = "target", layer: Layer | None = None, first: int = 0
) -> Any:
    """The decoder layers of a head after layer `first`: whole ones, each with keys and values of its own."""
    depths = range(first + 1, first + layers)
    return nn.ModuleList(
        make_block(target, depth=depth, kind=kind, layer=layer) for depth in depths
    )


@torch.no_grad()
def require_same_layer(target: Target, block: nn.Module) -> None:
    """Raise unless `block` can do what the target's last layer does; see `start` for q and k norms."""
    theirs, mine = target.base.layers[-1].state_dict(), block.state_dict()
    without = {
        "input_layernorm.weight",
        *(name for name in HEAD_NORMS if _of_heads(target, theirs, name)),
    }
    odd = [name for name in theirs if name not in mine and name not in without]
    odd += unlike_llama(target)
    if odd and type(block) is not type(target.base.layers[-1]):
        raise UserError(
            "head.init=last_layer needs a target whose last layer a Llama block can hold",
            f"{target.config.model_type} with {', '.join(odd)}",
            "set head.init=random, or head.block=target",
        )


def unlike_llama(target: Target) -> list[str]:
    """What the target's last layer does that its tensors' names don't tell."""
    odd = []
    if adds_one(target.base.norm):
        odd.append("a norm that does not multiply by its weight")
    attention, config = target.base.layers[-1].self_attn, target.config
    # Some classes keep the window on the layer, by its type; others read the config's in every layer.
    if getattr(attention, "sliding_window", getattr(config, "sliding_window", None)):
        odd.append("a sliding window")
    return odd


def _of_heads(target: Target, tensors: dict[str, Tensor], name: str) -> bool:
    """Whether a norm is there and works on one head at a time."""
    return name in tensors and len(tensors[name]) == target.head_width


def start_linears(head: nn.Module, target: Target) -> None:
    """The random start of every matrix; of experts, routers and sinks as the target's class begins them.

    Those are made without a value. Norms begin as they are made: a head's may be of another class than the target's.
    """
    model: Any = target.model
    for module in head.modules():
        own = any(True for _ in module.parameters(recurse=False))
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=0.02)
        elif own and not type(module).__name__.endswith("RMSNorm"):
            model._init_weights(module)


def float_state(module: nn.Module) -> dict[str, Tensor]:
    """A frozen module's tensors as a head begins: in float32 on the CPU."""
    return {name: as_numbers(value).float().cpu() for name, value in module.state_dict().items()}


def _epsilon(norm: nn.Module) -> float:
    """The epsilon of a target's norm, under either name that transformers gives it."""
    names = [name for name in ("variance_epsilon", "eps") if hasattr(norm, name)]
    if not names:
        raise UserError(
            "a target's norm must say its epsilon",
            type(norm).__name__,
            "choose another architecture",
        )
    return float(getattr(norm, names[0]))


def adds_one(norm: Any) -> bool:
    """Whether a norm multiplies by 1 + its weight, as Gemma's and Qwen3-Next's do."""
    scale = norm(torch.ones_like(norm.weight))
    return bool((scale - norm.weight).mean() > 0.5)


def gain(norm: Any) -> Tensor:
    """What a norm multiplies by, in float32 on the CPU."""
    return norm.weight.detach().float().cpu() + int(adds_one(norm))


@torch.no_grad()
def set_gain(norm: Any, gain_D: Tensor) -> None:
    norm.weight.copy_(gain_D - int(adds_one(norm)))


def nonzero(weight_D: torch.Tensor, smallest: float = 1e-3) -> Tensor:
    """The weights with their magnitude kept away from 0."""
    return torch.where(weight_D < 0, -1.0, 1.0) * weight_D.abs().clamp(min=smallest)
