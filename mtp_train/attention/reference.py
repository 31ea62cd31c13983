"""The slow equation of a draft chain's attention, with its whole score matrix: what `chain` is held to.

Knows one document at a time, no blocks and no context.

Shapes: L rows of one document, H query heads, G key/value heads, d head width, w value width.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def chain_attention(
    query_LHd: Tensor, keys_LGd: Sequence[Tensor], values_LGw: Sequence[Tensor], scaling: float
) -> Tensor:
    """Row p sees keys 0..p of step 0 and key p of every later step. Returns [L, H, w].

    Grouped heads share keys: queries are viewed as [G, H/G] per row.
    """
    rows, heads, width = query_LHd.shape
    groups = keys_LGd[0].shape[1]
    query = query_LHd.reshape(rows, groups, heads // groups, width)
    base = torch.einsum("igrd,jgd->grij", query, keys_LGd[0])
    future = torch.ones(rows, rows, dtype=torch.bool, device=query.device).triu(1)
    base = base.masked_fill(future, float("-inf"))
    own = [torch.einsum("igrd,igd->gri", query, key).unsqueeze(-1) for key in keys_LGd[1:]]
    scores = torch.cat([base, *own], dim=-1)
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32)) * scaling
    weights = scores.softmax(dim=-1).to(query.dtype)
    out = torch.einsum("grij,jgd->igrd", weights[..., :rows], values_LGw[0])
    for step, value in enumerate(values_LGw[1:]):
        out = out + torch.einsum("gri,igd->igrd", weights[..., rows + step], value)
    return out.reshape(rows, heads, -1)
