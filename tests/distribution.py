"""Exact distributions and the chi-square test against them. Float64 numpy, one row at a time: slow, and independent."""

from __future__ import annotations

import numpy as np
import torch

from mtp_train.engine.sampling import Sampling


def exact_probabilities(
    logits_V: np.ndarray, sampling: Sampling, seen: frozenset[int] = frozenset()
) -> np.ndarray:
    """The chance of each token under the rules [V], by their definitions: penalty, temperature, min-p, top-k, top-p."""
    logits = np.array(logits_V, dtype=np.float64)
    for token in seen:
        penalty = sampling.repetition_penalty
        logits[token] *= 1 / penalty if logits[token] > 0 else penalty
    if sampling.temperature == 0:
        return np.eye(len(logits))[int(np.argmax(logits))]
    p = _softmax(logits / sampling.temperature)
    p[p < sampling.min_p * p.max()] = 0
    if 0 < sampling.top_k < len(p):
        p[p < np.sort(p)[-sampling.top_k]] = 0
    if sampling.top_p < 1:
        p = _nucleus(p / p.sum(), sampling.top_p)
    return p / p.sum()


def _softmax(logits: np.ndarray) -> np.ndarray:
    weights = np.exp(logits - logits.max())
    return weights / weights.sum()


def _nucleus(p: np.ndarray, top_p: float) -> np.ndarray:
    """From the most likely down (of equals, the later first) until the chance so far is enough."""
    kept, so_far = np.zeros_like(p), 0.0
    for token in sorted(range(len(p)), key=lambda at: (p[at], at), reverse=True):
        if so_far >= top_p:
            break
        kept[token] = p[token]
        so_far += p[token]
    return kept


def p_value(observed: np.ndarray, probability: np.ndarray) -> float:
    """Chance of counts at least as far off. Cells of fewer than five expected counts are one; 0 for the impossible."""
    if observed[probability == 0].any():
        return 0.0
    expected = probability / probability.sum() * observed.sum()
    large = expected >= 5
    cells = np.append(observed[large], observed[~large].sum())
    means = np.append(expected[large], expected[~large].sum())
    present = means > 0
    return chi_square(cells[present], means[present])


def chi_square(observed: np.ndarray, expected: np.ndarray) -> float:
    """Chance of a larger statistic: the upper regularised gamma function at half the degrees of freedom."""
    statistic = float(((observed - expected) ** 2 / expected).sum())
    freedom = torch.tensor((len(observed) - 1) / 2, dtype=torch.float64)
    return float(torch.special.gammaincc(freedom, torch.tensor(statistic / 2, dtype=torch.float64)))
