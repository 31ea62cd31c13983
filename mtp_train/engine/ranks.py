"""Ranks that hold one target together run one schedule: what depends on a number, the lead rank decides.

All of them run the target, and a head that is spread as it is. Sums over ranks may round differently where they are
taken, and a chain of draws parts for good at the first difference; so drafts, and what verification made of them, are
the lead's, broadcast as integers, twice a step. Everything else (pages, batches, preemption, ends) follows from
them and from the requests, which must be the same on every rank.

While a spread head drafts, ranks choose alike: from the same sums and seeds. Should they not, its later drafts are
worse and no less lossless, since the lead's are verified by the distributions that the lead drew them from.

A draft model has no part in the target's plan and is small: it runs on the lead alone, and its distributions stay
there, since nobody else's verification counts.

Shapes: B sequences, N drafts.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor, distributed

from mtp_train.engine.propose import Draft, NoProposer, Proposer, Proposing

LEAD = 0  # its rank among those that hold the target


class Together:
    """The ranks of one target; one rank alone is its own lead."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.lead = size == 1 or distributed.get_rank() == LEAD

    def agree(self, values: list[Tensor]) -> list[Tensor]:
        """The lead's integers (or flags) in place of this rank's, which have the same shapes."""
        if self.size == 1 or not values:
            return values
        flat = torch.cat([value.reshape(-1).long() for value in values])
        distributed.broadcast(flat, LEAD)
        parts = flat.split([value.numel() for value in values])
        return [
            part.reshape(value.shape).to(value.dtype)
            for part, value in zip(parts, values, strict=True)
        ]

    def agree_on(self, draft: Draft | None) -> Draft | None:
        """The lead's drafts, and how they hang together."""
        if self.size == 1 or draft is None:
            return draft
        if draft.parent_BN is None:
            (token_BN,) = self.agree([draft.token_BN])
            return Draft(token_BN, draft.q_BNV, None, draft.count_B)
        parent_BN = torch.from_numpy(np.ascontiguousarray(draft.parent_BN)).to(draft.token_BN)
        token_BN, parent_BN = self.agree([draft.token_BN, parent_BN])
        parents = parent_BN.cpu().numpy().astype(draft.parent_BN.dtype)
        return Draft(token_BN, draft.q_BNV, parents, draft.count_B)

    def drafting(self, proposer: Proposer) -> Proposer:
        """The proposer as this rank runs it."""
        on_lead = proposer.cache_layers > 0 and not proposer.states
        return Follower(proposer) if on_lead and not self.lead else proposer


class Follower(NoProposer):
    """Stands for a proposer that runs on the lead alone: same places in the schedule, drafts without meaning."""

    def __init__(self, proposer: Proposer) -> None:
        self.drafts, self.depth, self.room = proposer.drafts, proposer.depth, proposer.room
        self.states, self.ahead = proposer.states, proposer.ahead
        self.positions = proposer.positions
        self.reach, self.early = proposer.reach, proposer.early
        self.cache_layers = 0
        self.tree = hasattr(proposer, "paths")

    def propose(self, step: Proposing) -> Draft:
        shape = len(step.newest), self.drafts
        token_BN = torch.zeros(shape, dtype=torch.int64, device=step.rules.greedy_B.device)
        return Draft(token_BN, None, np.zeros(shape, dtype=np.int64) if self.tree else None)
