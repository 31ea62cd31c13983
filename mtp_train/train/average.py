"""An exponential moving average of the head's weights, in float32: torch's `AveragedModel`, warmed up.

    average <- d * average + (1 - d) * weights        after each optimiser step, d = min(decay, (1 + n) / (10 + n))

n counts the updates before this one; the first one copies. The warm-up of d is that of TensorFlow's
`ExponentialMovingAverage` (`num_updates`): early in a run the average follows the weights instead of remembering
where they began. Knows no optimiser and no loss.
"""

from __future__ import annotations

from functools import partial

from torch import Tensor
from torch.optim.swa_utils import AveragedModel

from mtp_train.heads.base import DraftHead


def make_average(head: DraftHead, decay: float) -> AveragedModel:
    """A copy of `head` in its `module`, which `update_parameters(head)` moves after each step."""
    average = AveragedModel(head, avg_fn=partial(warm_average, decay))
    average.requires_grad_(False)
    return average


def warm_average(decay: float, average: Tensor, current: Tensor, updates: Tensor | int) -> Tensor:
    """The average after one more update; `updates` are those before it, 1 or more."""
    count = float(updates)
    return average.lerp(current, 1 - min(decay, (1 + count) / (10 + count)))
