"""The draft/target engine: continuous batches over paged caches, propose / verify / commit.

One allocator, one page table and one batch plan serve target and head. It drives a `Proposer`; it knows no head
family, no text and no training. What a batch does stands in `step`, who is in it in `schedule`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

import torch

from mtp_train.core.errors import UserError
from mtp_train.engine.config import EngineConfig, RunStats
from mtp_train.engine.parts import Parts
from mtp_train.engine.propose import NoProposer, Proposer
from mtp_train.engine.sampling import Sampling
from mtp_train.engine.schedule import Schedule
from mtp_train.engine.sequences import Completion, Request
from mtp_train.models.target import Target

__all__ = ["Engine", "EngineConfig", "RunStats"]


class Engine:
    """Generates completions for requests.

    Ranks that hold a target together make the same calls with the same requests, and get the same tokens.

    Args:
        proposer: who drafts; none for plain decoding.
    """

    def __init__(
        self, target: Target, proposer: Proposer | None = None, config: EngineConfig | None = None
    ) -> None:
        self.config = config or EngineConfig()
        self.parts = Parts(target, proposer or NoProposer(), self.config)
        self.proposer: Proposer = self.parts.proposer
        self.stats = RunStats(0.0, {}, 0, 0)

    @property
    def limit(self) -> int:
        """Longest sequence."""
        return self.parts.limit

    @torch.inference_mode()
    def generate(
        self,
        requests: Iterable[Request],
        sampling: Sampling | None = None,
        on_finish: Callable[[Completion], None] | None = None,
    ) -> list[Completion]:
        """Complete every request; results come in the requests' order, `on_finish` sees them as they end.

        A request that can't run (empty or too long a prompt, a token outside the vocabulary) is refused alone:
        its completion says why. `stats` holds the call's times.
        """
        listed = list(requests)
        if len({request.key for request in listed}) != len(listed):
            raise UserError(
                "request keys must be unique",
                f"{len(listed)} requests with repeated keys",
                "number them",
            )
        waiting = iter(listed)
        done: dict[str, Completion] = {}

        def finish(completion: Completion) -> None:
            done[completion.key] = completion
            if on_finish:
                on_finish(completion)

        self.serve(lambda: next(waiting, None), finish, sampling)
        return [done[request.key] for request in listed]

    @torch.inference_mode()
    def serve(
        self,
        source: Callable[[], Request | None],
        on_finish: Callable[[Completion], None],
        sampling: Sampling | None = None,
    ) -> None:
        """Complete requests as `source` gives them, and hand each completion to `on_finish`; nothing is kept.

        `source` is asked whenever there is room. None means that there is no request now: it is asked again after
        the next completion, which may bring one (the next turn of a conversation), and the call ends when nothing
        runs. Keys must be unique among the requests that run at once. `stats` holds the call's times.
        """
        run = Schedule(self.parts, source, sampling or Sampling())
        begin = time.perf_counter()
        tokens = 0
        try:
            for completion in run.completions():
                tokens += len(completion.tokens)
                on_finish(completion)
        finally:
            run.give_back()
        self.stats = RunStats(
            time.perf_counter() - begin,
            run.clock.seconds,
            tokens,
            run.steps,
            run.preempted,
            run.shared_rows,
        )
