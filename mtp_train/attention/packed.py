"""Attention over packed documents, for training and for feature capture.

Documents lie end to end in one ragged batch and never see each other. Holds no pages; knows no shift of tokens:
it is told where documents begin and which rollout step this is.

Shapes: T rows, H query heads, G key/value heads, d head width, L rows of one document, S earlier rollout steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from mtp_train.attention.interface import attend


class PackedContext:
    """Causal attention within each document.

    Args:
        offsets: document boundaries [documents + 1], from 0 to T.
    """

    def __init__(self, offsets: Sequence[int]) -> None:
        self.spans = list(pairwise(offsets))

    def __call__(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float
    ) -> Tensor:
        outs = [_causal(query[a:b], key[a:b], value[a:b], scaling) for a, b in self.spans]
        return torch.cat(outs)


class RolloutContext:
    """Attention of a draft chain trained with its own outputs (training-time test).

    Called once per rollout step s = 0, 1, ... with rows indexed by where their chain starts: the row of chain p
    at step s stands at position p + s. It sees what the engine's chain sees: the verified rows 0..p of step 0,
    then its own chain's rows of steps 1..s, and nothing of other chains (EAGLE-3, arXiv 2503.01840, section 3).

        step 0, row p: keys 0..p of step 0
        step 2, row p: keys 0..p of step 0, key p of step 1, key p of step 2

    One context serves one head layer through all steps of one batch.
    """

    def __init__(self, offsets: Sequence[int]) -> None:
        self.packed = PackedContext(offsets)
        self.keys: list[Tensor] = []  # per step [T, G, d]
        self.values: list[Tensor] = []

    def __call__(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float
    ) -> Tensor:
        self.keys.append(key)
        self.values.append(value)
        if len(self.keys) == 1:
            return self.packed(layer, query, key, value, scaling)
        outs = [self._chain(query, slice(a, b), scaling) for a, b in self.packed.spans]
        return torch.cat(outs)

    def _chain(self, query: Tensor, rows: slice, scaling: float) -> Tensor:
        keys = [key[rows] for key in self.keys]
        values = [value[rows] for value in self.values]
        return chain_attention(query[rows], keys, values, scaling)


def chain_attention(
    query_LHd: Tensor, keys_LGd: list[Tensor], values_LGd: list[Tensor], scaling: float
) -> Tensor:
    """One document's rollout attention: the causal part over step 0, one key per later step. Returns [L, H, d].

    Grouped heads share keys: queries are viewed as [G, H/G] per row.
    """
    rows, heads, width = query_LHd.shape
    groups = keys_LGd[0].shape[1]
    query = query_LHd.view(rows, groups, heads // groups, width)
    base = torch.einsum("igrd,jgd->grij", query, keys_LGd[0]).float() * scaling
    future = torch.ones(rows, rows, dtype=torch.bool, device=query.device).triu(1)
    base = base.masked_fill(future, float("-inf"))
    own = [torch.einsum("igrd,igd->gri", query, key).float() * scaling for key in keys_LGd[1:]]
    weights = torch.cat([base, torch.stack(own, dim=-1)], dim=-1).softmax(dim=-1).to(query.dtype)
    out = torch.einsum("grij,jgd->igrd", weights[..., :rows], values_LGd[0])
    for step, value in enumerate(values_LGd[1:]):
        out = out + torch.einsum("gri,igd->igrd", weights[..., rows + step], value)
    return out.reshape(rows, heads, width)


def _causal(query_LHd: Tensor, key_LGd: Tensor, value_LGd: Tensor, scaling: float) -> Tensor:
    query, key, value = (
        tensor.transpose(0, 1).unsqueeze(0) for tensor in (query_LHd, key_LGd, value_LGd)
    )
    return attend(query, key, value, scaling, causal=True).squeeze(0).transpose(0, 1)
