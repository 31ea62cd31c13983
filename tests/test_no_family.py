"""Training, engine, evaluation and export's checks know no head family: a new one is a file in heads/ and an entry."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from mtp_train.heads.families import FAMILIES

ROOT = Path(__file__).parents[1] / "mtp_train"
KNOW_NONE = (
    "batches",
    "engine",
    "evaluate",
    "train",
    "report",
    "export/check.py",
    "export/stage.py",
    "checkpoint",
    "losses",
    "attention",
)
CLASSES = {family.head.__name__ for family in FAMILIES.values()} | {
    family.config.__name__ for family in FAMILIES.values()
}
MODULES = {f"mtp_train.heads.{name}" for name in FAMILIES}


def known_families(source: str) -> list[str]:
    """What a file says of single families: their names as values, their classes, their modules."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Constant) and node.value in FAMILIES:
            found.append(repr(node.value))
        elif isinstance(node, ast.Name) and node.id in CLASSES:
            found.append(node.id)
        elif isinstance(node, ast.ImportFrom) and node.module in MODULES:
            found.append(f"from {node.module}")
        elif isinstance(node, ast.Call) and getattr(node.func, "id", "") == "isinstance":
            kinds = ast.unparse(node.args[1])
            found += [f"isinstance of {kinds}"] if "Head" in kinds else []
    return found


def files() -> list[Path]:
    found: list[Path] = []
    for place in KNOW_NONE:
        path = ROOT / place
        found += [path] if path.suffix else sorted(path.rglob("*.py"))
    return found


@pytest.mark.parametrize("path", files(), ids=lambda path: str(path.relative_to(ROOT)))
def test_a_file_names_no_family(path: Path) -> None:
    assert not known_families(path.read_text(encoding="utf-8"))


@pytest.mark.parametrize(
    "line",
    [
        'head.family == "eagle3"',
        "isinstance(head, MtpHead)",
        "isinstance(head, ChainHead)",
        "from mtp_train.heads.medusa import anything",
        "DFlashConfig()",
    ],
)
def test_the_search_finds_one(line: str) -> None:
    assert known_families(line)
