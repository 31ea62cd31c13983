"""What goes into the engine and what comes out, and a sequence's state in between. Knows no tensors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from mtp_train.engine.logprobs import TokenLogprobs
from mtp_train.engine.sampling import Sampling

# The output so far -> how many of its tokens stand, if it is complete.
StopRule = Callable[[tuple[int, ...]], int | None]


@dataclass(frozen=True)
class Request:
    """A prompt to continue.

    Attributes:
        script: a continuation that stands in for the target's greedy choices. The engine then measures what it would
            have drafted along a text that another engine wrote: two bfloat16 engines part at near-ties, and counters
            of different texts can't be compared closely.
        seed: of the request's own random draws, which then don't depend on the batch that it runs in; without one it
            shares the run's.
        sampling: the request's own rules, in place of the call's.
        ends: a stop rule beside the stop tokens, such as one for stop strings.
        logprobs: keep each token's log-probability and those of so many best ones, as the target has them before any
            sampling rule.
    """

    key: str
    prompt: tuple[int, ...]
    max_new_tokens: int
    stop_tokens: frozenset[int] = frozenset()
    script: tuple[int, ...] = ()
    seed: int | None = None
    sampling: Sampling | None = None
    ends: StopRule | None = None
    logprobs: int | None = None


@dataclass(frozen=True)
class DraftStep:
    """One verification: what was drafted and how many drafts were accepted.

    Counted as the engine verified it, also where the output ends inside the accepted run (as vLLM's counters do).

    Attributes:
        drafted: a chain's drafts; of a tree the accepted path, then the best draft that was rejected at its end.
        accepted: how many of `drafted` were accepted: the first ones.
        nodes: drafted tokens, those of a whole tree.
        alphas: sum over tokens of min(p, q) at each position that was reached, where the engine measures it.
    """

    drafted: tuple[int, ...]
    accepted: int
    nodes: int = 0
    alphas: tuple[float, ...] = ()


@dataclass(frozen=True)
class Completion:
    """A finished request. `steps` is empty without speculation.

    Attributes:
        undrafted: steps of a proposer that found nothing to draft: they said one token each.
    """

    key: str
    prompt: tuple[int, ...]
    tokens: tuple[int, ...]  # the stop token included, where one ended it
    finish: str  # "stop", "length", "refused: <reason>" or "failed: <reason>"
    steps: tuple[DraftStep, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()  # one per token, where asked for
    undrafted: int = 0


@dataclass(eq=False)
class Sequence:
    """A running request.

    Attributes:
        pages: its page table.
        tokens: prompt and output.
        cached: rows that the target has cached; all but the newest token's once it decodes.
        observed: rows that the proposer has read of the sequence's own tokens.
        named: pages that others can find.
        decoding: whether a forward has reached its newest token: it goes on from there, a row at a time.
        carry: what the proposer keeps for it.
        draft: drafts that were proposed ahead of their step.
    """

    request: Request
    sampling: Sampling
    pages: list[int] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    cached: int = 0
    observed: int = 0
    named: int = 0
    decoding: bool = False
    carry: Any = None
    draft: Any = None
    steps: list[DraftStep] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    undrafted: int = 0
    finish: str = ""

    @property
    def output(self) -> list[int]:
        return self.tokens[len(self.request.prompt) :]

    @property
    def pending(self) -> int:
        """Rows that the target has to read before the sequence decodes; what it has said is not said again."""
        return len(self.tokens) - bool(self.output) - self.cached

    def scripted(self, choices: list[int]) -> list[int]:
        """The target's choices for the next tokens, with the script's in their place as far as it goes."""
        at = len(self.output)
        script = list(self.request.script[at : at + len(choices)])
        return script + choices[len(script) :]

    def commit(self, tokens: list[int]) -> int:
        """Append verified tokens up to the first that ends the output, and note why; returns how many were."""
        before = len(self.tokens)
        room = self.request.max_new_tokens - len(self.output)
        for token in tokens[:room]:
            self.tokens.append(token)
            if token in self.request.stop_tokens:
                self.finish = "stop"
                break
        if not self.finish and len(self.output) >= self.request.max_new_tokens:
            self.finish = "length"
        self._apply_rule()
        return len(self.tokens) - before

    def restart(self) -> None:
        """Forget what is cached: it will be computed again from the tokens.

        Drafts that were drawn ahead stay: they would take from the request's randomness once more.
        """
        self.pages = []
        self.cached = self.observed = self.named = 0
        self.decoding = False
        self.carry = None

    def complete(self) -> Completion:
        return Completion(
            self.request.key,
            self.request.prompt,
            tuple(self.output),
            self.finish,
            tuple(self.steps),
            tuple(self.logprobs),
            self.undrafted,
        )

    def _apply_rule(self) -> None:
        """Cut the output where the request's own rule says that it is complete. A rule that fails ends its request."""
        if self.request.ends is None:
            return
        try:
            kept = self.request.ends(tuple(self.output))
        except Exception as error:  # of whatever kind: others run on
            self.finish = f"failed: its stop rule raised {type(error).__name__}: {error}"
            return
        if kept is not None:
            del self.tokens[len(self.request.prompt) + kept :]
            self.finish = "stop"


@dataclass(frozen=True)
class Batch:
    """What the next forward reads: the newest rows of sequences that decode, and chunks of prompts.

    Attributes:
        rows: of the sequences in `filling`, how many of their pending rows.
        ending: which of them this is the last chunk of: it says their first token.
        resuming: those whose pages had been taken, and which have now been read up to the newest token.
    """

    decoding: list[Sequence]
    filling: list[Sequence]
    rows: list[int]
    ending: list[int]
    resuming: list[Sequence]

    @property
    def all(self) -> list[Sequence]:
        return self.decoding + self.filling

    def complete(self) -> list[Sequence]:
        """Those in `filling` whose prompt ends in this batch."""
        return [self.filling[at] for at in self.ending]
