"""The report as one HTML file that needs no network. Knows what goes where; page/ knows how it looks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mtp_train.page.shell import render
from mtp_train.report import sections
from mtp_train.report.examples import TAGS, readable
from mtp_train.report.measures import timed
from mtp_train.report.slices import cut_views, grid_panels
from mtp_train.report.speed_model import model_view
from mtp_train.report.tables import all_tables
from mtp_train.report.verdict import headline, tiles, title


def page(
    evaluation: Mapping[str, Any], curves: Sequence[Mapping[str, Any]], stages: Mapping[str, float]
) -> str:
    return render(
        "mtp_train.report",
        "report",
        "report",
        title=title(evaluation),
        headline=headline(evaluation),
        evaluation=evaluation,
        tiles=tiles(evaluation),
        gauges=sections.gauges(evaluation),
        promise=sections.promise(evaluation["validation"]) if "validation" in evaluation else [],
        positions=sections.position_panels(evaluation),
        cuts=cut_views(evaluation),
        grid_panels=grid_panels(evaluation),
        categories=sections.category_blocks(evaluation),
        speed=sections.speed_rows(evaluation["speed"]) if "speed" in evaluation else {},
        timed=timed,
        time=sections.time_rows(evaluation["speed"]) if "speed" in evaluation else {},
        model=model_view(evaluation["speed_model"]) if "speed_model" in evaluation else {},
        curves=sections.curve_panels(evaluation, curves),
        examples=readable(evaluation.get("examples", ())),
        tags=TAGS,
        stages=sections.stage_rows(stages) if stages else {},
        tables=all_tables(evaluation, curves, stages),
    )
