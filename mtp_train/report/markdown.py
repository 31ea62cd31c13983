"""The report as Markdown: for a diff, a pull request or a terminal. Every figure of the evaluation is in it.

Knows no HTML. The examples are left to the page, which can colour them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mtp_train.page.table import Row, Table
from mtp_train.report import comparison as told
from mtp_train.report.tables import all_tables
from mtp_train.report.verdict import Tile, headline, tiles, title


def markdown(
    evaluation: Mapping[str, Any], curves: Sequence[Mapping[str, Any]], stages: Mapping[str, float]
) -> str:
    head = [f"# {cell(title(evaluation))}", cell(headline(evaluation))]
    verdicts = "\n".join(bullet(tile) for tile in tiles(evaluation))
    tables = [section(table) for table in all_tables(evaluation, curves, stages).values()]
    return "\n\n".join([*head, verdicts, *tables]) + "\n"


def comparison_markdown(
    comparison: Mapping[str, Any], evaluations: Sequence[Mapping[str, Any]]
) -> str:
    said = [*told.findings(comparison), *told.warnings(comparison)]
    runs = [f"{run.letter}: {run.name}" for run in told.compared(comparison)]
    head = [f"# {cell(told.title(comparison))}", bullets(said), bullets(runs)]
    tables = told.all_tables(comparison, evaluations).values()
    return "\n\n".join([*head, *map(section, tables)]) + "\n"


def bullets(lines: Sequence[str]) -> str:
    return "\n".join(f"- {cell(line)}" for line in lines)


def bullet(tile: Tile) -> str:
    sets = (f"{one.name} {one.value} ({one.certainty})" for one in tile.sets)
    rest = "; ".join((f"({tile.unit})", *sets, *tile.lines))
    return f"- **{cell(tile.name)}: {cell(tile.value)}** {cell(rest)}"


def section(table: Table) -> str:
    rule = ["---"] * table.labels + ["---:"] * (len(table.header) - table.labels)
    lines = [row_of(table.header), "| " + " | ".join(rule) + " |", *map(row_of, table.rows)]
    note = f"\n\n{cell(table.note)}" if table.note else ""
    return f"## {table.title}\n\n" + "\n".join(lines) + note


def row_of(row: Row) -> str:
    return "| " + " | ".join(map(cell, row)) + " |"


def cell(text: str) -> str:
    """Text that can neither end a cell nor become a tag, a link or an emphasis, whoever wrote it."""
    flat = " ".join(text.split())
    flat = flat.replace("&", "&amp;").replace("<", "&lt;")
    flat = "".join("\\" + sign if sign in "\\`*|" else sign for sign in flat)
    return flat.replace("](", "\\](")
