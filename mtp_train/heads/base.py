"""What training, engine and checkpoint need of any draft head: one forward, and what is read from it.

    state = fuse(target's states)                   enters step 0
    out_s = at(s)(embedding_s, state_s, position_s) state_0 = state, state_s+1 = out_s
    logits_s = lm_head(readout(out_s, s))           of `vocabulary`, the target's lm_head or the head's own

Knows no family: defaults here are those of a head that eats one state, feeds back what its lm_head reads and shares
the target's. Row p of a head stands at position p and reads token x[p+ahead]. Shifts nothing.

Shapes: T rows, N rows chosen from them, D hidden width, V the target's vocabulary, U the head's, S draft steps.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from mtp_train.attention.interface import AttentionContext
from mtp_train.core.errors import UserError
from mtp_train.heads.block import POSITIONS
from mtp_train.models.packed import pack_linears
from mtp_train.models.target import POST_NORM, Target


@dataclass(frozen=True)
class Projection:
    """A projection and what stands around it.

    Attributes:
        linear: [D, 2D], from the embedding's half and the state's.
        reads: what it is applied to [T, 2D], of embeddings and states [T, D] of rows at positions above 0.
        block: the decoder block behind it.
        final_norm: the norm behind the block; the identity where there is none.
    """

    linear: nn.Linear
    reads: Callable[[Tensor, Tensor], Tensor]
    block: nn.Module
    final_norm: nn.Module


class DraftHead(nn.Module, ABC):
    """One draft head.

    Attributes:
        family: its name in `families.FAMILIES`.
        config: the family's dataclass, as the head was made: with it and the tensors, the head can be made again.
        cache_layers: decoder layers that keep keys and values.
        depths: modules; `at(s)` is module s, and the last one from step `depths` - 1 on.
        ahead: 1 for a row of (x[p+1], H[p]), which predicts x[p+2]; 0 for a model without a state, which reads x[p] at
            position p and predicts x[p+1].
        states: the target states that `fuse` takes.
        steps: draft steps that the head has; None is any number.
        vocabulary: int64 [U], sorted target ids that the head can draft; None is all of them.
    """

    family: ClassVar[str]
    cache_layers: int = 1
    depths: int = 1
    ahead: ClassVar[int] = 1
    vocabulary: Tensor | None

    def __init__(
        self,
        config: Any,
        states: tuple[str, ...] = (POST_NORM,),
        steps: int | None = None,
        vocabulary_U: Tensor | None = None,
    ) -> None:
        super().__init__()
        self.config = config
        self.states = states
        self.steps = steps
        self.register_buffer("vocabulary", vocabulary_U)

    def embed(self, target: Target, token_T: Tensor) -> Tensor:
        """Embeddings of the rows' tokens [T, D]: the target's frozen ones, or the head's own."""
        return target.embed(token_T)

    def fuse(self, states: dict[str, Tensor]) -> Tensor:
        """What enters the first step in place of a state [T, D]."""
        return states[self.states[0]]

    @abstractmethod
    def forward(
        self, embedding_TD: Tensor, state_TD: Tensor, position_T: Tensor, context: AttentionContext
    ) -> Tensor:
        """Of rows (x[p+ahead], state, p): what is fed back as the next step's state [T, D]."""

    def at(self, step: int) -> DraftHead:
        """What runs draft step `step` (from 0)."""
        return self

    def projections(self) -> list[Projection]:
        """Those of [embedding | state] to what a decoder block works on, which can be fitted to features."""
        return []

    @property
    def positions(self) -> int:
        """The longest sequence that it was made for, by the layer of its own that it may have; 0: its target's."""
        return int(getattr(self.config, "layer", {}).get(POSITIONS, 0))

    def decoder_blocks(self) -> list[nn.Module]:
        """Its decoder blocks, which ranks that hold a target together share as they do the target's."""
        return []

    def serving(self, target: Target) -> DraftHead:
        """This head as an engine runs it, changed in place: in the target's dtype, frozen, its weights packed."""
        self.to(target.dtype).eval().requires_grad_(False)
        pack_linears(self)
        return self

    def require_rollout(self, steps: int) -> None:
        """Raise unless a rollout of so many steps trains every part of the head, and no step that it has not."""
        if self.steps is not None and steps != self.steps:
            rule = f"train.rollout_steps must be {self.steps}, the draft steps of this {self.family} head"
            raise UserError(rule, steps, "change either")
        if steps < self.depths:
            rule = f"train.rollout_steps must be {self.depths} or more: each module serves a step"
            raise UserError(rule, steps, "change it, or head.modules")

    def readout(self, out_ND: Tensor, step: int) -> Tensor:
        """What the lm_head of draft step `step` (from 0) reads of outputs [N, D]."""
        return out_ND

    def own_output(self) -> Tensor | None:
        """The head's own lm_head [U, D], or one per step [S, U, D]; None: the target's frozen one."""
        return None

    def own_parameter(self) -> Tensor | None:
        """The parameter that `own_output` is, or is rows of."""
        return self.own_output()

    def logits(self, target: Target, out_ND: Tensor, step: int) -> Tensor:
        """Logits of draft step `step` [N, U]."""
        read_ND = self.readout(out_ND, step)
        own = self.own_output()
        if own is None:
            return target.logits(read_ND)
        return torch.nn.functional.linear(read_ND, own if own.ndim == 2 else own[step])
