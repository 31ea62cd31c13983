"""The only place that shifts tokens against states.

The contract (vLLM, SGLang and the EAGLE reference agree): row p of a head holds token x[p+1] and state H[p] at
position p; its output predicts H[p+1], its logits x[p+2]. A draft chain that starts at row p goes on at step s with
token x[p+1+s], its own last output in place of the state, at position p+s; it predicts H[p+1+s] and x[p+2+s].

    tokens      <user> hi <asst> yes <end>        the reply: yes <end>
    position       0    1    2     3    4
    step 0, row 1: token <asst>, state H[1] -> predicts H[2], whose logits the target used to say `yes`
    step 1, row 0: token <asst>, own output -> predicts H[2] too

A model that reads no state (`ahead` = 0 in place of 1) holds token x[p] at position p and predicts x[p+1]: its output
takes the place of H[p] itself. Its step 0 of row 2 above reads <asst> and predicts what H[2] does.

So a *goal* is a row g whose state the target used to utter a trained token x[g+1]; at step s the row p = g-ahead-s of
the same document predicts it. Training walks over goals: one projection of the target's state serves every step.

Shapes: T rows, N goals, S steps, B sequences, K drafts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Rollout:
    """A pack of documents, aligned for S draft steps. Rows are indexed by where their chain starts."""

    token_ST: (
        Tensor  # int64, input token of each step; 0 past the document's end (never part of a goal)
    )
    position_ST: Tensor  # int64
    goal_N: Tensor  # int64, rows of the pack whose states are predicted
    label_N: Tensor  # int64, x[g+1]
    source_SN: Tensor  # int64, row p that predicts goal n at step s; 0 where there is none
    valid_SN: Tensor  # bool, whether the goal has such a row in its own document


def rollout(
    token_T: Tensor, loss_mask_T: Tensor, offsets: Sequence[int], steps: int, ahead: int = 1
) -> Rollout:
    """Align packed documents for `steps` draft steps.

    Args:
        token_T: tokens of the documents, end to end.
        loss_mask_T: 1 where a token is the target's own output.
        offsets: document boundaries, from 0 to T.
        ahead: how far a row's token is ahead of its position: `DraftHead.ahead`.
    """
    begin_T, end_T = _bounds(offsets, token_T.device)
    row_T = torch.arange(len(token_T), device=token_T.device)
    token_ST = torch.stack([_later(token_T, row_T + ahead + step, end_T) for step in range(steps)])
    position_ST = torch.stack([row_T - begin_T + step for step in range(steps)])
    goal_N = row_T[_later(loss_mask_T, row_T + 1, end_T) > 0]
    source_SN = torch.stack([goal_N - ahead - step for step in range(steps)])
    valid_SN = source_SN >= begin_T[goal_N]
    return Rollout(
        token_ST, position_ST, goal_N, token_T[goal_N + 1], source_SN.clamp(min=0), valid_SN
    )


def next_tokens(token_T: Tensor, last_row_B: Tensor, following_B: Tensor, ahead: int = 1) -> Tensor:
    """Token x[p+ahead] of each row of a ragged batch [T]; a sequence's last row gets the token that follows it."""
    if not ahead:
        return token_T
    shifted = torch.roll(token_T, -1)
    shifted[last_row_B] = following_B
    return shifted


def verified_tokens(draft_BK: Tensor, accepted_B: Tensor, following_B: Tensor) -> Tensor:
    """Token x[p+1] of each verified row [B, K+1]: accepted drafts, then the target's own next token.

    Rows past it hold rejected drafts: whatever they write is overwritten before anything reads it.
    """
    padded = torch.cat([draft_BK, following_B.unsqueeze(1)], dim=1)
    return padded.scatter(1, accepted_B.unsqueeze(1), following_B.unsqueeze(1))


def draft_rows(newest: Sequence[int], drafts: int, ahead: int = 1) -> list[list[int]]:
    """Rows of draft steps 1 .. drafts-1 of sequences whose newest tokens stand at positions `newest`: [steps][B]."""
    return [[row + step - ahead for row in newest] for step in range(1, drafts)]


def answer_rows(prompt: int, length: int, ahead: int = 1) -> tuple[slice, slice]:
    """Of one sequence whose answer begins at token `prompt`: the target's rows that chose the answer's tokens (the
    goals), and the head's rows that predict the same tokens at the first draft step.
    """
    first = max(prompt - 1, ahead)
    return slice(first, length - 1), slice(first - ahead, length - 1 - ahead)


def _bounds(offsets: Sequence[int], device: torch.device) -> tuple[Tensor, Tensor]:
    """First row and end of each row's document, [T] each."""
    edge = torch.as_tensor(offsets, dtype=torch.int64, device=device)
    length = edge.diff()
    return edge[:-1].repeat_interleave(length), edge[1:].repeat_interleave(length)


def _later(value_T: Tensor, row_T: Tensor, end_T: Tensor) -> Tensor:
    """value[row] where row lies in its document, else 0."""
    inside = row_T < end_T
    return torch.where(
        inside, value_T[row_T.clamp(max=len(value_T) - 1)], torch.zeros_like(value_T)
    )
