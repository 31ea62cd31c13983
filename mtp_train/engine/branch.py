"""A head drafts a tree: several tokens at a time, each with its own continuation.

    fixed     the same paths of ranks at every step (EAGLE-1, arXiv 2401.15077; Medusa, 2401.10774)
    dynamic   the best `top_k` drafts of a level are read on, each for its `top_k` best tokens; of all that were seen
              the `drafts` with the best joint probability are verified (EAGLE-2, arXiv 2406.16858, section 4)

Drafts are the head's best tokens, not draws: the target's choice is looked for among them. Heads of one module; the
rows of a level see their own ancestors and the verified rows before.

Shapes: B sequences, F drafts of a level that are read on, k = top_k, N drafts, D hidden width, U the head's vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import numpy as np
import torch
from torch import Tensor

from mtp_train.core.errors import UserError
from mtp_train.engine.propose import Draft, HeadRunner, Proposing
from mtp_train.engine.tree import fixed_paths, tree_rows
from mtp_train.heads.base import DraftHead
from mtp_train.heads.chain import ChainCarry, ChainHead
from mtp_train.models.target import Target

KINDS = ("dynamic", "fixed")


@dataclass(frozen=True)
class TreeConfig:
    """What a tree looks like.

    Attributes:
        kind: `dynamic` or `fixed`.
        drafts: N, drafted tokens that are verified.
        depth: of the deepest draft.
        top_k: children of a draft; of a dynamic tree also the drafts of a level that are read on.
    """

    kind: str = "dynamic"
    drafts: int = 8
    depth: int = 4
    top_k: int = 4

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise UserError(
                "a tree's kind must be one of " + ", ".join(KINDS), self.kind, "choose one"
            )
        for name in ("drafts", "depth", "top_k"):
            if getattr(self, name) < 1:
                raise UserError(
                    f"a tree's {name} must be 1 or more", getattr(self, name), "raise it"
                )
        most = self.top_k + self.top_k**2 * (self.depth - 1) if self.kind == "dynamic" else None
        most = most or sum(self.top_k**level for level in range(1, self.depth + 1))
        if self.drafts < self.depth or self.drafts > most:
            rule = f"a tree of depth {self.depth} and top_k {self.top_k} has {self.depth} to {most} drafts"
            raise UserError(rule, self.drafts, "change drafts, depth or top_k")


class TreeProposer(HeadRunner):
    """Drafts a tree with one head.

    Raises:
        UserError: a head of several modules, or a deeper tree than the head has steps.
    """

    early = False

    def __init__(self, target: Target, head: DraftHead, config: TreeConfig | None = None) -> None:
        config = config or TreeConfig()
        if head.no_tree():
            rule = "a tree is drafted by a head of one module, a token at a time"
            raise UserError(rule, head.no_tree(), "draft a chain")
        super().__init__(target, head, config.depth)
        self.chain = cast(ChainHead, self.head)
        self.config = config
        self.drafts = config.drafts
        self.reach: int | None = self.ahead
        self.paths = fixed_paths(config.drafts, config.depth, config.top_k)
        width = config.top_k if config.kind == "dynamic" else _widest(self.paths)
        self.room = max(config.drafts, width * (config.depth - 1)) + 1

    def propose(self, step: Proposing) -> Draft:
        assert step.carry is not None, "observe before propose"
        carry = cast(ChainCarry, step.carry)
        with step.clock("sampling"):
            best = self._best(carry.logits_BU.unsqueeze(1))
        grown = _Growth(self, step, carry)
        if self.config.kind == "dynamic":
            return grown.dynamic(best)
        return grown.fixed(best)

    def _best(self, logits_BFU: Tensor) -> tuple[Tensor, Tensor]:
        """The k best tokens of each row, in the target's ids, and their log-probabilities [B, F, k]."""
        top = logits_BFU.float().topk(self.config.top_k, dim=-1)
        score = top.values - logits_BFU.float().logsumexp(-1, keepdim=True)
        return self.head.in_target(top.indices), score


class _Growth:
    """One step's tree while it grows: drafts seen so far, and those of them whose rows the head has read."""

    def __init__(self, proposer: TreeProposer, step: Proposing, carry: ChainCarry) -> None:
        self.proposer, self.step, self.carry = proposer, step, carry
        self.batch = len(step.newest)
        self.top_k = proposer.config.top_k
        self.depth = proposer.config.depth
        self.at = torch.arange(self.batch, device=carry.state_BD.device).unsqueeze(1)
        # Read rows' lineage among themselves, bool [B, rows, rows]: a row's own depth is its ancestors' count.
        self.seen = np.zeros((self.batch, 0, 0), dtype=bool)

    def dynamic(self, best: tuple[Tensor, Tensor]) -> Draft:
        """Levels of the best drafts; then the best of all levels."""
        token_BM, score_BM = (value.flatten(1) for value in best)
        parent_BM = torch.zeros_like(token_BM)  # rows among all that were seen; 0 is the root
        tokens, scores, parents = [token_BM], [score_BM], [parent_BM]
        seen_BF = torch.arange(self.top_k, device=token_BM.device).expand(self.batch, -1)
        state_BFD = self.carry.state_BD.unsqueeze(1).expand(-1, self.top_k, -1)
        token_BF, score_BF = token_BM, score_BM
        row_BF = seen_BF + 1  # their rows in the whole tree
        read_parent = np.full((self.batch, self.top_k), -1)  # their parents among the read rows
        total = self.top_k
        for level in range(1, self.depth):
            out_BFD, first = self._read(token_BF, state_BFD, read_parent, level)
            token_BFk, score_BFk = self._best(out_BFD, level)
            joint_BM = (score_BF.unsqueeze(-1) + score_BFk).flatten(1)
            tokens.append(token_BFk.flatten(1))
            scores.append(joint_BM)
            parents.append(row_BF.repeat_interleave(self.top_k, dim=1))
            if level == self.depth - 1:
                break
            score_BF, index_BF = joint_BM.topk(self.top_k, dim=1)
            parent_BF = index_BF // self.top_k
            token_BF = tokens[-1].gather(1, index_BF)
            state_BFD = out_BFD[self.at, parent_BF]
            row_BF = 1 + total + index_BF
            read_parent = first + parent_BF.cpu().numpy()
            total += joint_BM.shape[1]
        return self._ranked(torch.cat(tokens, 1), torch.cat(scores, 1), torch.cat(parents, 1))

    def fixed(self, best: tuple[Tensor, Tensor]) -> Draft:
        """The tree of the configured ranks, a level at a time."""
        paths = self.proposer.paths
        row_of = {path: row for row, path in enumerate([(), *paths])}
        token_BN = torch.zeros(self.batch, len(paths), dtype=torch.int64, device=self.at.device)
        place: dict[tuple[int, ...], int] = {
            (): 0
        }  # of a path among the rows whose best tokens `best` holds
        read: dict[tuple[int, ...], int] = {}  # of a path among the read rows
        state_BFD = self.carry.state_BD.unsqueeze(1)
        for level in range(1, self.depth + 1):
            here = [path for path in paths if len(path) == level]
            if not here:
                break
            from_row = [place[path[:-1]] for path in here]
            token_BF = best[0][:, from_row, [path[-1] for path in here]]
            token_BN[:, [row_of[path] - 1 for path in here]] = token_BF
            onward = [index for index, path in enumerate(here) if (*path, 0) in row_of]
            if not onward:
                break
            parents = np.array([read.get(here[index][:-1], -1) for index in onward])
            origin = [from_row[index] for index in onward]
            state_BFD, first = self._read(
                token_BF[:, onward],
                state_BFD[:, origin],
                np.repeat(parents[None], self.batch, axis=0),
                level,
            )
            best = self._best(state_BFD, level)
            place = {here[index]: at for at, index in enumerate(onward)}
            read |= {path: first + at for path, at in place.items()}
        parent_N = np.array([row_of[path[:-1]] for path in paths])
        return Draft(token_BN, parent_BN=np.repeat(parent_N[None], self.batch, axis=0))

    def _read(
        self, token_BF: Tensor, state_BFD: Tensor, parent_BF: np.ndarray, level: int
    ) -> tuple[Tensor, int]:
        """The head's outputs [B, F, D] of a level's drafts, and the number of its first row among those read.

        parent_BF: the read row that each hangs on; -1 is the root, which the head has read as a verified row.
        """
        first, wide = self.seen.shape[1], token_BF.shape[1]
        if not self.proposer.cache_layers:  # reads no tokens: every draft's output is its parent's
            return state_BFD, first
        self.seen = _hang(self.seen, parent_BF)
        base = [row + 1 - self.proposer.ahead for row in self.step.newest]
        trees = tree_rows(base, self.seen, newest=wide)
        with self.step.clock("head"):
            plan = self.step.plan([row + first for row in base], [wide] * self.batch, trees)
            out = self.proposer.chain.run(
                self.proposer.target,
                self.step.cache,
                plan,
                token_BF.flatten(),
                state_BFD.flatten(0, 1),
                level,
            )
        return out.unflatten(0, (self.batch, wide)), first

    def _best(self, out_BFD: Tensor, level: int) -> tuple[Tensor, Tensor]:
        with self.step.clock("lm_head of the head"):
            read = out_BFD.flatten(0, 1)
            logits = self.proposer.chain.logits(self.proposer.target, read, level)
        with self.step.clock("sampling"):
            return self.proposer._best(logits.unflatten(0, out_BFD.shape[:2]))

    def _ranked(self, token_BM: Tensor, score_BM: Tensor, parent_BM: Tensor) -> Draft:
        """The N best of the M drafts seen. A child is never likelier than its parent, which therefore stays.

        Equal scores keep the earlier row, which is the parent's: the sort is stable.
        """
        order_BM = score_BM.argsort(dim=1, descending=True, stable=True)
        chosen_BN = order_BM[:, : self.proposer.drafts].sort(dim=1).values
        place = torch.zeros(
            self.batch, 1 + token_BM.shape[1], dtype=torch.int64, device=self.at.device
        )
        counted = torch.arange(1, self.proposer.drafts + 1, device=self.at.device)
        place.scatter_(1, chosen_BN + 1, counted.expand(self.batch, -1))
        parent_BN = place.gather(1, parent_BM.gather(1, chosen_BN))
        return Draft(token_BM.gather(1, chosen_BN), parent_BN=parent_BN.cpu().numpy())


def _hang(seen: np.ndarray, parent_BF: np.ndarray) -> np.ndarray:
    """The lineage of the read rows with a new level's: row i sees itself, its parent and what that sees."""
    batch, before, _ = seen.shape
    wide = parent_BF.shape[1]
    grown = np.zeros((batch, before + wide, before + wide), dtype=bool)
    grown[:, :before, :before] = seen
    at = np.arange(batch)
    for index in range(wide):
        parent_B = parent_BF[:, index]
        grown[:, before + index] = grown[at, parent_B] & (parent_B >= 0)[:, None]
        grown[:, before + index, before + index] = True
    return grown


def _widest(paths: list[tuple[int, ...]]) -> int:
    lengths = [len(path) for path in paths]
    return max(lengths.count(length) for length in set(lengths))
