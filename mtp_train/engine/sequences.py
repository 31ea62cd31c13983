"""What goes into the engine and what comes out, and a sequence's state in between. Knows no tensors."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Request:
    """A prompt to continue.

    Attributes:
        script: a continuation that stands in for the target's greedy choices. The engine then measures what it would
            have drafted along a text that another engine wrote: two bfloat16 engines part at near-ties, and counters
            of different texts can't be compared closely.
        seed: of the request's own random draws, which then don't depend on the batch that it runs in; without one it
            shares the run's.
    """

    key: str
    prompt: tuple[int, ...]
    max_new_tokens: int
    stop_tokens: frozenset[int] = frozenset()
    script: tuple[int, ...] = ()
    seed: int | None = None


@dataclass(frozen=True)
class DraftStep:
    """One verification: what was drafted and how many of its first tokens were accepted.

    Counted as the engine verified it, also where the output ends inside the accepted run (as vLLM's counters do).
    """

    drafted: tuple[int, ...]
    accepted: int


@dataclass(frozen=True)
class Completion:
    """A finished request. `steps` is empty without speculation."""

    key: str
    prompt: tuple[int, ...]
    tokens: tuple[int, ...]  # the stop token included, where one ended it
    finish: str  # "stop", "length", or "refused: <reason>"
    steps: tuple[DraftStep, ...] = ()


@dataclass
class Sequence:
    """A running request."""

    request: Request
    pages: list[int]
    tokens: list[int] = field(
        default_factory=list
    )  # prompt and output; the target has cached all but the last
    steps: list[DraftStep] = field(default_factory=list)
    finish: str = ""

    @property
    def output(self) -> list[int]:
        return self.tokens[len(self.request.prompt) :]

    def scripted(self, choices: list[int]) -> list[int]:
        """The target's choices for the next tokens, with the script's in their place as far as it goes."""
        at = len(self.output)
        script = list(self.request.script[at : at + len(choices)])
        return script + choices[len(script) :]

    def commit(self, tokens: list[int]) -> None:
        """Append verified tokens up to a stop token or the length limit, and note why it ended."""
        room = self.request.max_new_tokens - len(self.output)
        for token in tokens[:room]:
            self.tokens.append(token)
            if token in self.request.stop_tokens:
                self.finish = "stop"
                return
        if len(self.output) >= self.request.max_new_tokens:
            self.finish = "length"

    def complete(self) -> Completion:
        return Completion(
            self.request.key,
            self.request.prompt,
            tuple(self.output),
            self.finish,
            tuple(self.steps),
        )
