"""Where states come from. Precompute asks a source to capture sequences and to check what it captured.

A source of its own for each implementation of the target; all are held to the same gate. Knows no file.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, Protocol

import torch
from torch import Tensor

from mtp_train.attention.packed import PackedContext
from mtp_train.core.records import TokenizedConversation
from mtp_train.models.identity import Identity
from mtp_train.models.target import Target, eagle3_states, layer_of, spread_states
from mtp_train.precompute.gate import GateResult, Sample, check_choices, check_reference

EAGLE3 = "eagle3"  # stands for three auxiliary layers
SPREAD = re.compile(r"spread_([1-9]\d*)")  # for so many, spread evenly


@dataclass(frozen=True)
class VllmConfig:
    """Where vLLM is and how it runs.

    Attributes:
        python: the interpreter of an environment that holds vLLM; empty: our engine captures the states.
        engine: further arguments of vLLM's `LLM`, such as tensor_parallel_size.
    """

    python: str = ""
    engine: dict[str, Any] = field(default_factory=dict)


class StateSource(Protocol):
    """An implementation of a target that gives its states away."""

    name: str
    states: tuple[str, ...]
    target_hash: str
    quantisation: str
    identity: Identity
    hidden_size: int
    vocab_size: int
    dtype: str

    def capture(self, sequences: Sequence[TokenizedConversation]) -> dict[str, Tensor]:
        """Each state's rows of the sequences, end to end [T, D], on the CPU."""
        ...

    def check(self, samples: Sequence[Sample], result: GateResult) -> None:
        """Hold captured states against the implementation's own choices."""
        ...

    def check_reference(self, tokens: Sequence[int]) -> dict[str, Any]:
        """Hold the implementation against transformers' own model on a short text; what was compared."""
        ...


class EngineStates:
    """Our engine's packed prefill: sequences end to end in one ragged forward, checked against its paged path."""

    name = "engine"

    def __init__(self, target: Target, states: Sequence[str] = (Target.state,)) -> None:
        self.target = target
        self.states = expand_states(states, target.layers)
        self.target_hash, self.quantisation = target.hash, target.quantisation
        self.identity = target.identity
        self.hidden_size, self.vocab_size = target.hidden_size, target.vocab_size
        self.dtype = str(target.dtype).removeprefix("torch.")

    def capture(self, sequences: Sequence[TokenizedConversation]) -> dict[str, Tensor]:
        texts = [sequence.tokens for sequence in sequences]
        found = packed_states(self.target, texts, self.states)
        return {name: state.cpu() for name, state in found.items()}

    def check(self, samples: Sequence[Sample], result: GateResult) -> None:
        check_choices(self.target, samples, result)

    def check_reference(self, tokens: Sequence[int]) -> dict[str, Any]:
        return check_reference(self.target, tokens, self.states)


def packed_states(
    target: Target, texts: Sequence[Sequence[int]], states: Sequence[str]
) -> dict[str, Tensor]:
    """The named states of token sequences end to end [T, D], by one ragged forward, on the target's device."""
    device = target.device
    offsets = [0, *accumulate(len(text) for text in texts)]
    tokens = torch.tensor([token for text in texts for token in text], device=device)
    positions = torch.cat([torch.arange(len(text), device=device) for text in texts])
    return target.capture(tokens, positions, PackedContext(offsets), states)


def expand_states(states: Sequence[str], layers: int) -> tuple[str, ...]:
    """The states' own names: `eagle3` stands for three layers of a target of so many, `spread_5` for five of another
    choice. Raises for unknown names.
    """
    names: list[str] = []
    for state in states:
        spread = SPREAD.fullmatch(state)
        if spread:
            names += spread_states(layers, int(spread[1]))
        else:
            names += eagle3_states(layers) if state == EAGLE3 else [state]
    for name in names:
        if name != Target.state:
            layer_of(name, layers)
    return tuple(dict.fromkeys(names))
