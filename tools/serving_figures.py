"""What a serving check makes of its measurements: differences above the tolerances, a verdict on sampling, a table.

Pure functions over counters and log-likelihoods. Knows no engine, no head and no run folder.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

TAU_TOLERANCE = 0.05
POSITION_TOLERANCE = 0.03
EXCESS_TOLERANCE = (
    0.1  # nats per token; bfloat16 against float32 is off by less, a wrong sampler by more
)
EXCESS_ERRORS = 4.0  # standard errors that an excess must exceed to be one
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
class Score:
    """An output under the target, sums over its tokens.

    Attributes:
        likelihood: log p(x), of what was said.
        expected: sum over all tokens of p log p, its mean under the target given the text so far.
        variance: of log p(x) under the target given the text so far.
    """

    tokens: int
    likelihood: float
    expected: float
    variance: float


@dataclass(frozen=True)
class Sampled:
    """An engine's sampled outputs under the target.

    The likelihood itself wanders with the text. Its excess over what is expected at each token does not: for a sampler
    that is the target's these are differences of a martingale, of mean 0 and known variance.

    Attributes:
        likelihood: mean log-likelihood per token.
        excess: mean of log p(x) - expected per token.
        error: the excess's standard error for the target's own sampler.
    """

    tokens: int
    likelihood: float
    excess: float
    error: float

    @property
    def verdict(self) -> str:
        """`equal`, `different`, or `undecided` where so few tokens could hide a wrong sampler."""
        if abs(self.excess) > max(EXCESS_TOLERANCE, EXCESS_ERRORS * self.error):
            return "different"
        return "equal" if EXCESS_ERRORS * self.error <= 5 * EXCESS_TOLERANCE else "undecided"

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


def sampled(scores: Sequence[Score]) -> Sampled:
    """All outputs of one run together."""
    tokens = sum(score.tokens for score in scores)
    total = sum(score.likelihood for score in scores)
    excess = total - sum(score.expected for score in scores)
    error = math.sqrt(sum(score.variance for score in scores))
    return Sampled(tokens, total / tokens, excess / tokens, error / tokens)


def sampling_failures(engine: str, version: str, plain: Sampled, drafted: Sampled) -> list[str]:
    """What is wrong with an engine's sampled output, or with a check that finds nothing where a fault is known.

    plain, drafted: without and with speculation.
    """
    known = SAMPLING_FAULTS.get((engine, version))
    failures = []
    for name, found, fault in (("without", plain, None), ("with", drafted, known)):
        said = (
            f"{engine} {version}, {name} speculation: log-likelihood {found.excess:+.2f} nats per token over what the "
            f"target's own samples have (standard error {found.error:.2f})"
        )
        if fault and found.verdict != "different":
            failures.append(f"{said}: the known fault ({fault}) was not found")
        elif not fault and found.verdict == "different":
            failures.append(f"{said}: that is not the target's distribution")
        elif not fault and found.verdict == "undecided":
            failures.append(f"{said}: too few tokens to tell")
    return failures


def sampling_finding(engine: str, version: str, plain: Sampled, drafted: Sampled) -> str:
    """Lines for the reader."""
    words = {
        "equal": "the target's distribution, as far as this tells",
        "different": "NOT THE TARGET'S DISTRIBUTION",
        "undecided": "undecided, too few tokens",
    }
    known = " (known)" if (engine, version) in SAMPLING_FAULTS else ""
    lines = [f"{engine} {version}, temperature 1, log-likelihood per token under the target"]
    for name, found, mark in (("without", plain, ""), ("with", drafted, known)):
        lines.append(
            f"  {name + ' speculation':20s} {found.likelihood:.2f}, {found.excess:+.3f} over expectation "
            f"(standard error {found.error:.3f}, {found.tokens} tokens): {words[found.verdict]}{mark}"
        )
    return "\n".join(lines)


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
