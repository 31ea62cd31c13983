"""What a run will need, from sizes alone: disk, memory per rank, hours. Loads nothing, measures nothing.

Every figure is a sum that can be checked by hand; what is measured (bytes of a codec, tokens per second) comes in as a
number with its source.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from mtp_train.core.errors import UserError
from mtp_train.core.keys import NOTHING, key
from mtp_train.core.records import Sizes

TEXT = 4 + 1  # bytes per token: int32 id, uint8 mask
INDEX = 4 + 4 + 8  # bytes per sequence: two lengths in the index, an offset in the shard
# Of the raw bytes: lossless as measured on SmolLM2's post-norm states, without repeated beginnings (docs/benchmarks);
# fp8 by construction.
CODEC_RATIO = {"raw": 1.0, "lossless": 0.67, "fp8": 0.5}


@dataclass(frozen=True)
class PlanConfig:
    """What the estimate is about.

    Attributes:
        tokens: of the training set, where its text is not at hand (0: count the text).
        ranks: that will share the work.
        tokens_per_second: of one unit, as you measured it (0: what an earlier precompute of this run measured).
        tflops: sustained by one rank, in 10^12 a second; an assumption, for hours before anything is measured.
        allow_shortfall: go on even if the features won't fit on the disk.
        stage_seconds: of each stage, as measured somewhere; `run` scales them to this machine to say the time left.
    """

    tokens: int = key(0, NOTHING)
    ranks: int = key(1, NOTHING)
    tokens_per_second: float = key(0.0, NOTHING)
    tflops: float = key(0.0, NOTHING)
    allow_shortfall: bool = key(False, NOTHING)
    stage_seconds: dict[str, float] = key(dict, NOTHING)

    def __post_init__(self) -> None:
        if min(self.tokens, self.tokens_per_second, self.tflops) < 0 or self.ranks < 1:
            raise UserError(
                "plan.tokens, tokens_per_second and tflops must be 0 or more, plan.ranks 1 or more",
                (self.tokens, self.tokens_per_second, self.tflops, self.ranks),
                "correct the override",
            )


@dataclass(frozen=True)
class Workload:
    """The text of one set. `bound`: an upper bound, since the target has yet to write its answers."""

    name: str
    sequences: int
    tokens: int
    bound: bool = False


def disk_bytes(load: Workload, sizes: Sizes, states: int, codec: str) -> int:
    """Bytes of a feature store."""
    numbers = load.tokens * states * sizes.hidden * sizes.width
    return round(numbers * CODEC_RATIO[codec]) + load.tokens * TEXT + load.sequences * INDEX


def precompute_bytes(
    sizes: Sizes, states: int, rows_per_forward: int, rows_per_shard: int, tensor_parallel: int
) -> dict[str, int]:
    """Memory of one rank, by part: what the process itself takes beside them is not counted."""
    rows = rows_per_forward * sizes.width
    return {
        "weights": sizes.parameters * sizes.width // tensor_parallel,
        "forward": rows * (8 * sizes.hidden + 3 * sizes.intermediate // tensor_parallel),
        "states of two shards": 2 * rows_per_shard * states * sizes.hidden * sizes.width,
        "gate": 2 * 512 * sizes.vocabulary * sizes.width,
    }


def precompute_flops(sizes: Sizes) -> int:
    """Of one token's matrix products through the target; attention's own are left out, every expert is counted."""
    return 2 * (sizes.parameters - sizes.vocabulary * sizes.hidden)


def hours(tokens: int, tokens_per_second: float, units: int) -> float:
    """Of a measured speed of one unit, for `units` that share the work."""
    return tokens / tokens_per_second / units / 3600


def free_bytes(path: Path) -> int:
    """Of the disk on which `path` lies or will lie."""
    place = path.resolve()
    while not place.exists():
        place = place.parent
    return shutil.disk_usage(place).free


def stored_bytes(folders: Sequence[Path]) -> int:
    """Bytes that lie in the folders already."""
    files = (path for folder in folders for path in folder.glob("*"))
    return sum(path.stat().st_size for path in files if path.is_file())


def require_disk(need: int, have: int, place: Path, allowed: bool) -> None:
    """Raise if the store won't fit, unless that is allowed."""
    if need > have and not allowed:
        raise UserError(
            "the features must fit on the disk",
            f"{readable(need)} needed, {readable(have)} free at {place}",
            "use precompute.codec=lossless or fp8, fewer states or less data, another place "
            "(precompute.out), none at all (precompute.live=true), or plan.allow_shortfall=true",
        )


def readable(count: float) -> str:
    """Bytes in the unit that shows them best."""
    for unit in ("B", "KB", "MB", "GB"):
        if abs(count) < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.2f} TB"
