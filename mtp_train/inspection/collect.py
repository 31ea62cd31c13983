"""Running statistics over tokenised conversations, and a sample of them: what is kept does not grow with their length.

Per sequence two 64-bit hashes and its key stay, to find duplicates by; everything else is counters.

Knows no source, no tokenizer and no way to show anything.
"""

from __future__ import annotations

import hashlib
import heapq
import random
import re
from array import array
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from mtp_train.core.records import Accounting, TokenizedConversation

RUN = re.compile(rb"[^\x00]+")  # of a mask
CONTEXT = 6  # tokens before a reply that tell its header apart
CONTEXTS = 1_000  # distinct headers that are counted; a template has a handful
NAMED = 3  # keys that a finding names
LONGEST = 5
LARGEST = 5  # groups of duplicates that are named
OTHER: tuple[int, ...] = ()


@dataclass
class Finding:
    """How often something was seen, and where first."""

    count: int = 0
    keys: list[str] = field(default_factory=list)

    def add(self, key: str, times: int = 1) -> None:
        if times and len(self.keys) < NAMED:
            self.keys.append(key)
        self.count += times


@dataclass(frozen=True)
class Duplicates:
    """Sequences beyond the first of their kind."""

    repeated: int
    groups: int
    largest: tuple[tuple[int, tuple[str, ...]], ...]  # (sequences alike, some of their keys)


@dataclass(frozen=True)
class Signs:
    """What a wrong template or a wrong mask shows first."""

    untrained: Finding = field(default_factory=Finding)  # sequences without a trained token
    last_only: Finding = field(
        default_factory=Finding
    )  # sequences whose last token alone is trained
    empty: Finding = field(default_factory=Finding)  # replies that are an end-of-turn token alone
    unended: Finding = field(default_factory=Finding)  # replies without an end-of-turn token
    outside: Finding = field(default_factory=Finding)  # sequences with an id outside the vocabulary
    too_long: Finding = field(default_factory=Finding)  # sequences beyond max_tokens


@dataclass(frozen=True)
class Inspection:
    """What a data set trains."""

    accounting: Accounting
    vocabulary: int
    max_tokens: int | None
    lengths: Counter[int]  # tokens of a sequence -> sequences
    replies: Counter[int]  # tokens of a reply -> replies
    turns: Counter[int]  # replies of a sequence -> sequences
    before: Counter[
        tuple[int, ...]
    ]  # the CONTEXT tokens before a reply -> replies; OTHER: the rest
    last: Counter[int]  # last token of a reply -> replies
    longest: tuple[tuple[int, str], ...]  # (tokens, key), longest first
    equal: Duplicates  # by the whole token sequence
    prompts: Duplicates  # by the tokens before the first trained one
    signs: Signs
    trained_ids: int  # distinct ids that are trained somewhere
    trained_beyond: int  # trained tokens at or after position max_tokens
    sample: tuple[TokenizedConversation, ...]  # in the data's order

    @property
    def sequences(self) -> int:
        return self.lengths.total()

    @property
    def tokens(self) -> int:
        return weight(self.lengths)

    @property
    def trained(self) -> int:
        """Tokens with loss."""
        return weight(self.replies)

    @property
    def tokens_beyond(self) -> int:
        """Tokens at or after position max_tokens."""
        limit = self.max_tokens
        return sum((n - limit) * c for n, c in self.lengths.items() if n > limit) if limit else 0


class Repeats:
    """Finds what was added before, by hash."""

    def __init__(self) -> None:
        self._first: dict[int, str] = {}
        self._groups: dict[int, Finding] = {}

    def add(self, digest: int, key: str) -> None:
        first = self._first.get(digest)
        if first is None:
            self._first[digest] = key
        else:
            self._groups.setdefault(digest, Finding(1, [first])).add(key)

    def result(self) -> Duplicates:
        groups = self._groups.values()
        largest = heapq.nlargest(LARGEST, groups, key=lambda group: group.count)
        return Duplicates(
            repeated=sum(group.count - 1 for group in groups),
            groups=len(groups),
            largest=tuple((group.count, tuple(group.keys)) for group in largest),
        )


class Reservoir:
    """A uniform sample of a stream of unknown length (Vitter's algorithm R); the same seed draws the same ones."""

    def __init__(self, size: int, seed: int) -> None:
        self._size = size
        self._random = random.Random(seed)
        self._seen = 0
        self._kept: list[tuple[int, TokenizedConversation]] = []

    def add(self, item: TokenizedConversation) -> None:
        entry = self._seen, item
        self._seen += 1
        if len(self._kept) < self._size:
            self._kept.append(entry)
            return
        place = self._random.randrange(self._seen)
        if place < self._size:
            self._kept[place] = entry

    def result(self) -> tuple[TokenizedConversation, ...]:
        return tuple(item for _, item in sorted(self._kept, key=lambda entry: entry[0]))


class Collector:
    """Takes one sequence at a time.

    Args:
        vocabulary: number of token ids.
        ends: ids that end a turn.
        show: sequences to keep as a sample.
        seed: of the sample.
        max_tokens: a length that the user means to train with; None for any.
    """

    def __init__(
        self,
        vocabulary: int,
        ends: frozenset[int],
        *,
        show: int = 5,
        seed: int = 0,
        max_tokens: int | None = None,
    ) -> None:
        self._ends = ends
        self._max_tokens = max_tokens
        self._trained_ids = np.zeros(vocabulary, dtype=bool)
        self._lengths: Counter[int] = Counter()
        self._replies: Counter[int] = Counter()
        self._turns: Counter[int] = Counter()
        self._before: Counter[tuple[int, ...]] = Counter()
        self._last: Counter[int] = Counter()
        self._longest: list[tuple[int, str]] = []
        self._equal = Repeats()
        self._prompts = Repeats()
        self._signs = Signs()
        self._beyond = 0
        self._sample = Reservoir(show, seed)

    def add(self, sequence: TokenizedConversation) -> None:
        mask = bytes(sequence.loss_mask)
        runs = [found.span() for found in RUN.finditer(mask)]
        length = len(mask)
        self._lengths[length] += 1
        self._turns[len(runs)] += 1
        heapq.heappush(self._longest, (length, sequence.key))
        if len(self._longest) > LONGEST:
            heapq.heappop(self._longest)
        ids = array("q", sequence.tokens)
        self._find_repeats(sequence.key, ids, runs[0][0] if runs else length)
        self._count_ids(sequence.key, ids, mask)
        self._count_replies(sequence, runs)
        self._look_at(sequence.key, length, runs, mask)
        self._sample.add(sequence)

    def result(self, accounting: Accounting) -> Inspection:
        return Inspection(
            accounting=accounting,
            vocabulary=len(self._trained_ids),
            max_tokens=self._max_tokens,
            lengths=self._lengths,
            replies=self._replies,
            turns=self._turns,
            before=self._before,
            last=self._last,
            longest=tuple(sorted(self._longest, reverse=True)),
            equal=self._equal.result(),
            prompts=self._prompts.result(),
            signs=self._signs,
            trained_ids=int(self._trained_ids.sum()),
            trained_beyond=self._beyond,
            sample=self._sample.result(),
        )

    def _find_repeats(self, key: str, ids: array[int], prompt: int) -> None:
        written = memoryview(ids)
        digest = hashlib.blake2b(written[:prompt], digest_size=8)
        self._prompts.add(int.from_bytes(digest.digest()), key)
        digest.update(written[prompt:])
        self._equal.add(int.from_bytes(digest.digest()), key)

    def _count_ids(self, key: str, ids: array[int], mask: bytes) -> None:
        every = np.frombuffer(ids, dtype=np.int64)
        known = (every >= 0) & (every < len(self._trained_ids))
        if not known.all():
            self._signs.outside.add(key)
        self._trained_ids[every[known & (np.frombuffer(mask, dtype=np.uint8) != 0)]] = True

    def _count_replies(self, sequence: TokenizedConversation, runs: list[tuple[int, int]]) -> None:
        tokens = sequence.tokens
        for start, stop in runs:
            self._replies[stop - start] += 1
            self._last[tokens[stop - 1]] += 1
            header = tokens[max(0, start - CONTEXT) : start]
            full = len(self._before) >= CONTEXTS and header not in self._before
            self._before[OTHER if full else header] += 1
            ended = tokens[stop - 1] in self._ends
            self._signs.unended.add(sequence.key, not ended)
            self._signs.empty.add(sequence.key, ended and stop - start == 1)

    def _look_at(self, key: str, length: int, runs: list[tuple[int, int]], mask: bytes) -> None:
        self._signs.untrained.add(key, not runs)
        self._signs.last_only.add(key, runs == [(length - 1, length)])
        limit = self._max_tokens
        if limit and length > limit:
            self._signs.too_long.add(key)
            self._beyond += sum(max(0, stop - max(start, limit)) for start, stop in runs)


def collect(
    sequences: Iterable[TokenizedConversation], collector: Collector, accounting: Accounting
) -> Inspection:
    """Add every sequence; `accounting` is read after the last one, since a stream fills it on the way."""
    for sequence in sequences:
        collector.add(sequence)
    return collector.result(accounting)


def weight(counts: Counter[int]) -> int:
    """The sum of all that was counted."""
    return sum(value * times for value, times in counts.items())


def quantile(counts: Counter[int], share: float) -> int:
    """The smallest value that at least `share` of the counted ones do not exceed; 0 where nothing was counted."""
    wanted, reached = share * counts.total(), 0
    for value in sorted(counts):
        reached += counts[value]
        if reached >= wanted:
            return value
    return 0
