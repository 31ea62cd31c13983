"""Begin as the target's last layer applied once more to its own output, whichever norms the head has.

H = x / rms(x) * w is the final norm's output, but the last layer expects the residual x. A head with all norms works
on x: `hnorm` computes H / rms(H) * v, and v = r / w with r = typical rms(x) * rms(H) gives it x's direction and
length. Where a norm is left out, what it would do to typical rows goes into the matrix beside it, so that such a
head begins near the same function and a comparison shows the norm's worth, not that of a broken start:

    no hnorm        the projection's state half is diag(a / w), a = typical rms(x), in place of the identity
    no input norm   q, k and v (or what they are made of) read x, not x / rms(x) * u: their columns take u / a
    no final norm   the output y must have H's length by itself: the block works on s x, s = w / typical rms(y), in
                    place of x; what writes to the residual (matrices, experts, or norms behind them) takes s, and
                    the norms that read it undo it
    no q, k norms   (a Llama block for a target that has them) each head's rows of q and k take w / typical length

Knows which modules it is given, no head family.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from mtp_train.attention.packed import PackedContext
from mtp_train.core.errors import UserError
from mtp_train.heads.base import Projection
from mtp_train.heads.block import (
    HEAD_NORMS,
    Rotary,
    float_state,
    gain,
    nonzero,
    require_same_layer,
    run_block,
    set_gain,
)
from mtp_train.models.target import POST_NORM, PRE_NORM, Target

INITS = ("last_layer", "random")
FITTED = "fitted"  # for families with `projections`
RIDGE = 1e-3  # of the mean square of what a fitted projection reads
WRITES = 0.5  # of the last layer's writes, behind a fitted projection
READERS = ("q_proj", "k_proj", "v_proj", "q_a_proj", "kv_a_proj_with_mqa")  # of the residual


@dataclass(frozen=True)
class Lengths:
    """Medians over the rows of a fixed random text, of root mean squares."""

    before: Tensor  # of the residual x
    after: Tensor  # of its norm H
    product: Tensor  # of both
    applied: Tensor  # of the last layer's output, applied once more to x


@torch.no_grad()
def begin_as_last_layer(
    target: Target,
    project: nn.Linear,
    hnorm: Any,
    block: Any,
    final_norm: Any,
    noise: float,
) -> None:
    """Set the modules of block([embedding | hnorm(state)] projected) with a norm at its end.

    Args:
        project: [D, 2D], embedding half first.
        hnorm, final_norm: and the block's input norm: the identity where left out.
        noise: standard deviation of the projection's embedding half, over sqrt(D).
    """
    width = target.hidden_size
    layer = last_layer_for(target, block)
    block.load_state_dict({name: layer[name] for name in block.state_dict()})
    project.weight[:, :width] = torch.randn(width, width) * noise / width**0.5
    weight_D = nonzero(gain(target.base.norm))
    usual = usual_lengths(target)
    scale_D = _scale(weight_D, usual, final_norm)
    if has(hnorm):
        project.weight[:, width:] = torch.eye(width)
        set_gain(hnorm, scale_D * usual.product / weight_D)
    else:
        project.weight[:, width:] = torch.diag(scale_D * usual.before / weight_D)
    if not has(block.input_layernorm):
        first = gain(target.base.layers[-1].input_layernorm)
        _read_unnormed(block, first / (scale_D * usual.before))
    if has(final_norm):
        final_norm.load_state_dict(float_state(target.base.norm))
    else:
        _write_scaled(block, scale_D, usual)


@torch.no_grad()
def begin_fitted(
    target: Target, projection: Projection, rows: Iterable[tuple[Tensor, Tensor, Tensor]]
) -> int:
    """Fit a projection by least squares, after `begin_as_last_layer`; returns how many rows it was fitted to.

    It maps what it reads to the next state with the final norm undone: what the residual stream holds there. The block
    behind it, still the last layer's, writes to that residual, which is nearly right already; so its writes are
    scaled down by `WRITES`.

    Args:
        rows: embeddings, states and next states [N, D] of rows at positions above 0, pack by pack.
    """
    weight_D = nonzero(gain(target.base.norm))
    usual = usual_lengths(target)
    undo_D = _scale(weight_D, usual, projection.final_norm) * usual.before / weight_D
    width, count = projection.linear.in_features, 0
    square = torch.zeros(width, width, dtype=torch.float64)
    product = torch.zeros(width, len(undo_D), dtype=torch.float64)
    for embedding_ND, state_ND, next_ND in rows:
        read_NX = projection.reads(embedding_ND.float(), state_ND.float()).cpu()
        square += (read_NX.T @ read_NX).double()
        product += (read_NX.T @ (next_ND.float().cpu() * undo_D)).double()
        count += len(read_NX)
    square += torch.eye(width, dtype=torch.float64) * square.diagonal().mean() * RIDGE
    projection.linear.weight.copy_(torch.linalg.solve(square, product).T)
    _scale_writes(projection.block, torch.full_like(weight_D, WRITES))
    return count


def _scale(weight_D: Tensor, usual: Lengths, final_norm: Any) -> Tensor:
    """By what the block's residual differs from the target's: without a final norm it has the state's length."""
    return torch.ones_like(weight_D) if has(final_norm) else weight_D / usual.applied


@torch.no_grad()
def begin_as_identity(target: Target, blocks: Iterable[nn.Module]) -> None:
    """Set later blocks to the last layer without what it adds, so that the head begins as one of a single layer."""
    for block in blocks:
        layer = last_layer_for(target, block)
        block.load_state_dict({name: layer[name] for name in block.state_dict()})
        if has_post_norms(block):
            for norm in (block.post_attention_layernorm, block.post_feedforward_layernorm):
                set_gain(norm, torch.zeros(target.hidden_size))
            continue
        for matrix, bias in _writers(block):
            matrix.zero_()
            if bias is not None:
                bias.zero_()


@torch.no_grad()
def last_layer_for(target: Target, block: nn.Module) -> dict[str, Tensor]:
    """The last layer's tensors in float32 on the CPU, its q and k norms in the matrices if the block has none.

    Raises:
        UserError: the block can't hold the layer.
    """
    require_same_layer(target, block)
    layer, mine = float_state(target.base.layers[-1]), block.state_dict()
    missing = [name for name in HEAD_NORMS if name in layer and name not in mine]
    if missing:
        last = target.base.layers[-1]
        rows_TD = last.input_layernorm(random_states(target, (PRE_NORM,))[PRE_NORM])
    for name in missing:
        norm, matrix = name.removesuffix(".weight"), name.replace("norm", "proj")
        out_TD = last.get_submodule(norm.replace("norm", "proj"))(rows_TD)
        length_TH = out_TD.float().unflatten(-1, (-1, target.head_width)).square().mean(-1).sqrt()
        scale_H = 1 / length_TH[len(length_TH) // 4 :].median(dim=0).values.cpu()
        weight = layer.pop(name)
        scale = last.get_submodule(norm)(torch.ones_like(weight).to(out_TD)).float().cpu()
        layer[matrix] = layer[matrix] * torch.outer(scale_H, scale).flatten().unsqueeze(1)
    return layer


def has_post_norms(block: Any) -> bool:
    """Whether norms stand behind attention and mlp as well, as in Gemma-2 and 3."""
    return hasattr(block, "post_feedforward_layernorm")


def has(norm: Any) -> bool:
    """Whether a norm is there."""
    return not isinstance(norm, nn.Identity)


def _read_unnormed(block: Any, column_D: Tensor) -> None:
    for name in READERS:
        projection = getattr(block.self_attn, name, None)
        if projection is not None:
            projection.weight.mul_(column_D)


def _write_scaled(block: Any, scale_D: Tensor, usual: Lengths) -> None:
    """Let the block work on scale * x in place of x."""
    undo_D = usual.after / (usual.applied * scale_D)
    readers = [block.input_layernorm]
    if has_post_norms(block):
        readers.append(block.pre_feedforward_layernorm)
    else:
        readers.append(block.post_attention_layernorm)
    _scale_writes(block, scale_D)
    for norm in filter(has, readers):
        set_gain(norm, gain(norm) * undo_D)


def _scale_writes(block: Any, scale_D: Tensor) -> None:
    if has_post_norms(block):
        for norm in (block.post_attention_layernorm, block.post_feedforward_layernorm):
            set_gain(norm, gain(norm) * scale_D)
        return
    for matrix, bias in _writers(block):
        matrix.mul_(scale_D.unsqueeze(1))
        if bias is not None:
            bias.mul_(scale_D)


def _writers(block: Any) -> list[tuple[Tensor, Tensor | None]]:
    """Matrices [D, x] or [E, D, x] that write to the residual, with their biases."""
    linears = [block.self_attn.o_proj]
    linears += [part for name, part in block.mlp.named_modules() if name.endswith("down_proj")]
    found = [(linear.weight, linear.bias) for linear in linears]
    experts = getattr(block.mlp, "experts", None)
    if experts is not None:
        down = experts.down_proj
        bias = getattr(experts, "down_proj_bias", None)
        found.append((down.transpose(1, 2) if experts.is_transposed else down, bias))
    return found


def usual_lengths(target: Target) -> Lengths:
    """How long the target's residuals and states are."""
    states = random_states(target, (PRE_NORM, POST_NORM))
    before, after = states[PRE_NORM], states[POST_NORM]
    position_T = torch.arange(len(before), device=target.device)
    context = PackedContext([0, len(before)])
    rotary = Rotary(target).to(target.device)
    applied = run_block(target.base.layers[-1], rotary, before, position_T, context)
    product = _lengths(before) * _lengths(after)
    return Lengths(
        usual_length(before), usual_length(after), product.median(), usual_length(applied)
    )


def random_states(target: Target, names: tuple[str, ...]) -> dict[str, Tensor]:
    """The named states [T, D] of a fixed random text."""
    rows = min(64, target.max_positions)
    generator = torch.Generator().manual_seed(0)
    token_T = torch.randint(target.vocab_size, (rows,), generator=generator).to(target.device)
    position_T = torch.arange(rows, device=target.device)
    return target.capture(token_T, position_T, PackedContext([0, rows]), names)


def usual_length(state_TD: Tensor) -> Tensor:
    """Median of the rows' root mean squares."""
    return _lengths(state_TD).median()


def _lengths(state_TD: Tensor) -> Tensor:
    """Root mean squares but for the first rows, whose residuals are outliers."""
    return state_TD.float().square().mean(-1).sqrt()[len(state_TD) // 4 :].cpu()


def require_init(name: str, known: tuple[str, ...] = INITS) -> None:
    if name not in known:
        raise UserError("head.init must be one of " + ", ".join(known), name, "choose one of them")
