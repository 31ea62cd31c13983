"""The rows that a request keeps from one draft to the next. Knows torch alone.

Shapes: R rows, D hidden width.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Rows:
    """Consecutive verified rows of one request: the tokens that module 0 read there, its output, and where they end."""

    token_R: Tensor
    state_RD: Tensor
    last: int  # position of the last row

    @property
    def first(self) -> int:
        return self.last + 1 - len(self.token_R)

    def after(self, earlier: Rows | None) -> Rows:
        """These rows with those just before them; an earlier part that doesn't end there is of another time."""
        if earlier is None or earlier.last + 1 != self.first:
            return self
        return Rows(
            torch.cat([earlier.token_R, self.token_R]),
            torch.cat([earlier.state_RD, self.state_RD]),
            self.last,
        )

    def tail(self, count: int) -> Rows:
        return Rows(self.token_R[-count:].clone(), self.state_RD[-count:].clone(), self.last)
