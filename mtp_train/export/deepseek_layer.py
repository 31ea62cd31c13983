"""A DeepSeek decoder layer written out, from a folder's tensors and config.json alone, as serving engines compute it.

    c_q = norm(q_a x)      q = q_b c_q             (or q = q_proj x)         per head: [nope | rope]
    c | k_r = kv_a x       k_n | v = kv_b norm(c)                            per head; k_r is one for all heads
    k = [k_n | turned k_r]

It is what an export is held against: it shares no code with the heads' modules. (vLLM 0.32, deepseek_v2.py.)

Knows no head and no layout.

Shapes: T rows of one sequence, D hidden width, N heads, E experts, K of them chosen.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from mtp_train.export.reference import Layer
from mtp_train.models.plain import rotary_table


class DeepseekLayer(Layer):
    """One layer with latent attention, and experts unless its mlp is a plain one."""

    def attention(self, rows_TD: Tensor, position_T: Tensor) -> Tensor:
        sizes = self.config
        nope, rope = sizes["qk_nope_head_dim"], sizes["qk_rope_head_dim"]
        rank, heads = sizes["kv_lora_rank"], sizes["num_attention_heads"]
        query_NTH = self._query(rows_TD).unflatten(-1, (heads, -1)).transpose(0, 1)
        latent, turning = self.linear("self_attn.kv_a_proj_with_mqa", rows_TD).split(
            [rank, rope], -1
        )
        latent = self.norm(f"{self.prefix}self_attn.kv_a_layernorm.weight", latent)
        both = self.linear("self_attn.kv_b_proj", latent).unflatten(-1, (heads, -1)).transpose(0, 1)
        key_NTH, value_NTH = both.split([nope, sizes["v_head_dim"]], -1)
        position = {**self.config, "head_dim": rope}, position_T
        turned = _turned(turning, *rotary_table(*position))
        query_still, query_turning = query_NTH.split([nope, rope], -1)
        score_NTT = query_still @ key_NTH.transpose(1, 2)
        score_NTT = score_NTT + _turned(query_turning, *rotary_table(*position)) @ turned.T
        future_TT = torch.ones(score_NTT.shape[1:], dtype=torch.bool).triu(1)
        weight_NTT = (score_NTT * self._scale()).masked_fill(future_TT, float("-inf")).softmax(-1)
        return self.linear("self_attn.o_proj", (weight_NTT @ value_NTH).transpose(0, 1).flatten(1))

    def mlp(self, rows_TD: Tensor) -> Tensor:
        if f"{self.prefix}mlp.gate.weight" not in self.tensors:
            return super().mlp(rows_TD)
        chosen_TK, weight_TK = self._route(rows_TD)
        out = self._gated("mlp.shared_experts", rows_TD)
        for row, (chosen, weight) in enumerate(zip(chosen_TK.tolist(), weight_TK, strict=True)):
            for expert, share in zip(chosen, weight, strict=True):
                out[row] += share * self._gated(f"mlp.experts.{expert}", rows_TD[row])
        return out

    def _query(self, rows_TD: Tensor) -> Tensor:
        if self.config["q_lora_rank"] is None:
            return self.linear("self_attn.q_proj", rows_TD)
        low = self.linear("self_attn.q_a_proj", rows_TD)
        low = self.norm(f"{self.prefix}self_attn.q_a_layernorm.weight", low)
        return self.linear("self_attn.q_b_proj", low)

    def _scale(self) -> float:
        """1 / sqrt(H); YaRN's factor of the logits, squared, where the config has it."""
        rope = self.config["rope_parameters"]
        scale = (self.config["qk_nope_head_dim"] + self.config["qk_rope_head_dim"]) ** -0.5
        whole = rope.get("mscale_all_dim") if rope["rope_type"] != "default" else None
        factor = 0.1 * whole * math.log(rope["factor"]) + 1.0 if whole else 1.0
        return float(scale * factor**2)

    def _route(self, rows_TD: Tensor) -> tuple[Tensor, Tensor]:
        """The experts of each row and their weights [T, K]: the best K of the best groups."""
        logits_TE = self.linear("mlp.gate", rows_TD)
        third = self.config["scoring_func"] == "sigmoid"
        score_TE = logits_TE.sigmoid() if third else logits_TE.softmax(-1)
        bias = self.tensors.get(f"{self.prefix}mlp.gate.e_score_correction_bias")
        ranked_TE = score_TE if bias is None else score_TE + bias
        grouped = ranked_TE.unflatten(-1, (self.config["n_group"], -1))
        group = grouped.amax(-1) if bias is None else grouped.topk(2, -1).values.sum(-1)
        best = group.topk(self.config["topk_group"], -1).indices
        kept = torch.zeros_like(group).scatter(-1, best, 1.0).bool()
        ranked_TE = grouped.masked_fill(~kept.unsqueeze(-1), float("-inf")).flatten(-2)
        chosen_TK = ranked_TE.topk(self.config["num_experts_per_tok"], -1).indices
        weight_TK = score_TE.gather(-1, chosen_TK)
        if self.config["norm_topk_prob"]:
            weight_TK = weight_TK / (weight_TK.sum(-1, keepdim=True) + 1e-20)
        return chosen_TK, weight_TK * self.config["routed_scaling_factor"]

    def _gated(self, name: str, rows: Tensor) -> Tensor:
        gate = torch.nn.functional.silu(self.linear(f"{name}.gate_proj", rows))
        return self.linear(f"{name}.down_proj", gate * self.linear(f"{name}.up_proj", rows))


def _turned(rows: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """RoPE in the interleaved form: dimension 2i turns with 2i + 1."""
    even, odd = rows[..., ::2], rows[..., 1::2]
    return torch.stack([even * cosine - odd * sine, odd * cosine + even * sine], -1).flatten(-2)
