"""Who runs in the next batch: admission, chunks of prompts, pages as they are needed, preemption, retirement.

A sequence that needs a page when none is free takes those of the youngest one, which waits at the front of the queue
and is computed again from its tokens: nothing of its output is lost.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace

import torch

from mtp_train.engine.clock import Clock
from mtp_train.engine.parts import Parts
from mtp_train.engine.sampling import Randomness, Sampling
from mtp_train.engine.sequences import Batch, Completion, Request, Sequence
from mtp_train.engine.step import NOT_FINITE, Step


class Schedule:
    """One `serve` call: who waits, who runs, who is done."""

    def __init__(
        self, parts: Parts, source: Callable[[], Request | None], sampling: Sampling
    ) -> None:
        self.parts = parts
        self.config, self.pages, self.proposer = parts.config, parts.pages, parts.proposer
        self.sampling = sampling
        self.generator = torch.Generator(parts.target.device).manual_seed(sampling.seed)
        self.clock = Clock()
        self.source = source
        self.waiting: Request | None = None  # taken from the source, not yet let in
        self.returned: deque[Sequence] = deque()  # preempted
        self.running: list[Sequence] = []  # in the order of admission
        self.generators: dict[str, torch.Generator] = {}  # of running requests with a seed
        self.steps = self.preempted = self.shared_rows = 0
        self.step = Step(parts, self.clock, self.random)

    def completions(self) -> Iterable[Completion]:
        while self._next() or self.running or self.returned:
            yield from self._refused()
            self._admit()
            if self.running:
                batch = self._batch()
                self.step(batch)
                self.steps += bool(batch.decoding)
                self._name_pages()
                yield from self._retire()

    def give_back(self) -> None:
        """Release what an interrupted call held."""
        for sequence in self.running:
            self.pages.release(sequence.pages)
        self.running = []

    def random(self, sequences: list[Sequence]) -> Randomness:
        if not self.generators:
            return self.generator
        return [self.generators.get(item.request.key, self.generator) for item in sequences]

    # --- the queue --------------------------------------------------------------------------------------------

    def _next(self) -> Request | None:
        """The request that is next in line; it stays there."""
        if self.waiting is None:
            self.waiting = self.source()
        return self.waiting

    def _refused(self) -> Iterator[Completion]:
        while (request := self._next()) and (reason := self.parts.refusal(request, self.sampling)):
            self.waiting = None
            yield Completion(request.key, request.prompt, (), f"refused: {reason}")

    def _admit(self) -> None:
        """Let sequences in while there are places, and pages for all that they have so far."""
        while len(self.running) < self.config.max_batch:
            if self.returned:
                sequence = self.returned[0]
            elif (request := self._next()) and not self.parts.refusal(request, self.sampling):
                sequence = self._sequence(request)
            else:
                return
            if not self._begin(sequence):
                return
            if self.returned:
                self.returned.popleft()
            else:
                self.waiting = None
            self.running.append(sequence)

    def _sequence(self, request: Request) -> Sequence:
        """The request as a sequence, its output limited to the positions and the cache that there are."""
        room = max(self.parts.limit - len(request.prompt), 1)
        bounded = replace(request, max_new_tokens=min(request.max_new_tokens, room))
        if request.seed is not None:
            generator = torch.Generator(self.parts.target.device).manual_seed(request.seed)
            self.generators[request.key] = generator
        return Sequence(bounded, request.sampling or self.sampling, tokens=list(request.prompt))

    def _begin(self, sequence: Sequence) -> bool:
        """Take what others have computed of it, if there is room for the rest too."""
        sharing = self.config.share_prefixes and self.proposer.reach is not None
        known = len(sequence.tokens) - bool(sequence.output)  # a row is left to read in any case
        shared = self.pages.share(sequence.tokens[:known]) if sharing else []
        rows = len(shared) * self.pages.page_size
        if not self.pages.fits(len(sequence.tokens) + self._room - rows):
            self.pages.release(shared)
            return False
        sequence.pages = shared
        sequence.cached = sequence.observed = rows
        sequence.named = len(shared)
        self.shared_rows += rows
        return True

    @property
    def _room(self) -> int:
        """Rows past a sequence's tokens that a step may write."""
        return self.proposer.room + 1

    # --- one batch --------------------------------------------------------------------------------------------

    def _batch(self) -> Batch:
        """The oldest first, so that whoever has to yield its pages is not yet in it."""
        decoding: list[Sequence] = []
        filling: list[Sequence] = []
        rows: list[int] = []
        budget = self.config.prefill_rows
        for sequence in list(self.running):
            if sequence not in self.running:
                continue
            if sequence.decoding:
                if self._grow(sequence, len(sequence.tokens) + self._room):
                    decoding.append(sequence)
            elif budget:
                chunk = min(sequence.pending, budget)
                if self._grow(sequence, sequence.cached + chunk + self._room):
                    filling.append(sequence)
                    rows.append(chunk)
                    budget -= chunk
        pairs = zip(filling, rows, strict=True)
        last = [at for at, (item, chunk) in enumerate(pairs) if chunk == item.pending]
        ending = [at for at in last if not filling[at].output]
        resuming = [filling[at] for at in last if filling[at].output]
        return Batch(decoding, filling, rows, ending, resuming)

    def _grow(self, sequence: Sequence, rows: int) -> bool:
        """Pages for `rows` rows, taken from the youngest where none is free; False if that is the sequence itself."""
        need = self.pages.pages_for(rows) - len(sequence.pages)
        while need > self.pages.available:
            youngest = self.running[-1]
            self._preempt(youngest)
            if youngest is sequence:
                return False
        if need > 0:
            sequence.pages += self.pages.allocate(need * self.pages.page_size)
        return True

    def _preempt(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        self.pages.release(sequence.pages)
        sequence.restart()
        self.returned.appendleft(sequence)
        self.preempted += 1

    def _name_pages(self) -> None:
        """Let others find full pages: those that target and proposer have both read."""
        if not self.config.share_prefixes or self.proposer.reach is None:
            return
        for sequence in self.running:
            if not sequence.decoding or sequence.finish == NOT_FINITE:
                continue  # nothing has been said from these rows yet: they may not be numbers
            rows = sequence.cached
            if not self.proposer.ahead:
                rows = min(rows, sequence.observed)
            sequence.named = self.pages.name(sequence.pages, sequence.tokens, sequence.named, rows)

    def _retire(self) -> Iterator[Completion]:
        finished = [sequence for sequence in self.running if sequence.finish]
        if not finished:
            return
        self.running = [sequence for sequence in self.running if not sequence.finish]
        for sequence in finished:
            if (
                sequence.finish == NOT_FINITE
            ):  # whoever gets these pages sees them masked, and NaN shows all the same
                self.parts.cache.clear(sequence.pages[sequence.named :])
            self.pages.release(sequence.pages)
            self.generators.pop(sequence.request.key, None)
        for sequence in finished:
            yield sequence.complete()
