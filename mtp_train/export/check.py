"""Whether an exported folder is the head: read back, and computed by the engine's own equation. Knows no layout.

Shapes: T rows, D hidden width, V vocabulary, S draft steps.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mtp_train.core.errors import UserError
from mtp_train.export.layout import Chain, Layout
from mtp_train.heads.base import DraftHead, Unrolled
from mtp_train.heads.families import make_head
from mtp_train.models.target import Target

ROWS = 24
STEPS = 3
POSITIONS = (1, 5000)
SERVED_POSITIONS = (0, *POSITIONS)  # the first row of a text has a rule of its own in some engines
# Of the largest logit. Both sides compute in float32, in different order.
TOLERANCE = 1e-3


def check_export(head: DraftHead, target: Target, layout: Layout, folder: Path) -> dict[str, float]:
    """The largest differences of the logits of a head and its exported folder, by position and draft step.

    1. The folder, read back, computes the same numbers in the target's dtype, which it is written in.
    2. The engine's equation, straight from the file, gives the head's logits up to rounding.

    Raises:
        UserError: they differ.
    """
    tensors, config = layout.load(folder)
    _require_dtype(tensors, target)
    theirs = layout.read(tensors, config, target).to(target.device)
    ours = _copy(head, target)
    found = _read_back(ours, theirs, target)
    differ = {name: value for name, value in found.items() if value != 0}  # not a number too
    if not differ:
        # Weights as they are written, computed with in float32.
        rounded = {
            name: value.float() if value.is_floating_point() else value
            for name, value in tensors.items()
        }
        differ = {
            f"the engine's equation, {name}": value
            for name, value in _as_served(ours.float(), target, layout, rounded, config).items()
            if not value <= TOLERANCE
        }
    if differ:
        raise UserError(
            "an exported head's logits must be the head's own",
            differ,
            f"report this: the mapping of layout {layout.name} is wrong",
        )
    return found


def _read_back(ours: DraftHead, theirs: DraftHead, target: Target) -> dict[str, float]:
    pairs = {}
    for position in POSITIONS:
        found = zip(
            _logits(ours.to(target.dtype), target, position),
            _logits(theirs.to(target.dtype), target, position),
            strict=True,
        )
        for step, (mine, exported) in enumerate(found, start=1):
            pairs[f"position {position}, draft step {step}"] = float((mine - exported).abs().max())
    return pairs


@torch.no_grad()
def _as_served(
    head: DraftHead,
    target: Target,
    layout: Layout,
    tensors: dict[str, Tensor],
    config: dict[str, object],
) -> dict[str, float]:
    """Differences over the largest logit, by position and step, at one row whose chain has all steps."""
    found = {}
    for position in SERVED_POSITIONS:
        steps = head.steps or STEPS
        last = ROWS - 1 - steps
        states = _states(head, target)
        shown = {name: value[: last + 1].float().cpu() for name, value in states.items()}
        chain = Chain(_text(target), shown, position, steps, target)
        theirs = layout.served(tensors, config, chain)
        start_N = torch.tensor([last], device=target.device)
        unrolled = _unrolled(head, target, position, torch.float32, start_N)
        for step, served_V in zip(range(steps), theirs, strict=True):
            mine_V = _whole(head, chain, unrolled, step)
            name = f"position {position}, draft step {step + 1}"
            found[name] = _difference(mine_V, served_V)
    return found


def _difference(mine_V: Tensor, theirs_V: Tensor) -> float:
    """The largest difference over the largest logit; not a number if other tokens can be drafted."""
    drafted = mine_V.isfinite()
    if mine_V.shape != theirs_V.shape or not torch.equal(drafted, theirs_V.isfinite()):
        return float("nan")
    mine, theirs = mine_V[drafted], theirs_V[drafted]
    return float((mine - theirs).abs().max() / mine.abs().max())


def _whole(head: DraftHead, chain: Chain, unrolled: Unrolled, step: int) -> Tensor:
    """A head's logits [V] of the only chain over the target's vocabulary, in float32 on the CPU."""
    read_NE = unrolled.read_SNE[step].float().cpu()
    own = head.own_output()
    if own is None:
        logits_V = chain.lm_head(read_NE)[0]
        logits_U = logits_V if head.vocabulary is None else logits_V[head.vocabulary.cpu()]
    else:
        matrix = (own if own.ndim == 2 else own[step]).float().cpu()
        logits_U = (read_NE @ matrix.T)[0]
    if unrolled.bias is not None:
        read_SNR, matrix_VR = unrolled.bias
        logits_U = logits_U + (read_SNR[step].float().cpu() @ matrix_VR.float().cpu().T)[0]
    if head.vocabulary is None:
        return logits_U
    whole_V = torch.full((chain.target.vocab_size,), float("-inf"))
    whole_V[head.vocabulary.cpu()] = logits_U
    return whole_V


@torch.inference_mode()
def _logits(head: DraftHead, target: Target, position: int) -> list[Tensor]:
    """Logits of the draft steps of chains over fixed rows that begin at `position` [chains, U] each."""
    steps = head.steps or STEPS
    start_N = torch.arange(ROWS - steps, device=target.device)
    found = _unrolled(head, target, position, target.dtype, start_N)
    logits = [head.project(target, read_NE, step) for step, read_NE in enumerate(found.read_SNE)]
    if found.bias is not None:
        low_rank = zip(logits, found.bias[0], strict=True)
        logits = [one + read_NR @ found.bias[1].T for one, read_NR in low_rank]
    said = [] if found.confidence_SN is None else [found.confidence_SN.float()]
    return [*(one.float() for one in logits), *said]


def _unrolled(
    head: DraftHead, target: Target, position: int, dtype: torch.dtype, start_N: Tensor
) -> Unrolled:
    """Chains over a fixed text whose first row stands at `position`, and states for it."""
    token_T = _text(target).to(target.device)
    steps = head.steps or STEPS
    aligned = head.align(token_T, torch.ones_like(token_T), [0, ROWS], steps, start_N=start_N)
    states = {name: value.to(dtype) for name, value in _states(head, target).items()}
    embeddings: Any = _Embeddings(target, dtype)
    return head.unroll(embeddings, aligned.moved(position), states)


@dataclass(frozen=True)
class _Embeddings:
    """A target in another dtype, of which a rollout takes embeddings alone."""

    target: Target
    dtype: torch.dtype

    def embed(self, token_T: Tensor) -> Tensor:
        return self.target.embed(token_T).to(self.dtype)


def _states(head: DraftHead, target: Target) -> dict[str, Tensor]:
    """States of the text, in the target's dtype."""
    generator = torch.Generator().manual_seed(1)
    return {
        name: torch.randn(ROWS, target.hidden_size, generator=generator).to(
            target.device, target.dtype
        )
        for name in head.states
    }


def _text(target: Target) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(target.vocab_size, (ROWS,), generator=generator)


def _copy(head: DraftHead, target: Target) -> DraftHead:
    """The same head, to be cast."""
    copy = make_head(target, asdict(head.config)).to(target.device)
    copy.load_state_dict(head.state_dict())
    return copy


def _require_dtype(tensors: dict[str, Tensor], target: Target) -> None:
    odd = [
        f"{name} {value.dtype}"
        for name, value in tensors.items()
        if value.is_floating_point() and value.dtype != target.dtype
    ]
    if odd:
        raise UserError(
            f"an export must be written in the target's dtype, {target.dtype}",
            ", ".join(odd[:4]),
            "export the head again",
        )
