"""Log-probabilities of emitted tokens, raw: of the target's own logits, before penalty, temperature and filters.

That is what vLLM reports by default (`logprobs_mode="raw_logprobs"`). Knows no sampling rule and no text.

Shapes: N tokens, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class TokenLogprobs:
    """One emitted token's log-probability, and the most likely tokens there with theirs, best first."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...]


def token_logprobs(logits_NV: Tensor, token_N: Tensor, best: int) -> list[TokenLogprobs]:
    """Of each token, and of the `best` most likely in its place, float32. Only these leave the device."""
    log_p_NV = torch.log_softmax(logits_NV, dim=-1, dtype=torch.float32)
    chosen_N = log_p_NV.gather(1, token_N.unsqueeze(1)).squeeze(1)
    value_NT, index_NT = log_p_NV.topk(min(best, log_p_NV.shape[1]), dim=1)
    rows = zip(
        token_N.tolist(), chosen_N.tolist(), index_NT.tolist(), value_NT.tolist(), strict=True
    )
    return [
        TokenLogprobs(token, logprob, tuple(zip(indices, values, strict=True)))
        for token, logprob, indices, values in rows
    ]
