"""Draft trees: which draft hangs on which, and what its row sees. Knows no model and no tokens.

Row 0 of a sequence is its newest verified token, the root; row 1 + i is draft i. `parent_BN[b, i]` is the row that
draft i hangs on; a parent comes before its children, better ranked siblings before worse ones.

Shapes: B sequences, N drafts, R = N + 1 rows, D depth of the deepest draft.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count

import numpy as np
import torch
from torch import Tensor

from mtp_train.attention.paged import TreeRows

# How often a draft of rank 0, 1, 2, ... is the right one: sets which drafts a fixed tree holds. Of the order of what
# one-layer heads reach; a tree's worth is measured, not assumed.
RANK_RATES = (0.55, 0.14, 0.07, 0.05, 0.03, 0.03, 0.02, 0.02)


def lineage(parent_BN: np.ndarray) -> np.ndarray:
    """Bool [B, R, R]: row i sees row j, an ancestor of its own or itself."""
    batch, drafts = parent_BN.shape
    seen = np.repeat(np.eye(drafts + 1, dtype=bool)[None], batch, axis=0)
    at = np.arange(batch)
    for draft in range(drafts):
        seen[:, draft + 1] |= seen[at, parent_BN[:, draft]]
    return seen


def tree_rows(
    base: Sequence[int], seen_BRR: np.ndarray, newest: int | None = None
) -> list[TreeRows]:
    """The plan's trees: the last `newest` rows (default: all) of trees whose roots stand at `base`.

    seen_BRR: which rows of its own tree each row sees, itself included.
    """
    rows = seen_BRR.shape[1] if newest is None else newest
    depth_BR = seen_BRR.sum(-1) - 1
    return [
        TreeRows(root, depth, seen[len(seen) - rows :])
        for root, depth, seen in zip(base, depth_BR, seen_BRR, strict=True)
    ]


def deepest(match_BN: Tensor, seen_BRR: Tensor) -> tuple[Tensor, Tensor]:
    """The deepest row whose whole lineage matches, the best ranked of several: its row and its depth, [B] each.

    match_BN: whether draft i may follow its parent.
    """
    root = match_BN.new_ones(len(match_BN), 1)
    broken_BR = ~torch.cat([root, match_BN], dim=1)
    alive_BR = ~(seen_BRR & broken_BR.unsqueeze(1)).any(-1)
    depth_BR = torch.where(alive_BR, seen_BRR.sum(-1) - 1, -1)
    depth_B, row_B = depth_BR.max(dim=1)
    return row_B, depth_B


def path_rows(row_B: Tensor, seen_BRR: Tensor, depth: int) -> Tensor:
    """Rows from the root down to row `row_B` [B, depth + 1]; 0 past it."""
    batch, rows = seen_BRR.shape[:2]
    member_BR = seen_BRR[torch.arange(batch, device=row_B.device), row_B]
    place_BR = torch.where(member_BR, member_BR.long().cumsum(1) - 1, depth + 1)
    row_BR = torch.arange(rows, device=row_B.device).expand(batch, rows)
    path = row_BR.new_zeros(batch, depth + 2)
    return path.scatter_(1, place_BR, row_BR)[:, :-1]


def fixed_paths(drafts: int, depth: int, top_k: int) -> list[tuple[int, ...]]:
    """The `drafts` most likely paths of ranks, by `RANK_RATES`, parents before children and level by level.

    A path (1, 0) is the best child of the root's second child.
    """
    rates = [RANK_RATES[min(rank, len(RANK_RATES) - 1)] for rank in range(top_k)]
    order = count()
    open_paths: list[tuple[float, int, tuple[int, ...]]] = [
        (-rate, next(order), (rank,)) for rank, rate in enumerate(rates)
    ]
    chosen: list[tuple[int, ...]] = []
    while open_paths and len(chosen) < drafts:
        open_paths.sort()
        score, _, path = open_paths.pop(0)
        chosen.append(path)
        if len(path) < depth:
            children = [
                (score * rate, next(order), (*path, rank)) for rank, rate in enumerate(rates)
            ]
            open_paths += children
    return sorted(chosen, key=lambda path: (len(path), path))
