"""An evaluation read as a list of measurements, with the names that people read.

Knows no format of output. Input is the evaluate stage's JSON; what it leaves out is left out here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

SET_NAMES = {"heldout": "held-out", "ood": "out of domain"}
SET_STYLES = {"heldout": "held", "ood": "ood"}
MODES = ("greedy", "sampled")
MODE_STYLES = {"greedy": "solid", "sampled": "hollow"}
PART_STYLES = {
    "target": "p0",
    "head": "p1",
    "lm_head of the head": "p2",
    "sampling": "p3",
    "verification": "p3",
}
PART_NAMES = {"sampling": "verification and sampling"}
OWN = "CPU: Python of the engine"  # wall time that no named part accounts for


def counts_all_steps(evaluation: Mapping[str, Any]) -> bool:
    """Whether tau does not tell tokens per step by itself: it counts the steps that drafted, and trees are set beside
    chains.
    """
    return evaluation.get("scheme", {}).get("kind", "chain") != "chain" or any(
        whole.get("steps", whole["drafts"]) != whole["drafts"]
        for modes in evaluation["sets"].values()
        for whole in modes.values()
    )


@dataclass(frozen=True)
class Measure:
    """Acceptance on one prompt set, at one temperature, of one category or (None) of all."""

    set: str
    mode: str
    category: str | None
    values: Mapping[str, Any]

    @property
    def set_name(self) -> str:
        return SET_NAMES.get(self.set, self.set)

    @property
    def style(self) -> str:
        return SET_STYLES.get(self.set, "other")

    @property
    def mode_name(self) -> str:
        temperature = self.values["temperature"]
        return "greedy" if temperature == 0 else f"temperature {temperature:g}"

    @property
    def mode_title(self) -> str:
        return (
            "Greedy (temperature 0)" if self.mode_name == "greedy" else self.mode_name.capitalize()
        )

    @property
    def first(self) -> float:
        return float(self.values["per_position"][0])

    @property
    def first_interval(self) -> list[float] | None:
        bounds = self.values.get("per_position_ci")
        return bounds[0] if bounds else None


def measures(evaluation: Mapping[str, Any]) -> list[Measure]:
    """Every set at every temperature, each followed by its categories if it has several; the held-out set leads."""
    sets, found = evaluation["sets"], []
    for name in [
        *(name for name in SET_NAMES if name in sets),
        *sorted(sets.keys() - SET_NAMES.keys()),
    ]:
        modes = sets[name]
        for mode in (mode for mode in MODES if mode in modes):
            whole = modes[mode]
            found.append(Measure(name, mode, None, whole))
            categories = whole.get("categories", {})
            for category, values in categories.items() if len(categories) > 1 else ():
                values = {"temperature": whole["temperature"]} | values
                found.append(Measure(name, mode, category, values))
    return found


def overall(evaluation: Mapping[str, Any], mode: str) -> list[Measure]:
    """The prompt sets as wholes, at one temperature."""
    return [m for m in measures(evaluation) if m.mode == mode and m.category is None]


def overall_all(evaluation: Mapping[str, Any]) -> list[Measure]:
    """The prompt sets as wholes, at every temperature."""
    return [m for m in measures(evaluation) if m.category is None]


def runs(speed: Mapping[str, Any]) -> list[tuple[str, Mapping[str, Any]]]:
    """Plain decoding first, then each k, with the names of their rows."""
    speculative = sorted(speed["speculative"].items(), key=lambda item: int(item[0]))
    return [("plain decoding", speed["plain"])] + [(f"k = {k}", run) for k, run in speculative]


def timed(speed: Mapping[str, Any]) -> str:
    """What the speed was timed on: `Batch 1, 4 prompts, medians of 3 rounds in shuffled order`."""
    rounds = speed.get("rounds")
    how = f"medians of {rounds} rounds in shuffled order" if rounds else "one run each"
    return f"Batch {speed['batch']:,}, {speed['prompts']:,} prompts, {how}"


def parts(run: Mapping[str, Any]) -> dict[str, float]:
    """Seconds per named part in a fixed order, and the rest of the wall time as the engine's own Python."""
    seconds = run.get("seconds", {})
    order = [name for name in PART_STYLES if name in seconds]
    order += [name for name in seconds if name not in PART_STYLES]
    own = max(0.0, run["wall"] - sum(seconds.values()))
    return {PART_NAMES.get(name, name): float(seconds[name]) for name in order} | {OWN: own}


def part_style(name: str) -> str:
    styles = PART_STYLES | {PART_NAMES[part]: PART_STYLES[part] for part in PART_NAMES}
    return styles.get(name, "p4" if name == OWN else "p5")


def comparisons(lossless: Mapping[str, Any]) -> list[tuple[str, Mapping[str, Any]]]:
    """The two proofs of equality, by the names of their rows."""
    found = [("speculative = plain", lossless)]
    other = lossless.get("transformers")
    return found + ([("plain = transformers", other)] if other else [])
