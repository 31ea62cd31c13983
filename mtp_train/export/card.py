"""An export's README.md: what it is, how engines serve it, what was measured. Knows no layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mtp_train.core.provenance import versions
from mtp_train.export.layout import Layout
from mtp_train.models.target import Target

DRAFTS = 3  # of the commands where nothing was measured


def model_card(
    config: Any, target: Target, layout: Layout, figures: dict[str, Any], out: Path
) -> str:
    """README.md of the folder `out`.

    config: the head's.
    figures: the evaluation's, of its held-out prompts; empty if there is none.
    """
    greedy = figures.get("greedy")
    drafts = len(greedy["per_position"]) if greedy else DRAFTS
    folder = str(target.path.resolve()) if target.path else "TARGET"
    libraries = ", ".join(f"{key} {value}" for key, value in versions().items())
    engines = "\n\n".join(
        f"## {item.engine} ({item.version}, {'tried' if item.seen else 'from its source, not run'})"
        f"\n\n{item.how}"
        for item in layout.serving(config, folder, str(out.resolve()), drafts)
    )
    words = ", ".join(f"`{word}`" for word in layout.forbidden)
    path = (
        f"\n\nThe head's path must not contain {words}: vLLM would take another method."
        if words
        else ""
    )
    return f"""---
license: other # that of the target's weights and of your training data: fill it in
license_name:
license_link:
base_model: {target.path.name if target.path else "TARGET"}
tags: [speculative-decoding, {layout.family}]
---

# Draft head for {target.path.name if target.path else "the target"}

A head of family {layout.family} in the {layout.name} layout. It drafts for one target only: the weights that
mtp_train's `target_hash` calls `{target.hash}`, its quantisation {target.quantisation}.
It has no tokenizer: that is the target's.

{_measured(greedy)}

{engines}{path}

Written by {libraries}. The licence is that of the target's weights and of your training data.
"""


def _measured(greedy: dict[str, Any] | None) -> str:
    if not greedy:
        return "Acceptance was not measured before this export."
    positions = " / ".join(f"{value:.3f}" for value in greedy["per_position"])
    return (
        f"Measured in mtp_train's engine, greedy, k = {len(greedy['per_position'])}, "
        f"{greedy['prompts']} held-out prompts: "
        f"tau {greedy['tau']:.3f}, acceptance per position {positions}. "
        "Which k is fastest depends on the machine: the run's report compares them at batch 1."
    )
