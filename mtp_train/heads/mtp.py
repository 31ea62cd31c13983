"""The `mtp` head: EAGLE's single decoder layer with the RMSNorms restored.

    x   = eh_proj([enorm(e) | hnorm(h)])      e: embedding of token x[p+1], zero at position 0; h: state H[p]
    out = final_norm(block(x))                block: the target's own decoder layer class, both its norms active

`out` predicts H[p+1]: it feeds the frozen lm_head (logits for x[p+2]) and, while drafting, the next step's `h`.
The one module serves every draft depth. It is the DeepSeek-V3 MTP module (arXiv 2412.19437, section 2.2) with
EAGLE's feedback (arXiv 2401.15077), and engines serve it in the MiMo-MTP layout.

The head owns no embedding and no lm_head: both are the target's, frozen. It knows no attention context's insides
and shifts nothing.

Shapes: T rows, D hidden width.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from mtp_train.attention.interface import AttentionContext
from mtp_train.attention.packed import PackedContext
from mtp_train.core.errors import UserError
from mtp_train.models.target import Target


@dataclass(frozen=True)
class MtpConfig:
    """How a fresh head begins.

    Attributes:
        init: `last_layer` begins as the target's last layer applied once more, with its final norm undone before it;
            `random` does not.
        embedding_noise: standard deviation of the embedding half of `eh_proj` at the start, over sqrt(D).
    """

    family: str = "mtp"
    init: str = "last_layer"
    embedding_noise: float = 0.1

    def __post_init__(self) -> None:
        if self.init not in INITS:
            raise UserError(
                "head.init must be one of " + ", ".join(INITS), self.init, "choose one of them"
            )
        if self.family != "mtp":
            raise UserError("head.family must be one of mtp", self.family, "choose one of them")


class MtpHead(nn.Module):
    """One draft head. Build it with `build`; its parameters start in float32."""

    family = "mtp"

    def __init__(self, target: Target) -> None:
        super().__init__()
        config = copy.deepcopy(target.config)
        config._attn_implementation = target.config._attn_implementation
        if getattr(config, "layer_types", None):  # the block stands after the last of them
            config.layer_types = [*config.layer_types, config.layer_types[-1]]
        width = target.hidden_size
        norm = type(target.base.norm)
        self.layer = target.layers  # its place in a paged cache: after the target's layers
        self.enorm = norm(width, eps=_norm_epsilon(target.base.norm))
        self.hnorm = norm(width, eps=_norm_epsilon(target.base.norm))
        self.eh_proj = nn.Linear(2 * width, width, bias=False)
        self.block = _block_class(target)(config, layer_idx=self.layer)
        self.final_norm = norm(width, eps=_norm_epsilon(target.base.norm))
        self.rotary = type(target.base.rotary_emb)(config)
        self.float()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> MtpHead:
        """Cast or move the head; its RoPE frequencies stay float32, as in training and in serving engines.

        In bfloat16 the angle at distance 1,000 would be wrong by more than a radian.
        """
        kept = dict(self.rotary.named_buffers())
        super()._apply(fn, recurse)
        for name, value in kept.items():
            setattr(self.rotary, name, value.to(fn(value).device))
        return self

    def forward(
        self, embedding_TD: Tensor, state_TD: Tensor, position_T: Tensor, context: AttentionContext
    ) -> Tensor:
        """States [T, D] that predict the target's next ones, for rows (x[p+1], H[p], p)."""
        embedding = embedding_TD * (position_T != 0).unsqueeze(-1)
        rows = self.eh_proj(
            torch.cat([self.enorm(embedding), self.hnorm(state_TD)], dim=-1)
        ).unsqueeze(0)
        position = position_T.unsqueeze(0)
        out = self.block(
            rows,
            attention_mask=None,
            position_ids=position,
            position_embeddings=self.rotary(rows, position_ids=position),
            attention_context=context,
        )
        return self.final_norm(out).squeeze(0)


def build(target: Target, config: MtpConfig, seed: int = 0) -> MtpHead:
    """A fresh head for `target`, in float32 on its device."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        head = MtpHead(target)
        for module in head.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=0.02)
        INITS[config.init](head, target, config)
    return head.to(target.device)


@torch.no_grad()
def _from_last_layer(head: MtpHead, target: Target, config: MtpConfig) -> None:
    """Begin as the target's last layer applied once more to its own output.

    H = x / rms(x) * w is the final norm's output, but the block expects the residual x. `hnorm` computes
    H / rms(H) * v: with v = r / w it points along x, and r = typical rms(x) * rms(H) gives it x's length.
    """
    head.block.load_state_dict(
        {name: value.float() for name, value in target.base.layers[-1].state_dict().items()}
    )
    head.final_norm.load_state_dict(
        {name: value.float() for name, value in target.base.norm.state_dict().items()}
    )
    width = target.hidden_size
    head.eh_proj.weight[:, :width] = torch.randn(width, width) * config.embedding_noise / width**0.5
    head.eh_proj.weight[:, width:] = torch.eye(width)
    head.hnorm.weight.copy_(_residual_scale(target) / _nonzero(target.base.norm.weight.float()))


def _residual_scale(target: Target) -> Tensor:
    """Median over rows of rms(x) * rms(H), x the residual before the final norm, on a fixed random text."""
    seen: dict[str, Tensor] = {}
    hook = target.base.norm.register_forward_pre_hook(lambda _, inputs: seen.update(x=inputs[0]))
    rows = min(64, target.max_positions)
    token_T = torch.randint(
        target.vocab_size, (rows,), generator=torch.Generator().manual_seed(0)
    ).to(target.device)
    try:
        state_TD = target.forward(
            token_T, torch.arange(rows, device=target.device), PackedContext([0, rows])
        )
    finally:
        hook.remove()
    before, after = (
        value.float().square().mean(-1).sqrt().flatten() for value in (seen["x"], state_TD)
    )
    return (before * after)[rows // 4 :].median()  # the first rows' residuals are outliers


def _nonzero(weight_D: Tensor, smallest: float = 1e-3) -> Tensor:
    """The weights with their magnitude kept away from 0."""
    return torch.where(weight_D < 0, -1.0, 1.0) * weight_D.abs().clamp(min=smallest)


def _random(head: MtpHead, target: Target, config: MtpConfig) -> None:
    """Keep the random start."""


INITS = {"last_layer": _from_last_layer, "random": _random}


def _block_class(target: Target) -> Any:
    return type(target.base.layers[-1])


def _norm_epsilon(norm: nn.Module) -> float:
    """The epsilon of a target's norm, under either name that transformers gives it."""
    names = [name for name in ("variance_epsilon", "eps") if hasattr(norm, name)]
    if not names:
        raise UserError(
            "a target's norm must say its epsilon",
            type(norm).__name__,
            "choose another architecture",
        )
    return float(getattr(norm, names[0]))
