"""The gate: stored rows must be the states by which the engine itself would choose its tokens.

For a sample of sequences per shard, the engine's paged path (prefill of the first part, then the rest over the
cache) chooses a token per row; argmax(lm_head(stored row)) must be that token. A wrong norm, layer, order or file
shows here, before anything is trained on it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mtp_train.attention.paged import PagedContext, PagedKV, plan_batch
from mtp_train.core.errors import UserError
from mtp_train.models.target import Target

PAGE = 16
TIE_ULPS = (
    4  # choices whose logits differ by less than this many units of the dtype's precision are a tie
)


@dataclass
class GateResult:
    """Rows compared in all; `ties` of them chose another token within rounding. Anything else stops the run."""

    sequences: int = 0
    rows: int = 0
    ties: int = 0


def check_rows(hidden_TD: Tensor, keys: list[str], offsets: list[int]) -> None:
    """Raise if a row is not finite or all zero, naming its sequence."""
    bad = ~hidden_TD.isfinite().all(dim=-1) | (hidden_TD == 0).all(dim=-1)
    if bool(bad.any()):
        row = int(bad.nonzero()[0])
        sequence = max(index for index, start in enumerate(offsets[:-1]) if start <= row)
        raise UserError(
            "every stored state must be finite and not zero",
            f"row {row - offsets[sequence]} of sequence {keys[sequence]!r}: {hidden_TD[row, :4].tolist()}...",
            "try dtype float32 or bfloat16, and check the target",
        )


def check_choices(
    target: Target, key: str, token_T: Tensor, hidden_TD: Tensor, result: GateResult
) -> None:
    """Compare one stored sequence with the engine's own choices; adds to `result`."""
    engine_TV = target.logits(paged_states(target, token_T))
    start = len(token_T) - len(engine_TV)
    stored_TV = target.logits(hidden_TD[start:].to(target.dtype))
    chosen, expected = stored_TV.argmax(-1), engine_TV.argmax(-1)
    differ = chosen != expected
    gap = (
        (stored_TV.gather(1, chosen[:, None]) - stored_TV.gather(1, expected[:, None]))
        .squeeze(1)
        .float()
    )
    tolerance = (
        TIE_ULPS * torch.finfo(target.dtype).eps * stored_TV.amax(-1).abs().float().clamp(min=1)
    )
    wrong = differ & (gap > tolerance)
    result.sequences += 1
    result.rows += len(chosen)
    result.ties += int((differ & ~wrong).sum())
    if bool(wrong.any()):
        row = int(wrong.nonzero()[0])
        raise UserError(
            "argmax(lm_head(stored row)) must be the engine's own token",
            f"row {start + row} of sequence {key!r}: stored chooses {int(chosen[row])}, engine {int(expected[row])}",
            "check that the store holds post-final-norm states of this target",
        )


def paged_states(target: Target, token_T: Tensor) -> Tensor:
    """States of the second half of a sequence, computed as the engine does: over a cache of the first half."""
    rows = len(token_T)
    half = max(rows // 2, 1)
    pages = [list(range(-(-rows // PAGE)))]
    cache = PagedKV(
        target.layers,
        len(pages[0]),
        PAGE,
        target.kv_heads,
        target.head_width,
        dtype=target.dtype,
        device=target.device,
    )
    for start, count in ((0, half), (half, rows - half)):
        if count:
            plan = plan_batch(pages, [start], [count], PAGE, target.device)
            states = target.forward(
                token_T[start : start + count], plan.positions, PagedContext(cache, plan)
            )
    return states
