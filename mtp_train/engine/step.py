"""One batch: propose, verify, observe, commit.

For sequences whose newest token x[n-1] the target has not read yet (all older ones it has):

    propose   d[1..N] from the carried logits and state
    verify    target reads rows x[n-1], d[1..N]; a drafts on one path are accepted, one more token follows
    observe   the head re-runs the accepted path's rows with the target's states; carries the newest one
    commit    a + 1 tokens

A prompt's chunk is rows of the same forward: the last one's logits say its first token. Nothing between a chain's
verification and what the head makes of it needs to know on the host how many drafts were accepted; `commit` asks.

A tree's rows stand in the cache in the order of its drafts. Those of the accepted path are moved together afterwards.

A proposer that reads no states (`ahead` = 0: a small model of its own) observes after the commit instead, and its own
rows: of a chain it has read all but the last draft and the token that follows, of a tree nothing that lies in its
place; so it runs over what is missing. The first token of a prompt, which no head sees, is part of its prefill.

Shapes: T rows, B sequences that decode, F whose prompts are read, E of them to the end, N drafts, R = N + 1
rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from mtp_train.attention.paged import BatchPlan, TreeRows, plan_batch
from mtp_train.batches.align import next_tokens, verified_tokens
from mtp_train.engine.clock import Clock
from mtp_train.engine.logprobs import token_logprobs
from mtp_train.engine.parts import Parts
from mtp_train.engine.propose import Draft, Proposing
from mtp_train.engine.sampling import (
    Randomness,
    Rules,
    Sampling,
    best,
    draw,
    seen_tokens,
    seen_with_drafts,
)
from mtp_train.engine.sequences import Batch, DraftStep, Sequence
from mtp_train.engine.tree import lineage, path_rows, tree_rows
from mtp_train.engine.verify import (
    expected_acceptance,
    verify_greedy,
    verify_sampled,
    verify_tree,
    verify_typical,
)


@dataclass(frozen=True)
class Tree:
    """How a step's drafts hang together, on the host and on the device."""

    parent_BN: Tensor
    seen_BRR: Tensor
    seen: np.ndarray

    @classmethod
    def of(cls, parent_BN: np.ndarray, device: torch.device) -> Tree:
        seen = lineage(parent_BN)
        return cls(
            torch.from_numpy(parent_BN).to(device, torch.int64),
            torch.from_numpy(seen).to(device),
            seen,
        )


@dataclass(frozen=True)
class Verdict:
    """What the target made of the drafts.

    Attributes:
        accepted_B: drafts on the accepted path.
        following_B: the token that follows them.
        path_BD: rows of the accepted path from the root on, padded to the deepest; of a chain all rows in order.
        alpha_BK: expected acceptance of each draft position, where measured.
    """

    accepted_B: Tensor
    following_B: Tensor
    path_BD: Tensor
    alpha_BK: Tensor | None = None


class Step:
    """Runs batches of one `serve` call."""

    def __init__(
        self, parts: Parts, clock: Clock, random: Callable[[list[Sequence]], Randomness]
    ) -> None:
        self.target, self.cache = parts.target, parts.cache
        self.proposer, self.config = parts.proposer, parts.config
        self.together = parts.together
        self.clock, self.random = clock, random
        self._rules: dict[tuple[Sampling, ...], Rules] = {}

    def __call__(self, batch: Batch) -> None:
        decoding = batch.decoding
        draft = self._draft(batch)
        tree = None
        if draft is not None and draft.parent_BN is not None:
            tree = Tree.of(draft.parent_BN, self.target.device)
        rows = 1 + (draft.token_BN.shape[1] if draft is not None else 0)
        counts = [rows] * len(decoding) + batch.rows
        starts = [sequence.cached for sequence in batch.all]
        plan = self._plan(batch.all, starts, counts, tree)
        row_BR = self._decode_rows(decoding, draft)
        chunk_T = self._chunks(batch)
        with self.clock("target"):
            states = self._target_rows(torch.cat([row_BR.flatten(), chunk_T]), plan)
            logits_BRV, logits_EV = self._logits(states[self.target.state], plan, row_BR, batch)
        with self.clock("sampling"):
            verdict = self._verify(decoding, draft, tree, logits_BRV) if decoding else None
            first_E = self._first(batch.complete(), logits_EV) if batch.ending else None
        finite = _finite(logits_BRV, verdict, logits_EV)
        verdict, first_E, finite = self._agreed(verdict, first_E, finite)
        if tree is not None and verdict is not None:
            self._compact(plan, verdict, rows)
        shown = _Shown(starts, plan, states, row_BR, chunk_T, verdict, first_E, tree)
        if self.config.order == "overlapped" and self.proposer.ahead:
            self._observe(batch, shown)
        self._commit(batch, draft, verdict, first_E, logits_BRV, logits_EV, finite)
        if self.config.order == "plain" and self.proposer.ahead:
            self._observe(batch, shown)
        if not self.proposer.ahead:
            self._read([item for item in batch.all if not item.finish])

    # --- propose ----------------------------------------------------------------------------------------------

    def _draft(self, batch: Batch) -> Draft | None:
        sequences = batch.decoding
        if not self.proposer.drafts or not sequences:
            return None
        if batch.filling and not self.config.mixed_drafts:
            return None
        if all(sequence.draft is not None for sequence in sequences):
            draft: Draft | None = Draft.join([sequence.draft for sequence in sequences])
        else:
            draft = self._propose(sequences)
        for sequence in sequences:
            sequence.draft = None
            if sequence.carry is not None and draft is not None:
                sequence.carry = sequence.carry.used()
        return draft

    def _propose(self, sequences: list[Sequence]) -> Draft | None:
        rules = self._rules_of(sequences)
        carries = [sequence.carry for sequence in sequences]
        draft = self.proposer.propose(
            Proposing(
                self.cache,
                lambda starts, rows, trees: self._plan_of(sequences, starts, rows, trees),
                [len(sequence.tokens) - 1 for sequence in sequences],
                [sequence.tokens for sequence in sequences],
                type(carries[0]).join(carries) if None not in carries else None,
                rules,
                self.random(sequences),
                self.clock,
                drawn=self.config.verification == "rejection" and not rules.greedy,
                keep=self._alpha_rules(sequences) if self.config.alphas else None,
            )
        )
        return self.together.agree_on(draft)

    # --- verify -----------------------------------------------------------------------------------------------

    def _decode_rows(self, decoding: list[Sequence], draft: Draft | None) -> Tensor:
        """Tokens of the rows of sequences that decode [B, R]."""
        known_B1 = self._tensor([sequence.tokens[-1] for sequence in decoding]).unsqueeze(1)
        return known_B1 if draft is None else torch.cat([known_B1, draft.token_BN], dim=1)

    def _chunks(self, batch: Batch) -> Tensor:
        """Tokens of the prompts' chunks, end to end."""
        parts = zip(batch.filling, batch.rows, strict=True)
        return self._tensor(
            [
                token
                for item, rows in parts
                for token in item.tokens[item.cached : item.cached + rows]
            ]
        )

    def _target_rows(self, token_T: Tensor, plan: BatchPlan) -> dict[str, Tensor]:
        """The post-norm states and those that the proposer is shown, by name."""
        names = dict.fromkeys((self.target.state, *self.proposer.states))
        context = self.cache.context(plan)
        return self.target.capture(token_T, plan.positions, context, tuple(names))

    def _logits(
        self, state_TD: Tensor, plan: BatchPlan, row_BR: Tensor, batch: Batch
    ) -> tuple[Tensor, Tensor]:
        """Of every row that decodes [B, R, V], and of each ending prompt's last one [E, V]."""
        decoded = row_BR.numel()
        if batch.filling:
            last_E = plan.last_rows()[[len(batch.decoding) + at for at in batch.ending]]
            row_N = torch.arange(decoded, device=last_E.device)
            state_TD = state_TD[torch.cat([row_N, last_E])]
        logits = self.target.logits(state_TD)
        return logits[:decoded].unflatten(0, row_BR.shape), logits[decoded:]

    def _verify(
        self, decoding: list[Sequence], draft: Draft | None, tree: Tree | None, logits_BRV: Tensor
    ) -> Verdict:
        rules = self._rules_of(decoding)
        token_BN = logits_BRV.new_zeros(len(decoding), 0, dtype=torch.int64)
        if draft is not None:
            token_BN = _real(draft)
        row_R = torch.arange(logits_BRV.shape[1], device=logits_BRV.device)
        path_BD = row_R.expand(len(decoding), -1)
        seen = self._seen(decoding, token_BN, tree) if rules.penalised else None
        typical = (
            self.config.verification == "typical" and draft is not None and draft.count_B is None
        )
        chain = tree is None and not typical
        alpha_BK = self._alphas(decoding, draft, logits_BRV, seen)
        if rules.greedy and not typical:
            choice_BR = best(rules.logits(logits_BRV, seen))
        else:
            p_BRV = rules.probabilities(logits_BRV, seen)
            random = self.random(decoding)
            if chain and draft is not None and draft.q_BNV is not None:
                accepted_B, following_B = verify_sampled(token_BN, draft.q_BNV, p_BRV, random)
                return Verdict(accepted_B, following_B, path_BD, alpha_BK)
            if typical:
                tree = tree or Tree.of(_chain_parents(token_BN), self.target.device)
                row_B, accepted_B, following_B = verify_typical(
                    token_BN, p_BRV, tree.parent_BN, tree.seen_BRR, random
                )
                return Verdict(
                    accepted_B,
                    following_B,
                    path_rows(row_B, tree.seen_BRR, self.proposer.depth),
                    alpha_BK,
                )
            choice_BR = draw(p_BRV, random, _row_counts(draft))
        choice_BR = self._scripted(choice_BR, decoding, tree)
        if tree is None:
            accepted_B, following_B = verify_greedy(token_BN, choice_BR)
            return Verdict(accepted_B, following_B, path_BD, alpha_BK)
        row_B, accepted_B, following_B = verify_tree(
            token_BN, choice_BR, tree.parent_BN, tree.seen_BRR
        )
        path_BD = path_rows(row_B, tree.seen_BRR, self.proposer.depth)
        return Verdict(accepted_B, following_B, path_BD, alpha_BK)

    def _agreed(
        self, verdict: Verdict | None, first_E: Tensor | None, finite: Tensor
    ) -> tuple[Verdict | None, Tensor | None, Tensor]:
        """What the lead rank made of the batch."""
        own = [finite]
        own += [] if first_E is None else [first_E]
        own += [] if verdict is None else [verdict.accepted_B, verdict.following_B, verdict.path_BD]
        finite, *said = self.together.agree(own)
        first_E = None if first_E is None else said.pop(0)
        if verdict is not None:
            accepted_B, following_B, path_BD = said
            verdict = Verdict(accepted_B, following_B, path_BD, verdict.alpha_BK)
        return verdict, first_E, finite

    def _first(self, ending: list[Sequence], logits_EV: Tensor) -> Tensor:
        """The token that follows each prompt that ends in this batch [E]."""
        rules = self._rules_of(ending)
        seen = self._known_tokens(ending) if rules.penalised else None
        if rules.greedy:
            first_E = best(rules.logits(logits_EV, seen))
        else:
            first_E = draw(rules.probabilities(logits_EV, seen), self.random(ending))
        return self._scripted(first_E.unsqueeze(1), ending, None).squeeze(1)

    def _scripted(self, choice_BR: Tensor, sequences: list[Sequence], tree: Tree | None) -> Tensor:
        """The target's choices, with scripts in their place where requests have any."""
        if not any(sequence.request.script for sequence in sequences):
            return choice_BR
        chosen = []
        for index, (sequence, choices) in enumerate(
            zip(sequences, choice_BR.tolist(), strict=True)
        ):
            if tree is None:
                chosen.append(sequence.scripted(choices))
                continue
            depth = tree.seen[index].sum(-1) - 1
            script = sequence.request.script[len(sequence.output) :]
            chosen.append(
                [
                    script[at] if at < len(script) else own
                    for at, own in zip(depth, choices, strict=True)
                ]
            )
        return torch.tensor(chosen, device=choice_BR.device)

    def _alphas(
        self, decoding: list[Sequence], draft: Draft | None, logits_BRV: Tensor, seen: Tensor | None
    ) -> Tensor | None:
        if not self.config.alphas or draft is None or draft.q_BNV is None:
            return None
        rules = self._rules_of(decoding)
        rules = self._alpha_rules(decoding) if rules.greedy else rules
        p_BRV = rules.probabilities(logits_BRV, seen)
        return expected_acceptance(p_BRV[:, :-1], draft.q_BNV)

    def _seen(self, decoding: list[Sequence], token_BN: Tensor, tree: Tree | None) -> Tensor:
        """Which tokens stand before each row's choice, for penalties [B, R, V]."""
        tree = tree or Tree.of(_chain_parents(token_BN), self.target.device)
        seen_BNN = tree.seen_BRR[:, 1:, 1:]
        return seen_with_drafts(self._known_tokens(decoding), token_BN.clamp(min=0), seen_BNN)

    def _known_tokens(self, sequences: list[Sequence]) -> Tensor:
        tokens = [sequence.tokens for sequence in sequences]
        return seen_tokens(tokens, self.target.vocab_size, self.target.device)

    # --- observe ----------------------------------------------------------------------------------------------

    def _observe(self, batch: Batch, shown: _Shown) -> None:
        """Show a proposer that reads states what was verified, and draft at once where nothing else is needed."""
        if not self.proposer.drafts:
            return
        sequences = batch.all
        plan, states, offset = shown.plan, shown.states, 0
        next_parts, row_parts = [], []
        if shown.verdict is not None:
            verdict = shown.verdict
            wide = verdict.path_BD.shape[1]
            if shown.tree is not None:
                plan, states = self._along_path(batch, shown)
            accepted_B, following_B = verdict.accepted_B, verdict.following_B
            path_token_BD = shown.row_BR.gather(1, verdict.path_BD)[:, 1:]
            next_parts.append(verified_tokens(path_token_BD, accepted_B, following_B).flatten())
            row_parts.append(
                torch.arange(len(accepted_B), device=accepted_B.device) * wide + accepted_B
            )
            offset = len(accepted_B) * wide
        if batch.filling:
            last_F = plan.last_rows()[len(batch.decoding) :]
            following_F = self._after_chunks(batch, shown)
            next_parts.append(next_tokens(shown.chunk_T, last_F - offset, following_F))
            row_parts.append(last_F)
        carry = self.proposer.observe(
            self.cache, plan, torch.cat(next_parts), states, torch.cat(row_parts), self.clock
        )
        if carry is None:
            return
        for index, sequence in enumerate(sequences):
            sequence.carry = carry.one(index).after(sequence.carry)
        self._draft_early(batch)

    def _draft_early(self, batch: Batch) -> None:
        """Of a single-token head: its next draft needs neither a plan nor the host."""
        if not self.proposer.early or self.config.order != "overlapped":
            return
        joining = [item for item in batch.resuming if item.draft is None]
        ready = [*batch.decoding, *batch.complete(), *joining]
        draft = self._propose(ready) if ready else None
        if draft is not None:
            for index, sequence in enumerate(ready):
                sequence.draft = draft.one(index)

    def _compact(self, plan: BatchPlan, verdict: Verdict, rows: int) -> None:
        """Move the target's rows of each tree's accepted path together in the cache."""
        source_BD = _flat_rows(verdict.path_BD, rows)
        goal_D = torch.arange(source_BD.shape[1], device=source_BD.device)
        goal_BD = _flat_rows(goal_D.expand_as(source_BD), rows)
        source, goal = (plan.slots[index.flatten()] for index in (source_BD, goal_BD))
        self.cache.move(self.target.layers, source, goal)

    def _along_path(self, batch: Batch, shown: _Shown) -> tuple[BatchPlan, dict[str, Tensor]]:
        """The plan of the accepted paths' rows, once they stand together, and their states; chunks with them."""
        assert shown.verdict is not None
        path_BD = shown.verdict.path_BD
        wide = path_BD.shape[1]
        source_BD = _flat_rows(path_BD, shown.row_BR.shape[1])
        counts = [wide] * len(batch.decoding) + batch.rows
        plan = self._plan(batch.all, shown.starts, counts, None)
        tail = torch.arange(shown.row_BR.numel(), len(shown.plan.slots), device=path_BD.device)
        index_T = torch.cat([source_BD.flatten(), tail])
        return plan, {name: state[index_T] for name, state in shown.states.items()}

    def _after_chunks(self, batch: Batch, shown: _Shown) -> Tensor:
        """The token after each chunk [F]: the prompt's next, or what the target said."""
        starts = shown.starts[len(batch.decoding) :]
        spans = zip(batch.filling, starts, batch.rows, strict=True)
        after_F = self._tensor([[*item.tokens, 0][start + rows] for item, start, rows in spans])
        if shown.first_E is not None:
            after_F[batch.ending] = shown.first_E
        return after_F

    def _read(self, sequences: list[Sequence]) -> None:
        """Show a proposer that reads tokens alone the sequences' own, the newest with them."""
        if not sequences:
            return
        ends = [item.cached + 1 if item.decoding else item.cached for item in sequences]
        starts = [item.observed for item in sequences]
        fresh = [
            item.tokens[start:end] for item, start, end in zip(sequences, starts, ends, strict=True)
        ]
        plan = self._plan(sequences, starts, [len(tokens) for tokens in fresh], None)
        token_T = self._tensor([token for tokens in fresh for token in tokens])
        carry = self.proposer.observe(self.cache, plan, token_T, {}, plan.last_rows(), self.clock)
        for index, (sequence, end) in enumerate(zip(sequences, ends, strict=True)):
            sequence.observed = end
            if sequence.decoding and carry is not None:
                sequence.carry = carry.one(index)

    # --- commit -----------------------------------------------------------------------------------------------

    def _commit(
        self,
        batch: Batch,
        draft: Draft | None,
        verdict: Verdict | None,
        first_E: Tensor | None,
        logits_BRV: Tensor,
        logits_EV: Tensor,
        finite: Tensor,
    ) -> None:
        whole = finite.tolist()
        if verdict is not None:
            self._commit_decoded(batch.decoding, draft, verdict, logits_BRV, whole)
        for sequence, rows in zip(batch.filling, batch.rows, strict=True):
            sequence.cached += rows
        for sequence in batch.resuming:
            sequence.decoding = True
        if first_E is None:
            return
        for index, (sequence, token) in enumerate(
            zip(batch.complete(), first_E.tolist(), strict=True)
        ):
            if not whole[len(batch.decoding) + index]:
                sequence.finish = NOT_FINITE
                continue
            sequence.decoding = True
            if sequence.commit([token]) and sequence.request.logprobs is not None:
                self._keep_logprobs(sequence, logits_EV[index : index + 1], [token])

    def _commit_decoded(
        self,
        decoding: list[Sequence],
        draft: Draft | None,
        verdict: Verdict,
        logits_BRV: Tensor,
        whole: list[bool],
    ) -> None:
        accepted, following = verdict.accepted_B.tolist(), verdict.following_B.tolist()
        paths = verdict.path_BD.tolist()
        tokens = [] if draft is None else draft.token_BN.tolist()
        alphas = None if verdict.alpha_BK is None else verdict.alpha_BK.tolist()
        for index, sequence in enumerate(decoding):
            if not whole[index]:
                sequence.finish = NOT_FINITE
                continue
            path = paths[index][: accepted[index] + 1]
            taken = [tokens[index][row - 1] for row in path[1:]]
            if draft is not None and _count(draft, index):
                measured = () if alphas is None else tuple(alphas[index][: accepted[index] + 1])
                rejected = _rejected(draft, tokens[index], path, index)
                sequence.steps.append(
                    DraftStep((*taken, *rejected), len(taken), _count(draft, index), measured)
                )
            elif self.proposer.drafts:
                sequence.undrafted += 1
            sequence.cached += len(path)
            if draft is not None and draft.parent_BN is None:
                sequence.observed += min(accepted[index], draft.token_BN.shape[1] - 1)
            kept = sequence.commit([*taken, following[index]])
            if sequence.request.logprobs is not None:
                said = [*taken, following[index]][: max(kept, 0)]
                self._keep_logprobs(sequence, logits_BRV[index, path[: len(said)]], said)

    def _keep_logprobs(self, sequence: Sequence, logits_NV: Tensor, tokens: list[int]) -> None:
        assert sequence.request.logprobs is not None
        token_N = self._tensor(tokens)
        sequence.logprobs += token_logprobs(logits_NV, token_N, sequence.request.logprobs)
        del sequence.logprobs[len(sequence.output) :]

    # --- small things -----------------------------------------------------------------------------------------

    def _rules_of(self, sequences: list[Sequence]) -> Rules:
        """The sampling rules of these sequences; those of the last batches are kept."""
        key = tuple(sequence.sampling for sequence in sequences)
        if key not in self._rules:
            if len(self._rules) > 64:
                self._rules.clear()
            self._rules[key] = Rules.of(key, self.target.device)
        return self._rules[key]

    def _alpha_rules(self, sequences: list[Sequence]) -> Rules:
        """Temperature 1 where nothing is drawn: alpha of greedy text is that of the raw distributions."""
        return Rules.of([Sampling(temperature=1.0)] * len(sequences), self.target.device)

    def _plan(
        self, sequences: list[Sequence], starts: list[int], rows: list[int], tree: Tree | None
    ) -> BatchPlan:
        trees: list[TreeRows | None] | None = None
        if tree is not None:
            trees = [*tree_rows(starts[: len(tree.seen)], tree.seen)]
            trees += [None] * (len(sequences) - len(trees))
        return self._plan_of(sequences, starts, rows, trees)

    def _plan_of(
        self,
        sequences: list[Sequence],
        starts: list[int],
        rows: list[int],
        trees: list[TreeRows | None] | list[TreeRows] | None,
    ) -> BatchPlan:
        pages = [sequence.pages for sequence in sequences]
        return plan_batch(pages, starts, rows, self.config.page_size, self.target.device, trees)

    def _tensor(self, values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self.target.device)


NOT_FINITE = "failed: the target's logits are not finite"


@dataclass(frozen=True)
class _Shown:
    """What a forward gave, for the proposer to see."""

    starts: list[int]
    plan: BatchPlan
    states: dict[str, Tensor]
    row_BR: Tensor
    chunk_T: Tensor
    verdict: Verdict | None
    first_E: Tensor | None
    tree: Tree | None


def _finite(logits_BRV: Tensor, verdict: Verdict | None, logits_EV: Tensor) -> Tensor:
    """Whether each sequence's logits can be chosen from, those of every accepted draft's row too, bool [B + E]."""
    first_E = logits_EV.amax(dim=-1).isfinite()
    if verdict is None:
        return first_E
    path_BD = logits_BRV.amax(dim=-1).isfinite().gather(1, verdict.path_BD)
    place_D = torch.arange(path_BD.shape[1], device=path_BD.device)
    beyond_BD = place_D > verdict.accepted_B.unsqueeze(1)
    return torch.cat([(path_BD | beyond_BD).all(dim=1), first_E])


def _flat_rows(row_BD: Tensor, rows: int) -> Tensor:
    """Rows of sequences of `rows` rows each, as rows of the whole batch."""
    return row_BD + torch.arange(len(row_BD), device=row_BD.device).unsqueeze(1) * rows


def _count(draft: Draft, index: int) -> int:
    return draft.token_BN.shape[1] if draft.count_B is None else draft.count_B[index]


def _row_counts(draft: Draft | None) -> list[int] | None:
    """Rows of each sequence that are no padding, where there is any."""
    if draft is None or draft.count_B is None:
        return None
    return [count + 1 for count in draft.count_B]


def _real(draft: Draft) -> Tensor:
    """The drafts, with -1, which nobody says, for padding [B, N]."""
    if draft.count_B is None:
        return draft.token_BN
    count_B1 = torch.tensor(draft.count_B, device=draft.token_BN.device).unsqueeze(1)
    place_N = torch.arange(draft.token_BN.shape[1], device=draft.token_BN.device)
    return draft.token_BN.masked_fill(place_N >= count_B1, -1)


def _rejected(draft: Draft, tokens: list[int], path: list[int], index: int) -> tuple[int, ...]:
    """A chain's drafts after the accepted ones; of a tree the best draft at the path's end."""
    if draft.parent_BN is None:
        return tuple(tokens[len(path) - 1 : _count(draft, index)])
    children = np.flatnonzero(draft.parent_BN[index] == path[-1])
    return (tokens[children[0]],) if len(children) else ()


def _chain_parents(token_BN: Tensor) -> np.ndarray:
    batch, drafts = token_BN.shape
    return np.repeat(np.arange(drafts)[None], batch, axis=0)
