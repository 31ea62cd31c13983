"""Whether speculation changed what the target says: token for token, with ties within rounding shown as such.

Two greedy runs of one target can part only where its two best logits are equal within the arithmetic's rounding
(batches of other shapes round differently). Anything else is a fault.

Shapes: L tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from mtp_train.attention.packed import PackedContext
from mtp_train.engine.sequences import Completion
from mtp_train.models.target import Target

TIE = 1e-3  # gap of two logits, in float32, below which either choice is right


def compare(
    target: Target, plain: Sequence[Completion], other: Sequence[Completion]
) -> dict[str, Any]:
    """Compare two runs over the same prompts, in order."""
    ties, different, equal = [], [], 0
    for left, right in zip(plain, other, strict=True):
        assert left.key == right.key, "the same prompts in the same order"
        if left.tokens == right.tokens:
            equal += 1
            continue
        position = first_difference(left.tokens, right.tokens)
        gap = choice_gap(target, left, right, position)
        row = {"key": left.key, "position": position, "gap": gap}
        if gap < TIE:
            ties.append(row)
        else:
            different.append(
                row
                | {
                    "plain": list(left.tokens[position : position + 4]),
                    "speculative": list(right.tokens[position : position + 4]),
                }
            )
    return {
        "dtype": str(target.dtype).removeprefix("torch."),
        "prompts": len(plain),
        "tokens": sum(len(completion.tokens) for completion in plain),
        "equal": equal,
        "ties": ties,
        "different": different,
    }


def first_difference(left: Sequence[int], right: Sequence[int]) -> int:
    """Index of the first token that differs, or the shorter length."""
    pairs = zip(left, right, strict=False)
    return next((index for index, (a, b) in enumerate(pairs) if a != b), min(len(left), len(right)))


@torch.inference_mode()
def choice_gap(target: Target, left: Completion, right: Completion, position: int) -> float:
    """How far apart the target's logits of the two choices are, by a plain forward over the common text.

    Infinite where one output ends before the other: that is no choice of the target's.
    """
    if position >= min(len(left.tokens), len(right.tokens)):
        return float("inf")
    text = torch.tensor(left.prompt + left.tokens[:position], device=target.device)
    state_TD = target.forward(
        text, torch.arange(len(text), device=target.device), PackedContext([0, len(text)])
    )
    logits_V = target.logits(state_TD[-1]).float()
    # The choice must also be (nearly) the best: two equal but poor tokens are no tie.
    return float(
        max(
            logits_V.max() - logits_V[left.tokens[position]],
            logits_V.max() - logits_V[right.tokens[position]],
        )
    )


def transformers_greedy(target: Target, completion: Completion, reference: Any) -> tuple[int, ...]:
    """transformers' own `generate` on one prompt, for as many tokens as the completion has.

    The attention mask is passed: `generate` masks every pad token it finds, and some targets pad with a token that
    stands in their prompts.
    """
    prompt = torch.tensor([completion.prompt], device=target.device)
    out = reference.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        do_sample=False,
        max_new_tokens=len(completion.tokens),
    )
    return tuple(out[0, len(completion.prompt) :].tolist())
