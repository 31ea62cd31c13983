"""A sweep's jobs in order of their metric, and means over seeds: for the terminal, as Markdown and as JSON.

Knows neither how jobs run nor where their figures come from.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from rich.console import Console
from rich.table import Table

from mtp_train.losses.terms import TERMS

SEED = "train.seed"
DONE, FAILED, WAITING = "done", "failed", "waiting"
BESIDE = ("kl/1", "alpha/1", "agree/1", "tau_teacher_forced")  # shown whatever the metric is


@dataclass(frozen=True)
class Row:
    """One job.

    Attributes:
        swept: its values of the swept keys.
        folder: its run folder's name.
        status: done, failed or waiting.
        error: why it failed.
        seconds: of its work; of training, that of the steps.
        figures: what was measured, by name; none unless it is done.
    """

    swept: dict[str, str]
    folder: str
    status: str = WAITING
    error: str = ""
    seconds: float = math.nan
    figures: dict[str, float] = field(default_factory=dict)

    def figure(self, name: str) -> float:
        return self.figures.get(name, math.nan)


@dataclass(frozen=True)
class Group:
    """Jobs that differ in their seed alone.

    Attributes:
        swept: what they share.
        jobs, done: how many there are, and how many of them have the metric.
        mean, least, most: of the metric.
        standard_error: of the mean; NaN for fewer than two jobs.
    """

    swept: dict[str, str]
    jobs: int
    done: int
    mean: float
    least: float
    most: float
    standard_error: float


@dataclass(frozen=True)
class Report:
    """A sweep as it stands.

    Attributes:
        stage: which stage's sweep it is.
        metric: the figure that jobs are sorted by.
        shown: other figures that have a column, where any job has them.
    """

    stage: str
    metric: str
    rows: tuple[Row, ...]
    shown: tuple[str, ...] = ()

    @property
    def ranked(self) -> list[Row]:
        """Best first; jobs without the metric last, in their own order."""
        return sorted(self.rows, key=lambda row: _order(row.figure(self.metric), self.metric))

    @property
    def groups(self) -> list[Group]:
        """Best mean first; none unless several seeds were swept."""
        if SEED not in self.varied:
            return []
        members: dict[tuple[str, ...], list[Row]] = {}
        for row in self.rows:
            key = tuple(value for name, value in row.swept.items() if name != SEED)
            members.setdefault(key, []).append(row)
        found = [_group(rows, self.metric) for rows in members.values()]
        return sorted(found, key=lambda group: _order(group.mean, self.metric))

    @property
    def varied(self) -> list[str]:
        """The keys of which the jobs have different values."""
        first = self.rows[0].swept
        return [key for key in first if len({row.swept[key] for row in self.rows}) > 1]

    def tables(self) -> list[tuple[str, list[str], list[list[str]]]]:
        """Title, header and cells of what is shown."""
        jobs = (f"{self.stage}: {len(self.rows)} jobs, {self._rule}", *self._jobs())
        return [jobs, ("over seeds", *self._seeds())] if self.groups else [jobs]

    @property
    def _rule(self) -> str:
        return (
            f"best {self.metric} first ({'lower' if is_loss(self.metric) else 'higher'} is better)"
        )

    def _jobs(self) -> tuple[list[str], list[list[str]]]:
        beside = [
            name
            for name in dict.fromkeys((*self.shown, *BESIDE))
            if name != self.metric and any(name in row.figures for row in self.rows)
        ]
        cells = [
            [row.swept[key] for key in self.varied]
            + [_number(row.figure(name)) for name in (self.metric, *beside)]
            + [_number(row.seconds, 1), row.status]
            for row in self.ranked
        ]
        return [*self.varied, self.metric, *beside, "seconds", "status"], cells

    def _seeds(self) -> tuple[list[str], list[list[str]]]:
        keys = [key for key in self.varied if key != SEED]
        cells = [
            [group.swept[key] for key in keys]
            + [f"{group.done} of {group.jobs}"]
            + [_number(value) for value in (group.mean, group.least, group.most)]
            + [_number(group.standard_error)]
            for group in self.groups
        ]
        return [*keys, "seeds", f"{self.metric} mean", "least", "most", "standard error"], cells

    @property
    def errors(self) -> list[str]:
        return [f"{row.folder}: {row.error}" for row in self.rows if row.error]

    def write(self, console: Console) -> None:
        """Show it in a terminal."""
        for title, header, cells in self.tables():
            table = Table(*header, title=title, title_justify="left")
            for line in cells:
                table.add_row(*line)
            console.print(table)
        for error in self.errors:
            console.print(error)

    def markdown(self) -> str:
        """The same as Markdown."""
        parts = [
            f"{title}\n\n"
            + "\n".join(_line(row) for row in (header, ["---"] * len(header), *cells))
            for title, header, cells in self.tables()
        ]
        parts += ["\n".join(f"- {error}" for error in self.errors)] if self.errors else []
        return "\n\n".join(parts) + "\n"

    def as_dict(self) -> dict[str, Any]:
        """All figures, jobs and groups best first; what isn't finite is null."""
        return {
            "format": 1,
            "stage": self.stage,
            "metric": self.metric,
            "better": "lower" if is_loss(self.metric) else "higher",
            "jobs": [_finite(asdict(row)) for row in self.ranked],
            "over_seeds": [_finite(asdict(group)) for group in self.groups],
        }


def is_loss(metric: str) -> bool:
    """Whether less is better: the loss terms; acceptance, agreement and tau are better the higher they are."""
    return metric.split("/")[0] in TERMS


def _order(value: float, metric: str) -> tuple[bool, float]:
    finite = math.isfinite(value)
    return not finite, (value if is_loss(metric) else -value) if finite else 0.0


def _group(rows: Sequence[Row], metric: str) -> Group:
    values = [row.figure(metric) for row in rows if math.isfinite(row.figure(metric))]
    error = statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.nan
    mean = statistics.fmean(values) if values else math.nan
    return Group(
        swept={key: value for key, value in rows[0].swept.items() if key != SEED},
        jobs=len(rows),
        done=len(values),
        mean=mean,
        least=min(values, default=math.nan),
        most=max(values, default=math.nan),
        standard_error=error,
    )


def _number(value: float, digits: int = 4) -> str:
    return f"{value:.{digits}f}" if math.isfinite(value) else "-"


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value
