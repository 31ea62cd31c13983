"""The head with the highest measured acceptance, beside the resumable checkpoints and never pruned with them.

`best/` has the form of `head/`; its card says the step and what was measured. The card is also the memory: a resumed
run holds its measurements against it, so that a run that was killed ends with the best of an unbroken one.
Knows no engine.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mtp_train.checkpoint.heads import CARD, HeadCard, read_card, save_checkpoint
from mtp_train.core.owned import set_aside
from mtp_train.core.progress import say
from mtp_train.heads.base import DraftHead

BEST = "best"
MEASURED_BY = ("prompts", "drafts", "max_new_tokens")


def keep_best(out: Path, head: DraftHead, card: HeadCard) -> bool:
    """Write `out/best` if the card's measured tau is above that of the one there; a tie keeps the earlier.

    One that was measured otherwise (other prompts, drafts or lengths) can't be compared, and is set aside.
    """
    folder = out / BEST
    if (folder / CARD).is_file():
        there = read_card(folder)
        if _measured_by(there) != _measured_by(card):
            say(f"train: {BEST} was measured otherwise; it is kept as {set_aside(folder)}")
        elif there.measured["tau"] >= card.measured["tau"]:
            return False
    save_checkpoint(folder, head, card)
    return True


def _measured_by(card: HeadCard) -> dict[str, Any]:
    return {name: card.config.get("online_eval", {}).get(name) for name in MEASURED_BY}


def forget_best(out: Path) -> None:
    """A run that begins anew has no best yet; one that lies there is of steps that are taken again: set aside."""
    if (out / BEST / CARD).is_file():
        say(f"train: the best head of an earlier start is kept as {set_aside(out / BEST)}")
