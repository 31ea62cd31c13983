"""A Llama decoder layer written out, from a folder's tensors and its config.json alone, as serving engines compute it.

It is what an export is held against: it shares no code with the heads' modules, but for the table of RoPE kinds. Knows
no head and no layout.

Shapes: T rows of one sequence, D hidden width, N heads, H head width.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from mtp_train.export.layout import Chain
from mtp_train.models.plain import rotary_table

Step = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]


class Layer:
    """One layer: q, k, v, o and a gated mlp, whose weights lie below a prefix.

    Args:
        tensors: float32.
        config: the layer's: hidden_size, num_attention_heads, rope_parameters, ...
    """

    def __init__(self, tensors: Mapping[str, Tensor], config: Mapping[str, Any], prefix: str):
        self.tensors, self.config, self.prefix = tensors, config, prefix

    def norm(self, name: str, rows_TD: Tensor) -> Tensor:
        """RMSNorm with the weight of that name."""
        mean_T1 = rows_TD.square().mean(-1, keepdim=True)
        return rows_TD * torch.rsqrt(mean_T1 + self.config["rms_norm_eps"]) * self.tensors[name]

    def linear(self, name: str, rows: Tensor) -> Tensor:
        """`rows` times the layer's matrix of that name, plus its bias where there is one."""
        whole = self.prefix + name
        out = rows @ self.tensors[f"{whole}.weight"].T
        bias = self.tensors.get(f"{whole}.bias")
        return out if bias is None else out + bias

    def attention(self, rows: Tensor, position_T: Tensor) -> Tensor:
        """Causal attention [T, D] of rows that may be wider than D."""
        width, groups = self.config["head_dim"], self.config["num_key_value_heads"]
        q_NTH, k_GTH, v_GTH = (
            self.linear(f"self_attn.{name}_proj", rows).unflatten(-1, (-1, width)).transpose(0, 1)
            for name in "qkv"
        )
        table = rotary_table(self.config, position_T)
        repeat = len(q_NTH) // groups
        k_NTH = turned(k_GTH, table).repeat_interleave(repeat, 0)
        score_NTT = turned(q_NTH, table) @ k_NTH.transpose(1, 2) / width**0.5
        unseen_TT = torch.ones(score_NTT.shape[1:], dtype=torch.bool).triu(1)
        if "sliding_attention" in (self.config.get("layer_types") or ()):
            unseen_TT |= ~torch.ones_like(unseen_TT).triu(1 - self.config["sliding_window"])
        weight_NTT = score_NTT.masked_fill(unseen_TT, float("-inf")).softmax(-1)
        mixed_NTH = weight_NTT @ v_GTH.repeat_interleave(repeat, 0)
        return self.linear("self_attn.o_proj", mixed_NTH.transpose(0, 1).flatten(1))

    def whole(self, rows_TD: Tensor, position_T: Tensor) -> Tensor:
        """A decoder layer with both its norms."""
        normed = self.norm(f"{self.prefix}input_layernorm.weight", rows_TD)
        rows_TD = rows_TD + self.attention(normed, position_T)
        normed = self.norm(f"{self.prefix}post_attention_layernorm.weight", rows_TD)
        return rows_TD + self.mlp(normed)

    def mlp(self, rows_TD: Tensor) -> Tensor:
        gate = torch.nn.functional.silu(self.linear("mlp.gate_proj", rows_TD))
        return self.linear("mlp.down_proj", gate * self.linear("mlp.up_proj", rows_TD))


def chained(
    step: Step, chain: Chain, state_TD: Tensor, lm_head: Callable[[Tensor], Tensor]
) -> list[Tensor]:
    """Logits of each draft step of a head that feeds its own output back.

    Args:
        step: (embedding, state, position) of all rows so far -> what lm_head reads, and what is fed back.
        state_TD: what enters the rows of the text.
    """
    embedding, position = chain.embedding(), chain.position()
    logits = []
    for _ in range(chain.steps):
        rows = len(state_TD)
        read_TD, fed_TD = step(embedding[:rows], state_TD, position[:rows])
        logits.append(lm_head(read_TD[-1:])[0])
        state_TD = torch.cat([state_TD, fed_TD[-1:]])
    return logits


def turned(rows_NTH: Tensor, table: tuple[Tensor, Tensor]) -> Tensor:
    """RoPE in the half-split form: dimension i turns with i + H / 2."""
    first, second = rows_NTH.chunk(2, dim=-1)
    cosine, sine = table
    return torch.cat([first * cosine - second * sine, second * cosine + first * sine], dim=-1)
