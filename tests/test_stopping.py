"""Stop strings: the first token that completes one, wherever the string begins and however tokens come."""

from __future__ import annotations

import random

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from toys import make_tokenizer
from transformers import PreTrainedTokenizerFast

from mtp_train.core.errors import UserError
from mtp_train.text.stopping import StopStrings


def pieces(words: list[str]) -> PreTrainedTokenizerFast:
    """A tokenizer as Llama-2's: pieces that carry their space, bytes to fall back to, the text's first space lost."""
    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
    vocabulary = {token: index for index, token in enumerate(["<unk>", "</s>", *bytes_, *words])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", eos_token="</s>", pad_token="</s>"
    )


def ids(tokenizer: PreTrainedTokenizerFast, tokens: list[str]) -> tuple[int, ...]:
    found = tokenizer.convert_tokens_to_ids(tokens)
    assert tokenizer.unk_token_id not in found
    return tuple(found)


def slow(tokenizer: PreTrainedTokenizerFast, strings: list[str], output: tuple[int, ...]) -> object:
    """The definition: decode every beginning, whole, behind a word that keeps the first space."""
    for count in range(1, len(output) + 1):
        word = tokenizer.encode("a", add_special_tokens=False)
        text = tokenizer.decode([*word, *output[:count]], skip_special_tokens=True)[1:]
        if any(string in text for string in strings):
            return count
    return None


def test_a_string_over_several_tokens_ends_with_its_last() -> None:
    tokenizer = make_tokenizer()
    output = ids(tokenizer, list("so it ends. or not"))
    stop = StopStrings(tokenizer, ["ends"])
    assert stop(output) == len("so it ends")
    assert stop.text(output[: stop(output)]) == "so it "


def test_the_first_of_several_strings_counts_however_many_tokens_come_at_once() -> None:
    tokenizer = make_tokenizer()
    output = ids(tokenizer, list("one, two. three"))
    for step in range(1, len(output) + 1):
        stop = StopStrings(tokenizer, ["three", "two", "wo."])
        found = [stop(output[:end]) for end in range(step, len(output) + step, step)]
        assert next(count for count in found if count) == len("one, two"), step
    assert stop.text(output) == "one, "


def test_an_output_that_is_not_the_last_ones_continuation_is_read_from_its_start() -> None:
    tokenizer = make_tokenizer()
    stop = StopStrings(tokenizer, ["bc"])
    assert stop(ids(tokenizer, list("a long text without it"))) is None
    assert stop(ids(tokenizer, list("abc"))) == 3
    assert stop(ids(tokenizer, list("a long text without it, abc"))) == 27
    assert stop(()) is None


def test_special_tokens_are_no_text() -> None:
    tokenizer = make_tokenizer()
    output = ids(tokenizer, ["a", "</s>", "b"])
    assert StopStrings(tokenizer, ["ab"])(output) == 3
    assert StopStrings(tokenizer, ["</s>"])(output) is None


def test_a_string_inside_a_token_and_the_first_space() -> None:
    tokenizer = pieces(["a", "▁a", "▁the", "▁end", "ing", "."])
    output = ids(tokenizer, ["▁the", "▁end", "ing", "."])
    assert StopStrings(tokenizer, ["he e"])(output) == 2
    assert StopStrings(tokenizer, ["in"])(output) == 3
    first = StopStrings(tokenizer, [" the"])
    assert first(output) == 1 and first.text(output) == ""
    assert StopStrings(tokenizer, ["gone"]).text(output) == " the ending."


@pytest.mark.parametrize("step", [1, 2, 3, 5])
def test_characters_made_of_bytes(step: int) -> None:
    """The euro's three bytes are three tokens; a run of bytes that is no text yet decodes to nothing of it."""
    tokenizer = pieces(["a", "▁a", "▁the", "x"])
    euro = [f"<0x{byte:02X}>" for byte in "€".encode()]
    output = ids(tokenizer, ["▁the", *euro, *euro, "x", *euro, "a"])

    def found(string: str) -> int | None:
        stop = StopStrings(tokenizer, [string])
        results = [stop(output[:end]) for end in range(step, len(output) + step, step)]
        return next((count for count in results if count), None)

    assert [found(string) for string in ("€", "€€", "e€€x", "€x€a", "€€€")] == [4, 7, 8, 12, None]


@pytest.mark.parametrize("seed", range(20))
def test_windows_find_what_whole_texts_show(seed: int) -> None:
    rng = random.Random(seed)
    euro = [f"<0x{byte:02X}>" for byte in "€é".encode()]
    words = ["a", "▁a", "b", "ab", "▁", "bab", "x"]
    tokenizer = pieces(words)
    drawn = [rng.choice([*words, *euro, "</s>"]) for _ in range(60)]
    output = ids(tokenizer, drawn)
    strings = ["".join(rng.choices("ab x€é", k=rng.randint(2, 4))) for _ in range(3)]
    stop, at, found = StopStrings(tokenizer, strings), 0, None
    while found is None and at < len(output):
        at += rng.randint(1, 4)
        found = stop(output[:at])
    assert found == slow(tokenizer, strings, output)


def test_no_strings_are_refused() -> None:
    for strings in ([], ["a", ""]):
        with pytest.raises(UserError, match="must not be empty"):
            StopStrings(make_tokenizer(), strings)
