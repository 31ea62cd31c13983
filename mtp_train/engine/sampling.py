"""Logits to probabilities and draws. Pure tensor arithmetic.

Shapes: any leading dimensions, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mtp_train.core.errors import UserError


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


def draw(weights: Tensor, generator: torch.Generator) -> Tensor:
    """One index per row, with chance proportional to `weights` [..., V] -> [...].

    The exponential race: argmax of w/e with e ~ Exp(1) is index i with chance w_i / sum(w).
    """
    race = torch.empty_like(weights).exponential_(generator=generator)
    return (weights / race).argmax(dim=-1)
