"""Weights of draft steps. A later draft only counts when all before it were accepted."""

from __future__ import annotations

import torch
from torch import Tensor

from mtp_train.core.errors import UserError


def geometric(steps: int, decay: float) -> Tensor:
    """decay^s for s = 0 .. steps-1, normalised to sum 1 (HASS and EAGLE-3 use such weights)."""
    if not 0 < decay <= 1:
        raise UserError("loss.decay must lie in (0, 1]", decay, "use 0.7, or 1 for equal weights")
    weight = decay ** torch.arange(steps, dtype=torch.float32)
    return weight / weight.sum()
