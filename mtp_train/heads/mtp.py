"""The `mtp` head: EAGLE's single decoder layer with the RMSNorms restored.

    x   = eh_proj([enorm(e) | hnorm(h)])      e: embedding of token x[p+1], zero at position 0; h: state H[p]
    out = final_norm(block(x))                block: the target's own decoder layer class, both its norms active

`out` predicts H[p+1]: it feeds the frozen lm_head (logits for x[p+2]) and, while drafting, the next step's `h`.
It is the DeepSeek-V3 MTP module (arXiv 2412.19437, section 2.2) with EAGLE's feedback (arXiv 2401.15077). Each norm
can be left out, so that its worth can be measured; only the head with all of them can be served.

One module serves every draft step (`modules: 1`, FastMTP's arrangement, the MiMo-MTP layout), or D modules serve one
depth each (DeepSeek-V3's): module k takes module k-1's output as its state, with the final norm, and token x[p+1+k].
Its rows attend to its own rows alone, causally, as in eq. 21-23 of that paper:

    module 0, row p: token x[p+1], state H[p]            keys of module 0's rows 0..p
    module 1, row p: token x[p+2], module 0's output p   keys of module 1's rows 0..p

Deeper than D the last module goes on recurrently. (vLLM begins again with module 0 there.)

A module of several layers has whole decoder layers between its block and its final norm.

The head owns no embedding and no lm_head: both are the target's, frozen. It knows no attention context's insides
and shifts nothing.

Shapes: T rows, D hidden width.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from mtp_train.attention.interface import AttentionContext, windowed
from mtp_train.core.errors import UserError
from mtp_train.heads.base import Projection
from mtp_train.heads.block import (
    Rotary,
    make_block,
    make_later_blocks,
    make_norm,
    require_block,
    require_layers,
    require_window,
    run_block,
    start_linears,
)
from mtp_train.heads.chain import ChainHead
from mtp_train.heads.native import begin_as_native
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
class MtpConfig:
    """How a head is made and how a fresh one begins.

    Attributes:
        modules: 1 for all draft steps, or one for each of the first D; every one of them begins alike.
        draft_vocabulary: so many of the most frequent trained tokens can be drafted; 0 is all of the vocabulary.
        layers: decoder layers of each module; those after the first begin as the identity, unless `init` is `random`.
        block: `target` for its own decoder layer class, `llama` for a plain Llama's of its sizes.
        init: `last_layer` begins as the target's last layer applied once more, with its final norm undone before it
            (see `start`, also for heads without some norm); `fitted` as that, with the projection fitted to the
            features by least squares; `native` as the MTP modules that the target was published with (see `native`);
            `random` as none of them.
        window: positions that a row sees, its own the last; 0: all before it.
        embedding_noise: standard deviation of the embedding half of `eh_proj` at the start, over sqrt(D).
        enorm, hnorm, input_norm, final_norm: whether the head has these norms; input_norm is the block's first.
    """

    family: str = "mtp"
    modules: int = 1
    layers: int = 1
    block: str = "target"
    init: str = "last_layer"
    window: int = 0
    draft_vocabulary: int = 0
    embedding_noise: float = 0.1
    enorm: bool = True
    hnorm: bool = True
    input_norm: bool = True
    final_norm: bool = True

    def __post_init__(self) -> None:
        require_window(self.window)
        require_init(self.init, (*INITS, FITTED, "native"))
        require_block(self.block)
        require_layers(self.layers)
        require_size(self.draft_vocabulary)
        if self.modules < 1:
            raise UserError("head.modules must be 1 or more", self.modules, "raise it")


class MtpHead(ChainHead):
    """One draft head. Build it with `build`; its parameters start in float32.

    The head is its first module; `later` holds the others, a head of one module each. `later_blocks` are a module's
    own decoder layers after its first.
    """

    family = "mtp"

    def __init__(self, target: Target, config: MtpConfig, depth: int = 0) -> None:
        super().__init__(config, vocabulary_U=empty_vocabulary(config.draft_vocabulary))
        self.depths = config.modules
        self.cache_layers = config.modules * config.layers
        width = target.hidden_size
        self.enorm = make_norm(target, config.enorm, config.block)
        self.hnorm: Any = make_norm(target, config.hnorm, config.block)
        self.eh_proj = nn.Linear(2 * width, width, bias=False)
        first = depth * config.layers
        self.block = make_block(
            target, input_norm=config.input_norm, depth=first, kind=config.block
        )
        self.later_blocks = make_later_blocks(target, config.layers, config.block, first=first)
        self.final_norm = make_norm(target, config.final_norm, config.block)
        self.rotary = Rotary(target, config.block)
        alone = replace(config, modules=1, draft_vocabulary=0)
        self.later: Any = nn.ModuleList(
            MtpHead(target, alone, depth) for depth in range(1, config.modules)
        )
        self.float()

    def at(self, step: int) -> MtpHead:
        head: MtpHead = self.in_order()[min(step, self.depths - 1)]
        return head

    def in_order(self) -> list[MtpHead]:
        """The modules, that of depth 0 first."""
        return [self, *self.later]

    def extended(self, target: Target, config: Any, counts_V: Tensor | None = None) -> MtpHead:
        """A head of as many modules, each a copy of its only one, and with the draft vocabulary asked for."""
        head, modules = self, getattr(config, "modules", 1)
        if self.depths == 1 < modules:
            head = MtpHead(target, replace(self.config, modules=modules)).to(target.device)
            one = self.state_dict()
            head.load_state_dict(one, strict=False)
            for module in head.later:
                module.load_state_dict({name: one[name] for name in module.state_dict()})
        choose_again(head, config, counts_V)
        return head

    def decoder_blocks(self) -> list[nn.Module]:
        return [block for module in self.in_order() for block in module.own_blocks()]

    def own_blocks(self) -> list[nn.Module]:
        """The decoder layers of this module alone."""
        return [self.block, *self.later_blocks]

    def projections(self) -> list[Projection]:
        return [
            Projection(module.eh_proj, module._halves, module.block, module.final_norm)
            for module in self.in_order()
        ]

    def forward(
        self, embedding_TD: Tensor, state_TD: Tensor, position_T: Tensor, context: AttentionContext
    ) -> Tensor:
        """The first module's states [T, D] that predict the target's next ones, for rows (x[p+1], H[p], p)."""
        context = windowed(context, self.config.window)
        halves = self._halves(embedding_TD * (position_T != 0).unsqueeze(-1), state_TD)
        rows_TD = self.eh_proj(halves.to(self.eh_proj.weight.dtype))
        for block in self.own_blocks():
            rows_TD = run_block(block, self.rotary, rows_TD, position_T, context)
        out: Tensor = self.final_norm(rows_TD)
        return out

    def _halves(self, embedding_TD: Tensor, state_TD: Tensor) -> Tensor:
        return torch.cat([self.enorm(embedding_TD), self.hnorm(state_TD)], dim=-1)


def build(
    target: Target, config: MtpConfig, seed: int = 0, counts_V: Tensor | None = None
) -> MtpHead:
    """A fresh head for `target`, in float32 on its device.

    Args:
        counts_V: how often each token is trained; a draft vocabulary is chosen by it.
    """
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        head = MtpHead(target, config)
        start_linears(head, target)
        if config.init in ("last_layer", FITTED):
            for module in head.in_order():
                begin_as_last_layer(
                    target,
                    module.eh_proj,
                    module.hnorm,
                    module.block,
                    module.final_norm,
                    config.embedding_noise,
                )
        if config.init == "native":
            begin_as_native(target, head.in_order())
        if config.init != "random":
            for module in head.in_order():
                begin_as_identity(target, module.later_blocks)
    choose_for(head, config.draft_vocabulary, counts_V)
    return head.to(target.device)
