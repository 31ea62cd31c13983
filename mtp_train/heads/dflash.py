"""The `dflash` head: a block of drafts in one forward (arXiv 2602.06036).

    c      = hidden_norm(fc([g1 | .. | gn]))      g: the residual streams of n layers; of every verified row
    rows   = [embedding of x[a] ; embedding of the mask token, B - 1 times]     at positions a .. a+B-1
    layer  : keys and values of [c of the rows before a ; the block's rows], queries of the block's rows alone,
             q, k and v projections the same for both; within the block every row sees every other
    logits = lm_head(norm(rows))                  the target's; slot k >= 1 predicts x[a+k]

A chain that starts at row p has its anchor a = p + 1: the newest token, whose state nobody knows yet. Layers are
Qwen3's (norms on queries and keys). What a layer caches of verified rows needs no query, and depends on their states
alone.

Shifts nothing: which chains are trained, from which tokens, is `batches.align`'s.

Shapes: T rows, N blocks, B rows of a block, R = N B rows, S draft steps, D hidden width, H heads, G key/value heads, d
head width, C sequences that draft.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Self

import numpy as np
import torch
from torch import Tensor, nn

from mtp_train.attention.blocks import BlockContext, BlockLayout
from mtp_train.attention.interface import AttentionContext, AttentionRule
from mtp_train.attention.paged import BatchPlan, PagedKV, TreeRows
from mtp_train.batches.align import Blocks, blocks, trained_starts
from mtp_train.core.errors import UserError
from mtp_train.heads.base import DraftHead, Drafting, Drafts, NextDraft, Timer, Unrolled
from mtp_train.heads.block import (
    Rotary,
    make_norm,
    require_layer,
    require_layers,
    require_window,
    start_linears,
)
from mtp_train.models import plain
from mtp_train.models.target import Target, spread_states

KIND = "llama"  # of blocks, norms and RoPE


@dataclass(frozen=True)
class DFlashConfig:
    """How a head is made and how a fresh one begins.

    Attributes:
        layers: decoder layers.
        block_size: B: the newest token and B - 1 drafts.
        states: the target's states that are read; none: `target_states` of them, spread evenly.
        target_states: how many are, if they are not named.
        window: positions that a row sees, its own the last; 0: all before it.
        mask_token: id of the token that stands for what is not known yet, one that no text has; -1: chosen among those
            that are never trained.
        anchor_share: share of the chains whose newest and next token are trained that a step trains, drawn anew.
        most_anchors: of a document, at most.
        layer: what the layers have for themselves: their sizes, rms_norm_eps, rope_parameters.
    """

    family: str = "dflash"
    layers: int = 5
    block_size: int = 8
    states: list[str] = field(default_factory=list)
    target_states: int = 5
    window: int = 0
    mask_token: int = -1
    anchor_share: float = 0.25
    most_anchors: int = 512
    layer: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        require_layers(self.layers)
        require_layer(self.layer, KIND, "random")
        for name, least in (("block_size", 2), ("target_states", 1), ("most_anchors", 1)):
            if getattr(self, name) < least:
                rule = f"head.{name} must be {least} or more"
                raise UserError(rule, getattr(self, name), "raise it")
        require_window(self.window)
        if not 0 < self.anchor_share <= 1:
            rule = "head.anchor_share must lie in (0, 1]"
            raise UserError(rule, self.anchor_share, "use 0.25, or 1 for every chain")


class DFlashHead(DraftHead):
    """One draft head. Build it with `build`; its parameters start in float32.

    Args:
        config: with its states and its mask token named.
    """

    family = "dflash"
    at_once = True
    first_slot: ClassVar[int] = 1  # of the block, that predicts the first draft

    def __init__(self, target: Target, config: DFlashConfig) -> None:
        steps = config.block_size - self.first_slot
        super().__init__(config, states=tuple(config.states), steps=steps)
        width, own = target.hidden_size, config.layer
        sizes: Any = plain.plain_config(target, own)
        self.cache_layers = config.layers
        self.mask_token = config.mask_token
        self.first_layer = target.layers
        self.fc = nn.Linear(len(config.states) * width, width, bias=False)
        self.hidden_norm = make_norm(target, kind=KIND, layer=own)
        self.layers: Any = nn.ModuleList(
            BlockLayer(sizes, target.layers + depth) for depth in range(config.layers)
        )
        self.norm = make_norm(target, kind=KIND, layer=own)
        self.rotary = Rotary(target, KIND, own)
        self.rule = AttentionRule(sizes.head_dim**-0.5, config.window or None)
        self.float()

    @property
    def share(self) -> float:
        return float(self.config.anchor_share)

    def decoder_blocks(self) -> list[nn.Module]:
        return list(self.layers)

    def fuse(self, states: dict[str, Tensor]) -> Tensor:
        whole = torch.cat([states[name] for name in self.states], dim=-1)
        fused: Tensor = self.hidden_norm(self.fc(whole.to(self.fc.weight.dtype)))
        return fused

    # --- over packed documents --------------------------------------------------------------------------------

    def align(
        self,
        token_T: Tensor,
        loss_mask_T: Tensor,
        offsets: Sequence[int],
        steps: int,
        *,
        start_N: Tensor | None = None,
        seed: int | None = None,
    ) -> Blocks:
        if start_N is None and seed is not None:
            ready_N = trained_starts(token_T, loss_mask_T, offsets)
            start_N = self._drawn(ready_N, offsets, seed)
        return blocks(token_T, loss_mask_T, offsets, steps, start_N)

    def unroll(self, target: Target, aligned: Blocks, states: dict[str, Tensor]) -> Unrolled:
        fused_TD = self.fuse(states)
        layout = BlockLayout(
            aligned.begin_N.tolist(), aligned.start_N.tolist(), self.config.block_size
        )
        context = BlockContext(layout)
        table = self.rotary(fused_TD.unsqueeze(0), aligned.position_T.unsqueeze(0))
        for layer in self.layers:
            context.store(layer.index, *layer.cached(fused_TD, table))
        position_N = aligned.position_T[aligned.start_N] + 1
        read_NBD = self._block(target, aligned.token_SN[0], position_N, context)
        steps = len(aligned.token_SN)
        read_SND = read_NBD[:, self.first_slot : self.first_slot + steps].transpose(0, 1)
        return self.read(read_SND, aligned.token_SN)

    def read(self, read_SND: Tensor, token_SN: Tensor) -> Unrolled:
        """What a block's outputs say; token_SN: the token before each draft."""
        return Unrolled(read_SND)

    def _drawn(self, ready_N: Tensor, offsets: Sequence[int], seed: int) -> Tensor:
        """A random part of these rows, rising: so large a share of each document's, one at least."""
        draw = np.random.default_rng(seed)
        rows, kept = ready_N.cpu().numpy(), []
        document = np.searchsorted(np.asarray(offsets), rows, side="right")
        for here in np.unique(document):
            mine = rows[document == here]
            count = max(round(len(mine) * self.config.anchor_share), 1)
            kept.append(draw.choice(mine, min(count, self.config.most_anchors), replace=False))
        chosen = np.sort(np.concatenate(kept)) if kept else rows
        return torch.from_numpy(chosen).to(ready_N.device)

    # --- over the paged cache ---------------------------------------------------------------------------------

    def room(self, drafts: int) -> int:
        return (
            int(self.config.block_size) - 1
        )  # a block is always whole: what it has seen in training

    def reach(self, drafts: int) -> int:
        return 0

    def observe(
        self,
        target: Target,
        cache: PagedKV,
        plan: BatchPlan,
        next_T: Tensor,
        states: dict[str, Tensor],
        drafts: int,
        clock: Timer,
    ) -> ObservedContext:
        with clock("head"):
            fused_TD = self.fuse(states)
            table = self.rotary(fused_TD.unsqueeze(0), plan.positions.unsqueeze(0))
            for layer in self.layers:
                cache.write(layer.index, plan.slots, *layer.cached(fused_TD, table))
        return ObservedContext()

    def drafts(self, target: Target, where: Drafting, carry: Any, count: int) -> Drafts:
        size = int(self.config.block_size)
        shape = np.arange(size), np.ones((size, size), dtype=bool)
        trees = [TreeRows(newest, *shape) for newest in where.newest]
        plan = where.plan(where.newest, [size] * len(trees), trees)
        token_C = torch.tensor(where.token, device=plan.positions.device)
        first_C = torch.tensor(where.newest, device=plan.positions.device)
        with where.clock("head"):
            read_CBD = self._block(target, token_C, first_C, where.cache.context(plan))
        read_SCD = read_CBD[:, self.first_slot : self.first_slot + count].transpose(0, 1)
        with where.clock("lm_head of the head"):
            logits_SCU = self.project(target, read_SCD, 0)
        for step, (read_CD, logits_CU) in enumerate(zip(read_SCD, logits_SCU, strict=True)):
            with where.clock("head"):
                following = self.follow(read_CD, logits_CU, token_C, step)
            token_C = yield following

    def follow(self, read_CD: Tensor, logits_CU: Tensor, token_C: Tensor, step: int) -> NextDraft:
        """The draft of step `step`, after token `token_C`."""
        return NextDraft(logits_CU)

    # --- both -------------------------------------------------------------------------------------------------

    def _block(
        self, target: Target, token_N: Tensor, position_N: Tensor, context: AttentionContext
    ) -> Tensor:
        """What the lm_head may read of blocks that begin with these tokens, at these positions [N, B, D]."""
        size = self.config.block_size
        token_NB = token_N.unsqueeze(1).expand(-1, size).clone()
        token_NB[:, 1:] = self.mask_token
        slot_B = torch.arange(size, device=token_N.device)
        position_R = (position_N.unsqueeze(1) + slot_B).flatten()
        rows_RD = self.embed(target, token_NB.flatten()).to(self.fc.weight.dtype)
        table = self.rotary(rows_RD.unsqueeze(0), position_R.unsqueeze(0))
        for layer in self.layers:
            rows_RD = layer(rows_RD, table, context, self.rule)
        out: Tensor = self.norm(rows_RD)
        return out.unflatten(0, (-1, size))


class BlockLayer(nn.Module):
    """A decoder layer of Qwen3's kind, whose keys and values are those of context rows too.

    index: its place in the paged cache.
    """

    def __init__(self, sizes: Any, index: int) -> None:
        super().__init__()
        made: Any = plain.Layer(sizes, layer_idx=index)
        self.self_attn, self.mlp = made.self_attn, made.mlp
        self.input_layernorm = made.input_layernorm
        self.post_attention_layernorm = made.post_attention_layernorm
        self.self_attn.q_norm = plain.Norm(sizes.head_dim, eps=sizes.rms_norm_eps)
        self.self_attn.k_norm = plain.Norm(sizes.head_dim, eps=sizes.rms_norm_eps)
        self.index, self.width = index, sizes.head_dim

    def cached(self, fused_TD: Tensor, table: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Keys and values [T, G, d] of rows without queries."""
        attention = self.self_attn
        key_TGd = attention.k_norm(self._heads(attention.k_proj(fused_TD)))
        return _turned(key_TGd, table), self._heads(attention.v_proj(fused_TD))

    def forward(
        self,
        rows_RD: Tensor,
        table: tuple[Tensor, Tensor],
        context: AttentionContext,
        rule: AttentionRule,
    ) -> Tensor:
        attention, normed = self.self_attn, self.input_layernorm(rows_RD)
        query = _turned(attention.q_norm(self._heads(attention.q_proj(normed))), table)
        key = _turned(attention.k_norm(self._heads(attention.k_proj(normed))), table)
        value = self._heads(attention.v_proj(normed))
        attended = context(self.index, query, key, value, rule).flatten(1)
        rows_RD = rows_RD + attention.o_proj(attended)
        out: Tensor = rows_RD + self.mlp(self.post_attention_layernorm(rows_RD))
        return out

    def _heads(self, rows: Tensor) -> Tensor:
        return rows.unflatten(-1, (-1, self.width))


def _turned(rows_THd: Tensor, table: tuple[Tensor, Tensor]) -> Tensor:
    cosine, sine = (part.squeeze(0) for part in table)
    return plain.rotated(rows_THd, cosine, sine).to(rows_THd.dtype)


@dataclass(frozen=True)
class BlockCarry:
    """Nothing: all that drafts need is in the cache."""

    def one(self, index: int) -> Self:
        return self

    @classmethod
    def join(cls, parts: Sequence[Self]) -> Self:
        return cls()

    def after(self, earlier: Self | None) -> Self:
        return self

    def used(self) -> Self:
        return self


class ObservedContext:
    """Verified rows whose keys and values are cached."""

    def carry(self, row_B: Tensor) -> BlockCarry:
        return BlockCarry()

    def settle(self) -> None:
        pass

    def chains(self, row_C: Tensor) -> BlockCarry:
        return BlockCarry()


def settle(config: Any, target: Target, counts_V: Tensor | None) -> Any:
    """The configuration with its states and its mask token named."""
    states = config.states or spread_states(target.layers, config.target_states)
    mask = settled_mask(config.mask_token, target, counts_V)
    return replace(config, states=list(states), mask_token=mask)


def settled_mask(mask: int, target: Target, counts_V: Tensor | None) -> int:
    """The mask token that is named, or with -1 one that is chosen."""
    if mask < 0:
        mask = unused_token(target, counts_V)
    if mask >= target.vocab_size:
        rule = f"head.mask_token must be a token of the target, below {target.vocab_size}"
        raise UserError(rule, mask, "name another, or -1")
    return mask


def unused_token(target: Target, counts_V: Tensor | None) -> int:
    """The last token that no text has and that ends or fills none; without counts the last one of all.

    Raises:
        UserError: the text has every token.
    """
    if counts_V is None:
        return target.vocab_size - 1
    free_V = counts_V.cpu() == 0
    config: Any = target.config
    for name in ("eos_token_id", "pad_token_id", "bos_token_id"):
        ids = getattr(config, name, None)
        for token in ids if isinstance(ids, list) else [ids]:
            if token is not None and 0 <= token < len(free_V):
                free_V[token] = False
    free = free_V.nonzero()
    if not len(free):
        rule = "head.mask_token must be a token that no text has"
        raise UserError(rule, "the text has every token", "name a reserved one")
    return int(free[-1])


def build(
    target: Target, config: DFlashConfig, seed: int = 0, counts_V: Tensor | None = None
) -> DFlashHead:
    """A fresh head for `target`, in float32 on its device.

    Args:
        counts_V: how often each token stands in the text; the mask token is chosen by it.
    """
    return begin(DFlashHead, target, config, seed, counts_V)


def begin(made: type[Any], target: Target, config: Any, seed: int, counts_V: Tensor | None) -> Any:
    """A fresh head of that class, its matrices random."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        head = made(target, settle(config, target, counts_V))
        start_linears(head, target)
    return head.to(target.device)
