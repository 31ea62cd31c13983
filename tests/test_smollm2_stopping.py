"""Stop strings in SmolLM2's own text: byte-level pieces that carry spaces, characters of several tokens."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerBase

from mtp_train.models.target import load_tokenizer
from mtp_train.text.stopping import StopStrings

TEXT = "Here is the answer:\n\n1. Grüße aus Köln 🙂🚀 — naïve café.\nUser: and then?\n\nObservation: 42 → done"


@pytest.fixture(scope="module")
def tokenizer(smollm2_path: Path) -> PreTrainedTokenizerBase:
    return load_tokenizer(smollm2_path)


def first(tokenizer: PreTrainedTokenizerBase, strings: list[str], output: tuple[int, ...]) -> int:
    """The first beginning whose whole text has one of the strings."""
    texts = (tokenizer.decode(output[:count]) for count in range(1, len(output) + 1))
    return next(at for at, text in enumerate(texts, 1) if any(string in text for string in strings))


@pytest.mark.parametrize("step", [1, 2, 3, 7, 100])
@pytest.mark.parametrize(
    ("strings", "left"),
    [
        (["User:"], "— naïve café.\n"),
        (["\nUser", "café"], "— naïve "),
        (["🚀"], "Köln 🙂"),
        (["ü"], "1. Gr"),
        ([" answer:\n"], "Here is the"),
        (["servation", "→ d"], "\n\nOb"),
        (["Here"], ""),
    ],
)
def test_the_text_ends_where_the_string_begins(
    tokenizer: PreTrainedTokenizerBase, strings: list[str], left: str, step: int
) -> None:
    output = tuple(tokenizer.encode(TEXT))
    assert len(output) > len(TEXT) // 4 and tokenizer.decode(output) == TEXT
    stop = StopStrings(tokenizer, strings)
    found = [stop(output[:end]) for end in range(step, len(output) + step, step)]
    count = next(count for count in found if count is not None)
    assert count == first(tokenizer, strings, output)
    text = stop.text(output[:count])
    assert TEXT.startswith(text) and TEXT[len(text) :].startswith(tuple(strings))
    assert text.endswith(left)


@pytest.mark.parametrize("seed", range(10))
def test_windows_find_what_whole_texts_show(tokenizer: PreTrainedTokenizerBase, seed: int) -> None:
    """Any tokens at all: pieces of characters that never become one, special ones, text in between."""
    rng = random.Random(seed)
    pieces = [*tokenizer.encode("🙂🚀é→ the cat\n\n"), *range(3), *rng.sample(range(49152), 6)]
    output = tuple(rng.choice(pieces) for _ in range(120))
    text = tokenizer.decode(output, skip_special_tokens=True)
    at = rng.randrange(len(text) - 40)
    strings = [text[at : at + length] for length in (2, 9)]
    strings = [string for string in strings if "\N{REPLACEMENT CHARACTER}" not in string]
    stop, length, found = StopStrings(tokenizer, strings or [" the cat"]), 0, None
    while found is None and length < len(output):
        length += rng.randint(1, 6)
        found = stop(output[:length])
    whole = (
        tokenizer.decode(output[:n], skip_special_tokens=True) for n in range(1, len(output) + 1)
    )
    want = next(
        (n for n, part in enumerate(whole, 1) if any(string in part for string in stop.strings)),
        None,
    )
    assert found == want
