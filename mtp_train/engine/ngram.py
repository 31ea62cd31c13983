"""Prompt lookup: the newest tokens, where they stood before, and what followed there (Saxena 2023; vLLM's `ngram`).

Costs no model. Knows neither target nor head.

Shapes: B sequences, K drafts.
"""

from __future__ import annotations

import numpy as np
import torch

from mtp_train.core.errors import UserError
from mtp_train.engine.propose import Draft, NoProposer, Proposing


class NgramProposer(NoProposer):
    """Drafts what followed the latest earlier occurrence of the sequence's last tokens.

    Args:
        drafts: K, at most.
        longest, shortest: tokens that must be equal; the longest match wins.
    """

    def __init__(self, drafts: int, longest: int = 4, shortest: int = 2) -> None:
        if drafts < 1 or not 1 <= shortest <= longest:
            raise UserError(
                "prompt lookup needs 1 or more drafts, and 1 <= shortest <= longest",
                f"{drafts} drafts, {shortest} to {longest} tokens",
                "correct them",
            )
        self.drafts = self.depth = self.room = drafts
        self.longest, self.shortest = longest, shortest

    def propose(self, step: Proposing) -> Draft | None:
        with step.clock("sampling"):
            found = [self.lookup(tokens) for tokens in step.tokens]
        if not any(found):
            return None
        padded = [drafts + [0] * (self.drafts - len(drafts)) for drafts in found]
        device = step.cache.device
        token_BK = torch.tensor(padded, dtype=torch.int64, device=device)
        return Draft(token_BK, count_B=tuple(len(drafts) for drafts in found))

    def lookup(self, tokens: list[int]) -> list[int]:
        """What followed the last match, up to K tokens; empty without one."""
        text = np.asarray(tokens)
        for size in range(min(self.longest, len(text) - 1), self.shortest - 1, -1):
            windows = np.lib.stride_tricks.sliding_window_view(text[:-1], size)
            places = np.flatnonzero((windows == text[-size:]).all(axis=1))
            if len(places):
                after = int(places[-1]) + size
                return [int(token) for token in text[after : after + self.drafts]]
        return []
