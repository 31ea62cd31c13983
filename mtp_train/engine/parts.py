"""What an engine is made of, and which requests it can run. Knows no batch.

One allocator, one page table per sequence and one cache serve target and head.
"""

from __future__ import annotations

from mtp_train.attention.backends import backend_for
from mtp_train.attention.paged import PagedKV
from mtp_train.engine.config import EngineConfig
from mtp_train.engine.pages import PageAllocator
from mtp_train.engine.propose import Proposer
from mtp_train.engine.ranks import Together
from mtp_train.engine.sampling import Sampling
from mtp_train.engine.sequences import Request
from mtp_train.models.target import Target


class Parts:
    """Target, proposer, pages and cache, and the ranks that hold them together."""

    def __init__(self, target: Target, proposer: Proposer, config: EngineConfig) -> None:
        self.target, self.config = target, config
        self.together = Together(target.tensor_parallel)
        self.proposer = proposer = self.together.drafting(proposer)
        pages = config.cache_rows // config.page_size
        self.pages = PageAllocator(pages, config.page_size, proposer.reach or 0)
        self.backend = backend_for(target.device, config.attention)
        self.cache = PagedKV(
            target.layers + proposer.cache_layers,
            pages,
            config.page_size,
            dtype=target.dtype,
            device=target.device,
            backend=self.backend.of,
        )

    @property
    def limit(self) -> int:
        """Longest sequence: what target's and head's positions and the whole cache hold, drafts' rows included."""
        capacity = self.pages.pages * self.pages.page_size
        positions = self.target.max_positions
        return min(
            positions, self.proposer.positions or positions, capacity - self.proposer.room - 2
        )

    def refusal(self, request: Request, sampling: Sampling) -> str:
        """Why a request can't run here; empty if it can."""
        limit = self.limit
        sampling = request.sampling or sampling
        if not request.prompt:
            return "an empty prompt has no state to continue from"
        if len(request.prompt) >= limit:
            return f"the prompt leaves no room below {limit} positions"
        if request.max_new_tokens < 1:
            return f"max_new_tokens is {request.max_new_tokens}, it must be 1 or more"
        if min(request.prompt) < 0 or max(request.prompt) >= self.target.vocab_size:
            return f"a token lies outside the vocabulary of {self.target.vocab_size}"
        if request.script and not sampling.greedy:
            return "a script stands for greedy choices, the sampling is not greedy"
        return ""
