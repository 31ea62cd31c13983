"""Attention over packed documents, for training and for feature capture.

Documents lie end to end in one ragged batch and never see each other. Holds no pages; knows no shift of tokens:
it is told where documents begin and which rollout step this is.

Shapes: T rows, H query heads, G key/value heads, d key width, w value width, L rows of one document.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn.functional import pad

from mtp_train.attention.chain import chain_attention
from mtp_train.attention.interface import AttentionRule, as_autocast, attend

Written = dict[int, tuple[tuple[Tensor, ...], tuple[Tensor, ...]]]


class PackedContext:
    """Causal attention within each document.

    Args:
        offsets: document boundaries [documents + 1], from 0 to T.
    """

    def __init__(self, offsets: Sequence[int]) -> None:
        self.spans = list(pairwise(offsets))

    def __call__(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, rule: AttentionRule
    ) -> Tensor:
        rule = rule.within(max((b - a for a, b in self.spans), default=0))
        if not rule.plain:  # torch has no kernel for these that is linear in memory
            return chain_attention(query, [key], [value], self.spans, rule)
        outs = [_causal(query[a:b], key[a:b], value[a:b], rule.scaling) for a, b in self.spans]
        return torch.cat(outs)


class KeptContext(PackedContext):
    """The same, which keeps every layer's keys and values for rows that come later and see them.

    Attributes:
        written: by layer; keys [T, G, d] and values [T, G, w].
    """

    def __init__(self, offsets: Sequence[int]) -> None:
        super().__init__(offsets)
        self.written: dict[int, tuple[Tensor, Tensor]] = {}

    def __call__(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, rule: AttentionRule
    ) -> Tensor:
        query, key, value = (as_autocast(rows) for rows in (query, key, value))
        self.written[layer] = key, value
        return super().__call__(layer, query, key, value, rule)


class RolloutContext:
    """Attention of a draft chain trained with its own outputs (training-time test).

    Called once per rollout step s = 0, 1, ... with rows indexed by where their chain starts: the row of chain p
    at step s stands at position p + s. It sees what the engine's chain sees: the verified rows 0..p of step 0,
    then its own chain's rows of steps 1..s, and nothing of other chains (EAGLE-3, arXiv 2503.01840, section 3).

        step 0, row p: keys 0..p of step 0
        step 2, row p: keys 0..p of step 0, key p of step 1, key p of step 2

    A context serves one step: it is given the keys and values of the steps before, and `then` is the next step's, given
    its own too. Nothing that was given is changed, so a step is a function of values: it can be run again, compiled or
    checkpointed. Each layer has its own keys, and its own first step: a head of one module per depth calls another
    layer at each, whose rows then see that layer's rows 0..p, plainly causal. Memory is linear in a document's length.
    Step 0 goes the same way as the others: its keys' gradients are summed in float32, and it is faster than the flash
    kernel that torch has for CPUs.

    Args:
        earlier: by layer; keys [T, G, d] and values [T, G, w] of every step so far.
    """

    def __init__(self, offsets: Sequence[int], earlier: Written | None = None) -> None:
        self.offsets, self.spans = offsets, list(pairwise(offsets))
        self.earlier = earlier or {}
        self.written: Written = {}

    def __call__(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, rule: AttentionRule
    ) -> Tensor:
        query, key, value = (as_autocast(rows) for rows in (query, key, value))
        keys, values = self.earlier.get(layer, ((), ()))
        self.written[layer] = keys, values = (*keys, key), (*values, value)
        return chain_attention(query, keys, values, self.spans, rule)

    def then(self) -> RolloutContext:
        """The next step's."""
        return RolloutContext(self.offsets, {**self.earlier, **self.written})


def _causal(query_LHd: Tensor, key_LGd: Tensor, value_LGw: Tensor, scaling: float) -> Tensor:
    query, key, value = (
        tensor.transpose(0, 1).unsqueeze(0) for tensor in (query_LHd, key_LGd, value_LGw)
    )
    width = value.shape[-1]
    if (
        width < key.shape[-1]
    ):  # torch has no kernel for narrower values and would fill an [L, L] matrix
        value = pad(value, (0, key.shape[-1] - width))
    out = attend(query, key, value, scaling, causal=True)[..., :width]
    return out.squeeze(0).transpose(0, 1)
