"""Which code computes paged attention: the torch backend or FlashInfer. They take the same plans.

Knows neither engine nor model: who asks gets a function from cache and plan to the context of that batch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from importlib.util import find_spec

import torch

from mtp_train.attention.flashinfer_backend import FlashInferContext, Workspace
from mtp_train.attention.interface import AttentionContext
from mtp_train.attention.paged import BatchPlan, PagedContext, PagedKV
from mtp_train.core.errors import UserError

CHOICES = ("auto", "torch", "flashinfer")


@dataclass(frozen=True)
class Backend:
    """Makes the context of a batch.

    Attributes:
        of: the context of a plan over a cache, made once: target and head share it.
        refused: reasons why layers ran on the torch backend all the same, so far.
    """

    name: str
    of: Callable[[PagedKV, BatchPlan], AttentionContext]
    refused: set[str]


def backend_for(device: torch.device, wanted: str = "auto") -> Backend:
    """The backend of caches on `device`; `auto` is FlashInfer on a CUDA device that has it, else torch.

    Raises:
        UserError: an unknown name, or FlashInfer where it can't run.
    """
    if wanted not in CHOICES:
        raise UserError(
            f"engine.attention is one of {', '.join(CHOICES)}", wanted, "choose one of them"
        )
    on_gpu, installed = device.type == "cuda", find_spec("flashinfer") is not None
    if wanted == "torch" or (wanted == "auto" and not (on_gpu and installed)):
        return Backend("torch", PagedContext.of, set())
    if not on_gpu:
        raise UserError(
            "engine.attention=flashinfer needs a CUDA device",
            f"target on {device.type}",
            "set target.device=cuda or engine.attention=auto",
        )
    if not installed:
        raise UserError(
            "engine.attention=flashinfer needs the package flashinfer",
            "it is not installed",
            "pip install 'mtp_train[gpu]' or set engine.attention=auto",
        )
    return flashinfer_on(_workspace(device))


def flashinfer_on(workspace: Workspace) -> Backend:
    """FlashInfer with the buffers and wrappers of `workspace`."""
    return Backend("flashinfer", partial(_of, workspace), workspace.refused)


@cache
def _workspace(device: torch.device) -> Workspace:
    import flashinfer  # an extra, and slow to import

    with torch.inference_mode(False):
        return Workspace(device, flashinfer)


def _of(workspace: Workspace, kv: PagedKV, plan: BatchPlan) -> AttentionContext:
    made = plan.contexts.get(id(kv))
    if made is None:
        made = plan.contexts[id(kv)] = FlashInferContext(kv, plan, workspace)
    return made
