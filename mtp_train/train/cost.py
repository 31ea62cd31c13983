"""What training a head takes, from shapes alone: memory of one rank, arithmetic. Nothing is loaded, nothing is run.

Each part is a sum that can be checked by hand, but for what the head's forward keeps for its backward. That is
counted, on tensors without storage, at two pack sizes: it is a constant (the weights in autocast's dtype) and so much
per row. What a device's allocator rounds up, and the process itself, come on top.

Shapes: T rows, N goals (at most T), D hidden width, V vocabulary or the part of it in the loss, S draft steps, P the
head's trained parameters.
"""

from __future__ import annotations

import copy
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.autograd.graph import saved_tensors_hooks

from mtp_train.heads.base import DraftHead, Unrolled
from mtp_train.losses.chunked import CHUNK
from mtp_train.models.partial import resident_bytes
from mtp_train.models.target import Target
from mtp_train.train.config import TrainConfig

FLOAT = 4  # bytes
LOGITS = 5  # float32 [chunk, V] that the loss holds, beside one in the target's dtype
PROBE = (64, 128)  # rows


def train_bytes(
    target: Target,
    head: DraftHead,
    config: TrainConfig,
    *,
    ranks: int = 1,
    autocast: bool = True,
    whole: bool = False,
) -> dict[str, int]:
    """Bytes by part.

    Args:
        target, head: without storage.
        whole: whether training runs the target, and not only reads its ends.
        ranks: more than one keep another copy of the gradients, to exchange them (DDP).
        autocast: whether matmuls run in bfloat16.
    """
    held = sum(p.numel() for p in head.parameters()) * FLOAT
    trained = sum(p.numel() for p in head.parameters() if p.requires_grad) * FLOAT
    width, rows = target.dtype.itemsize, config.rows
    states = len(dict.fromkeys((target.state, *head.states)))
    constant, per_row = kept_for_backward(head, target, config.rollout_steps, autocast)
    loaded, all_of_it = (resident_bytes(target.model, whole=some) for some in (whole, True))
    parts = {
        "target, whole" if loaded == all_of_it else "target's ends": loaded,
        "head, float32": held,
        "gradients": trained,
        "gradients, exchanged": trained * (ranks > 1),
        "AdamW's moments": 2 * trained,
        "average of weights": trained * (config.ema > 0),
        "pack's states": rows * states * target.hidden_size * width,
        "head in autocast's dtype": constant,
        f"activations of {config.rollout_steps} steps": rows * per_row,
        "loss": _loss_bytes(target, head, config),
    }
    return {name: size for name, size in parts.items() if size}


def train_flops(target: Target, head: DraftHead, config: TrainConfig) -> int:
    """Of one token's matrix products, forward and backward: every draft step, and the loss as if every token had one.

    Attention's own products, which grow with the sequence, are left out.
    """
    own = head.own_output()
    looked_up = [module.weight for module in head.modules() if isinstance(module, nn.Embedding)]
    outside = {id(weight) for weight in looked_up}
    if own is not None:
        outside.add(id(own if own._base is None else own._base))
    inside = [p for p in head.parameters() if p.ndim > 1 and id(p) not in outside]
    parts = head.parts  # that serve a step each
    block = sum(p.numel() for p in inside) // parts
    vocabulary = _loss_vocabulary(target, head, config)
    backward = 1 if own is None else 2  # by the states, and by a matrix that is trained
    per_step = 6 * block + 2 * _read_width(target, head) * vocabulary * (1 + backward)
    steps = config.rollout_steps * head.share
    return round(2 * target.hidden_size * vocabulary + steps * per_step)


def _loss_bytes(target: Target, head: DraftHead, config: TrainConfig) -> int:
    """A chunk's logits, the states that are compared with their gradients, and copies of output matrices."""
    wide, width = _read_width(target, head), target.dtype.itemsize
    vocabulary = _loss_vocabulary(target, head, config)
    part = vocabulary if vocabulary < target.vocab_size else 0
    logits = min(CHUNK, config.rows) * vocabulary * (LOGITS * FLOAT + width)
    states = round(2 * config.rollout_steps * config.rows * head.share * wide * FLOAT)
    rows_of_lm_head = part * target.hidden_size * width
    own = head.own_output()
    if own is None:
        return logits + states + rows_of_lm_head
    # cast for the matmuls, its summed gradient, and one chunk's
    matrices = own.numel() * (width + FLOAT) + own.shape[-2] * own.shape[-1] * width
    return logits + states + rows_of_lm_head + matrices


def _read_width(target: Target, head: DraftHead) -> int:
    """Width of what the head's lm_head reads."""
    own = head.own_output()
    return target.hidden_size if own is None else own.shape[-1]


def _loss_vocabulary(target: Target, head: DraftHead, config: TrainConfig) -> int:
    """Tokens that the loss compares."""
    part = config.loss_vocabulary if head.vocabulary is None else len(head.vocabulary)
    return min(part or target.vocab_size, target.vocab_size)


def kept_for_backward(
    head: DraftHead, target: Target, steps: int, autocast: bool
) -> tuple[int, int]:
    """Bytes that a rollout keeps whatever its rows, and per row."""
    fake = copy.deepcopy(head)
    with FakeTensorMode(allow_non_fake_inputs=True):
        _make_fake(fake)
        few, many = (_kept(fake, target, rows, steps, autocast) for rows in PROBE)
    per_row = (many - few) // (PROBE[1] - PROBE[0])
    return few - per_row * PROBE[0], per_row


def _kept(head: DraftHead, target: Target, rows: int, steps: int, autocast: bool) -> int:
    """Bytes of the distinct storages that autograd keeps of a rollout, the head's parameters aside."""
    own = {p.untyped_storage()._cdata for p in head.parameters()}
    seen: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in own:
            seen[storage._cdata] = storage.nbytes()
        return tensor

    context = torch.autocast("cpu", torch.bfloat16) if autocast else nullcontext()
    with saved_tensors_hooks(keep, lambda tensor: tensor), context:
        found = _roll_out(head, target, rows, steps)
    assert len(found.read_SNE) == steps, (
        "alive until here: a freed storage's place would be counted once for two"
    )
    return sum(seen.values())


def _roll_out(head: DraftHead, target: Target, rows: int, steps: int) -> Unrolled:
    """The head's rollout over one document; everything that it keeps hangs on what it gives."""
    wide, dtype = target.hidden_size, target.dtype
    states = {name: torch.empty(rows, wide, dtype=dtype) for name in head.states}
    with unset_fake_temporarily():  # rows are counted
        token_T = torch.ones(rows, dtype=torch.int64)
        start_N = torch.arange(0, rows, max(round(1 / head.share), 1))
        aligned = head.align(token_T, token_T, [0, rows], steps, start_N=start_N)
    embedding: Any = _Embedding(wide, dtype)
    return head.unroll(embedding, aligned, states)


@dataclass(frozen=True)
class _Embedding:
    """Stands in for a target, of which a rollout takes embeddings alone."""

    width: int
    dtype: torch.dtype

    def embed(self, token_T: Tensor) -> Tensor:
        return torch.empty(len(token_T), self.width, dtype=self.dtype)


def _make_fake(head: DraftHead) -> None:
    """Put fake CPU tensors in the place of a head's, which autocast takes for real ones."""
    for module in head.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            # A grouped product's shape rule knows bfloat16 alone, so experts keep half of what they do.
            dtype = torch.bfloat16 if parameter.ndim == 3 else parameter.dtype
            made = torch.empty(parameter.shape, dtype=dtype)
            setattr(module, name, nn.Parameter(made, parameter.requires_grad))
        for name, buffer in list(module.named_buffers(recurse=False)):
            setattr(module, name, torch.empty(buffer.shape, dtype=buffer.dtype))
