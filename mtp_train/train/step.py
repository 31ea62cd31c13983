"""One micro-batch: roll the head out over a pack and hold every draft step against the target.

The same module trains and validates, and its forward is the engine's chain: own output states fed back, positions
and tokens by `batches.align`, attention by the rollout context.

Shapes: T rows, N goals, S draft steps, D hidden width.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from mtp_train.attention.packed import RolloutContext
from mtp_train.batches.align import Rollout, rollout
from mtp_train.batches.pack import Pack
from mtp_train.heads.base import DraftHead
from mtp_train.losses.chunked import LossValues, label_rows
from mtp_train.losses.part import part_acceptance
from mtp_train.losses.terms import LossConfig, weighted_loss
from mtp_train.losses.weights import goal_weights
from mtp_train.models.target import Target


@dataclass(frozen=True)
class PackLoss:
    """Values per draft step and goal; those without a row (`rollout.valid_SN`) mean nothing and weigh nothing.

    `values.loss` is their weighted sum: divide by the global `losses.weights.denominator`.
    """

    values: LossValues
    rollout: Rollout


class RolloutModule(nn.Module):
    """The head with the frozen target's embedding and lm_head around it: what a wrapper for many devices wraps.

    The target is held outside the module tree: it is neither trained, nor replicated, nor saved.
    """

    def __init__(
        self,
        head: DraftHead,
        target: Target,
        vocabulary_U: Tensor | None = None,
        loss: LossConfig | None = None,
    ) -> None:
        """vocabulary_U: sorted token ids over which the training loss compares p and q; None is all of them."""
        super().__init__()
        self.head = head
        self.loss = loss or LossConfig()
        self._target = [target]
        self._whole = target.lm_head.weight.detach()
        self._vocabulary = vocabulary_U if head.vocabulary is None else head.vocabulary
        self._part = (
            self._whole if self._vocabulary is None else self._whole[self._vocabulary].contiguous()
        )

    def forward(
        self,
        pack: Pack,
        steps: int,
        measure: bool = False,
        inputs: dict[str, Tensor] | None = None,
    ) -> PackLoss:
        """Roll out over `pack`; `measure` is for validation: alpha too, always over the whole vocabulary.

        inputs: what the head is fed in place of the pack's states (with noise); the target's part is the pack's.

        The kl of a head with a draft vocabulary is over that part, p renormalised: over the whole it is infinite.
        """
        target = self._target[0]
        aligned = rollout(pack.token_T, pack.loss_mask_T, pack.offsets, steps, self.head.ahead)
        outs = head_states(
            self.head,
            target,
            self.head.fuse(pack.states if inputs is None else inputs),
            aligned,
            RolloutContext(pack.offsets),
        )
        student = torch.stack(
            [
                self.head.readout(out_TD.index_select(0, source_N), step)
                for step, (out_TD, source_N) in enumerate(zip(outs, aligned.source_SN, strict=True))
            ]
        ).float()
        teacher = pack.states[target.state][aligned.goal_N]
        part = None if measure and self.head.vocabulary is None else self._vocabulary
        own = self._own_output(part, steps)
        values = weighted_loss(
            self.loss,
            student,
            teacher,
            self._whole if part is None else self._part,
            weight_SN=self._weights(aligned, pack),
            label_N=aligned.label_N if part is None else label_rows(aligned.label_N, part),
            student_head=own,
            softcap=target.logit_softcap,
            measure=measure,
        )
        if measure and part is not None and own is not None:  # the head's own part
            alpha_SN, agree_SN = part_acceptance(
                student, teacher, self._whole, own, part, target.logit_softcap
            )
            values = replace(values, alpha_SN=alpha_SN, agree_SN=agree_SN)
        return PackLoss(values, aligned)

    def _own_output(self, part: Tensor | None, steps: int) -> Tensor | None:
        """The head's own lm_head, its rows those of the loss."""
        own = self.head.own_output()
        if own is None:
            return None
        rows = own if own.ndim == 2 else own[:steps]
        return rows if part is None or self.head.vocabulary is not None else rows[..., part, :]

    def _weights(self, aligned: Rollout, pack: Pack) -> Tensor:
        """Weight of each step and goal [S, N]; 0 where the goal has no row."""
        step_S = self.loss.step_weight(len(aligned.valid_SN)).to(aligned.goal_N.device)
        goal_N = goal_weights(aligned.goal_N, pack.offsets, self.loss.mean_over)
        return aligned.valid_SN * step_S.unsqueeze(1) * goal_N


def head_states(
    head: DraftHead, target: Target, state_TD: Tensor, aligned: Rollout, context: RolloutContext
) -> list[Tensor]:
    """The head's outputs at every step [T, D], rows indexed by where their chain starts.

    state_TD: what enters the first step, `head.fuse` of the target's states.
    """
    outs: list[Tensor] = []
    for step, (token_T, position_T) in enumerate(
        zip(aligned.token_ST, aligned.position_ST, strict=True)
    ):
        embedding_TD = head.embed(target, token_T)
        state_TD = head.at(step)(embedding_TD, state_TD, position_T, context)
        outs.append(state_TD)
    return outs
