"""Whether an exported folder is the head: read back, and computed by the engine's own equation. Knows no layout.

Shapes: T rows, D hidden width, V vocabulary, S draft steps.
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import torch
from torch import Tensor

from mtp_train.attention.packed import RolloutContext
from mtp_train.batches.align import Rollout, rollout
from mtp_train.core.errors import UserError
from mtp_train.export.layout import Chain, Layout
from mtp_train.heads.base import DraftHead
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
        aligned, states = _inputs(head, target, position)
        steps = len(aligned.token_ST)
        last = ROWS - 1 - steps
        shown = {name: value[: last + 1].float().cpu() for name, value in states.items()}
        chain = Chain(_text(target), shown, position, steps, target)
        theirs = layout.served(tensors, config, chain)
        for step, (out, served_V) in enumerate(
            zip(_outputs(head, target, aligned, states, torch.float32), theirs, strict=True)
        ):
            mine_V = _whole(head, chain, out[last : last + 1].cpu(), step)
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


def _whole(head: DraftHead, chain: Chain, out_ND: Tensor, step: int) -> Tensor:
    """A head's logits [V] of one output over the target's vocabulary, in float32 on the CPU."""
    read_ND = head.readout(out_ND.to(next(head.parameters()).device), step).float().cpu()
    own = head.own_output()
    if own is None:
        return chain.lm_head(read_ND)[0]
    matrix = (own if own.ndim == 2 else own[step]).float().cpu()
    logits_U = (read_ND @ matrix.T)[0]
    if head.vocabulary is None:
        return logits_U
    whole_V = torch.full((chain.target.vocab_size,), float("-inf"))
    whole_V[head.vocabulary.cpu()] = logits_U
    return whole_V


@torch.inference_mode()
def _logits(head: DraftHead, target: Target, position: int) -> list[Tensor]:
    """Logits of the draft steps of a chain over fixed rows that begin at `position` [rows, U] each."""
    aligned, states = _inputs(head, target, position)
    outs = _outputs(head, target, aligned, states, target.dtype)
    return [head.logits(target, out, step).float() for step, out in enumerate(outs)]


def _outputs(
    head: DraftHead, target: Target, aligned: Rollout, states: dict[str, Tensor], dtype: torch.dtype
) -> list[Tensor]:
    """The head's outputs [T, D] at every step."""
    context = RolloutContext([0, ROWS])
    state_TD = head.fuse({name: value.to(dtype) for name, value in states.items()})
    outs = []
    for step, (token_T, position_T) in enumerate(
        zip(aligned.token_ST, aligned.position_ST, strict=True)
    ):
        embedding_TD = head.embed(target, token_T).to(dtype)
        state_TD = head.at(step)(embedding_TD, state_TD, position_T, context)
        outs.append(state_TD)
    return outs


def _inputs(head: DraftHead, target: Target, position: int) -> tuple[Rollout, dict[str, Tensor]]:
    """A fixed text whose first row stands at `position`, aligned, and states for it, in the target's dtype."""
    token_T = _text(target).to(target.device)
    steps = head.steps or STEPS
    aligned = rollout(token_T, torch.ones_like(token_T), [0, ROWS], steps, head.ahead)
    aligned.position_ST.add_(position)
    generator = torch.Generator().manual_seed(1)
    states = {
        name: torch.randn(ROWS, target.hidden_size, generator=generator).to(
            target.device, target.dtype
        )
        for name in head.states
    }
    return aligned, states


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
