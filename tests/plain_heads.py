"""Published heads' equations in plain torch, from tensors by their published names. Shares no code with the package.

Each gives the logits of a chain: a text whose last row drafts, then a known token per later step.

Shapes: T rows, D hidden width, N heads, G key/value heads, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import silu

Weights = Mapping[str, Tensor]
Step = Callable[
    [Tensor, Tensor], Tensor
]  # embeddings and states of the rows so far -> what is fed back


@dataclass(frozen=True)
class Sizes:
    """A Llama-type layer's: query heads, key/value heads, RoPE's base, the norms' epsilon."""

    heads: int = 4
    kv_heads: int = 2
    theta: float = 1e4
    epsilon: float = 1e-6


def norm(rows: Tensor, weight: Tensor, sizes: Sizes) -> Tensor:
    return rows / (rows.pow(2).mean(-1, keepdim=True) + sizes.epsilon).sqrt() * weight


def turned(rows_NTH: Tensor, theta: float) -> Tensor:
    """RoPE at positions 0, 1, ...: pairs (i, i + H/2) as complex numbers."""
    half = rows_NTH.shape[-1] // 2
    angle = torch.outer(torch.arange(rows_NTH.shape[1]), theta ** (-torch.arange(half) / half))
    pairs = torch.complex(rows_NTH[..., :half], rows_NTH[..., half:])
    moved = pairs * torch.polar(torch.ones_like(angle), angle)
    return torch.cat([moved.real, moved.imag], -1)


def attention(w: Weights, prefix: str, rows: Tensor, sizes: Sizes, both_ways: int = 0) -> Tensor:
    """Causal attention with whatever biases and q and k norms the layer has; the last `both_ways` rows see all."""

    def heads(kind: str, count: int) -> Tensor:
        out = rows @ w[f"{prefix}self_attn.{kind}_proj.weight"].T
        out = out + w.get(f"{prefix}self_attn.{kind}_proj.bias", torch.zeros(()))
        out = out.view(len(rows), count, -1)
        scale = w.get(f"{prefix}self_attn.{kind}_norm.weight")
        return (out if scale is None else norm(out, scale, sizes)).transpose(0, 1)

    query, key = (
        turned(heads(kind, count), sizes.theta)
        for kind, count in (("q", sizes.heads), ("k", sizes.kv_heads))
    )
    value = heads("v", sizes.kv_heads)
    out = []
    for at, one in enumerate(query):
        shared = at * sizes.kv_heads // sizes.heads
        score = one @ key[shared].T / one.shape[-1] ** 0.5
        unseen = torch.full_like(score, float("-inf")).triu(1)
        unseen[len(rows) - both_ways :] = 0
        score = score + unseen
        out.append(score.softmax(-1) @ value[shared])
    return torch.cat(out, -1) @ w[f"{prefix}self_attn.o_proj.weight"].T


def rest(w: Weights, prefix: str, rows: Tensor, sizes: Sizes) -> Tensor:
    """What follows a layer's attention."""
    x = norm(rows, w[f"{prefix}post_attention_layernorm.weight"], sizes)
    gated = silu(x @ w[f"{prefix}mlp.gate_proj.weight"].T) * (
        x @ w[f"{prefix}mlp.up_proj.weight"].T
    )
    return rows + gated @ w[f"{prefix}mlp.down_proj.weight"].T


def layer(
    w: Weights, prefix: str, rows: Tensor, sizes: Sizes, first: str = "input_layernorm"
) -> Tensor:
    """A whole decoder layer; `first` is what its input norm is called."""
    x = norm(rows, w[f"{prefix}{first}.weight"], sizes)
    return rest(w, prefix, rows + attention(w, prefix, x, sizes), sizes)


def chain(step: Step, embedding: Tensor, state: Tensor, steps: int) -> list[Tensor]:
    """Outputs of the last row at every step; each is the next row's state."""
    found = []
    for _ in range(steps):
        found.append(step(embedding[: len(state)], state)[-1])
        state = torch.cat([state, found[-1].unsqueeze(0)])
    return found


def eagle(w: Weights, embedding: Tensor, state: Tensor, steps: int, sizes: Sizes) -> list[Tensor]:
    """EAGLE-1/2 (SafeAILab's `cnets1.py`): layers.0 without an input norm, later ones with it."""
    count = len({name for name in w if name.endswith("self_attn.q_proj.weight")})

    def step(embedding: Tensor, state: Tensor) -> Tensor:
        rows = torch.cat([embedding, state], -1) @ w["fc.weight"].T + w.get(
            "fc.bias", torch.zeros(())
        )
        rows = rest(w, "layers.0.", rows + attention(w, "layers.0.", rows, sizes), sizes)
        for number in range(1, count):
            rows = layer(w, f"layers.{number}.", rows, sizes)
        return rows

    return chain(step, embedding, state, steps)


def eagle3(
    w: Weights,
    embedding: Tensor,
    states: list[Tensor],
    steps: int,
    sizes: Sizes,
    first: str = "midlayer.",
    later: tuple[tuple[str, str], ...] = (),
    flags: tuple[str, ...] = (),
    mask: int | None = None,
) -> list[Tensor]:
    """EAGLE-3 (SafeAILab's `cnets.py`) with the options of vLLM's: what the lm_head reads at each step.

    Args:
        first: prefix of the first layer.
        later: prefix and input norm's name of each layer after it.
        flags: those that config.json sets.
        mask: token of the rows after the text's, of a head that drafts in parallel.
    """

    def fused(states: list[Tensor]) -> Tensor:
        if "fc_norm" in flags:
            normed = [norm(one, w[f"fc_norm.{at}.weight"], sizes) for at, one in enumerate(states)]
            states = normed
        both = torch.cat(states, -1)
        if "norm_before_fc" in flags:
            both = norm(both, w["input_norm.weight"], sizes)
        return both @ w["fc.weight"].T

    def step(embedding: Tensor, state: Tensor) -> Tensor:
        normed = norm(state, w[f"{first}hidden_norm.weight"], sizes)
        token = norm(embedding, w[f"{first}input_layernorm.weight"], sizes)
        base = normed if "norm_before_residual" in flags else state
        rows = base + attention(w, first, torch.cat([token, normed], -1), sizes)
        rows = rest(w, first, rows, sizes)
        for prefix, name in later:
            rows = layer(w, prefix, rows, sizes, name)
        return norm(rows, w["norm.weight"], sizes) if "norm_output" in flags else rows

    if mask is None:
        found = chain(step, embedding, fused(states), steps)
    else:
        rows = fused(states)
        hidden = fused(list(w["mask_hidden"].reshape(1, -1).chunk(3, -1))).expand(steps - 1, -1)
        token = w["embed_tokens.weight"][mask].expand(steps - 1, -1)
        both = torch.cat([embedding[: len(rows)], token]), torch.cat([rows, hidden])
        found = list(step(*both)[-steps:])
    return (
        found if "norm_output" in flags else [norm(one, w["norm.weight"], sizes) for one in found]
    )


def dflash(
    w: Weights,
    embedding: Tensor,
    states: list[Tensor],
    steps: int,
    sizes: Sizes,
    mask: int,
    first_slot: int = 1,
) -> list[Tensor]:
    """DFlash (z-lab's `dflash.py`) and DSpark's backbone: what the lm_head reads of a block behind the states."""
    context = norm(torch.cat(states, -1) @ w["fc.weight"].T, w["hidden_norm.weight"], sizes)
    unknown = w["embed_tokens.weight"][mask].expand(steps + first_slot - 1, -1)
    rows = torch.cat([embedding[len(context) - 1].unsqueeze(0), unknown])
    for number in range(len({name for name in w if name.endswith("self_attn.q_proj.weight")})):
        prefix = f"layers.{number}."
        x = norm(rows, w[f"{prefix}input_layernorm.weight"], sizes)
        mixed = attention(w, prefix, torch.cat([context, x]), sizes, both_ways=len(x))
        rows = rest(w, prefix, rows + mixed[-len(x) :], sizes)
    return list(norm(rows, w["norm.weight"], sizes)[first_slot:])


def mimo(w: Weights, embedding: Tensor, state: Tensor, steps: int, sizes: Sizes) -> list[Tensor]:
    """MiMo's MTP layer (vLLM's `mimo_mtp.py`): [hidden | token], no token at position 0, the normed output fed back."""
    prefix = "model.mtp_layers.0."

    def step(embedding: Tensor, state: Tensor) -> Tensor:
        token = torch.cat([torch.zeros_like(embedding[:1]), embedding[1:]])
        halves = [
            norm(state, w[f"{prefix}hidden_layernorm.weight"], sizes),
            norm(token, w[f"{prefix}token_layernorm.weight"], sizes),
        ]
        rows = layer(w, prefix, torch.cat(halves, -1) @ w[f"{prefix}input_proj.weight"].T, sizes)
        return norm(rows, w[f"{prefix}final_layernorm.weight"], sizes)

    return chain(step, embedding, state, steps)


def medusa(w: Weights, state_D: Tensor, step: int, layers: int, name: Any) -> Tensor:
    """One Medusa head's blocks (FasterDecoding's `ResBlock`); `name(step, layer)` is a block's prefix."""
    for at in range(layers):
        prefix = name(step, at)
        bias = w.get(f"{prefix}bias", torch.zeros(()))
        state_D = state_D + silu(w[f"{prefix}weight"] @ state_D + bias)
    return state_D
