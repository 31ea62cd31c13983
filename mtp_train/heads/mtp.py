"""The `mtp` head: EAGLE's single decoder layer with the RMSNorms restored.

    x   = eh_proj([enorm(e) | hnorm(h)])      e: embedding of token x[p+1], zero at position 0; h: state H[p]
    out = final_norm(block(x))                block: the target's own decoder layer class, both its norms active

`out` predicts H[p+1]: it feeds the frozen lm_head (logits for x[p+2]) and, while drafting, the next step's `h`.
The one module serves every draft depth. It is the DeepSeek-V3 MTP module (arXiv 2412.19437, section 2.2) with
EAGLE's feedback (arXiv 2401.15077), and engines serve it in the MiMo-MTP layout. Each norm can be left out, so that
its worth can be measured; only the head with all of them can be served.

The head owns no embedding and no lm_head: both are the target's, frozen. It knows no attention context's insides
and shifts nothing.

Shapes: T rows, D hidden width.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from mtp_train.attention.interface import AttentionContext
from mtp_train.heads.base import DraftHead
from mtp_train.heads.block import Rotary, make_block, make_norm, run_block, start_linears
from mtp_train.heads.start import begin_as_last_layer, require_init
from mtp_train.models.target import Target


@dataclass(frozen=True)
class MtpConfig:
    """How a head is made and how a fresh one begins.

    Attributes:
        init: `last_layer` begins as the target's last layer applied once more, with its final norm undone before it
            (see `start`, also for heads without some norm); `random` does not.
        embedding_noise: standard deviation of the embedding half of `eh_proj` at the start, over sqrt(D).
        enorm, hnorm, input_norm, final_norm: whether the head has these norms; input_norm is the block's first.
    """

    family: str = "mtp"
    init: str = "last_layer"
    embedding_noise: float = 0.1
    enorm: bool = True
    hnorm: bool = True
    input_norm: bool = True
    final_norm: bool = True

    def __post_init__(self) -> None:
        require_init(self.init)


class MtpHead(DraftHead):
    """One draft head. Build it with `build`; its parameters start in float32."""

    family = "mtp"

    def __init__(self, target: Target, config: MtpConfig) -> None:
        super().__init__(config)
        width = target.hidden_size
        self.enorm = make_norm(target, config.enorm)
        self.hnorm: Any = make_norm(target, config.hnorm)
        self.eh_proj = nn.Linear(2 * width, width, bias=False)
        self.block = make_block(target, input_norm=config.input_norm)
        self.final_norm = make_norm(target, config.final_norm)
        self.rotary = Rotary(target)
        self.float()

    def forward(
        self, embedding_TD: Tensor, state_TD: Tensor, position_T: Tensor, context: AttentionContext
    ) -> Tensor:
        """States [T, D] that predict the target's next ones, for rows (x[p+1], H[p], p)."""
        embedding = embedding_TD * (position_T != 0).unsqueeze(-1)
        halves = torch.cat([self.enorm(embedding), self.hnorm(state_TD)], dim=-1)
        rows_TD = self.eh_proj(halves.to(self.eh_proj.weight.dtype))
        out: Tensor = self.final_norm(
            run_block(self.block, self.rotary, rows_TD, position_T, context)
        )
        return out


def build(target: Target, config: MtpConfig, seed: int = 0) -> MtpHead:
    """A fresh head for `target`, in float32 on its device."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        head = MtpHead(target, config)
        start_linears(head)
        if config.init == "last_layer":
            begin_as_last_layer(
                target,
                head.eh_proj,
                head.hnorm,
                head.block,
                head.final_norm,
                config.embedding_noise,
            )
    return head.to(target.device)
