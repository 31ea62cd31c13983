"""Decoder blocks held by the ranks that hold a target together, by the plan that transformers has for its layers.

Knows no head and no engine.
"""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.distributed.tensor import DTensor
from transformers.distributed.tensor_parallel import apply_tensor_parallelism

from mtp_train.models import plain
from mtp_train.models.target import Target


def spread_block(target: Target, block: nn.Module) -> None:
    """Leave this rank its share of a block's matrices, in place; what the plan doesn't name stays whole.

    Column by column for what reads the residual (q, k, v, gate, up), row by row for what writes to it, whose results
    are then added over the ranks. The block must be the same on all of them, and for inference.
    """
    held = [part for part in target.model.parameters() if isinstance(part, DTensor)]
    apply_tensor_parallelism(block, held[0].device_mesh, block_plan(target, block))


def block_plan(target: Target, block: nn.Module) -> dict[str, str]:
    """transformers' style of each module and parameter of a block that has one, by name in the block."""
    own = isinstance(block, type(target.base.layers[-1]))
    config: Any = target.config if own else plain.Config
    named = dict(block.named_modules()), dict(block.named_parameters())
    pattern_style = (config.base_model_tp_plan or {}).items()
    styles = {pattern.removeprefix("layers.*."): style for pattern, style in pattern_style}
    plan = {name: style for name, style in styles.items() if any(name in known for known in named)}
    for name in named[
        1
    ]:  # a module's style is that of its parameters, but for those with one of their own
        module = name.rpartition(".")[0]
        if module in plan:
            plan.setdefault(name, plan[module])
    return plan
