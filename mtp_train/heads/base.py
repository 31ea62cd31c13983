"""What training, engine and checkpoint need of any draft head. Knows no family.

A head answers three questions, and everybody else asks only these:

    unroll     packed documents with the target's states -> what every draft step's lm_head reads (`align` says of which
               rows): training, validation, `plan` and an export's check
    observe    verified rows -> what the head keeps of them, in the paged cache and beside it: engine, costs
    drafts     one draft after the other, each from the tokens chosen before: engine, validation, costs

A chain that starts at row p drafts x[p+1+ahead], x[p+2+ahead], ...; its step s predicts H[p+ahead+s]. Defaults here are
those of a head that reads one state and shares the target's lm_head. Shifts nothing.

Shapes: T rows, N rows chosen from them, S draft steps, B sequences, D hidden width, E the width that the lm_head reads,
V the target's vocabulary, U the head's.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, Self

import torch
from torch import Tensor, nn

from mtp_train.attention.paged import BatchPlan, PagedKV, TreeRows
from mtp_train.core.errors import UserError
from mtp_train.heads.block import POSITIONS
from mtp_train.heads.vocabulary import LmHeadPart
from mtp_train.models.packed import pack_linears
from mtp_train.models.target import POST_NORM, Target

# (starts, rows, trees) of the step's sequences, in order -> their plan.
Planner = Callable[[list[int], list[int], "list[TreeRows] | None"], BatchPlan]
Timer = Callable[[str], AbstractContextManager[None]]  # by the name of the part that it times


@dataclass(frozen=True)
class Unrolled:
    """What S draft steps of N goals are read from.

    Attributes:
        read_SNE: what the lm_head of each step reads.
        bias: (read_SNR, matrix_VR) of a low rank, whose product is added to the logits; of a head that has it.
        confidence_SN: logit of the chance that the draft is accepted; of a head that says it.
    """

    read_SNE: Tensor
    bias: tuple[Tensor, Tensor] | None = None
    confidence_SN: Tensor | None = None


class Carry(Protocol):
    """What a head keeps of its newest verified rows between steps, beside the cache."""

    def one(self, index: int) -> Self:
        """That of one sequence."""
        ...

    @classmethod
    def join(cls, parts: Sequence[Self]) -> Self: ...

    def after(self, earlier: Self | None) -> Self:
        """That of the same sequences' next rows: none of those before was drafted from, or `used` was."""
        ...

    def used(self) -> Self:
        """What is left to carry once drafts were made from it."""
        ...


class Observed(Protocol):
    """Verified rows that a head has read."""

    def carry(self, row_B: Tensor) -> Carry:
        """What drafts that follow row `row_B` of each sequence need."""
        ...

    def settle(self) -> None:
        """Of the only sequence, whose tokens are all known: do what is left to do, so that `chains` may be asked."""
        ...

    def chains(self, row_C: Tensor) -> Carry:
        """Of the only sequence: what drafts that follow each of these rows need, each a chain of its own."""
        ...


@dataclass(frozen=True)
class Drafting:
    """Where a head drafts.

    Attributes:
        newest: position of each sequence's newest token.
        token: that token.
        clock: times the parts.
    """

    cache: PagedKV
    plan: Planner
    newest: list[int]
    token: list[int]
    clock: Timer


@dataclass(frozen=True)
class NextDraft:
    """Logits of every sequence's next draft, and the logit of the chance that it is accepted where the head says it."""

    logits_BU: Tensor
    confidence_B: Tensor | None = None


# Yields what each next draft is chosen from, and is sent the choice [B], in the target's vocabulary.
Drafts = Generator[NextDraft, Tensor, None]


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
        ahead: 1 for a head whose row p reads x[p+1] and the target's H[p]; 0 for a model without a state, which reads
            x[p].
        at_once: whether one forward drafts all tokens; else each draft takes one.
        states: the target states that it reads.
        steps: draft steps that the head has; None is any number.
        vocabulary: int64 [U], sorted target ids that the head can draft; None is all of them.
        temperatures: float32 [S], by which the confidence's logits are divided; None of a head that says none.
    """

    family: ClassVar[str]
    cache_layers: int = 1
    ahead: ClassVar[int] = 1
    at_once: ClassVar[bool] = False
    vocabulary: Tensor | None
    temperatures: Tensor | None

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
        self.register_buffer("temperatures", None)
        self._lm_head_part = LmHeadPart()

    # --- what a family is -------------------------------------------------------------------------------------

    @abstractmethod
    def align(
        self,
        token_T: Tensor,
        loss_mask_T: Tensor,
        offsets: Sequence[int],
        steps: int,
        *,
        start_N: Tensor | None = None,
        seed: int | None = None,
    ) -> Any:
        """Which rows of packed documents are predicted from where, and from which tokens.

        Args:
            start_N: rows where chains start, each with its whole chain's inputs in its document; none: of every chain
                that predicts a trained token.
            seed: of a family that trains some of those at a time: which ones.
        """

    @abstractmethod
    def unroll(self, target: Target, aligned: Any, states: dict[str, Tensor]) -> Unrolled:
        """Draft with the documents' own tokens in the drafts' places.

        Args:
            aligned: of `align`.
            states: the target's, by name [T, D].
        """

    @abstractmethod
    def observe(
        self,
        target: Target,
        cache: PagedKV,
        plan: BatchPlan,
        next_T: Tensor,
        states: dict[str, Tensor],
        drafts: int,
        clock: Timer,
    ) -> Observed:
        """Read rows that are new.

        A head that is one token ahead is shown verified rows with the target's states, others the newest tokens.

        Args:
            next_T: token x[p+ahead] of each row p.
            drafts: how many will be asked for.
        """

    @abstractmethod
    def drafts(self, target: Target, where: Drafting, carry: Any, count: int) -> Drafts:
        """Draft `count` tokens per sequence."""

    def room(self, drafts: int) -> int:
        """Rows past the newest token that so many drafts write at most."""
        return drafts

    def reach(self, drafts: int) -> int | None:
        """Tokens after a row on which what is cached there depends; None: its pages can't be shared."""
        return self.ahead

    def early(self, drafts: int) -> bool:
        """Whether it drafts so many from its carry alone, without plan or tokens."""
        return False

    def no_tree(self) -> str:
        """What keeps it from drafting a tree; empty if nothing does."""
        return f"{self.family} heads draft no trees"

    # --- what it reads ----------------------------------------------------------------------------------------

    def embed(self, target: Target, token_T: Tensor) -> Tensor:
        """Embeddings of the rows' tokens [T, D]: the target's frozen ones, or the head's own."""
        return target.embed(token_T)

    def fuse(self, states: dict[str, Tensor]) -> Tensor:
        """What the head makes of the target's states before anything else [T, D]."""
        return states[self.states[0]]

    # --- its lm_head ------------------------------------------------------------------------------------------

    def own_output(self) -> Tensor | None:
        """The head's own lm_head [U, D], or one per step [S, U, D]; None: the target's frozen one."""
        return None

    def own_parameter(self) -> Tensor | None:
        """The parameter that `own_output` is, or is rows of."""
        return self.own_output()

    def project(self, target: Target, read_NE: Tensor, step: int) -> Tensor:
        """Logits of draft step `step` (from 0) [N, U] of what its lm_head reads."""
        own = self.own_output()
        if own is None and self.vocabulary is not None:
            return self._lm_head_part.logits(target, self.vocabulary, read_NE)
        if own is None:
            return target.logits(read_NE)
        return torch.nn.functional.linear(read_NE, own if own.ndim == 2 else own[step])

    def in_target(self, token: Tensor) -> Tensor:
        """The head's ids as the target's."""
        return token if self.vocabulary is None else self.vocabulary[token]

    # --- how it is made and run -------------------------------------------------------------------------------

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

    def serving(self, target: Target) -> Self:
        """This head as an engine runs it, changed in place: in the target's dtype, frozen, its weights packed."""
        self.to(target.dtype).eval().requires_grad_(False)
        pack_linears(self)
        return self

    @property
    def parts(self) -> int:
        """Parts that serve a draft step each, which share its parameters."""
        return 1

    @property
    def share(self) -> float:
        """Of the chains that could be trained, how large a part a step trains, over all draft steps."""
        return 1.0

    def extended(self, target: Target, config: Any, counts_V: Tensor | None = None) -> DraftHead:
        """This head with what a configuration asks for beyond it and can be begun from what it has.

        counts_V: how often each token is trained, of the target's vocabulary.
        """
        return self

    def require_rollout(self, steps: int) -> None:
        """Raise unless a rollout of so many steps trains every part of the head, and no step that it has not."""
        if self.steps is not None and steps != self.steps:
            rule = f"train.rollout_steps must be {self.steps}, the draft steps of this {self.family} head"
            raise UserError(rule, steps, "change either")
