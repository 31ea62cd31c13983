"""Write what `mtp-train plan` computes into the README.md of every recipe that has its target's dimensions.

    python tools/plan_recipes.py

A recipe whose target's type or head family isn't there yet is passed over, and says so.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

from mtp_train.cli.job import Job
from mtp_train.cli.plan import Outlook, duration
from mtp_train.core.errors import UserError
from mtp_train.precompute.estimate import CODEC_RATIO, PlanConfig, Workload, readable

RECIPES = Path(__file__).resolve().parents[1] / "recipes"
BLOCK = re.compile(r"(?<=<!-- plan -->\n).*?(?=<!-- /plan -->)", re.DOTALL)


def main() -> int:
    for readme in sorted(RECIPES.glob("*/README.md")):
        try:
            table = plan_table(readme.parent.name)
        except UserError as error:
            print(f"{readme.parent.name}: passed over, {error}", file=sys.stderr)
            continue
        text = readme.read_text(encoding="utf-8")
        readme.write_text(table.join(BLOCK.split(text, maxsplit=1)), encoding="utf-8")
        print(f"{readme.parent.name}: written")
    return 0


def plan_table(name: str) -> str:
    """What the plan of a recipe says, in Markdown; nothing in it is measured."""
    folder = RECIPES / name
    draft = [f"head.path={folder / 'draft'}"] if (folder / "draft").is_dir() else []
    job = Job([f"recipe={name}", f"target.path={folder / 'target'}", *draft])
    plan: PlanConfig = job.section("plan", PlanConfig)
    outlook = Outlook(job, plan, [Workload("train", 0, plan.tokens)], plan.ranks)
    rows = [
        (f"disk, {codec}" + (", chosen" if codec == outlook.kept else ""), outlook.disk(codec))
        for codec in CODEC_RATIO
    ]
    lines = [f"| {what} | {readable(size)} | {', '.join(outlook.states)} |" for what, size in rows]
    for stage, parts in outlook.memory().items():
        each = ", ".join(f"{part} {readable(size)}" for part, size in parts.items())
        lines.append(f"| memory per rank, {stage} | {readable(sum(parts.values()))} | {each} |")
    for stage, hours in outlook.assumed_hours().items():
        how = (
            f"if each of {plan.ranks} ranks does {plan.tflops:g} TFLOP/s, an assumption; matrix products of the "
            "weights alone (of all experts), without attention's own, validation and the disk"
        )
        lines.append(f"| time, {stage} | {duration(hours)} | {how} |")
    head = f"| {plan.tokens:,} tokens, {plan.ranks} ranks | computed, not measured | of which |"
    return "\n".join([head, "|---|---|---|", *lines, ""])


if __name__ == "__main__":
    sys.exit(main())
