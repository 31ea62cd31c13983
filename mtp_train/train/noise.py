"""EAGLE's noise on the states that a head is fed in training, so that it learns to start from slightly wrong ones.

    noisy = state + U(-a, a)        per number; arXiv 2401.15077, section 4.1 (Training): a = 0.1

EAGLE's published code (eagle/train/main.py, `AddUniformNoise`, std 0.2) draws (rand - 0.5) * std * 512 / L, L being
the sequence's length: the paper's at 512 tokens, less on longer sequences and more on shorter ones. Here it is the
paper's, whatever the length.

A draw depends on (seed, step, sequence) alone: the same after a resume, in any pack and on any rank. The states that
the target is compared by are never touched. Knows no head and no loss.
"""

from __future__ import annotations

import hashlib
from itertools import pairwise

import torch
from torch import Tensor

from mtp_train.batches.pack import Pack


def noisy_states(pack: Pack, amplitude: float, seed: int, step: int) -> dict[str, Tensor]:
    """The pack's states [T, D] with noise, by name, in their own dtype.

    Args:
        step: the optimiser step, from 0.
    """
    return {
        name: torch.cat(
            [
                _noisy(state_TD[start:stop], amplitude, f"{seed}/{step}/{name}/{key}")
                for key, (start, stop) in zip(pack.keys, pairwise(pack.offsets), strict=True)
            ]
        )
        for name, state_TD in pack.states.items()
    }


def _noisy(state_LD: Tensor, amplitude: float, name: str) -> Tensor:
    seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8]) >> 1
    generator = torch.Generator(state_LD.device).manual_seed(seed)
    noise_LD = torch.empty(state_LD.shape, dtype=torch.float32, device=state_LD.device)
    noise_LD.uniform_(-amplitude, amplitude, generator=generator)
    return (state_LD.float() + noise_LD).to(state_LD.dtype)
