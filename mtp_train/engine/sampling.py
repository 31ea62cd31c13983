"""Logits to probabilities and draws. Pure tensor arithmetic.

Shapes: any leading dimensions, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mtp_train.core.errors import UserError

# One generator for the batch, or one per row: a row's draws are then its own, whatever the batch it runs in.
Randomness = torch.Generator | Sequence[torch.Generator]


@dataclass(frozen=True)
class Sampling:
    """How tokens are chosen. Temperature 0 is greedy."""

    temperature: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        if self.temperature < 0:
            raise UserError(
                "a temperature must be 0 or more", self.temperature, "use 0 for greedy decoding"
            )

    @property
    def greedy(self) -> bool:
        return self.temperature == 0


def probabilities(logits: Tensor, temperature: float) -> Tensor:
    """softmax(logits / temperature) in float32 [..., V]; needs a temperature above 0."""
    return torch.softmax(logits.float() / temperature, dim=-1)


def draw(weights: Tensor, random: Randomness) -> Tensor:
    """One index per row, with chance proportional to `weights` [..., V] -> [...].

    The exponential race: argmax of w/e with e ~ Exp(1) is index i with chance w_i / sum(w).
    """
    race = torch.empty_like(weights)
    for part, generator in _parts(race, random):
        part.exponential_(generator=generator)
    return (weights / race).argmax(dim=-1)


def uniform_like(values: Tensor, random: Randomness) -> Tensor:
    """Uniform draws from [0, 1), shaped as `values` [B, ...]."""
    drawn = torch.empty_like(values)
    for part, generator in _parts(drawn, random):
        part.uniform_(generator=generator)
    return drawn


def _parts(values: Tensor, random: Randomness) -> Iterator[tuple[Tensor, torch.Generator]]:
    """What each generator fills: all of `values`, or a row each."""
    if isinstance(random, torch.Generator):
        return iter([(values, random)])
    return zip(values, random, strict=True)
