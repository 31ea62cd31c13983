"""AdamW on float32 master weights, and a learning rate that is a pure function of the step.

Optimiser state goes in and out as named tensors: checkpoints hold no pickle.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor


def make_optimizer(
    module: nn.Module, learning_rate: float, betas: tuple[float, float], weight_decay: float
) -> torch.optim.AdamW:
    """AdamW; norm weights and other vectors are not decayed."""
    matrices = [
        parameter
        for parameter in module.parameters()
        if parameter.requires_grad and parameter.ndim > 1
    ]
    vectors = [
        parameter
        for parameter in module.parameters()
        if parameter.requires_grad and parameter.ndim <= 1
    ]
    groups = [
        {"params": matrices, "weight_decay": weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    # One kernel for the whole step: on a CPU it takes a tenth of the time. On GPUs torch's default is as good.
    fused = all(parameter.device.type == "cpu" for parameter in [*matrices, *vectors])
    return torch.optim.AdamW(groups, lr=learning_rate, betas=betas, fused=fused or None)


def learning_rate(
    step: float, total: float, peak: float, warmup: int, floor: float = 0.02
) -> float:
    """Linear warm-up over `warmup` steps, then cosine from `peak` to `floor * peak` at `total`.

    step: those done, a fraction where fewer packs than now made a step, as after a resume on more ranks.
    """
    if step < warmup:
        return peak * min((step + 1) / warmup, 1.0)
    progress = (step - warmup) / max(total - warmup, 1)
    return peak * (floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * min(progress, 1.0))))


def optimizer_tensors(optimizer: torch.optim.Optimizer, module: nn.Module) -> dict[str, Tensor]:
    """The optimiser's state as `<parameter>.<moment>`, in its own precision; shards are gathered on every rank."""
    names: dict[Tensor, str] = {parameter: name for name, parameter in module.named_parameters()}
    return {
        f"{names[parameter]}.{key}": _whole(torch.as_tensor(value).detach()).clone()
        for parameter, state in optimizer.state.items()
        for key, value in state.items()
    }


def load_optimizer(
    optimizer: torch.optim.Optimizer, module: nn.Module, tensors: dict[str, Tensor]
) -> None:
    """Put saved state back, exactly; each rank keeps the shard that belongs to its parameter's."""
    parameters = dict(module.named_parameters())
    for full, tensor in tensors.items():
        name, key = full.rsplit(".", 1)
        # AdamW keeps its step count on the CPU, its moments beside the parameter.
        value = tensor if key == "step" else _beside(tensor, parameters[name])
        optimizer.state[parameters[name]][key] = value


def _whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _beside(tensor: Tensor, parameter: Tensor) -> Tensor:
    tensor = tensor.to(parameter.device)
    if not isinstance(parameter, DTensor):
        return tensor
    # every rank has read the whole tensor: nothing is sent
    mesh, placements = parameter.device_mesh, parameter.placements
    return distribute_tensor(tensor, mesh, placements, src_data_rank=None)
