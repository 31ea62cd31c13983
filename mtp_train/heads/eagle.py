"""The `eagle` head: EAGLE-1/2 as published (arXiv 2401.15077, 2406.16858), the baseline without input and final norms.

    x   = fc([e | h])       e: embedding of token x[p+1]; h: post-norm state H[p]
    out = block(x)          block: the target's own decoder layer class without its input norm

`out` predicts H[p+1] as it stands: it feeds the frozen lm_head and, while drafting, the next step's `h`. Engines do
not zero the embedding at position 0 for this method, as they do for `mtp`. A head of several layers has whole decoder
layers, with their input norms, after that one.

Knows no attention context's insides and shifts nothing.

Shapes: T rows, D hidden width.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from mtp_train.attention.interface import AttentionContext, windowed
from mtp_train.heads.base import Projection
from mtp_train.heads.block import (
    Rotary,
    make_block,
    make_later_blocks,
    require_block,
    require_layer,
    require_layers,
    require_window,
    run_block,
    start_linears,
)
from mtp_train.heads.chain import ChainHead
from mtp_train.heads.start import (
    FITTED,
    INITS,
    begin_as_identity,
    begin_as_last_layer,
    require_init,
)
from mtp_train.heads.vocabulary import choose_again, choose_for, empty_vocabulary, require_size
from mtp_train.models.target import Target


@dataclass(frozen=True)
class EagleConfig:
    """How a fresh head begins.

    Attributes:
        block: `target` for its own decoder layer class, `llama` for a plain Llama's of its sizes.
        layer: what a Llama block has for itself: its sizes, rms_norm_eps, rope_parameters.
        layers: decoder layers; those after the first begin as the identity, unless `init` is `random`.
        draft_vocabulary: so many of the most frequent trained tokens can be drafted; 0 is all of the vocabulary.
        window: positions that a row sees, its own the last; 0: all before it.
        fc_bias: whether `fc` has a bias, as the authors' own heads have; vLLM leaves it out.
        init: `last_layer`, `fitted` or `random`, as for `mtp`; without norms it begins near the same function.
        embedding_noise: standard deviation of the embedding half of `fc` at the start, over sqrt(D).
    """

    family: str = "eagle"
    block: str = "target"
    layer: dict[str, Any] = field(default_factory=dict)
    layers: int = 1
    window: int = 0
    draft_vocabulary: int = 0
    fc_bias: bool = False
    init: str = "last_layer"
    embedding_noise: float = 0.1

    def __post_init__(self) -> None:
        require_window(self.window)
        require_init(self.init, (*INITS, FITTED))
        require_layers(self.layers)
        require_size(self.draft_vocabulary)
        require_block(self.block)
        require_layer(self.layer, self.block, self.init)


class EagleHead(ChainHead):
    """One draft head. Build it with `build`; its parameters start in float32."""

    family = "eagle"

    def __init__(self, target: Target, config: EagleConfig) -> None:
        super().__init__(config, vocabulary_U=empty_vocabulary(config.draft_vocabulary))
        self.cache_layers = config.layers
        self.fc = nn.Linear(2 * target.hidden_size, target.hidden_size, bias=config.fc_bias)
        self.block = make_block(target, input_norm=False, kind=config.block, layer=config.layer)
        self.later = make_later_blocks(target, config.layers, config.block, config.layer)
        self.rotary = Rotary(target, config.block, config.layer)
        self.float()

    def decoder_blocks(self) -> list[nn.Module]:
        return [self.block, *self.later]

    def projections(self) -> list[Projection]:
        return [Projection(self.fc, _halves, self.block, nn.Identity())]

    def extended(self, target: Target, config: Any, counts_V: Tensor | None = None) -> EagleHead:
        """This head with the draft vocabulary asked for."""
        choose_again(self, config, counts_V)
        return self

    def forward(
        self, embedding_TD: Tensor, state_TD: Tensor, position_T: Tensor, context: AttentionContext
    ) -> Tensor:
        """States [T, D] that predict the target's next ones, for rows (x[p+1], H[p], p)."""
        context = windowed(context, self.config.window)
        rows_TD = self.fc(_halves(embedding_TD, state_TD).to(self.fc.weight.dtype))
        for block in self.decoder_blocks():
            rows_TD = run_block(block, self.rotary, rows_TD, position_T, context)
        return rows_TD


def _halves(embedding_TD: Tensor, state_TD: Tensor) -> Tensor:
    return torch.cat([embedding_TD, state_TD], dim=-1)


def build(
    target: Target, config: EagleConfig, seed: int = 0, counts_V: Tensor | None = None
) -> EagleHead:
    """A fresh head for `target`, in float32 on its device.

    Args:
        counts_V: how often each token is trained; a draft vocabulary is chosen by it.
    """
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        head = EagleHead(target, config)
        start_linears(head, target)
        if config.init in ("last_layer", FITTED):
            none = nn.Identity()
            begin_as_last_layer(target, head.fc, none, head.block, none, config.embedding_noise)
            begin_as_identity(target, head.later)
        if head.fc.bias is not None:
            head.fc.bias.data.zero_()
    choose_for(head, config.draft_vocabulary, counts_V)
    return head.to(target.device)
