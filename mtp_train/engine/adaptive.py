"""A chain of drafts that stops where the next one no longer pays.

A head that says how sure it is gives the chance that its first s drafts are all accepted. A step with s drafts yields
1 + (the chances' sum) tokens on average and takes as long as was measured for so many at this batch size. A draft is
verified if that makes more tokens a second than without it:

    (1 + c_1 + .. + c_s) / seconds(s)  >  (1 + c_1 + .. + c_s-1) / seconds(s - 1)

Whether a draft is tried depends on those before it alone, never on itself, so that sampled output keeps its
distribution. Drawn drafts have one length for the whole batch, greedy ones a length per sequence.

A head that says nothing drafts as many as a table names for the batch size.

Shapes: B sequences, S drafts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from mtp_train.core.errors import UserError
from mtp_train.engine.chain import ChainProposer
from mtp_train.engine.propose import Draft, Proposing
from mtp_train.heads.base import DraftHead
from mtp_train.models.target import Target


@dataclass(frozen=True)
class StepCosts:
    """Measured seconds of a step, by batch size: with 0, 1, .. drafts.

    Of a head that drafts all tokens at once, its forward is part of each.
    """

    seconds: Mapping[int, Sequence[float]]

    def __post_init__(self) -> None:
        if not self.seconds or any(len(row) < 2 for row in self.seconds.values()):
            rule = "an adaptive scheme needs the seconds of a step without drafts and with some"
            raise UserError(rule, dict(self.seconds), "measure them, or use evaluate.scheme=chain")

    def of(self, batch: int) -> Sequence[float]:
        """Those of the nearest batch size that was measured."""
        return self.seconds[min(self.seconds, key=lambda known: abs(known - batch))]


class AdaptiveProposer(ChainProposer):
    """Drafts up to K tokens in a row, and offers those that pay.

    Args:
        costs: of a step; with a head that says no confidence, none.
        table: drafts by batch size, for a head that says none; sizes between take the next smaller one's.
    """

    def __init__(
        self,
        target: Target,
        head: DraftHead,
        drafts: int,
        costs: StepCosts | None = None,
        table: Mapping[int, int] | None = None,
    ) -> None:
        sure = head.temperatures is not None
        if (costs if sure else table) is None:
            rule = "an adaptive scheme needs " + (
                "measured costs" if sure else "a table of drafts by batch size"
            )
            raise UserError(rule, "none", "give one, or use the scheme chain")
        if target.tensor_parallel > 1:
            rule = "an adaptive scheme runs on a target that one rank holds"
            raise UserError(rule, f"{target.tensor_parallel} ranks", "use the scheme chain")
        super().__init__(target, head, drafts)
        self.costs, self.table = costs, dict(table or {})
        self.early = False

    def propose(self, step: Proposing) -> Draft | None:
        if self.costs is None:
            return self._by_table(step)
        draft, confidence_SB = self.drafted(step, self.drafts)
        assert confidence_SB is not None, "a head with temperatures says its confidence"
        chance_BS = torch.nn.functional.logsigmoid(confidence_SB.float()).cumsum(0).exp().T
        if step.drawn:
            chance_BS = chance_BS.mean(0, keepdim=True).expand_as(chance_BS)
        seconds = self.costs.of(len(chance_BS))
        counts = [paying(row, seconds) for row in chance_BS.tolist()]
        return shortened(draft, counts)

    def _by_table(self, step: Proposing) -> Draft | None:
        batch = len(step.newest)
        known = [size for size in sorted(self.table) if size <= batch] or [min(self.table)]
        count = min(self.table[known[-1]], self.drafts)
        return self.drafted(step, count)[0] if count else None


def paying(chances: Sequence[float], seconds: Sequence[float]) -> int:
    """Drafts to verify, by the chance that each and those before it are accepted."""
    tokens, count = 1.0, 0
    for chance, before, after in zip(chances, seconds, seconds[1:], strict=False):
        if (tokens + chance) * before <= tokens * after:
            break
        tokens, count = tokens + chance, count + 1
    return count


def shortened(draft: Draft, counts: Sequence[int]) -> Draft | None:
    """The first drafts of each sequence; none if none has any."""
    most = max(counts)
    if not most:
        return None
    q_BNV = None if draft.q_BNV is None else draft.q_BNV[:, :most]
    equal = all(count == most for count in counts)
    return replace(
        draft,
        token_BN=draft.token_BN[:, :most],
        q_BNV=q_BNV,
        count_B=None if equal else tuple(counts),
    )
