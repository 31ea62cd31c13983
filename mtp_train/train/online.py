"""Acceptance while training: the engine itself decodes a few held-out prompts with a copy of the head.

What is counted is what `evaluate` counts, by the same definitions (evaluate/acceptance.py). Knows no loss, no optimiser
and no text: prompts are cut out of the held-out features. Neither the head that is trained nor any shared random state
is touched.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from mtp_train.batches.pack import Features
from mtp_train.core.errors import UserError
from mtp_train.engine.chain import ChainProposer
from mtp_train.engine.engine import Engine, EngineConfig
from mtp_train.engine.sequences import Completion, Request
from mtp_train.heads.base import DraftHead
from mtp_train.models.target import Target


@dataclass(frozen=True)
class OnlineConfig:
    """Greedy decoding of held-out prompts during training.

    Attributes:
        every: optimiser steps between two measurements, the last step being measured too; 0 is off.
        prompts: how many, a fixed draw of the held-out sequences.
        drafts: k, drafted tokens per step.
        max_new_tokens: longest output.
    """

    every: int = 0
    prompts: int = 8
    drafts: int = 3
    max_new_tokens: int = 64

    def __post_init__(self) -> None:
        if self.every < 0:
            raise UserError(
                "train.online_eval.every must be 0 or more", self.every, "use 0 for never"
            )
        for name in ("prompts", "drafts", "max_new_tokens"):
            if getattr(self, name) < 1:
                rule = f"train.online_eval.{name} must be 1 or more"
                raise UserError(rule, getattr(self, name), "raise it, or set every to 0")

    def due(self, step: int, total: int) -> bool:
        """Whether step `step` of `total` is measured after it was taken."""
        return self.every > 0 and (step % self.every == 0 or step == total)


def held_out_requests(
    held_out: Features, config: OnlineConfig, stop: frozenset[int], limit: int
) -> list[Request]:
    """Prompts of held-out sequences: the tokens before a sequence's first trained one.

    Args:
        stop: tokens that end an answer.
        limit: longest sequence that the target holds; longer prompts are passed over.

    Raises:
        UserError: no sequence begins with tokens that aren't trained.
    """
    found = []
    chosen = _candidates(held_out, config.prompts)
    for index, sequence in zip(chosen, held_out.read(chosen), strict=True):
        start = int(sequence.loss_mask.argmax())
        if 0 < start < limit:
            prompt = tuple(sequence.tokens[:start].tolist())
            found.append(Request(str(index), prompt, config.max_new_tokens, stop))
    if not found:
        raise UserError(
            "train.online_eval needs held-out sequences that begin with a prompt",
            f"none among {len(held_out)}",
            "hold out chats, or set train.online_eval.every=0",
        )
    return found


def measure(
    target: Target, head: DraftHead, requests: Sequence[Request], config: OnlineConfig
) -> Tensor:
    """Decode the requests; the counts of `step_counts`. `head` is copied, and cast as the engine does it."""
    if not requests:
        return torch.zeros(1 + config.drafts, dtype=torch.float64)
    proposer = ChainProposer(target, copy.deepcopy(head), config.drafts)
    engine = Engine(target, proposer, _sizes(requests, config))
    return step_counts(engine.generate(requests), config.drafts)


def step_counts(completions: Sequence[Completion], drafts: int) -> Tensor:
    """Steps, then steps that accepted more than i drafts, i = 0 .. drafts-1: float64 [1 + drafts]. Counts add."""
    accepted = torch.tensor(
        [step.accepted for completion in completions for step in completion.steps],
        dtype=torch.int64,
    )
    rows = [len(accepted), *(int((accepted > position).sum()) for position in range(drafts))]
    return torch.tensor(rows, dtype=torch.float64)


def figures(counts: Tensor) -> dict[str, float]:
    """tau = 1 + accepted / steps, and the share of steps that accepted drafts 1..i, of counts [1 + drafts]."""
    steps, *accepted = counts.tolist()
    shares = [count / max(steps, 1.0) for count in accepted]
    positions = {f"per_position/{place + 1}": share for place, share in enumerate(shares)}
    return {"tau": 1.0 + sum(shares), **positions, "steps": steps}


def _candidates(held_out: Features, wanted: int) -> list[int]:
    """A fixed draw of sequences with trained tokens: a stride would fall in step with interleaved kinds."""
    trained = held_out.loss_tokens().nonzero()[0]
    return sorted(np.random.default_rng(0).permutation(trained)[:wanted].tolist())


def _sizes(requests: Sequence[Request], config: OnlineConfig) -> EngineConfig:
    """A cache for just these requests, no larger than an engine's usual one unless a single request needs it."""
    page = EngineConfig.page_size
    rows = [len(item.prompt) + item.max_new_tokens + config.drafts + page for item in requests]
    return EngineConfig(cache_rows=max(max(rows), min(sum(rows), EngineConfig.cache_rows)) + page)
