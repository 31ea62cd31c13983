"""A set's text on disk: what it holds, what it was made from, and what became of every row."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from toys import conversation, conversations, make_tokenizer

from mtp_train.core.errors import UserError
from mtp_train.core.records import Accounting, TokenizedConversation
from mtp_train.precompute.corpus import make_corpus
from mtp_train.store.corpus import (
    KEYS,
    NAME,
    TOKENS,
    Corpus,
    found_corpus,
    lengths_of,
    sequences_digest,
    write_corpus,
)
from mtp_train.text.sources import DataConfig
from mtp_train.text.template import ChatTemplate

CHATS = [*conversations(7, seed=3), conversation("ü \"'#1", [1], [2])]
TEMPLATE = ChatTemplate(make_tokenizer())


def test_a_corpus_gives_back_its_sequences(tmp_path: Path) -> None:
    accounting = Accounting()

    def stream() -> Iterator[TokenizedConversation]:
        for chat in CHATS:
            accounting.used += 1
            yield chat

    corpus = write_corpus(tmp_path / "c", stream(), "inputs", accounting)
    assert list(corpus) == CHATS
    assert corpus.lengths.tolist() == [len(chat.tokens) for chat in CHATS]
    assert (corpus.note.sequences, corpus.note.tokens) == (8, sum(corpus.lengths))
    assert corpus.note.loss_tokens == sum(sum(chat.loss_mask) for chat in CHATS)
    assert corpus.note.accounting["used"] == 8, "counted once the stream has ended"
    assert corpus.note.digest == sequences_digest(CHATS) == sequences_digest(corpus)
    np.testing.assert_array_equal(lengths_of(CHATS), lengths_of(corpus))
    with pytest.raises(IndexError):
        corpus[8]


def test_the_digest_feels_where_a_sequence_ends() -> None:
    one = [conversation("a", [1], [2, 3]), conversation("b", [4], [5])]
    other = [conversation("a", [1], [2]), conversation("b", [3, 4], [5])]
    assert sequences_digest(one) != sequences_digest(other)
    # The same bytes end to end: only their lengths tell a key from a token and its mask.
    token = TokenizedConversation("a", (0x41414141,), (1,))
    key = TokenizedConversation("aAAAA\x01", (), ())
    assert sequences_digest([token]) != sequences_digest([key])


def test_an_unfinished_or_another_corpus_is_not_found(tmp_path: Path) -> None:
    write_corpus(tmp_path, CHATS, "inputs", Accounting())
    assert found_corpus(tmp_path, "inputs") is not None
    assert found_corpus(tmp_path, "other inputs") is None
    (tmp_path / NAME).unlink()
    assert found_corpus(tmp_path, "inputs") is None
    assert found_corpus(tmp_path / "nowhere", "inputs") is None


def test_a_corpus_without_one_of_its_files_is_an_error(tmp_path: Path) -> None:
    write_corpus(tmp_path, CHATS, "inputs", Accounting())
    (tmp_path / TOKENS).unlink()
    with pytest.raises(UserError, match="must be whole"):
        Corpus(tmp_path)


def test_an_empty_corpus_is_one(tmp_path: Path) -> None:
    corpus = write_corpus(tmp_path, [], "inputs", Accounting())
    assert len(corpus) == 0 and list(corpus) == []
    assert (tmp_path / KEYS).stat().st_size == 0


# --- from sources and answers ---------------------------------------------------------------------------------


def chat(key: str, *contents: str) -> dict[str, object]:
    roles = ("user", "assistant")
    messages = [{"role": roles[i % 2], "content": c} for i, c in enumerate(contents)]
    return {"id": key, "messages": messages}


def answer(key: str, prompt: list[int], output: list[int]) -> dict[str, object]:
    return {
        "id": key,
        "category": "all",
        "messages": [],
        "prompt_ids": prompt,
        "output_ids": output,
        "finish": "stop",
    }


def write(path: Path, rows: list[object]) -> str:
    lines = (row if isinstance(row, str) else json.dumps(row) for row in rows)
    path.write_text("".join(f"{line}\n" for line in lines))
    return str(path)


def made(tmp_path: Path, config: DataConfig, answered: Path | None = None) -> Corpus:
    return make_corpus(tmp_path / "text", "train", answered, config, TEMPLATE, "tokenizer", 61)


def test_answers_come_first_then_sources_and_every_row_is_counted(tmp_path: Path) -> None:
    answers = tmp_path / "answers.jsonl"
    rows: list[object] = [
        answer("t", [5, 6], [7, 2]),
        answer("t#1", [5, 6, 7, 2, 8], [9, 2]),
        answer("long", [5] * 30, [6]),
        answer("long#1", [*[5] * 30, 6, 7], [8]),
        answer("empty", [5], []),
    ]
    write(answers, rows)
    source = write(tmp_path / "s.jsonl", [chat("x", "a", "b"), chat("y", "a"), "{broken"])
    config = DataConfig(sets={"train": [source]}, max_tokens=25)
    corpus = made(tmp_path, config, answers)
    assert [sequence.key for sequence in corpus] == ["t", "x"]
    assert corpus[0].tokens == (5, 6, 7, 2, 8, 9, 2)
    assert corpus[0].loss_mask == (0, 0, 1, 1, 0, 1, 1)
    counts = corpus.note.accounting
    assert counts["input"] == 8
    assert counts["used"] == 3
    assert sum(counts["refused"].values()) == 5
    assert counts["refused"]["longer than 25 tokens"] == 2, "both turns of the sequence"


def test_a_corpus_is_made_again_only_when_its_inputs_change(tmp_path: Path) -> None:
    source = write(tmp_path / "s.jsonl", [chat("x", "a", "b")])
    config = DataConfig(sets={"train": source})
    first = made(tmp_path, config).folder / NAME
    before = first.stat().st_mtime_ns
    assert made(tmp_path, config).folder / NAME == first and first.stat().st_mtime_ns == before
    renamed = tmp_path / "elsewhere.jsonl"
    Path(source).rename(renamed)
    made(tmp_path, DataConfig(sets={"train": str(renamed)}))
    assert first.stat().st_mtime_ns == before, "the same rows under another name"
    write(renamed, [chat("x", "a", "c")])
    assert len(made(tmp_path, DataConfig(sets={"train": str(renamed)}))) == 1
    changed = first.stat().st_mtime_ns
    assert changed > before
    made(tmp_path, DataConfig(sets={"train": str(renamed)}, strict=True))
    assert first.stat().st_mtime_ns > changed


def test_split_truncate_and_refuse(tmp_path: Path) -> None:
    answers = tmp_path / "answers.jsonl"
    write(answers, [answer("a", [5, 6], list(range(7, 27)))])
    split = made(tmp_path, DataConfig(length="split", max_tokens=12, context=4), answers)
    assert [sequence.key for sequence in split] == ["a", "a@1", "a@2"]
    trained = [
        token
        for sequence in split
        for token, flag in zip(sequence.tokens, sequence.loss_mask, strict=True)
        if flag
    ]
    assert trained == list(range(7, 27)), "each trained token once"
    cut = made(tmp_path, DataConfig(length="truncate", max_tokens=12), answers)
    assert [len(sequence.tokens) for sequence in cut] == [12]
    assert cut.note.accounting["repaired"] == {"cut to 12 tokens": 1}
    with pytest.raises(UserError, match=r"at least one sequence.*longer than 12 tokens"):
        made(tmp_path, DataConfig(max_tokens=12), answers)


@pytest.mark.parametrize(
    "value", [{"pth": "x"}, {"path": "x", "wait": 2}, 3, [["x"]], {"path": "x", "length": "cut"}]
)
def test_a_wrong_source_is_refused_when_the_configuration_is_read(value: object) -> None:
    with pytest.raises(UserError):
        DataConfig(sets={"train": value})
