"""How the ranks share the training of one head: replicas (DDP), FSDP2, or DeepSpeed's ZeRO-1, 2 and 3.

accelerate starts the process group and runs replicas. It refuses FSDP2 and ZeRO on CPU ranks, so these two stand on
torch's `fully_shard` and DeepSpeed's engine themselves: the code that the tests run is the code that GPUs run.
Every strategy averages gradients over ranks, and its arithmetic is in float32 or under accelerate's autocast.
Knows neither data nor order nor files: tensors go in and out whole, on every rank.
"""

from __future__ import annotations

import math
import os
from abc import ABC, abstractmethod
from collections.abc import Iterator, MutableMapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from copy import deepcopy
from importlib.util import find_spec
from typing import Any, cast

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

from mtp_train.core.errors import UserError
from mtp_train.heads.base import DraftHead
from mtp_train.train.config import TrainConfig
from mtp_train.train.optim import load_optimizer, make_optimizer, optimizer_tensors
from mtp_train.train.step import RolloutModule

MOMENTS = ("exp_avg", "exp_avg_sq")
NOT_TAKEN = (
    "FSDP_OFFLOAD_PARAMS",
    "ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE",
    "ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE",
    "ACCELERATE_DEEPSPEED_CONFIG_FILE",
)
BUCKET = 50_000_000  # elements that ZeRO reduces at once


class LossModule(nn.Module):
    """The loss of a pack alone: what a strategy wraps, since wrappers look for tensors in what forward returns."""

    def __init__(self, rollout: RolloutModule, accelerator: Accelerator) -> None:
        super().__init__()
        self.rollout = rollout
        self._accelerator = [accelerator]

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        with self._accelerator[0].autocast():
            loss: Tensor = self.rollout(*args, **kwargs).values.loss
        return loss


class Strategy(ABC):
    """One head in training.

    Attributes:
        groups: the optimiser's parameter groups, for the learning rate.
        readable: a head to measure and to save, whole inside `whole()`. It is the head itself where no rank holds a
            mere share of it.
    """

    groups: list[dict[str, Any]]
    readable: DraftHead

    @abstractmethod
    def accumulate(self, scale: float, last: bool, *args: Any, **kwargs: Any) -> Tensor:
        """Add the gradient of scale * loss of a pack, summed over the ranks; returns the loss itself, detached.

        Args:
            last: whether a step follows.
            args, kwargs: of `RolloutModule`.
        """

    @abstractmethod
    def clip(self) -> float:
        """Clip the gradient to the configured norm; returns what its norm was, over all parameters of all ranks.

        Where clipping and stepping are one (ZeRO), both are done here.
        """

    @abstractmethod
    def step(self) -> None:
        """Step the optimiser and forget the gradient."""

    @abstractmethod
    def whole(self) -> AbstractContextManager[Any]:
        """Inside, `readable` has its parameters on every rank: a rank may use it alone, for reading only."""

    @abstractmethod
    def optimizer_tensors(self) -> dict[str, Tensor]:
        """The optimiser's state as `<parameter>.<moment>`, whole."""

    @abstractmethod
    def load_optimizer(self, tensors: dict[str, Tensor]) -> None:
        """Put such state back, exactly; each rank takes its share."""


class Replicas(Strategy):
    """Every rank holds the head and its optimiser: DDP by accelerate, or one rank alone."""

    def __init__(self, rollout: RolloutModule, config: TrainConfig, accelerator: Accelerator):
        self.accelerator, self.config, self.readable = accelerator, config, rollout.head
        self.module, self.optimizer = accelerator.prepare(rollout, _optimizer(rollout, config))
        self.raw: torch.optim.Optimizer = getattr(self.optimizer, "optimizer", self.optimizer)
        self.groups = self.raw.param_groups

    def accumulate(self, scale: float, last: bool, *args: Any, **kwargs: Any) -> Tensor:
        accelerator = self.accelerator
        with nullcontext() if last else accelerator.no_sync(self.module):
            with accelerator.autocast():
                loss: Tensor = self.module(*args, **kwargs).values.loss
            accelerator.backward(loss * (scale * accelerator.num_processes))
        return loss.detach()

    def clip(self) -> float:
        return float(self.accelerator.clip_grad_norm_(self.module.parameters(), self.config.clip))

    def step(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    def whole(self) -> AbstractContextManager[Any]:
        return nullcontext()

    def optimizer_tensors(self) -> dict[str, Tensor]:
        return optimizer_tensors(self.raw, self.readable)

    def load_optimizer(self, tensors: dict[str, Tensor]) -> None:
        load_optimizer(self.raw, self.readable, tensors)


class Shards(Strategy):
    """FSDP2: parameters, gradients and moments in shards; parameters are whole for a forward and a backward.

    The head is one unit. It is a single layer that every draft step runs again: smaller units would only gather the
    same tensors several times.
    """

    def __init__(self, rollout: RolloutModule, config: TrainConfig, accelerator: Accelerator):
        self.accelerator, self.config, self.head = accelerator, config, rollout.head
        self.readable = _hollow(self.head)
        mesh = init_device_mesh(accelerator.device.type, (accelerator.num_processes,))
        module = LossModule(rollout, accelerator)
        self.module: FSDPModule = fully_shard(module, mesh=mesh, reshard_after_forward=True)
        self.optimizer = _optimizer(rollout, config)
        self.groups = self.optimizer.param_groups

    def accumulate(self, scale: float, last: bool, *args: Any, **kwargs: Any) -> Tensor:
        loss: Tensor = self.module(*args, **kwargs)  # type: ignore[operator]
        (loss * (scale * self.accelerator.num_processes)).backward()
        return loss.detach()

    def clip(self) -> float:
        norm = nn.utils.clip_grad_norm_(self.head.parameters(), self.config.clip)
        return float(norm.full_tensor() if isinstance(norm, DTensor) else norm)

    def step(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    @contextmanager
    def whole(self) -> Iterator[None]:
        # a copy, not `unshard`: state_dict() would put the shards back
        fulls = [cast(DTensor, shard.detach()).full_tensor() for shard in self.head.parameters()]
        with _filled(self.readable, fulls):
            yield

    def optimizer_tensors(self) -> dict[str, Tensor]:
        return optimizer_tensors(self.optimizer, self.head)

    def load_optimizer(self, tensors: dict[str, Tensor]) -> None:
        load_optimizer(self.optimizer, self.head, tensors)


class Zero(Strategy):
    """DeepSpeed's ZeRO: moments in shards; from stage 2 gradients too, from stage 3 parameters too."""

    def __init__(
        self, stage: int, rollout: RolloutModule, config: TrainConfig, accelerator: Accelerator
    ):
        self.deepspeed = _deepspeed(accelerator)
        self.accelerator, self.head, self.stage = accelerator, rollout.head, stage
        # from stage 3 on, every forward of the head's own modules is for all ranks at once
        self.readable = _hollow(self.head) if stage == 3 else self.head
        module = LossModule(rollout, accelerator)
        self.base = _optimizer(rollout, config)
        size = sum(parameter.numel() for parameter in rollout.parameters())
        self.engine, *_ = self.deepspeed.initialize(
            model=module,
            optimizer=self.base,
            config={
                "train_micro_batch_size_per_gpu": 1,
                "gradient_clipping": config.clip,
                "zero_optimization": {
                    "stage": stage,
                    "overlap_comm": False,
                    "stage3_param_persistence_threshold": 0,
                    "reduce_bucket_size": min(size, BUCKET),
                },
            },
        )
        self.groups = self.base.param_groups
        own = rollout.head.own_parameter()
        if stage == 3 and own is not None:  # read outside of its module's forward
            self.deepspeed.zero.register_external_parameter(module, own)

    def accumulate(self, scale: float, last: bool, *args: Any, **kwargs: Any) -> Tensor:
        self.engine.set_gradient_accumulation_boundary(last)
        loss: Tensor = self.engine(*args, **kwargs)
        self.engine.backward(loss * (scale * self.accelerator.num_processes))
        return loss.detach()

    def clip(self) -> float:
        self.engine.step()
        # a gradient that is not finite is left out in silence, its norm too
        norm = self.engine.get_global_grad_norm() if self.engine.was_step_applied() else math.nan
        return float(norm)

    def step(self) -> None:
        """`clip` has done it."""

    @contextmanager
    def whole(self) -> Iterator[None]:
        if self.stage < 3:
            yield
            return
        parameters = list(self.head.parameters())
        with self.deepspeed.zero.GatheredParameters(parameters):
            fulls = [parameter.data for parameter in parameters]
            with _filled(self.readable, fulls):
                yield

    def optimizer_tensors(self) -> dict[str, Tensor]:
        get_state = self.deepspeed.utils.safe_get_full_optimizer_state
        self._link()
        step = self.base.state[self._partitions()[0]]["step"]
        tensors = {}
        for name, parameter in self._trained():
            tensors[f"{name}.step"] = torch.as_tensor(step).detach().clone()
            for key in MOMENTS:
                tensors[f"{name}.{key}"] = get_state(parameter, key).detach().clone()
        return tensors

    def load_optimizer(self, tensors: dict[str, Tensor]) -> None:
        set_state = self.deepspeed.utils.safe_set_full_optimizer_state
        step = next(value for name, value in tensors.items() if name.endswith(".step"))
        for flat in self._partitions():
            state = {key: torch.zeros_like(flat) for key in MOMENTS}
            self.base.state[flat] = {"step": step.clone(), **state}
        self._link()
        for name, parameter in self._trained():
            for key in MOMENTS:
                set_state(parameter, tensors[f"{name}.{key}"].to(self.accelerator.device), key)

    def _trained(self) -> list[tuple[str, nn.Parameter]]:
        """The parameters that the optimiser steps; a frozen part has no moments."""
        return [named for named in self.head.named_parameters() if named[1].requires_grad]

    def _link(self) -> None:
        """Let parameters know their moments. Stages 1 and 2 do it once, after the first group's first step alone."""
        if self.stage < 3:
            link = self.deepspeed.utils.lazy_init_hp_params_optimizer_state
            groups = self.engine.optimizer.bit16_groups
            for group, flat in zip(groups, self._partitions(), strict=True):
                link(group, flat, self.base.state)

    def _partitions(self) -> list[Tensor]:
        """This rank's share of the parameters, one flat float32 tensor per group."""
        names = ("single_partition_of_fp32_groups", "fp32_partitioned_groups_flat")
        partitions: list[Tensor] = getattr(self.engine.optimizer, names[self.stage == 3])
        return partitions


def make_strategy(
    rollout: RolloutModule, config: TrainConfig, accelerator: Accelerator
) -> Strategy:
    """The strategy `config.parallel`. One rank has nothing to share."""
    if accelerator.num_processes == 1 or config.parallel == "ddp":
        return Replicas(rollout, config, accelerator)
    if config.parallel == "fsdp2":
        return Shards(rollout, config, accelerator)
    return Zero(int(config.parallel.removeprefix("zero")), rollout, config, accelerator)


def require_library(strategy: str) -> None:
    """Raise unless what a strategy for several ranks needs is installed. Imports nothing."""
    if strategy.startswith("zero") and find_spec("deepspeed") is None:
        rule = "train.parallel=zero1, zero2 and zero3 need DeepSpeed"
        raise UserError(rule, "none", "pip install 'mtp_train[deepspeed]', or use fsdp2")


def launched_strategy(environment: MutableMapping[str, str]) -> str:
    """The strategy of the config file that `accelerate launch` was given; empty if it names none.

    Takes accelerate's requests out of the environment: it starts ranks, and the strategies here do the rest. A second
    call finds none. What a file asks for beyond that is refused rather than left undone.
    """
    fsdp = environment.pop("ACCELERATE_USE_FSDP", "") == "true"
    zero = environment.pop("ACCELERATE_USE_DEEPSPEED", "") == "true"
    values = {name: environment.get(name, "none") for name in NOT_TAKEN}
    asked = [name for name, value in values.items() if value not in ("none", "false")]
    if fsdp and environment.get("FSDP_VERSION") != "2":
        asked.append(f"FSDP_VERSION={environment.get('FSDP_VERSION')}")
    if (fsdp or zero) and asked:
        rule = "an accelerate config may choose fsdp_version 2 or a zero_stage, and no more"
        raise UserError(rule, ", ".join(asked), "begin from a file of recipes/accelerate")
    if fsdp:
        return "fsdp2"
    return f"zero{environment.get('ACCELERATE_DEEPSPEED_ZERO_STAGE')}" if zero else ""


def _hollow(head: DraftHead) -> DraftHead:
    """A copy that holds no parameters' memory until it is filled."""
    copy = deepcopy(head)
    for parameter in copy.parameters():
        parameter.data = parameter.data.new_empty(0)
    return copy


@contextmanager
def _filled(head: DraftHead, fulls: list[Tensor]) -> Iterator[None]:
    for parameter, full in zip(head.parameters(), fulls, strict=True):
        parameter.data = full
    try:
        yield
    finally:
        for parameter in head.parameters():
            parameter.data = parameter.data.new_empty(0)


def _optimizer(rollout: RolloutModule, config: TrainConfig) -> torch.optim.AdamW:
    betas = (config.beta1, config.beta2)
    return make_optimizer(rollout.head, config.learning_rate, betas, config.weight_decay)


def _deepspeed(accelerator: Accelerator) -> Any:
    if accelerator.device.type == "cpu":
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    import deepspeed

    deepspeed.utils.logger.setLevel("WARNING")
    if (
        accelerator.device.type == "cpu"
    ):  # gloo is enough: no compiler is started for a shared-memory all-reduce
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(torch.distributed.get_backend())
    return deepspeed
