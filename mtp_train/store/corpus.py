"""Tokens and masks of a data set on disk, as they go into precompute: written as a stream, memory-mapped to read.

Ranks share one file's pages instead of holding hundreds of thousands of Python lists each. `corpus.json`, written
last, names the inputs that the content was made from, and makes the folder whole.
Knows no target and no features.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from mtp_train.core.errors import UserError
from mtp_train.core.owned import Kind, replaced_folder
from mtp_train.core.provenance import (
    file_digests,
    read_json,
    require_files,
    sealed,
    unsealed,
    write_json,
)
from mtp_train.core.records import TokenizedConversation

NAME = "corpus.json"
FORMAT = 1
TOKENS, MASK, OFFSETS = "tokens.i32", "mask.u8", "offsets.i64"
KEYS, KEY_OFFSETS = "keys.utf8", "key_offsets.i64"
AGAIN = "delete the folder and run precompute again"
COUNTED = 1 << 22  # tokens at a time: numpy counts wide copies
TEXT = Kind(
    "set's text",
    {KEY_OFFSETS: (), NAME: ("inputs", "digest", "sequences")},
    (TOKENS, MASK, OFFSETS, KEYS, "live.json"),
)
FILES = {TOKENS: np.int32, MASK: np.uint8, OFFSETS: np.int64, KEY_OFFSETS: np.int64, KEYS: np.uint8}


@dataclass(frozen=True)
class CorpusNote:
    """What `corpus.json` says."""

    inputs: str  # digest of the sources' content, the template and the settings
    digest: str  # of keys, tokens and masks, in order
    sequences: int
    tokens: int
    loss_tokens: int
    accounting: dict[str, Any]
    files: dict[str, str] = field(default_factory=dict)  # SHA-256 by name
    format: int = FORMAT


class Corpus(Sequence[TokenizedConversation]):
    """Random access to a finished corpus."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        note = unsealed(read_json(folder / NAME), folder / NAME, AGAIN)
        if note.get("format") != FORMAT:
            raise UserError(
                f"a corpus must have format {FORMAT}", note.get("format"), f"delete {folder}"
            )
        self.note = CorpusNote(**note)
        self._arrays = {name: _mapped(folder / name, kind) for name, kind in FILES.items()}
        if len(self._arrays[OFFSETS]) != self.note.sequences + 1:
            raise UserError("a corpus must be whole", folder, AGAIN)

    def require_same(self) -> None:
        """Raise unless the files have the bytes that were written; reads all of them."""
        require_files(self.folder, self.note.files, AGAIN)

    def __len__(self) -> int:
        return self.note.sequences

    def __getitem__(self, index: int) -> TokenizedConversation:  # type: ignore[override]
        if not 0 <= index < len(self):
            raise IndexError(f"sequence {index} of {len(self)}")
        begin, end = self._arrays[OFFSETS][index : index + 2]
        first, last = self._arrays[KEY_OFFSETS][index : index + 2]
        key = self._arrays[KEYS][first:last].tobytes().decode("utf-8")
        tokens, mask = (self._arrays[name][begin:end] for name in (TOKENS, MASK))
        return TokenizedConversation(key, tuple(tokens.tolist()), tuple(mask.tolist()))

    @cached_property
    def lengths(self) -> np.ndarray:
        """Tokens of every sequence [sequences]."""
        return np.diff(self._arrays[OFFSETS])

    @cached_property
    def loss_tokens(self) -> np.ndarray:
        """Tokens with mask 1 of every sequence [sequences]."""
        counts = np.zeros(len(self), dtype=np.int64)
        filled = self.lengths > 0
        begins = self._arrays[OFFSETS][:-1][filled]
        if len(begins):
            counts[filled] = np.add.reduceat(self._arrays[MASK], begins, dtype=np.int64)
        return counts

    def token_counts(self, vocab_size: int, *, trained: bool = False) -> np.ndarray:
        """How often each token stands in the text, or is trained: int64 [vocab_size]."""
        counts = np.zeros(vocab_size, dtype=np.int64)
        for start in range(0, self.note.tokens, COUNTED):
            tokens, mask = (self._arrays[name][start : start + COUNTED] for name in (TOKENS, MASK))
            counts += np.bincount(tokens[mask > 0] if trained else tokens, minlength=vocab_size)
        return counts


def write_corpus(
    folder: Path,
    sequences: Iterable[TokenizedConversation],
    inputs: str,
    accounting: Any,
) -> Corpus:
    """Write `sequences` as they come; an earlier text in `folder` is replaced.

    Args:
        accounting: asked for its `as_dict()` once the last sequence has come.
    """
    remedy = "move it away, or name another run folder"
    with replaced_folder(folder, TEXT, remedy) as new:
        _write(new, sequences, inputs, accounting)
    return Corpus(folder)


def _write(
    folder: Path, sequences: Iterable[TokenizedConversation], inputs: str, accounting: Any
) -> None:
    running, count, trained, rows, letters = hashlib.sha256(), 0, 0, 0, 0
    with ExitStack() as stack:
        files = {name: stack.enter_context(open(folder / name, "wb")) for name in FILES}
        for name in (OFFSETS, KEY_OFFSETS):
            files[name].write(np.int64(0).tobytes())
        for sequence in sequences:
            parts = _bytes_of(sequence)
            rows, letters = rows + len(sequence.tokens), letters + len(parts[KEYS])
            parts |= {OFFSETS: np.int64(rows).tobytes(), KEY_OFFSETS: np.int64(letters).tobytes()}
            for name, part in parts.items():
                files[name].write(part)
            _add(running, parts)
            count, trained = count + 1, trained + sum(sequence.loss_mask)
    note = CorpusNote(
        inputs,
        running.hexdigest()[:16],
        count,
        rows,
        trained,
        accounting.as_dict(),
        file_digests(folder),
    )
    write_json(folder / NAME, sealed(asdict(note)))


def found_corpus(folder: Path, inputs: str) -> Corpus | None:
    """The corpus in `folder`, if it is whole and was made from these inputs."""
    if not (folder / NAME).is_file() or read_json(folder / NAME).get("inputs") != inputs:
        return None
    corpus = Corpus(folder)
    corpus.require_same()
    return corpus


def sequences_digest(sequences: Iterable[TokenizedConversation]) -> str:
    """Digest of keys, tokens and masks, in order: the one that a corpus of the same sequences notes."""
    if isinstance(sequences, Corpus):
        return sequences.note.digest
    running = hashlib.sha256()
    for sequence in sequences:
        _add(running, _bytes_of(sequence))
    return running.hexdigest()[:16]


def lengths_of(sequences: Sequence[TokenizedConversation]) -> np.ndarray:
    """Tokens of every sequence [sequences]."""
    if isinstance(sequences, Corpus):
        return sequences.lengths
    return np.array([len(sequence.tokens) for sequence in sequences], dtype=np.int64)


def _bytes_of(sequence: TokenizedConversation) -> dict[str, bytes]:
    return {
        TOKENS: np.asarray(sequence.tokens, dtype=np.int32).tobytes(),
        MASK: np.asarray(sequence.loss_mask, dtype=np.uint8).tobytes(),
        KEYS: sequence.key.encode("utf-8"),
    }


def _add(running: Any, parts: dict[str, bytes]) -> None:
    """Lengths go in too: moving a token from one sequence to the next changes the digest."""
    for name in (KEYS, TOKENS, MASK):
        running.update(len(parts[name]).to_bytes(8, "little"))
        running.update(parts[name])


def _mapped(path: Path, kind: Any) -> np.ndarray:
    if not path.is_file():
        raise UserError("a corpus must be whole", f"{path} is missing", "run precompute again")
    if path.stat().st_size == 0:  # an empty file cannot be mapped
        return np.zeros(0, dtype=kind)
    return np.memmap(path, dtype=kind, mode="r")
