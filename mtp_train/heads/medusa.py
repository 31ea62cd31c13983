"""The `medusa` head: K residual blocks that draft K tokens from one state (arXiv 2401.10774).

    out_s = h + silu(linear(h))                  once per layer; each draft step s has its own layers
    logits_s = lm_heads[s] out_s                 the head's own, or the target's frozen one

h is the target's state H[p] at every step: row p's step s predicts x[p+2+s] by itself, as a chain's step s does, so
training and engine align it like any other head. x[p+1] is the target's own prediction from H[p]; the head reads
neither tokens nor positions and keeps no keys and values.

Shifts nothing.

Shapes: T rows, N rows chosen from them, D hidden width, V vocabulary, K draft steps.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from mtp_train.attention.interface import AttentionContext
from mtp_train.core.errors import UserError
from mtp_train.heads.chain import ChainHead
from mtp_train.heads.vocabulary import choose_again, choose_for, empty_vocabulary, require_size
from mtp_train.models.target import Target


@dataclass(frozen=True)
class MedusaConfig:
    """How a head is made. A fresh one begins with zero layers and copies of the target's lm_head, as published.

    Attributes:
        steps: K, draft tokens; training rolls out as many.
        layers: residual layers per step.
        bias: whether the layers have one, as the authors' own heads have.
        own_lm_heads: train an lm_head per step (K V D parameters), or read the target's frozen one.
        draft_vocabulary: so many of the most frequent trained tokens can be drafted; 0 is all of the vocabulary. For
            heads that read the target's lm_head: vLLM cuts no others.
    """

    family: str = "medusa"
    steps: int = 3
    layers: int = 1
    bias: bool = False
    own_lm_heads: bool = True
    draft_vocabulary: int = 0

    def __post_init__(self) -> None:
        for name in ("steps", "layers"):
            if getattr(self, name) < 1:
                raise UserError(f"head.{name} must be 1 or more", getattr(self, name), "raise it")
        require_size(self.draft_vocabulary)
        if self.draft_vocabulary and self.own_lm_heads:
            rule = "head.draft_vocabulary of a medusa head needs head.own_lm_heads=false"
            raise UserError(
                rule, self.draft_vocabulary, "set it, or use 0 for the whole vocabulary"
            )


class MedusaHead(ChainHead):
    """One draft head. Build it with `build`; its parameters start in float32."""

    family = "medusa"
    cache_layers = 0

    def __init__(self, target: Target, config: MedusaConfig) -> None:
        vocabulary_U = empty_vocabulary(config.draft_vocabulary)
        super().__init__(config, steps=config.steps, vocabulary_U=vocabulary_U)
        width = target.hidden_size
        self.blocks: Any = nn.ModuleList(
            nn.ModuleList(nn.Linear(width, width, bias=config.bias) for _ in range(config.layers))
            for _ in range(config.steps)
        )
        size = (config.steps, target.vocab_size, width)
        self.lm_heads = nn.Parameter(torch.empty(size)) if config.own_lm_heads else None
        self.float()

    def extended(self, target: Target, config: Any, counts_V: Tensor | None = None) -> MedusaHead:
        """This head with the draft vocabulary asked for; its lm_heads, if it has any, keep the whole."""
        if self.lm_heads is None:
            choose_again(self, config, counts_V)
        return self

    def forward(
        self, embedding_TD: Tensor, state_TD: Tensor, position_T: Tensor, context: AttentionContext
    ) -> Tensor:
        """The state as it is [T, D]: every step reads it."""
        return state_TD

    def readout(self, out_ND: Tensor, step: int) -> Tensor:
        for layer in self.blocks[step]:
            out_ND = out_ND + nn.functional.silu(layer(out_ND.to(layer.weight.dtype)))
        return out_ND

    def own_output(self) -> Tensor | None:
        return self.lm_heads


def build(target: Target, config: MedusaConfig, counts_V: Tensor | None = None) -> MedusaHead:
    """A fresh head for `target`, in float32 on its device. Nothing of it is random.

    Args:
        counts_V: how often each token is trained; a draft vocabulary is chosen by it.
    """
    head = MedusaHead(target, config)
    with torch.no_grad():
        for module in head.modules():
            if isinstance(module, nn.Linear):
                module.weight.zero_()
                if module.bias is not None:
                    module.bias.zero_()
        if head.lm_heads is not None:
            head.lm_heads.copy_(target.lm_head.weight.float().cpu())
    choose_for(head, config.draft_vocabulary, counts_V)
    return head.to(target.device)
