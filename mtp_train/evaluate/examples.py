"""Outputs cut into runs of tokens by who said them. Knows no figures."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedTokenizerBase

from mtp_train.engine.sequences import Completion


def example(
    tokenizer: PreTrainedTokenizerBase, completion: Completion, prompt: str, category: str
) -> dict[str, Any]:
    """An output as segments of kind `target`, `accepted` or `rejected` (drafted, not part of the output)."""
    segments = [
        {"text": tokenizer.decode(list(ids)), "kind": kind} for kind, ids in runs(completion)
    ]
    return {
        "key": completion.key,
        "category": category,
        "prompt": prompt,
        "segments": [s for s in segments if s["text"]],
    }


def runs(completion: Completion) -> list[tuple[str, tuple[int, ...]]]:
    """The output in order: the prefill's token, then per step accepted drafts, the first rejected one, the target's.

    Later rejected drafts are left out: they follow a token that never stood there.
    """
    tokens = completion.tokens
    found: list[tuple[str, tuple[int, ...]]] = [("target", tokens[:1])]
    at = 1
    for step in completion.steps:
        accepted = tokens[at : at + step.accepted]
        rejected = step.drafted[step.accepted : step.accepted + 1]
        following = tokens[at + step.accepted : at + step.accepted + 1]
        found += [
            ("accepted", accepted),
            ("rejected", rejected if following else ()),
            ("target", following),
        ]
        at += step.accepted + 1
    return [(kind, ids) for kind, ids in found if ids]
