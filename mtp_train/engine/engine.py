"""The draft/target engine: continuous batches over paged caches, propose / verify / commit.

One allocator, one page table and one batch plan serve target and head. It drives a `Proposer`; it knows no head
family, no text and no training.

A step, for sequences whose newest token x[n-1] the target has not read yet (all older ones it has):

    propose   d[1..K] from the carried logits and state
    verify    target reads rows x[n-1], d[1..K] at positions n-1 .. n-1+K; accept a of K, one more token follows
    observe   the head re-runs the same rows, same plan, with the target's states; carries row n-1+a
    commit    a + 1 tokens

A proposer that reads no states (`ahead` = 0: a small model of its own) observes after the commit instead, and its own
rows: it has read all tokens but the last draft, if that was accepted, and the one that follows. So it runs over the two
newest, d[a] and x[n+a]; the first token of a prompt, which no head sees, is part of its prefill.

Shapes: T rows, B sequences, K drafts, R = K + 1 verified rows, V vocabulary.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from mtp_train.attention.paged import BatchPlan, PagedContext, PagedKV, plan_batch
from mtp_train.batches.align import draft_rows, next_tokens, verified_tokens
from mtp_train.core.errors import UserError
from mtp_train.engine.clock import Clock
from mtp_train.engine.pages import PageAllocator
from mtp_train.engine.propose import Carry, Draft, NoProposer, Proposer, choose
from mtp_train.engine.sampling import Randomness, Sampling, probabilities
from mtp_train.engine.sequences import Completion, DraftStep, Request, Sequence
from mtp_train.engine.verify import verify_greedy, verify_sampled
from mtp_train.models.target import Target


@dataclass(frozen=True)
class EngineConfig:
    """Sizes of an engine.

    Attributes:
        max_batch: sequences that run at once.
        page_size: rows per page.
        cache_rows: rows of the paged cache, shared by all running sequences.
        prefill_rows: prompt rows per prefill forward (one longer prompt runs alone).
    """

    max_batch: int = 64
    page_size: int = 16
    cache_rows: int = 32768
    prefill_rows: int = 2048

    def __post_init__(self) -> None:
        for name in ("max_batch", "page_size", "cache_rows", "prefill_rows"):
            if getattr(self, name) < 1:
                raise UserError(f"engine.{name} must be 1 or more", getattr(self, name), "raise it")


@dataclass(frozen=True)
class RunStats:
    """What one `generate` call took. `seconds` splits `wall` by part; the rest is the engine's own Python."""

    wall: float
    seconds: dict[str, float]
    tokens: int
    steps: int


class Engine:
    """Generates completions for requests.

    Args:
        proposer: who drafts; none for plain decoding.
    """

    def __init__(
        self, target: Target, proposer: Proposer | None = None, config: EngineConfig | None = None
    ) -> None:
        self.target = target
        self.proposer: Proposer = proposer or NoProposer()
        self.config = config or EngineConfig()
        self.pages = PageAllocator(
            self.config.cache_rows // self.config.page_size, self.config.page_size
        )
        self.cache = PagedKV(
            target.layers + self.proposer.cache_layers,
            self.pages.pages,
            self.config.page_size,
            dtype=target.dtype,
            device=target.device,
        )
        self.stats = RunStats(0.0, {}, 0, 0)

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
        run = _Run(self, source, sampling or Sampling())
        begin = time.perf_counter()
        tokens = 0
        for completion in run.completions():
            tokens += len(completion.tokens)
            on_finish(completion)
        self.stats = RunStats(time.perf_counter() - begin, run.clock.seconds, tokens, run.steps)

    @property
    def limit(self) -> int:
        """Longest sequence: what the target's positions and the whole cache hold, drafts' rows included."""
        capacity = self.pages.pages * self.pages.page_size
        return min(self.target.max_positions, capacity - self.proposer.drafts - 1)

    def refusal(self, request: Request, sampling: Sampling) -> str:
        """Why a request can't run here; empty if it can."""
        limit = self.limit
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


class _Run:
    """One `serve` call: who waits, the running batch, and what the proposer carries for it."""

    def __init__(
        self, engine: Engine, source: Callable[[], Request | None], sampling: Sampling
    ) -> None:
        self.engine = engine
        self.target = engine.target
        self.proposer = engine.proposer
        self.sampling = sampling
        self.generator = torch.Generator(engine.target.device).manual_seed(sampling.seed)
        self.clock = Clock()
        self.source = source
        self.waiting: Request | None = None  # taken from the source, not yet let in
        self.running: list[Sequence] = []
        self.generators: dict[str, torch.Generator] = {}  # of running requests with a seed
        self.carry: Carry | None = None
        self.steps = 0

    def completions(self) -> Iterable[Completion]:
        while self._next() or self.running:
            yield from self._refused()
            self._admit()
            yield from self._retire()
            if self.running:
                self._step()
                yield from self._retire()

    # --- scheduling -------------------------------------------------------------------------------------------

    def _next(self) -> Request | None:
        """The request that is next in line; it stays there."""
        if self.waiting is None:
            self.waiting = self.source()
        return self.waiting

    def _refused(self) -> Iterable[Completion]:
        while (request := self._next()) and (reason := self.engine.refusal(request, self.sampling)):
            self.waiting = None
            yield Completion(request.key, request.prompt, (), f"refused: {reason}")

    def _admit(self) -> None:
        """Prefill waiting requests while there is room. A sequence's pages for its whole life are taken at once."""
        config = self.engine.config
        joining: list[Sequence] = []
        rows = 0
        while len(self.running) + len(joining) < config.max_batch and (waiting := self._next()):
            request = self._bounded(waiting)
            need = len(request.prompt) + request.max_new_tokens + self.proposer.drafts
            full = rows and rows + len(request.prompt) > config.prefill_rows
            if (
                full
                or self.engine.refusal(request, self.sampling)
                or not self.engine.pages.fits(need)
            ):
                break
            self.waiting = None
            if request.seed is not None:
                generator = torch.Generator(self.target.device).manual_seed(request.seed)
                self.generators[request.key] = generator
            rows += len(request.prompt)
            joining.append(
                Sequence(request, self.engine.pages.allocate(need), list(request.prompt))
            )
        if joining:
            self._prefill(joining)

    def _bounded(self, request: Request) -> Request:
        """The request with its output limited to the positions and the cache that there are."""
        room = self.engine.limit - len(request.prompt)
        if request.max_new_tokens <= room:
            return request
        return replace(request, max_new_tokens=max(room, 1))

    def _retire(self) -> Iterable[Completion]:
        if not any(sequence.finish for sequence in self.running):
            return
        keep = [index for index, sequence in enumerate(self.running) if not sequence.finish]
        finished = [sequence for sequence in self.running if sequence.finish]
        self.carry = self.carry.select(keep) if self.carry else None
        self.running = [self.running[index] for index in keep]
        for sequence in finished:
            self.engine.pages.release(sequence.pages)
            self.generators.pop(sequence.request.key, None)
            yield sequence.complete()

    # --- one batch --------------------------------------------------------------------------------------------

    def _prefill(self, joining: list[Sequence]) -> None:
        plan = self._plan(
            joining, [0] * len(joining), [len(sequence.tokens) for sequence in joining]
        )
        token_T = self._tensor([token for sequence in joining for token in sequence.tokens])
        last_B = plan.last_rows()
        with self.clock("target"):
            states = self._target_rows(token_T, plan)
            logits_BV = self.target.logits(states[self.target.state][last_B])
        with self.clock("sampling"):
            first_B, _ = choose(logits_BV, self.sampling, self._random(joining))
        first_B = self._scripted(first_B.unsqueeze(1), joining).squeeze(1)
        for sequence, token in zip(joining, first_B.tolist(), strict=True):
            sequence.commit([token])
        if self.proposer.ahead:
            next_T = next_tokens(token_T, last_B, first_B)
            carry = self.proposer.observe(
                self.engine.cache, plan, next_T, states, last_B, self.clock
            )
        else:
            carry = self._read(joining, [0] * len(joining))
        if carry is not None:
            self.carry = carry if self.carry is None else self.carry.join(carry)
        self.running += joining

    def _step(self) -> None:
        drafts = self.proposer.drafts
        newest = [len(sequence.tokens) - 1 for sequence in self.running]
        draft = self._propose(newest)
        plan = self._plan(self.running, newest, [drafts + 1] * len(newest))
        known_B = self._tensor([sequence.tokens[-1] for sequence in self.running])
        row_BR = (
            known_B.unsqueeze(1)
            if draft is None
            else torch.cat([known_B.unsqueeze(1), draft.token_BK], dim=1)
        )
        with self.clock("target"):
            states = self._target_rows(row_BR.flatten(), plan)
            logits_BRV = self.target.logits(states[self.target.state]).unflatten(0, row_BR.shape)
        with self.clock("sampling"):
            accepted_B, following_B = self._verify(row_BR[:, 1:], draft, logits_BRV)
        if drafts and self.proposer.ahead:
            row_B = torch.arange(len(newest), device=accepted_B.device) * (drafts + 1) + accepted_B
            next_BR = verified_tokens(row_BR[:, 1:], accepted_B, following_B)
            carry = self.proposer.observe(
                self.engine.cache, plan, next_BR.flatten(), states, row_B, self.clock
            )
            self.carry = carry if carry is None else carry.after(self.carry)
        self._commit(row_BR[:, 1:], accepted_B, following_B)
        if not self.proposer.ahead:
            self.carry = self._read(self.running, [len(item.tokens) - 2 for item in self.running])
        self.steps += 1

    def _read(self, sequences: list[Sequence], starts: list[int]) -> Carry | None:
        """Show the proposer the sequences' own tokens from `starts` on, the newest with them."""
        fresh = [item.tokens[start:] for item, start in zip(sequences, starts, strict=True)]
        plan = self._plan(sequences, starts, [len(tokens) for tokens in fresh])
        token_T = self._tensor([token for tokens in fresh for token in tokens])
        return self.proposer.observe(
            self.engine.cache, plan, token_T, {}, plan.last_rows(), self.clock
        )

    def _propose(self, newest: list[int]) -> Draft | None:
        if not self.proposer.drafts:
            return None
        plans = [
            self._plan(self.running, rows, [1] * len(newest))
            for rows in draft_rows(newest, self.proposer.drafts, self.proposer.ahead)
        ]
        return self.proposer.propose(
            self.engine.cache,
            plans,
            self.carry,
            self.sampling,
            self._random(self.running),
            self.clock,
        )

    def _verify(
        self, draft_BK: Tensor, draft: Draft | None, logits_BRV: Tensor
    ) -> tuple[Tensor, Tensor]:
        if self.sampling.greedy:
            return verify_greedy(draft_BK, self._scripted(logits_BRV.argmax(dim=-1), self.running))
        target_p = probabilities(logits_BRV, self.sampling.temperature)
        draft_p = target_p[:, :0] if draft is None or draft.p_BKV is None else draft.p_BKV
        return verify_sampled(draft_BK, draft_p, target_p, self._random(self.running))

    def _random(self, sequences: list[Sequence]) -> Randomness:
        if not self.generators:
            return self.generator
        return [self.generators.get(item.request.key, self.generator) for item in sequences]

    def _scripted(self, choice_BR: Tensor, sequences: list[Sequence]) -> Tensor:
        """The target's choices, with scripts in their place where requests have any."""
        if not any(sequence.request.script for sequence in sequences):
            return choice_BR
        rows = zip(sequences, choice_BR.tolist(), strict=True)
        return torch.tensor(
            [sequence.scripted(choices) for sequence, choices in rows], device=choice_BR.device
        )

    def _commit(self, draft_BK: Tensor, accepted_B: Tensor, following_B: Tensor) -> None:
        rows = zip(
            self.running, draft_BK.tolist(), accepted_B.tolist(), following_B.tolist(), strict=True
        )
        for sequence, drafted, accepted, following in rows:
            if drafted:
                sequence.steps.append(DraftStep(tuple(drafted), accepted))
            sequence.commit([*drafted[:accepted], following])

    def _target_rows(self, token_T: Tensor, plan: BatchPlan) -> dict[str, Tensor]:
        """The post-norm states and those that the proposer is shown, by name."""
        names = dict.fromkeys((self.target.state, *self.proposer.states))
        context = PagedContext.of(self.engine.cache, plan)
        return self.target.capture(token_T, plan.positions, context, tuple(names))

    def _plan(self, sequences: list[Sequence], starts: list[int], rows: list[int]) -> BatchPlan:
        pages = [sequence.pages for sequence in sequences]
        return plan_batch(pages, starts, rows, self.engine.config.page_size, self.target.device)

    def _tensor(self, values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self.target.device)
