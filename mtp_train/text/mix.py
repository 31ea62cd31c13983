"""Several streams of rows as one, in shares. Knows nothing of the rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from random import Random
from typing import TypeVar

from mtp_train.core.errors import UserError

T = TypeVar("T")
Opener = Callable[[], Iterator[T]]


def mix(
    openers: Sequence[Opener[T]], weights: Sequence[float | None], seed: int
) -> Iterator[tuple[int, T, bool]]:
    """(source, row, whether it is part of the mix) for every row of every source, each once.

    Without weights all rows are part of it, one source after the other. With weights the mix is as large as the
    scarcest source allows: source i gives n_i rows, n_i / sum(n) equal to its share to within a row, drawn evenly
    from its whole length by `seed` and interleaved in proportion. Sources are read twice: first to count their rows.
    """
    if all(weight is None for weight in weights):
        for index, opener in enumerate(openers):
            yield from ((index, row, True) for row in opener())
        return
    if any(weight is None for weight in weights):
        raise UserError(
            "either all sources have a weight or none", list(weights), "give each source a weight"
        )
    shares = [float(weight or 0) for weight in weights]
    sizes = [sum(1 for _ in opener()) for opener in openers]
    wanted = quotas(sizes, shares)
    draws = [
        _draw(opener(), size, count, Random(f"{seed} {index}"))
        for index, (opener, size, count) in enumerate(zip(openers, sizes, wanted, strict=True))
    ]
    for index in interleave(wanted):
        for row, kept in draws[index]:
            yield index, row, kept
            if kept:
                break
    for index, draw in enumerate(draws):
        yield from ((index, row, kept) for row, kept in draw)


def quotas(sizes: Sequence[int], shares: Sequence[float]) -> list[int]:
    """Rows that each source gives: as many as the scarcest allows, in the ratio of the shares."""
    total = min(size / share for size, share in zip(sizes, shares, strict=True))
    return [min(size, round(total * share)) for size, share in zip(sizes, shares, strict=True)]


def interleave(counts: Sequence[int]) -> Iterator[int]:
    """Source indices, `counts[i]` times i, every stretch close to the ratio of the counts."""
    given = [0] * len(counts)
    for _ in range(sum(counts)):
        # The source whose next row is due first: row j of n stands at (j + 1/2) / n of the whole.
        due = [
            (given[index] + 0.5) / count if given[index] < count else 2.0
            for index, count in enumerate(counts)
        ]
        index = due.index(min(due))
        given[index] += 1
        yield index


def _draw(rows: Iterator[T], size: int, count: int, random: Random) -> Iterator[tuple[T, bool]]:
    """`count` of `size` rows, each choice as likely as any, in their order (Knuth, volume 2, 3.4.2, algorithm S)."""
    for row in rows:
        kept = random.random() * size < count
        size, count = size - 1, count - kept
        yield row, kept
