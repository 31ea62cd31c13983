"""The `peagle` head: EAGLE-3 that drafts all tokens in one forward (arXiv 2602.01469).

    depth 0      an `eagle3` head's row: (embedding of x[p+1], fc([g1 | g2 | g3]))       at position p
    depth d > 0  (embedding of the mask token, fc(mask_hidden))                          at position p + d
    logits_d   = lm_head(norm(out_d))                        predicts x[p+2+d]

Depth 0 is plainly causal. Row d of the chain that starts at p sees the depth-0 rows up to p, and its own chain's rows
of depths 1 .. d. `mask_hidden` and the head's own embedding are learned; nothing that is drafted is read. Layers, flags
and lm_head are `eagle3`'s.

    depth 0, rows     0   1   2   3    | chain at row 2, depths 1, 2: positions 3, 4
    depth 0, row 2    see see see -    |
    depth 2 of it     see see see -    | see see

Training keeps every chain at depth 0, and at depth d a part of those that it keeps at depth d - 1: max(r^d, least) of
all, drawn anew at every step, so that the rows of all depths are about three times those of depth 0.

Shifts nothing: which chains there are, and from which tokens, is `batches.align`'s.

Shapes: T rows of depth 0, N chains, R rows deeper than 0, S depths, B sequences, D hidden width, U draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from mtp_train.attention.blocks import BlockContext, BlockLayout
from mtp_train.attention.packed import KeptContext
from mtp_train.batches.align import Blocks, blocks, draft_rows
from mtp_train.core.errors import UserError
from mtp_train.heads import eagle3
from mtp_train.heads.base import DraftHead, Drafting, Drafts, NextDraft, Unrolled
from mtp_train.heads.chain import ChainCarry
from mtp_train.heads.dflash import settled_mask
from mtp_train.heads.eagle3 import STATES, Eagle3Config, Eagle3Head
from mtp_train.heads.start import random_states
from mtp_train.models.target import Target


@dataclass(frozen=True)
class PEagleConfig(Eagle3Config):
    """How a head is made and how a fresh one begins: an `eagle3` head's options, and

    Attributes:
        layers: decoder layers.
        depths: S: tokens that one forward drafts at most; training rolls out as many.
        mask_token: id of the token that stands for what is not known yet, one that no text has; -1: chosen among those
            that are never trained.
        depth_share: r: share of the chains of one depth that are trained at the next one.
        least_share: of all chains, at every depth.
    """

    family: str = "peagle"
    layers: int = 4
    depths: int = 8
    mask_token: int = -1
    depth_share: float = 0.7
    least_share: float = 0.2

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.depths < 2:
            raise UserError("head.depths must be 2 or more", self.depths, "raise it")
        for name in ("depth_share", "least_share"):
            if not 0 < getattr(self, name) <= 1:
                raise UserError(f"head.{name} must lie in (0, 1]", getattr(self, name), "use 1")


class PEagleHead(Eagle3Head):
    """One draft head. Build it with `build`; its parameters start in float32.

    Args:
        config: with its states and its mask token named, and the draft vocabulary as large as it really is.
    """

    family = "peagle"
    at_once = True

    def __init__(self, target: Target, config: PEagleConfig) -> None:
        super().__init__(target, config)
        _require_plain_scores(self.block)
        width = target.hidden_size
        self.steps = config.depths
        self.mask_token = config.mask_token
        self.mask_hidden = nn.Parameter(torch.zeros(STATES * width))
        self.embed_tokens = nn.Embedding(target.vocab_size, width)
        self.float()

    @property
    def parts(self) -> int:
        return 1

    @property
    def share(self) -> float:
        depths = range(self.config.depths)
        return sum(self._share(depth) for depth in depths) / len(depths)

    def embed(self, target: Target, token_T: Tensor) -> Tensor:
        embedded: Tensor = self.embed_tokens(token_T)
        return embedded

    def masks(self, target: Target, rows: int) -> tuple[Tensor, Tensor]:
        """What so many rows deeper than 0 read: embeddings and states [R, D]."""
        token_1 = torch.full((1,), self.mask_token, device=self.mask_hidden.device)
        fused_1D = self.fused(list(self.mask_hidden.unsqueeze(0).chunk(STATES, dim=-1)))
        return self.embed(target, token_1).expand(rows, -1), fused_1D.expand(rows, -1)

    # --- over packed documents --------------------------------------------------------------------------------

    def align(  # type: ignore[override]
        self,
        token_T: Tensor,
        loss_mask_T: Tensor,
        offsets: Sequence[int],
        steps: int,
        *,
        start_N: Tensor | None = None,
        seed: int | None = None,
    ) -> Blocks:
        aligned = blocks(token_T, loss_mask_T, offsets, steps, start_N)
        if start_N is not None or seed is None:
            return aligned
        return aligned.kept(self._drawn(len(aligned.start_N), steps, seed).to(token_T.device))

    def unroll(  # type: ignore[override]
        self, target: Target, aligned: Blocks, states: dict[str, Tensor]
    ) -> Unrolled:
        position_T, verified = aligned.position_T, KeptContext(aligned.offsets)
        embedding_TD = self.embed(target, aligned.token_T)
        out_TD = self(embedding_TD, self.fuse(states), position_T, verified)
        first_ND = self.readout(out_TD.index_select(0, aligned.start_N), 0)
        rows_N = np.maximum(np.asarray(aligned.steps_N.tolist(), dtype=np.int64) - 1, 0)
        chain_R = np.repeat(np.arange(len(rows_N)), rows_N)
        if not len(chain_R):
            absent = first_ND.new_zeros(len(aligned.token_SN) - 1, *first_ND.shape)
            return Unrolled(torch.cat([first_ND.unsqueeze(0), absent]))
        depth_R = np.arange(len(chain_R)) - np.repeat(np.cumsum(rows_N) - rows_N, rows_N) + 1
        context = BlockContext(_layout(aligned, rows_N))
        for layer, written in verified.written.items():
            context.store(layer, *written)
        chain, depth = (torch.from_numpy(one).to(position_T.device) for one in (chain_R, depth_R))
        position_R = position_T[aligned.start_N[chain]] + depth
        out_RD = self(*self.masks(target, len(chain_R)), position_R, context)
        read_RD = self.readout(out_RD, 1)
        read_SND = first_ND.new_zeros(len(aligned.token_SN), *first_ND.shape)
        places = torch.cat([torch.zeros_like(aligned.start_N), depth])
        chains = torch.cat([torch.arange(len(first_ND), device=chain.device), chain])
        return Unrolled(read_SND.index_put((places, chains), torch.cat([first_ND, read_RD])))

    def _drawn(self, chains: int, steps: int, seed: int) -> Tensor:
        """Which chains each depth trains, bool [S, N]: those of a depth are among those of the depth before."""
        place_N = np.random.default_rng(seed).permutation(chains)
        share = [self._share(depth) for depth in range(steps)]
        return torch.from_numpy(np.stack([place_N < round(chains * one) for one in share]))

    def _share(self, depth: int) -> float:
        return max(float(self.config.depth_share) ** depth, float(self.config.least_share))

    # --- over the paged cache ---------------------------------------------------------------------------------

    def no_tree(self) -> str:
        return DraftHead.no_tree(self)

    def drafts(self, target: Target, where: Drafting, carry: ChainCarry, count: int) -> Drafts:
        deeper = self._deeper(target, where, count) if count > 1 else ()
        yield NextDraft(carry.logits_BU)
        for logits_BU in deeper:
            yield NextDraft(logits_BU)

    def _deeper(self, target: Target, where: Drafting, count: int) -> Tensor:
        """Logits of all drafts after the first [count - 1, B, U]."""
        (starts,) = draft_rows(where.newest, 2, self.ahead)
        plan = where.plan(starts, [count - 1] * len(starts), None)
        with where.clock("head"):
            masks = self.masks(target, len(plan.positions))
            out_RD = self(*masks, plan.positions, where.cache.context(plan))
        with where.clock("lm_head of the head"):
            logits_RU = self.logits(target, out_RD, 1)
        return logits_RU.unflatten(0, (len(starts), -1)).transpose(0, 1)


def _layout(aligned: Blocks, rows_N: np.ndarray) -> BlockLayout:
    """The blocks of the chains that have rows deeper than 0."""
    begins, starts = np.asarray(aligned.begin_N.tolist()), np.asarray(aligned.start_N.tolist())
    some = rows_N > 0
    return BlockLayout(
        begins[some].tolist(), starts[some].tolist(), rows_N[some].tolist(), causal=True
    )


def _require_plain_scores(block: Any) -> None:
    """Refuse a layer whose attention has what chains of several rows are not computed with."""
    if getattr(block.self_attn, "sinks", None) is not None:
        raise UserError(
            "a peagle head needs a layer without attention sinks",
            type(block).__name__,
            "set head.block=llama",
        )


def settle(config: PEagleConfig, target: Target, counts_V: Tensor | None) -> PEagleConfig:
    """The configuration with its mask token named."""
    return replace(config, mask_token=settled_mask(config.mask_token, target, counts_V))


def build(
    target: Target, config: PEagleConfig, seed: int = 0, counts_V: Tensor | None = None
) -> PEagleHead:
    """A fresh head for `target`, in float32 on its device.

    Args:
        counts_V: how often each token is trained; the draft vocabulary and the mask token are chosen by it.
    """
    settled = settle(config, target, counts_V)
    head: PEagleHead = eagle3.begin(PEagleHead, target, settled, seed, counts_V)
    _begin_inputs(head, target, seed)
    return head


@torch.no_grad()
def _begin_inputs(head: PEagleHead, target: Target, seed: int) -> None:
    """The target's embeddings, and in the place of unknown states their mean, or a random one of a random head."""
    token_V = torch.arange(target.vocab_size, device=target.device)
    head.embed_tokens.weight.copy_(target.embed(token_V))
    if head.config.init == "last_layer":
        found = random_states(target, head.states)
        means = [found[name].float().mean(0) for name in head.states]
        head.mask_hidden.copy_(torch.cat(means))
    else:
        generator = torch.Generator().manual_seed(seed)
        head.mask_hidden.copy_(torch.randn(head.mask_hidden.shape, generator=generator))
