"""What is set of an engine, and what a call of it took. Knows nothing else of it."""

from __future__ import annotations

from dataclasses import dataclass

from mtp_train.core.errors import UserError
from mtp_train.core.keys import END, key

VERIFICATIONS = ("rejection", "one_hot", "typical")
ORDERS = ("overlapped", "plain")


@dataclass(frozen=True)
class EngineConfig:
    """How an engine runs.

    Attributes:
        max_batch: sequences that run at once.
        page_size: rows per page.
        cache_rows: rows of the paged cache, shared by all running sequences.
        prefill_rows: prompt rows per forward; longer prompts take several.
        verification: how sampled drafts of a chain are accepted: `rejection` draws them and compares chances, `one_hot`
            takes the head's best and looks for it among the target's own draws, as vLLM does by default. Trees
            are verified by `one_hot` in either case. `typical` is Medusa's rule and NOT lossless.
        mixed_drafts: speculate in batches that prompts are read in, too.
        share_prefixes: sequences that begin with the same tokens share full pages.
        order: `overlapped` shows the head what was verified before the host knows what was accepted, and drafts one
            token ahead at once where one is all; `plain` does one thing after the other. The tokens are the same.
        attention: `flashinfer`, `torch`, or `auto`: FlashInfer where there is a GPU and the package.
        tensor_parallel: ranks that hold target and head together, where a stage loads them for an engine.
        alphas: measure sum over tokens of min(p, q) at every draft position that is reached.
    """

    max_batch: int = key(64, END)
    page_size: int = key(16, END)
    cache_rows: int = 32768
    prefill_rows: int = key(2048, END)
    verification: str = "rejection"
    mixed_drafts: bool = True
    share_prefixes: bool = key(True, END)
    order: str = key("overlapped", END)
    attention: str = key("auto", END)
    alphas: bool = False
    tensor_parallel: int = key(1, END)

    def __post_init__(self) -> None:
        for name in ("max_batch", "page_size", "cache_rows", "prefill_rows", "tensor_parallel"):
            if getattr(self, name) < 1:
                raise UserError(f"engine.{name} must be 1 or more", getattr(self, name), "raise it")
        for name, known in (("verification", VERIFICATIONS), ("order", ORDERS)):
            if getattr(self, name) not in known:
                rule = f"engine.{name} must be one of " + ", ".join(known)
                raise UserError(rule, getattr(self, name), "choose one of them")

    @property
    def lossless(self) -> bool:
        """Whether speculation leaves the target's distribution as it is."""
        return self.verification != "typical"


@dataclass(frozen=True)
class RunStats:
    """What one `generate` call took. `seconds` splits `wall` by part; the rest is the engine's own Python.

    Attributes:
        steps: forwards of the target in which something was decoded.
        preempted: times that a sequence gave up its pages and was computed again.
        shared_rows: prompt rows that another sequence had computed.
    """

    wall: float
    seconds: dict[str, float]
    tokens: int
    steps: int
    preempted: int = 0
    shared_rows: int = 0
