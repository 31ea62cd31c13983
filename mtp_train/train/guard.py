"""When training must stop, and on which sequences: a loss that isn't finite, or one that explodes.

    exploded: loss > factor * median of the last 100 losses, and above every one of the first 20

The second condition spares a head that has nearly learnt its data by heart, where ten times almost nothing is still
nothing. All ranks judge the same global loss, so they stop together. Knows no head and no optimiser.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice, pairwise
from math import isfinite
from pathlib import Path
from statistics import median
from typing import Any

from mtp_train.batches.pack import Pack
from mtp_train.core.errors import UserError

RECENT = 100
FIRST = 20
NAMED_PACKS = 2
NAMED_SEQUENCES = 16


@dataclass(frozen=True)
class PackReport:
    """One pack of the step that went wrong."""

    rank: int
    loss: float  # per goal
    keys: tuple[str, ...]
    numbers: tuple[int, ...]  # the sequences' places in the store
    damaged: tuple[str, ...]  # keys of sequences whose states aren't finite

    @property
    def severity(self) -> tuple[bool, float]:
        finite = isfinite(self.loss)
        return bool(self.damaged) or not finite, self.loss if finite else 0.0


def exploded(loss: float, curves: Sequence[dict[str, Any]], factor: float) -> bool:
    """Whether a step's loss stands out of those before it; never within the first steps.

    curves: what was logged so far; rows without a loss, or with loss 0 (nothing trained), don't count.
    """
    first = list(islice(_losses(curves), FIRST))
    if not factor or len(first) < FIRST:
        return False
    recent = median(islice(_losses(reversed(curves)), RECENT))
    return loss > factor * recent and loss > max(first)


def _losses(curves: Iterable[dict[str, Any]]) -> Iterable[float]:
    return (row["loss"] for row in curves if row.get("loss"))


def report(rank: int, loss: float, numbers: Sequence[int], pack: Pack) -> PackReport:
    """loss: of the pack, per goal."""
    damaged = tuple(
        key
        for key, (start, stop) in zip(pack.keys, pairwise(pack.offsets), strict=True)
        if not all(bool(state[start:stop].isfinite().all()) for state in pack.states.values())
    )
    return PackReport(rank, loss, pack.keys, tuple(numbers), damaged)


def alarm(
    what: str, packs: Sequence[PackReport], store: object | None, tokenizer: Path | None
) -> UserError:
    """The error that stops a run.

    Args:
        what: the figure that is wrong, and the step.
        packs: of all ranks.
        store, tokenizer: where the features and the target lie, if they lie anywhere.
    """
    worst = sorted(packs, key=lambda item: item.severity, reverse=True)
    bad = [item for item in worst if item.severity[0]] or worst[:1]
    shown = bad[:NAMED_PACKS]
    said = [_told(item) for item in shown]
    if len(bad) > len(shown):
        said.append(f"and {len(bad) - len(shown)} more packs")
    numbers = [number for item in shown for number in item.numbers[:NAMED_SEQUENCES]]
    look = "look at them"
    if store is not None:
        sample = f"mtp-train store sample {store} --tokenizer {tokenizer or 'TARGET'} --sequence"
        look += f": {sample} {' '.join(map(str, numbers))}"
    cure = (
        "make these features again (mtp-train store verify names the shard)"
        if any(item.damaged for item in bad)
        else "lower train.learning_rate and add go_on=true to go on from the last checkpoint, which is as it was, or "
        "leave these sequences out"
    )
    rule = "the training loss must stay finite and must not explode"
    return UserError(rule, f"{what}: {'; '.join(said)}", f"{cure}; {look}")


def _told(item: PackReport) -> str:
    keys = ", ".join(map(repr, item.keys[:NAMED_SEQUENCES]))
    rest = len(item.keys) - NAMED_SEQUENCES
    damaged = ", ".join(map(repr, item.damaged[:NAMED_SEQUENCES]))
    return (
        f"pack on rank {item.rank} with loss {item.loss:.4g} per goal, sequences {keys}"
        + (f" and {rest} more" if rest > 0 else "")
        + (f", of which {damaged} have states that are not finite" if damaged else "")
    )
