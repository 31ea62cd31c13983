"""One micro-batch: roll the head out over a pack and hold every draft step against the target.

The same module trains and validates, and its forward is the engine's chain: own output states fed back, positions
and tokens by `batches.align`, attention by the rollout context.

Shapes: T rows, N goals, S draft steps, D hidden width.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from mtp_train.attention.packed import RolloutContext
from mtp_train.batches.align import Rollout, rollout
from mtp_train.batches.pack import Pack
from mtp_train.losses.chunked import DistillOutput, distill
from mtp_train.losses.reference import smooth_l1
from mtp_train.models.target import Target


@dataclass(frozen=True)
class PackLoss:
    """Values per draft step and goal; terms without a row (`rollout.valid_SN`) mean nothing."""

    distill: DistillOutput
    state_SN: Tensor
    rollout: Rollout

    def weighted(self, step_weight_S: Tensor, state_weight: float) -> Tensor:
        """Sum over goals of sum_s weight_s (KL + state_weight * smooth L1): divide by the global number of goals."""
        term_SN = self.distill.kl_SN + state_weight * self.state_SN
        return ((term_SN * self.rollout.valid_SN).sum(1) * step_weight_S).sum()


class RolloutModule(nn.Module):
    """The head with the frozen target's embedding and lm_head around it: what a wrapper for many devices wraps.

    The target is held outside the module tree: it is neither trained, nor replicated, nor saved.
    """

    def __init__(self, head: nn.Module, target: Target, vocabulary_U: Tensor | None = None) -> None:
        """vocabulary_U: token ids over which the training loss compares p and q; None is the whole vocabulary."""
        super().__init__()
        self.head = head
        self._target = [target]
        self._whole = target.lm_head.weight.detach()
        self._part = self._whole if vocabulary_U is None else self._whole[vocabulary_U].contiguous()

    def forward(self, pack: Pack, steps: int, measure: bool = False) -> PackLoss:
        """Roll out over `pack`; `measure` is for validation: alpha too, always over the whole vocabulary."""
        target = self._target[0]
        aligned = rollout(pack.token_T, pack.loss_mask_T, pack.offsets, steps)
        outs = head_states(self.head, target, pack.hidden_TD, aligned, RolloutContext(pack.offsets))
        student = torch.stack(
            [
                out_TD.index_select(0, source_N)
                for out_TD, source_N in zip(outs, aligned.source_SN, strict=True)
            ]
        ).float()
        teacher = pack.hidden_TD[aligned.goal_N]
        result = distill(student, teacher, self._whole if measure else self._part, measure=measure)
        return PackLoss(result, smooth_l1(student, teacher.float()), aligned)


def head_states(
    head: nn.Module, target: Target, hidden_TD: Tensor, aligned: Rollout, context: RolloutContext
) -> list[Tensor]:
    """The head's output states at every step [T, D], rows indexed by where their chain starts."""
    outs: list[Tensor] = []
    state_TD = hidden_TD
    for token_T, position_T in zip(aligned.token_ST, aligned.position_ST, strict=True):
        state_TD = head(target.embed(token_T), state_TD, position_T, context)
        outs.append(state_TD)
    return outs
