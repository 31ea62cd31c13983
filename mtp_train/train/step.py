"""One micro-batch: roll the head out over a pack and hold every draft step against the target.

The same module trains and validates, and what it runs is the head's own rollout, whose forward the engine runs too.
Knows no family.

Shapes: T rows, N goals, S draft steps, D hidden width.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from mtp_train.batches.align import Aligned
from mtp_train.batches.pack import Pack
from mtp_train.heads.base import DraftHead
from mtp_train.losses.chunked import LossValues, label_rows
from mtp_train.losses.part import part_acceptance
from mtp_train.losses.terms import Compared, LossConfig, weighted_loss
from mtp_train.losses.weights import goal_weights
from mtp_train.models.target import Target


@dataclass(frozen=True)
class PackLoss:
    """Values per draft step and goal; those without a row (`rollout.valid_SN`) mean nothing and weigh nothing.

    `values.loss` is their weighted sum: divide by the global `losses.weights.denominator`.
    """

    values: LossValues
    rollout: Aligned
    confidence_SN: Tensor | None = None  # of a head that says it


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
        seed: int = 0,
    ) -> PackLoss:
        """Roll out over `pack`; `measure` is for validation: alpha too, always over the whole vocabulary.

        inputs: what the head is fed in place of the pack's states (with noise); the target's part is the pack's.
        seed: which chains are trained, of a head that trains some of them at a time.

        The kl of a head with a draft vocabulary is over that part, p renormalised: over the whole it is infinite.
        """
        target = self._target[0]
        aligned = self.head.align(
            pack.token_T, pack.loss_mask_T, pack.offsets, steps, seed=None if measure else seed
        )
        found = self.head.unroll(target, aligned, pack.states if inputs is None else inputs)
        student = found.read_SNE.float()
        teacher = pack.states[target.state][aligned.goal]
        part = None if measure and self.head.vocabulary is None else self._vocabulary
        own = self._own_output(part, steps)
        bias = found.bias
        if bias is not None and part is not None:
            bias = bias[0], bias[1][part]
        compared = Compared(
            student,
            teacher,
            self._whole if part is None else self._part,
            aligned.label if part is None else label_rows(aligned.label, part),
            own,
            bias,
            found.confidence_SN,
            target.logit_softcap,
        )
        values = weighted_loss(
            self.loss,
            compared,
            weight_SN=self._weights(aligned, pack),
            start_SN=aligned.source_SN,
            valid_SN=aligned.valid_SN,
            measure=measure,
        )
        if measure and part is not None:  # the head's own part
            cap = target.logit_softcap
            rows, own_cap = (self._part, cap) if own is None else (own, None)
            alpha_SN, agree_SN = part_acceptance(
                student,
                teacher,
                self._whole,
                rows,
                part,
                cap,
                bias=bias,
                student_softcap=own_cap,
            )
            values = replace(values, alpha_SN=alpha_SN, agree_SN=agree_SN)
        return PackLoss(values, aligned, found.confidence_SN)

    def _own_output(self, part: Tensor | None, steps: int) -> Tensor | None:
        """The head's own lm_head, its rows those of the loss."""
        own = self.head.own_output()
        if own is None:
            return None
        rows = own if own.ndim == 2 else own[:steps]
        return rows if part is None or self.head.vocabulary is not None else rows[..., part, :]

    def _weights(self, aligned: Aligned, pack: Pack) -> Tensor:
        """Weight of each step and goal [S, N]; 0 where the goal has no row."""
        step_S = self.loss.step_weight(len(aligned.valid_SN)).to(aligned.goal.device)
        if aligned.goal.ndim == 1:
            return (
                aligned.valid_SN
                * step_S.unsqueeze(1)
                * goal_weights(aligned.goal, pack.offsets, self.loss.mean_over)
            )
        chain_N = goal_weights(aligned.source_SN[0], pack.offsets, self.loss.mean_over)
        if self.loss.mean_over == "tokens":  # the chains stand for all of the pack's goals
            chain_N = chain_N * (goals_of(pack) / max(len(chain_N), 1))
        return aligned.valid_SN * step_S.unsqueeze(1) * chain_N


def goals_of(pack: Pack) -> Tensor:
    """How many rows of a pack utter a trained token."""
    first = torch.as_tensor(pack.offsets[:-1], device=pack.loss_mask_T.device)
    return (pack.loss_mask_T > 0).sum() - (pack.loss_mask_T[first] > 0).sum()


def chain_seed(seed: int, step: int, first: int) -> int:
    """Of the chains that are trained of a pack: of the run, the step and the pack's first sequence alone."""
    return (seed * 1_000_003 + step) * 1_000_003 + int(first)
