"""The report as one HTML file that needs no network. Knows what goes where; assets/ knows how it looks."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Mapping, Sequence
from importlib.resources import files
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from mtp_train.report import sections
from mtp_train.report.examples import readable
from mtp_train.report.tables import all_tables
from mtp_train.report.verdict import headline, tiles, title


def page(
    evaluation: Mapping[str, Any], curves: Sequence[Mapping[str, Any]], stages: Mapping[str, float]
) -> str:
    script = asset("page.js")
    return template().render(
        title=title(evaluation),
        headline=headline(evaluation),
        evaluation=evaluation,
        tiles=tiles(evaluation),
        gauges=sections.gauges(evaluation),
        promise=sections.promise(evaluation["validation"]) if "validation" in evaluation else [],
        positions=sections.position_panels(evaluation),
        categories=sections.category_blocks(evaluation),
        speed=sections.speed_rows(evaluation["speed"]) if "speed" in evaluation else {},
        time=sections.time_rows(evaluation["speed"]) if "speed" in evaluation else {},
        curves=sections.curve_panels(evaluation, curves),
        examples=readable(evaluation.get("examples", ())),
        stages=sections.stage_rows(stages) if stages else {},
        tables=all_tables(evaluation, curves, stages),
        style=asset("page.css"),
        script=script,
        script_digest=content_digest(script),
    )


def template() -> Any:
    environment = Environment(
        loader=PackageLoader("mtp_train.report", "assets"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template("page.html.j2")


def asset(name: str) -> Markup:
    """A file of assets/, ours and so not escaped."""
    return Markup((files("mtp_train.report") / "assets" / name).read_text(encoding="utf-8"))


def content_digest(script: str) -> str:
    """What the page's policy admits: this script and no other, should text of a model ever slip through."""
    return base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
