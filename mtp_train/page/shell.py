"""A page as one HTML file that needs no network: its templates, its style sheet, and the one script it admits.

Knows no content: each package that writes a page extends `shell.html.j2` with a template of its own.
"""

from __future__ import annotations

import base64
import hashlib
from importlib.resources import files
from typing import Any

from jinja2 import ChoiceLoader, Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

HERE = "mtp_train.page"
GENERATOR = '<meta name="generator" content="mtp-train">'  # tells pages of ours from a user's


def render(package: str, name: str, kind: str, **values: Any) -> str:
    """The page that `name`.html.j2 of `package`'s assets makes of `values`; text in them is escaped.

    Args:
        package: module name of the package whose assets hold `name`.html.j2 and, where it needs more than the shared
            script and sheet, `name`.js and `name`.css.
        kind: what the page is, in a word.
        values: what the template names; `title` among them.
    """
    script = asset(HERE, "page.js") + own(package, f"{name}.js")
    return (
        environment(package)
        .get_template(f"{name}.html.j2")
        .render(
            kind=kind,
            generator=Markup(GENERATOR),
            style=asset(HERE, "page.css") + own(package, f"{name}.css"),
            script=script,
            script_digest=content_digest(script),
            **values,
        )
    )


def environment(package: str) -> Environment:
    return Environment(
        loader=ChoiceLoader([PackageLoader(package, "assets"), PackageLoader(HERE, "assets")]),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )


def asset(package: str, name: str) -> Markup:
    """A file of assets/, ours and so not escaped."""
    return Markup((files(package) / "assets" / name).read_text(encoding="utf-8"))


def own(package: str, name: str) -> Markup:
    """What only this page needs; often nothing."""
    there = (files(package) / "assets" / name).is_file()
    return asset(package, name) if there else Markup("")


def content_digest(script: str) -> str:
    """What the page's policy admits: this script and no other, should text of a model ever slip through."""
    return base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
