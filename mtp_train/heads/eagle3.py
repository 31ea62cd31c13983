"""The `eagle3` head: EAGLE-3 (arXiv 2503.01840) and, by options, 3.1.

    h      = fc([g1 | g2 | g3])                   g: the residual streams of three layers; step 0 only
    r      = h + attention([input_layernorm(e) | hidden_norm(h)])
    out    = r + mlp(post_attention_layernorm(r))
    logits = lm_head(norm(out))                   the head's own, over a draft vocabulary

e is the embedding of token x[p+1]; `out` is the next step's h. 3.1 norms each g (`fc_norm`) and feeds norm(out) back
(`norm_output`); `norm_before_fc` norms [g1 | g2 | g3] as one. The attention and the mlp are those of the target's own
decoder layer class, queries, keys and values reading twice the width. A head of several layers has whole decoder layers
after that one, on `out` alone.

Knows no attention context's insides and shifts nothing.

Shapes: T rows, N rows chosen from them, D hidden width, U draft vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from mtp_train.attention.interface import AttentionContext, windowed
from mtp_train.core.errors import UserError
from mtp_train.heads.block import (
    Rotary,
    float_state,
    gain,
    make_block,
    make_later_blocks,
    make_norm,
    require_block,
    require_layer,
    require_layers,
    require_window,
    run_attention,
    run_block,
    set_gain,
    start_linears,
)
from mtp_train.heads.chain import ChainHead
from mtp_train.heads.start import (
    begin_as_identity,
    has_post_norms,
    last_layer_for,
    random_states,
    require_init,
    usual_length,
)
from mtp_train.heads.vocabulary import choose_vocabulary, empty_vocabulary, require_size
from mtp_train.models.target import Target, eagle3_states

STATES = 3
PROJECTIONS = ("q_proj", "k_proj", "v_proj")


@dataclass(frozen=True)
class Eagle3Config:
    """How a head is made and how a fresh one begins.

    Attributes:
        block: `target` for its own decoder layer class, `llama` for a plain Llama's of its sizes.
        layer: what a Llama block has for itself: its sizes, rms_norm_eps, rope_parameters.
        layers: decoder layers; those after the first begin as the identity, unless `init` is `random`.
        window: positions that a row sees, its own the last; 0: all before it.
        init: `last_layer` begins as the target's last layer applied to the third state, with the target's own final
            norm and lm_head rows; `random` does not.
        embedding_noise: standard deviation of the embedding half of q, k and v at the start, over sqrt(D).
        states: three of the target's states; none: the usual choice for its depth.
        draft_vocabulary: so many of the most frequent trained tokens can be drafted; 0 is all of the vocabulary.
        norm_before_residual: the residual is hidden_norm(h), not h.
        norm_before_fc: one norm over the three states side by side.
        fc_norm, norm_output: EAGLE-3.1.
    """

    family: str = "eagle3"
    block: str = "target"
    layer: dict[str, Any] = field(default_factory=dict)
    layers: int = 1
    window: int = 0
    init: str = "last_layer"
    embedding_noise: float = 0.1
    states: list[str] = field(default_factory=list)
    draft_vocabulary: int = 32000
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False

    def __post_init__(self) -> None:
        require_window(self.window)
        require_init(self.init)
        require_block(self.block)
        require_layers(self.layers)
        if self.norm_before_fc and self.fc_norm:
            rule = "a head must have one of head.norm_before_fc and head.fc_norm, not both"
            raise UserError(rule, "both", "leave one out")
        require_layer(self.layer, self.block, self.init)
        if len(self.states) not in (0, STATES):
            raise UserError(f"head.states must be {STATES} states or none", self.states, "name 3")
        require_size(self.draft_vocabulary)


class Eagle3Head(ChainHead):
    """One draft head. Build it with `build`; its parameters start in float32.

    Args:
        config: with its states named and the draft vocabulary as large as it really is.
    """

    family = "eagle3"

    def __init__(self, target: Target, config: Eagle3Config) -> None:
        size = config.draft_vocabulary
        super().__init__(
            config,
            states=tuple(config.states),
            vocabulary_U=empty_vocabulary(size),
        )
        width = target.hidden_size
        self.cache_layers = config.layers
        self.input_norm: Any = nn.Identity()
        if config.norm_before_fc:
            self.input_norm = make_norm(target, kind=config.block, layer=config.layer, parts=STATES)
        self.fc_norm: Any = nn.ModuleList(
            make_norm(target, kind=config.block, layer=config.layer)
            for _ in range(STATES * config.fc_norm)
        )
        self.fc = nn.Linear(STATES * width, width, bias=False)
        self.hidden_norm: Any = make_norm(target, kind=config.block, layer=config.layer)
        self.block: Any = make_block(target, kind=config.block, layer=config.layer)
        self.later = make_later_blocks(target, config.layers, config.block, config.layer)
        _require_parts(self.block)
        for name in PROJECTIONS:
            old = getattr(self.block.self_attn, name)
            wide = nn.Linear(2 * width, old.out_features, bias=old.bias is not None)
            setattr(self.block.self_attn, name, wide)
        self.norm: Any = make_norm(target, kind=config.block, layer=config.layer)
        self.lm_head = nn.Linear(width, size or target.vocab_size, bias=False)
        self.rotary = Rotary(target, config.block, config.layer)
        self.float()

    def decoder_blocks(self) -> list[nn.Module]:
        return [self.block, *self.later]

    def fuse(self, states: dict[str, Tensor]) -> Tensor:
        return self.fused([states[name] for name in self.states])

    def fused(self, parts: list[Tensor]) -> Tensor:
        """h of three states [T, D]."""
        if self.config.fc_norm:
            parts = [norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)]
        whole = self.input_norm(torch.cat(parts, dim=-1))
        fused: Tensor = self.fc(whole.to(self.fc.weight.dtype))
        return fused

    def forward(
        self, embedding_TD: Tensor, state_TD: Tensor, position_T: Tensor, context: AttentionContext
    ) -> Tensor:
        """What the next step is fed [T, D], for rows (x[p+1], fused or own state, p)."""
        context = windowed(context, self.config.window)
        normed_TD = self.hidden_norm(state_TD)
        rows = torch.cat([self.block.input_layernorm(embedding_TD), normed_TD], dim=-1)
        residual_TD = normed_TD if self.config.norm_before_residual else state_TD
        residual_TD = residual_TD + run_attention(
            self.block.self_attn, self.rotary, rows, position_T, context
        )
        out_TD: Tensor = residual_TD + self.block.mlp(
            self.block.post_attention_layernorm(residual_TD)
        )
        for block in self.later:
            out_TD = run_block(block, self.rotary, out_TD, position_T, context)
        return self.norm(out_TD) if self.config.norm_output else out_TD

    def readout(self, out_ND: Tensor, step: int) -> Tensor:
        return out_ND if self.config.norm_output else self.norm(out_ND)

    def own_output(self) -> Tensor:
        return self.lm_head.weight


def _require_parts(block: Any) -> None:
    """Refuse a layer that the equations above don't describe."""
    missing = [name for name in PROJECTIONS if getattr(block.self_attn, name, None) is None]
    if missing or has_post_norms(block):
        raise UserError(
            "an eagle3 head needs a layer with q, k and v projections and two norms",
            f"{type(block).__name__} "
            + (f"without {', '.join(missing)}" if missing else "with four"),
            "set head.block=llama",
        )


def settle(config: Any, target: Target, draft_vocabulary: int) -> Any:
    """The configuration with its states named, and a draft vocabulary of that many tokens."""
    states = config.states or list(eagle3_states(target.layers))
    return replace(config, states=states, draft_vocabulary=draft_vocabulary)


def build(
    target: Target, config: Eagle3Config, seed: int = 0, counts_V: Tensor | None = None
) -> Eagle3Head:
    """A fresh head for `target`, in float32 on its device.

    Args:
        counts_V: how often each token is trained; the draft vocabulary is chosen by it.
    """
    head: Eagle3Head = begin(Eagle3Head, target, config, seed, counts_V)
    return head


def begin(
    made: type[Any], target: Target, config: Eagle3Config, seed: int, counts_V: Tensor | None
) -> Any:
    """A fresh head of that class."""
    size = config.draft_vocabulary
    vocabulary_U = choose_vocabulary(counts_V, size) if size else None
    settled = settle(config, target, 0 if vocabulary_U is None else len(vocabulary_U))
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        head = made(target, settled)
        start_linears(head, target)
        if vocabulary_U is not None and head.vocabulary is not None:
            head.vocabulary.copy_(vocabulary_U)
        if config.init == "last_layer":
            _begin_as_last_layer(head, target)
    return head.to(target.device)


@torch.no_grad()
def _begin_as_last_layer(head: Eagle3Head, target: Target) -> None:
    """The third state goes through the target's last layer, final norm and lm_head.

    hidden_norm gives it its usual length back, whether it is the residual or not; queries, keys and values undo that.
    """
    width = target.hidden_size
    layer = last_layer_for(target, head.block)
    found = random_states(target, head.states)
    last = usual_length(found[head.states[-1]])
    head.fc.weight.zero_()
    head.fc.weight[:, -width:] = torch.eye(width)
    if head.config.fc_norm:
        set_gain(head.fc_norm[-1], last.expand(width))
    if head.config.norm_before_fc:
        side_by_side = torch.cat([found[name] for name in head.states], dim=-1)
        set_gain(head.input_norm, usual_length(side_by_side).expand(STATES * width))
    set_gain(head.hidden_norm, last.expand(width))
    first_D = gain(target.base.layers[-1].input_layernorm)
    for name, value in layer.items():
        mine = head.block.get_parameter(name)
        if mine.shape == value.shape:
            mine.copy_(value)
        else:
            noise = torch.randn(len(value), width) * head.config.embedding_noise / width**0.5
            mine.copy_(torch.cat([noise, value * first_D / last], dim=1))
    set_gain(head.block.input_layernorm, torch.ones(width))
    begin_as_identity(target, head.later)
    head.norm.load_state_dict(float_state(target.base.norm))
    rows = target.lm_head.weight.float().cpu()
    head.lm_head.weight.copy_(rows if head.vocabulary is None else rows[head.vocabulary])
