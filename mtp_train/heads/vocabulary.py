"""Which tokens a head can draft. Knows no family and no store.

An lm_head of the head's own has a row for each of them. A head that shares the target's reads those rows of it
(FR-Spec, arXiv 2502.14856): nothing is added that could be trained, and the choice can be made anew.

Serving formats write the choice as offsets and flags (d2t[i] = vocabulary[i] - i, t2d = vocabulary's members), or as
the list of its tokens.

Shapes: N rows, D hidden width, V the target's vocabulary, U the chosen part.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn

from mtp_train.core.errors import UserError
from mtp_train.core.progress import say
from mtp_train.models.target import Target


class LmHeadPart:
    """The target's lm_head at a vocabulary's rows, copied when it is first asked for, and for another one again."""

    def __init__(self) -> None:
        self._rows: nn.Module | None = None
        self._weight: Callable[[], Any] = lambda: None
        self._vocabulary: tuple[int, int] = (0, 0)

    def logits(self, target: Target, vocabulary_U: Tensor, read_ND: Tensor) -> Tensor:
        """Logits of the vocabulary's tokens [N, U], capped as the target's."""
        weight, vocabulary = target.lm_head.weight, _version(vocabulary_U)
        if self._rows is None or self._weight() is not weight or self._vocabulary != vocabulary:
            self._rows = target.lm_head_rows(vocabulary_U)
            self._weight, self._vocabulary = ref(weight), vocabulary
        return target.capped(self._rows(read_ND))

    def __deepcopy__(self, memo: dict[int, Any]) -> LmHeadPart:
        return LmHeadPart()  # a copy of the head may be moved elsewhere


def _version(vocabulary_U: Tensor) -> tuple[int, int]:
    """Where it is and how often it was written; nobody counts that of tensors for inference."""
    written = -1 if vocabulary_U.is_inference() else vocabulary_U._version
    return vocabulary_U.data_ptr(), written


def empty_vocabulary(size: int) -> Tensor | None:
    """The place of so many tokens; none for the whole vocabulary."""
    return torch.zeros(size, dtype=torch.int64) if size else None


def require_size(size: int) -> None:
    if size < 0:
        rule = "head.draft_vocabulary must be 0 or more"
        raise UserError(rule, size, "use 0 for the whole vocabulary")


def choose_for(head: Any, size: int, counts_V: Tensor | None) -> None:
    """Let a head that shares the target's lm_head draft `size` tokens; 0 is all of them."""
    chosen_U = choose_vocabulary(counts_V, size) if size else None
    device = next(head.parameters()).device
    head.vocabulary = None if chosen_U is None else chosen_U.to(device)
    head.config = replace(head.config, draft_vocabulary=0 if chosen_U is None else len(chosen_U))


def choose_again(head: Any, config: Any, counts_V: Tensor | None) -> None:
    """Where a configuration asks for another draft vocabulary than such a head has, choose one."""
    size = getattr(config, "draft_vocabulary", 0)
    if config.family == head.family and size != head.config.draft_vocabulary:
        choose_for(head, size, counts_V)


def choose_vocabulary(counts_V: Tensor | None, size: int) -> Tensor:
    """The most frequent trained tokens, in the order of their ids: int64 [U], U <= size.

    Fewer than `size` where fewer tokens are trained at all: a row for a token that is never trained would learn only
    that it is wrong. Says how much of the trained text the choice covers.

    Args:
        counts_V: how often each token is trained.
    """
    if counts_V is None or not int(counts_V.sum()):
        raise UserError(
            "a draft vocabulary is chosen by how often tokens are trained",
            "no trained tokens",
            "check the loss masks, or use head.draft_vocabulary=0 for the whole vocabulary",
        )
    ranked = counts_V.argsort(descending=True, stable=True)
    trained = int((counts_V > 0).sum())
    vocabulary_U = ranked[: min(size, trained)].sort().values.cpu()
    less = f", all that are trained ({size} were asked for)" if trained < size else ""
    say(
        f"head: {len(vocabulary_U)} draft tokens{less} cover "
        f"{coverage(vocabulary_U, counts_V):.2%} of the trained text"
    )
    return vocabulary_U


def coverage(vocabulary_U: Tensor, counts_V: Tensor) -> float:
    """Share of the counted tokens that are in the vocabulary."""
    return float(counts_V[vocabulary_U].sum() / counts_V.sum())


def require_vocabulary(vocabulary_U: Tensor, vocab_size: int) -> None:
    """Raise unless the ids rise and lie in the target's vocabulary."""
    rising = bool((vocabulary_U.diff() > 0).all())
    inside = len(vocabulary_U) > 0 and vocabulary_U[0] >= 0 and vocabulary_U[-1] < vocab_size
    if not (rising and inside):
        raise UserError(
            f"a draft vocabulary must hold rising token ids below {vocab_size}",
            f"{vocabulary_U[:4].tolist()} ... {vocabulary_U[-4:].tolist()}",
            "use another checkpoint",
        )
