"""What a serving check makes of its measurements: differences above the tolerances, a verdict on sampling, a table.

Pure functions over counters and log-likelihoods. Knows no engine, no head and no run folder.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

TAU_TOLERANCE = 0.05
POSITION_TOLERANCE = 0.03
LIKELIHOOD_TOLERANCE = 0.25  # nats per token; a wrong sampler is off by more
LIKELIHOOD_ERRORS = 4.0  # standard errors that a difference must exceed to be one
TABLE_BEGIN = "<!-- written by tools/verify_serving.py: begin -->"
TABLE_END = "<!-- written by tools/verify_serving.py: end -->"
# Engines whose sampled speculative output is known not to be the target's. One that is here and passes is a failure
# too: the check would be blind, or the engine mended.
SAMPLING_FAULTS = {("vLLM, CPU build", "0.32.0"): "speculative output at temperature 1 is noise"}


@dataclass(frozen=True)
class Counters:
    """An engine's speculative counters.

    Attributes:
        drafts: proposals of k tokens for one sequence.
        accepted: how many of them had their first i + 1 tokens accepted, by position i.
    """

    drafts: int
    accepted: tuple[int, ...]

    def plus(self, other: Counters) -> Counters:
        pairs = zip(self.accepted, other.accepted, strict=True)
        return Counters(self.drafts + other.drafts, tuple(a + b for a, b in pairs))

    def figures(self) -> dict[str, Any]:
        """tau and per position as vLLM defines them; 1 and zeros where nothing was drafted."""
        drafts = max(self.drafts, 1)
        return {
            "drafts": self.drafts,
            "tau": 1 + sum(self.accepted) / drafts,
            "per_position": [count / drafts for count in self.accepted],
            "acceptance_rate": sum(self.accepted) / (drafts * len(self.accepted)),
        }


@dataclass(frozen=True)
class Likelihood:
    """Sampled outputs with speculation beside those without, under the target.

    Attributes:
        plain, drafted: mean log-likelihood per token, over prompts.
        difference: drafted - plain, paired by prompt.
        error: its standard error.
    """

    prompts: int
    plain: float
    drafted: float
    difference: float
    error: float

    @property
    def verdict(self) -> str:
        """`equal`, `different`, or `undecided` where so few prompts could hide a wrong sampler."""
        if abs(self.difference) > max(LIKELIHOOD_TOLERANCE, LIKELIHOOD_ERRORS * self.error):
            return "different"
        if LIKELIHOOD_ERRORS * self.error > 4 * LIKELIHOOD_TOLERANCE:
            return "undecided"
        return "equal"

    def as_dict(self) -> dict[str, Any]:
        return asdict(self) | {"verdict": self.verdict}


@dataclass(frozen=True)
class Row:
    """One line of the table."""

    layout: str
    engine: str
    version: str
    state: str
    k: int | None = None
    theirs: float | None = None
    ours: float | None = None


def gaps(theirs: Mapping[str, Any], ours: Mapping[str, Any]) -> list[str]:
    """Differences above the tolerances."""
    found = []
    if not abs(theirs["tau"] - ours["tau"]) <= TAU_TOLERANCE:
        found.append(
            f"tau {ours['tau']:.3f} against vLLM's {theirs['tau']:.3f} (tolerance {TAU_TOLERANCE})"
        )
    for position, (mine, its) in enumerate(
        zip(ours["per_position"], theirs["per_position"], strict=True), start=1
    ):
        if not abs(mine - its) <= POSITION_TOLERANCE:
            found.append(
                f"position {position} {mine:.3f} against {its:.3f} (tolerance {POSITION_TOLERANCE})"
            )
    return found


def likelihood(plain: Sequence[float], drafted: Sequence[float]) -> Likelihood:
    """Compare mean log-likelihoods per token of the same prompts' outputs. At least two prompts."""
    differences = [b - a for a, b in zip(plain, drafted, strict=True)]
    return Likelihood(
        len(differences),
        statistics.fmean(plain),
        statistics.fmean(drafted),
        statistics.fmean(differences),
        statistics.stdev(differences) / math.sqrt(len(differences)),
    )


def sampling_failures(engine: str, version: str, found: Likelihood) -> list[str]:
    """What is wrong with an engine's sampled output, or with a check that finds nothing where a fault is known."""
    known = SAMPLING_FAULTS.get((engine, version))
    said = (
        f"{engine} {version}: its sampled output has {found.drafted:.2f} nats per token with speculation, "
        f"{found.plain:.2f} without ({found.difference:+.2f}, standard error {found.error:.2f})"
    )
    if known and found.verdict != "different":
        return [f"{said}: the known fault ({known}) was not found"]
    if known or found.verdict == "equal":
        return []
    if found.verdict == "undecided":
        return [f"{said}: too few prompts to tell"]
    return [f"{said}: that is not the target's distribution"]


def sampling_finding(engine: str, version: str, found: Likelihood) -> str:
    """One line for the reader."""
    words = {
        "equal": "sampling is the target's as far as this tells",
        "different": "SAMPLING IS NOT THE TARGET'S",
        "undecided": "undecided, too few prompts",
    }
    known = " (known)" if (engine, version) in SAMPLING_FAULTS else ""
    return (
        f"{engine} {version}, temperature 1, {found.prompts} prompts: mean log-likelihood {found.plain:.2f} without "
        f"and {found.drafted:.2f} with speculation: {words[found.verdict]}{known}"
    )


def table(rows: Iterable[Row]) -> str:
    """Markdown."""
    lines = [
        "| format | engine | version | state | k | tau, theirs | tau, ours |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        figures = [
            "" if value is None else f"{value:.3f}" if isinstance(value, float) else str(value)
            for value in (row.k, row.theirs, row.ours)
        ]
        cells = [f"`{row.layout}`", row.engine, row.version, row.state, *figures]
        lines.append("| " + " | ".join(cell.replace("|", "/") for cell in cells) + " |")
    return "\n".join(lines)


def with_block(text: str, block: str) -> str:
    """A document with what stands between its marks replaced.

    Raises:
        ValueError: it has no marks.
    """
    before, begin, rest = text.partition(TABLE_BEGIN)
    _, end, after = rest.partition(TABLE_END)
    if not (begin and end):
        raise ValueError(f"the document must have the lines {TABLE_BEGIN} and {TABLE_END}")
    return f"{before}{begin}\n\n{block}\n\n{end}{after}"
