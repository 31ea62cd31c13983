"""What an evaluation says in a sentence and in four figures. Knows no format of output."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

from mtp_train.page.figures import count, figure, times
from mtp_train.report.measures import Measure, counts_all_steps, overall, timed


@dataclass(frozen=True)
class Setting:
    """A headline figure's value on one prompt set, with its interval (or nothing) and its n."""

    name: str
    style: str
    value: str
    certainty: str


@dataclass(frozen=True)
class Tile:
    """One headline figure: `sets` tell it per prompt set, `lines` its n and what it should be seen beside."""

    name: str
    value: str
    unit: str
    lines: tuple[str, ...] = ()
    sets: tuple[Setting, ...] = ()
    state: str = "plain"  # plain, good or bad
    gauge: str | None = None  # tau or first: which scale it can be drawn on


def title(evaluation: Mapping[str, Any]) -> str:
    target, head = evaluation["target"], evaluation["head"]
    return f"{head['family']} draft head for {PurePath(target['path']).name}"


def headline(evaluation: Mapping[str, Any]) -> str:
    """The result in one sentence, in-domain and greedy; what was not measured is not mentioned."""
    first, *_ = overall(evaluation, "greedy")
    per_step = first.values.get("tokens_per_step", first.values["tau"])
    said = [
        f"On {first.set_name} prompts each step of the target yields "
        f"{figure(per_step, 2)} tokens at k = {evaluation['k']}"
    ]
    if clause := speed_said(evaluation):
        said.append(clause)
    if "lossless" in evaluation:
        same = "the same, token for token" if is_equal(evaluation["lossless"]) else "not the same"
        said.append(f"greedy output is {same}")
    return said[0] + "".join(", " + part for part in said[1:-1]) + joined_last(said) + "."


def joined_last(said: Sequence[str]) -> str:
    return f", and {said[-1]}" if len(said) > 1 else ""


def tiles(evaluation: Mapping[str, Any]) -> list[Tile]:
    """Tau, first-position acceptance, speed and losslessness, as far as they were measured."""
    greedy = overall(evaluation, "greedy")
    found = [tau_tile(greedy), first_tile(greedy)]
    if counts_all_steps(evaluation):
        found.insert(1, per_step_tile(greedy))
    if "speed" in evaluation:
        found.append(speed_tile(evaluation))
    if "lossless" in evaluation:
        found.append(lossless_tile(evaluation["lossless"]))
    return found


TOLD_SETS = 3  # prompt sets in a tile; the rest stand in their own section


def tau_tile(greedy: Sequence[Measure]) -> Tile:
    sets = tuple(setting(m, m.values["tau"], m.values.get("tau_ci")) for m in greedy[:TOLD_SETS])
    name, unit = "Mean acceptance length", "tau, tokens per step"
    return Tile(name, sets[0].value, unit, more_sets(greedy), sets, gauge="tau")


def per_step_tile(greedy: Sequence[Measure]) -> Tile:
    sets = tuple(
        setting(m, m.values["tokens_per_step"], m.values["tokens_per_step_ci"])
        for m in greedy[:TOLD_SETS]
        if "tokens_per_step" in m.values
    )
    name, unit = "Tokens per step", "over all steps, those without drafts too"
    return Tile(name, sets[0].value, unit, more_sets(greedy), sets)


def first_tile(greedy: Sequence[Measure]) -> Tile:
    sets = tuple(setting(m, m.first, m.first_interval) for m in greedy[:TOLD_SETS])
    name, unit = "First-position acceptance", "of first drafts accepted"
    return Tile(name, sets[0].value, unit, more_sets(greedy), sets, gauge="first")


def more_sets(greedy: Sequence[Measure]) -> tuple[str, ...]:
    rest = len(greedy) - TOLD_SETS
    return (f"{rest} more below",) if rest > 0 else ()


def setting(measure: Measure, value: float, bounds: Sequence[float] | None) -> Setting:
    certainty = f"{count(measure.values['prompts'])} prompts"
    if bounds:
        certainty = f"95 % {figure(bounds[0], 2)} to {figure(bounds[1], 2)}, {certainty}"
    return Setting(measure.set_name, measure.style, figure(value, 2), certainty)


NOT_MEASURABLE = "not measurable here"


def served_k(evaluation: Mapping[str, Any]) -> str | None:
    """The timed k that is recommended at the timed batch size, or the nearest below it; None: plain decoding is."""
    runs, speed = evaluation["speed"]["speculative"], evaluation["speed"]
    recommended = evaluation.get("speed_model", {}).get("recommended", {})
    best = recommended.get(str(speed["batch"]), evaluation["k"])
    if best == 0:
        return None
    return max((k for k in runs if int(k) <= best), key=int, default=min(runs, key=int))


def speed_said(evaluation: Mapping[str, Any]) -> str:
    """The speed in a clause, of the recommended k; empty where none was timed."""
    if not evaluation.get("speed", {}).get("speculative"):
        return ""
    k = served_k(evaluation)
    if k is None:
        return "decoding is not faster with any k"
    run = evaluation["speed"]["speculative"][k]
    if run.get("warnings"):
        return f"its speed is {NOT_MEASURABLE}"
    return f"decoding is {times(run['ratio'])} as fast as without the head at k = {k}"


def speed_tile(evaluation: Mapping[str, Any]) -> Tile:
    speed, k = evaluation["speed"], served_k(evaluation)
    how = timed(speed)
    if k is None:
        return Tile("Speed", "1.00\N{MULTIPLICATION SIGN}", "plain decoding is best", (how,))
    run = speed["speculative"][k]
    if warned := tuple(run.get("warnings", ())):
        return Tile("Speed", "?", NOT_MEASURABLE, (f"k = {k}: {warned[0]}", *warned[1:], how))
    rates = (figure(one["tokens_per_s"], 1) for one in (run, speed["plain"]))
    lines = [f"k = {k}: {' against '.join(rates)} tokens/s", how]
    if "ratio_ci" in run:
        low, high = (figure(bound, 2) for bound in run["ratio_ci"])
        lines.insert(1, f"95 % {low} to {high}; by processor time {times(run['cpu_ratio'])}")
    state = "good" if run["ratio"] > 1 else "bad"
    return Tile(
        "Speed", times(run["ratio"]), "as fast as plain decoding", tuple(lines), state=state
    )


def is_equal(comparison: Mapping[str, Any]) -> bool:
    """Every prompt equal, or tied within rounding where it parts."""
    explained = comparison["equal"] + len(comparison.get("ties", ()))
    return not comparison.get("different") and explained == comparison["prompts"]


def lossless_tile(lossless: Mapping[str, Any]) -> Tile:
    good = is_equal(lossless)
    unit = "greedy output is unchanged" if good else "greedy output changes"
    lines = [f"equal to plain decoding: {tally(lossless)}"]
    lines.append(f"n = {count(lossless['tokens'])} tokens, {lossless['dtype']}")
    if "transformers" in lossless:
        lines.append(f"plain decoding equal to transformers: {tally(lossless['transformers'])}")
    state = "good" if good else "bad"
    return Tile("Lossless", "Yes" if good else "No", unit, tuple(lines), state=state)


def tally(found: Mapping[str, Any]) -> str:
    """`63 of 64 prompts, 1 tied within rounding`."""
    ties, different = len(found.get("ties", ())), len(found.get("different", ()))
    text = f"{count(found['equal'])} of {count(found['prompts'])} prompts"
    if ties:
        text += f", {ties} tied within rounding"
    return text + (f", {different} different" if different else "")
