"""Which tokens a head with its own lm_head can draft. Knows no head and no store.

Serving formats write the choice as offsets and flags: d2t[i] = vocabulary[i] - i, t2d = vocabulary's members.

Shapes: V the target's vocabulary, U the chosen part.
"""

from __future__ import annotations

from torch import Tensor

from mtp_train.core.errors import UserError
from mtp_train.core.progress import say


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
