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
from dataclasses import dataclass, replace

import torch
from torch import Tensor


@dataclass(frozen=True)
class Aligned:
    """Which rows of packed documents are predicted, from where. A chain's row is the one where it starts.

    Attributes:
        goal: rows whose states are predicted: int64 [N] where every step has the same, else [S, N].
        label: x[goal+1], likewise.
        source_SN: int64, row where the chain that predicts goal n at step s starts; 0 where there is none.
        valid_SN: bool, whether there is such a chain in the goal's document, and the goal utters a trained token.
        offsets: document boundaries, from 0 to T.
    """

    goal: Tensor
    label: Tensor
    source_SN: Tensor
    valid_SN: Tensor
    offsets: tuple[int, ...]


@dataclass(frozen=True)
class Rollout(Aligned):
    """Chains of every row, for S draft steps.

    Attributes:
        token_ST: int64, input token of each step; 0 past the document's end (never part of a goal).
        position_ST: int64.
    """

    token_ST: Tensor
    position_ST: Tensor

    def moved(self, rows: int) -> Rollout:
        """The same documents, so many positions later."""
        return replace(self, position_ST=self.position_ST + rows)


@dataclass(frozen=True)
class Blocks(Aligned):
    """N chains that are drafted in one forward each, for S draft steps.

    Attributes:
        start_N: int64, row where each starts.
        begin_N: int64, first row of its document.
        position_T: int64, position of every row of the pack.
        token_T: int64, x[p+ahead] of every row p of the pack; 0 past its document's end.
        token_SN: int64, x[start+ahead+s]: the token before the draft of step s; 0 past the document's end.
        steps_N: int64, draft steps that each is asked for: up to the last that predicts anything.
    """

    start_N: Tensor
    begin_N: Tensor
    position_T: Tensor
    token_T: Tensor
    token_SN: Tensor
    steps_N: Tensor

    def moved(self, rows: int) -> Blocks:
        """The same documents, so many positions later."""
        return replace(self, position_T=self.position_T + rows)

    def kept(self, kept_SN: Tensor) -> Blocks:
        """The chains that these steps are kept of, without the others."""
        some_N = kept_SN.any(0).nonzero().squeeze(1)
        valid_SN = (self.valid_SN & kept_SN)[:, some_N]
        return replace(
            self,
            goal=self.goal[:, some_N],
            label=self.label[:, some_N],
            source_SN=self.source_SN[:, some_N],
            valid_SN=valid_SN,
            start_N=self.start_N[some_N],
            begin_N=self.begin_N[some_N],
            token_SN=self.token_SN[:, some_N],
            steps_N=_until_last(valid_SN),
        )


def rollout(
    token_T: Tensor, loss_mask_T: Tensor, offsets: Sequence[int], steps: int, ahead: int = 1
) -> Rollout:
    """Align packed documents for `steps` draft steps of a chain from every row.

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
        goal_N,
        token_T[goal_N + 1],
        source_SN.clamp(min=0),
        valid_SN,
        tuple(offsets),
        token_ST,
        position_ST,
    )


def blocks(
    token_T: Tensor,
    loss_mask_T: Tensor,
    offsets: Sequence[int],
    steps: int,
    start_N: Tensor | None = None,
    ahead: int = 1,
) -> Blocks:
    """Align packed documents for chains that start at rows `start_N`; none: every chain that predicts a trained token.

    Chains whose starts are given are asked for all steps. Other arguments as `rollout` has them.
    """
    begin_T, end_T = _bounds(offsets, token_T.device)
    row_T = torch.arange(len(token_T), device=token_T.device)
    trained_T = _later(loss_mask_T, row_T + 1, end_T) > 0
    given = start_N is not None
    if start_N is None:
        ahead_ST = torch.stack(
            [_later(trained_T, row_T + ahead + step, end_T) for step in range(steps)]
        )
        start_N = row_T[ahead_ST.any(0)]
    goal_SN = torch.stack([start_N + ahead + step for step in range(steps)])
    end_N = end_T[start_N]
    inside_SN = goal_SN < end_N
    goal_SN = goal_SN.clamp(max=len(token_T) - 1)
    valid_SN = inside_SN & trained_T[goal_SN]
    return Blocks(
        goal_SN,
        _later(token_T, goal_SN + 1, end_N),
        start_N.expand(steps, -1),
        valid_SN,
        tuple(offsets),
        start_N,
        begin_T[start_N],
        row_T - begin_T,
        _later(token_T, row_T + ahead, end_T),
        torch.where(inside_SN, token_T[goal_SN], torch.zeros_like(goal_SN)),
        torch.full_like(start_N, steps) if given else _until_last(valid_SN),
    )


def trained_starts(
    token_T: Tensor, loss_mask_T: Tensor, offsets: Sequence[int], ahead: int = 1
) -> Tensor:
    """Rows whose chain's newest token and first draft are both the target's own output [N]."""
    _, end_T = _bounds(offsets, token_T.device)
    row_T = torch.arange(len(token_T), device=token_T.device)
    newest_T = _later(loss_mask_T, row_T + ahead, end_T)
    return row_T[(newest_T > 0) & (_later(loss_mask_T, row_T + ahead + 1, end_T) > 0)]


def chains(aligned: Rollout, start_N: Tensor, ahead: int = 1) -> Rollout:
    """The chains that start at rows `start_N`, each goal a step's own; their inputs must lie in their documents."""
    steps = range(len(aligned.token_ST))
    goal_SN = torch.stack([start_N + ahead + step for step in steps])
    following_SN = aligned.token_ST[0][
        (goal_SN + 1 - ahead).clamp(max=aligned.token_ST.shape[1] - 1)
    ]
    return replace(
        aligned,
        goal=goal_SN,
        label=following_SN,
        source_SN=start_N.expand(len(steps), -1),
        valid_SN=torch.ones_like(goal_SN, dtype=torch.bool),
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


def _until_last(valid_SN: Tensor) -> Tensor:
    """Steps up to the last that is there [N]."""
    number_S1 = torch.arange(1, len(valid_SN) + 1, device=valid_SN.device).unsqueeze(1)
    return (number_S1 * valid_SN).amax(0)


def _later(value_T: Tensor, row_T: Tensor, end_T: Tensor) -> Tensor:
    """value[row] where row lies in its document, else 0."""
    found = value_T[row_T.clamp(max=len(value_T) - 1)]
    return torch.where(row_T < end_T, found, torch.zeros_like(found))
