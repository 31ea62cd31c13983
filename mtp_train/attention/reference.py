"""The slow equation of a draft chain's attention, with its whole score matrix: what `chain` is held to.

Knows one document at a time, no blocks and no context.

Shapes: L rows of one document, H query heads, G key/value heads, d head width, w value width.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from mtp_train.attention.interface import AttentionRule


def chain_attention(
    query_LHd: Tensor,
    keys_LGd: Sequence[Tensor],
    values_LGw: Sequence[Tensor],
    rule: AttentionRule,
) -> Tensor:
    """Row p sees keys 0..p of step 0 and key p of every later step. Returns [L, H, w].

    Key j of step i stands at position j + i, the row of the last step at p + its number: a window is a bound on the
    difference. Grouped heads share keys: queries are viewed as [G, H/G] per row.
    """
    rows, heads, width = query_LHd.shape
    groups = keys_LGd[0].shape[1]
    query = query_LHd.reshape(rows, groups, heads // groups, width)
    base = torch.einsum("igrd,jgd->grij", query, keys_LGd[0])
    own = [torch.einsum("igrd,igd->gri", query, key).unsqueeze(-1) for key in keys_LGd[1:]]
    scores = torch.cat([base, *own], dim=-1)
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32)) * rule.scaling
    if rule.softcap is not None:
        scores = rule.softcap * torch.tanh(scores / rule.softcap)
    scores = scores.masked_fill(
        _hidden(rows, len(own), rule.window).to(query.device), float("-inf")
    )
    if rule.sinks is not None:
        sink = rule.sinks.to(scores.dtype).reshape(groups, -1, 1, 1).expand(-1, -1, rows, 1)
        scores = torch.cat([scores, sink], dim=-1)
    weights = scores.softmax(dim=-1).to(query.dtype)
    out = torch.einsum("grij,jgd->igrd", weights[..., :rows], values_LGw[0])
    for step, value in enumerate(values_LGw[1:]):
        out = out + torch.einsum("gri,igd->igrd", weights[..., rows + step], value)
    return out.reshape(rows, heads, -1)


def _hidden(rows: int, later: int, window: int | None) -> Tensor:
    """Bool [L, L + later]: which of step 0's keys, then which of its own later keys, a row does not see."""
    row, column = torch.arange(rows).unsqueeze(1), torch.arange(rows)
    distance = torch.cat(
        [row + later - column, later - torch.arange(1, later + 1).expand(rows, later)], dim=1
    )
    future = torch.cat([column > row, torch.zeros(rows, later, dtype=torch.bool)], dim=1)
    return future if window is None else future | (distance >= window)
