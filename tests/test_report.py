"""The report's three files, from a made-up evaluation (no figure here was measured)."""

from __future__ import annotations

import base64
import copy
import hashlib
import json
import math
import random
import re
from html.parser import HTMLParser
from itertools import pairwise
from typing import Any

import pytest
from report_samples import NAMES, comparison, enriched, many_sets

from mtp_train.core.errors import UserError
from mtp_train.page.figures import anything, rounded
from mtp_train.page.scale import fit, whole_steps
from mtp_train.report.comparison import all_tables, findings, pairs, warnings
from mtp_train.report.comparison_page import comparison_page
from mtp_train.report.curves import thin, trailing_mean
from mtp_train.report.markdown import cell, comparison_markdown, markdown
from mtp_train.report.page import page
from mtp_train.report.places import NAME_GAP, Place, Point, Series, place_chart, spaced
from mtp_train.report.slices import cut_views, grid_panels
from mtp_train.report.speed_model import advice, predicted_table
from mtp_train.report.stage import write_comparison, write_report
from mtp_train.report.tables import all_tables as report_tables
from mtp_train.report.verdict import headline, lossless_tile, tiles

HOSTILE = "<script>alert('owned')</script><img src=x onerror=alert(1)>"
CATEGORIES = {
    "heldout": {
        "how_to": 0.50,
        "summary": 0.56,
        "word_problem": 0.47,
        "rewrite": 0.44,
        "list": 0.41,
    },
    "ood": {"code": 0.31, "dialogue": 0.24, "translation": 0.17},
}
STAGES = {
    "regenerate": 171.4,
    "precompute": 48.9,
    "train": 402.7,
    "evaluate": 133.2,
    "report": 0.8,
    "export": 6.3,
}


def simulate(rng: random.Random, chance: float, prompts: int) -> tuple[list[list[int]], int]:
    """Accepted drafts per step of each prompt, and the number of tokens that they yield."""
    steps = []
    for _ in range(prompts):
        own = min(0.9, max(0.05, rng.gauss(chance, 0.06)))
        chances = own, own * 0.98, own * 1.02
        steps.append([accepted(rng, chances) for _ in range(rng.randint(40, 75))])
    return steps, sum(len(one) + sum(one) for one in steps)


def accepted(rng: random.Random, chances: tuple[float, ...]) -> int:
    return next((i for i, chance in enumerate(chances) if rng.random() > chance), len(chances))


def measured(steps: list[list[int]], tokens: int) -> dict[str, Any]:
    every = [one for prompt in steps for one in prompt]
    n = len(every)
    reached = [sum(one > i for one in every) for i in range(3)]
    shares = [count / n for count in reached]
    spread = [1.5 * 1.96 * math.sqrt(share * (1 - share) / n) for share in shares]
    wide = 1.5 * 1.96 * 1.1 / math.sqrt(n)  # prompts differ: resampling them gives more
    tau = 1 + sum(every) / n
    return {
        "prompts": len(steps),
        "tokens": tokens,
        "drafts": n,
        "tau": tau,
        "tau_ci": [tau - wide, tau + wide],
        "tau_macro": sum(1 + sum(one) / len(one) for one in steps) / len(steps),
        "acceptance_rate": sum(every) / (3 * n),
        "per_position": shares,
        "per_position_ci": [
            [max(0.0, share - half), share + half]
            for share, half in zip(shares, spread, strict=True)
        ],
        "conditional": [now / before for now, before in zip(reached, [n, *reached], strict=False)],
    }


def acceptance(rng: random.Random, chances: dict[str, float], temperature: float) -> dict[str, Any]:
    penalty = 0.05 * temperature
    found = {
        name: simulate(rng, chance - penalty, 5 + len(name)) for name, chance in chances.items()
    }
    whole = [prompt for steps, _ in found.values() for prompt in steps]
    return {
        "temperature": temperature,
        **measured(whole, sum(tokens for _, tokens in found.values())),
        "categories": {name: measured(*each) for name, each in found.items()},
    }


def evaluation() -> dict[str, Any]:
    rng = random.Random(20)
    sets = {
        name: {"greedy": acceptance(rng, chances, 0.0), "sampled": acceptance(rng, chances, 1.0)}
        for name, chances in CATEGORIES.items()
    }
    return {
        "format": 1,
        "target": {
            "path": "models/made-up-135M-Instruct",
            "hash": "5af571cbf074e6d2",
            "hidden_size": 576,
            "vocab_size": 49152,
            "layers": 30,
        },
        "head": {"family": "mtp", "parameters": 4207104, "step": 960, "sha256": "9b1c" * 16},
        "versions": {
            "mtp_train": "0.1.0",
            "python": "3.11.2",
            "torch": "2.13.0+cpu",
            "transformers": "5.24.0",
        },
        "data_digest": "0011223344556677",
        "command": "mtp-train evaluate run=runs/made-up engine.k=3",
        "machine": {"cpu": "Made-up CPU 2.9 GHz", "threads": 2, "device": "cpu"},
        "k": 3,
        "dtype": "bfloat16",
        "max_new_tokens": 128,
        "sets": sets,
        "validation": {
            "training": {"kl/1": 1.28411, "alpha/1": 0.44872, "agree/1": 0.51263},
            "engine": {"kl/1": 1.28437, "alpha/1": 0.44861, "agree/1": 0.51235},
        },
        "lossless": lossless(),
        "speed": speed(),
        "examples": examples(),
    }


def lossless() -> dict[str, Any]:
    return {
        "dtype": "float32",
        "prompts": 64,
        "tokens": 7013,
        "equal": 63,
        "ties": [{"key": "heldout/17", "position": 88, "gap": 1.9e-06}],
        "different": [],
        "transformers": {"prompts": 8, "equal": 8, "ties": [], "different": []},
    }


def speed() -> dict[str, Any]:
    plain = timed(66.03, 796, {"target": 58.41, "sampling": 2.37})
    parts = ("target", "head", "lm_head of the head", "sampling")
    spent = {
        1: (1.44, (43.2, 3.1, 4.6, 3.05)),
        2: (1.66, (36.4, 4.5, 7.6, 3.31)),
        3: (1.81, (34.2, 6.3, 9.6, 3.44)),
    }
    speculative = {}
    for k, (tau, seconds) in spent.items():
        run = timed(
            sum(seconds) + 2.1 + k / 2, round(796 / tau), dict(zip(parts, seconds, strict=True))
        )
        ratio = run["tokens_per_s"] / plain["tokens_per_s"]
        speculative[str(k)] = run | {"tau": tau, "ratio": ratio}
    return {"batch": 1, "prompts": 8, "plain": plain, "speculative": speculative}


def timed(wall: float, steps: int, seconds: dict[str, float]) -> dict[str, Any]:
    rate = 804 / wall
    return {"tokens_per_s": rate, "wall": wall, "tokens": 804, "steps": steps, "seconds": seconds}


def examples() -> list[dict[str, Any]]:
    said = (
        "t:To|a: clean|t: a|r: cast|t: wooden|a: cutting board|r:,\n|t::|t:\n|a:\n1.|t: Rinse|a: it with|r: the"
        "|t: warm|a: water.|t:\n|a:2.|t: Rub|a: the|r: wood|t: surface|a: with a|t: coarse|a: salt|r:.\n"
        "|t: and|a: half a|t: lemon|a:.\n|t:3.|a: Let it|t: rest|r: for|t:,|a: then|t: wipe|a: it|t: dry|a:."
    )
    kinds = {"t": "target", "a": "accepted", "r": "rejected"}
    cut = [piece.split(":", 1) for piece in said.split("|")]
    board = [{"text": text, "kind": kinds[kind]} for kind, text in cut]
    bus = [
        {"text": "The bus", "kind": "accepted"},
        {"text": " leaves", "kind": "target"},
        {"text": " at 9", "kind": "rejected"},
        {"text": " every 20 minutes, so", "kind": "accepted"},
        {"text": " 3", "kind": "target"},
        {"text": " buses leave in an hour.", "kind": "accepted"},
    ]
    return [
        {
            "key": "heldout/3",
            "category": "how_to",
            "prompt": "How do I clean a cutting board?",
            "segments": board,
        },
        {
            "key": "heldout/9",
            "category": "word_problem",
            "prompt": "A bus leaves every\n  20 minutes.",
            "segments": bus,
        },
    ]


def curves() -> list[dict[str, Any]]:
    rng, rows = random.Random(4), []
    for step in range(1, 961):
        warm = 1 - math.exp(-step / 260)
        rows.append(
            {
                "step": step,
                "loss": 4.6 - 2.4 * warm + rng.gauss(0, 0.14),
                "gradient_norm": 1.1 + rng.random(),
                "learning_rate": 1e-3 * (1 + math.cos(math.pi * step / 960)) / 2,
                "seconds": 0.37 + rng.random() / 20,
            }
        )
        if step % 60 == 0:
            rows.append({"step": step, "validation": validated(warm)})
    return rows


def validated(warm: float) -> dict[str, float]:
    found = {f"kl/{i}": 3.4 - 2.1 * warm + 0.3 * i for i in (1, 2, 3)}
    found |= {f"alpha/{i}": 0.46 * warm / i**0.4 for i in (1, 2, 3)}
    found |= {f"agree/{i}": 0.52 * warm / i**0.4 for i in (1, 2, 3)}
    found |= {f"prefix/{i}": 0.52 * warm**i / i**1.1 for i in (1, 2, 3)}
    return found | {"tau_teacher_forced": 1 + sum(found[f"prefix/{i}"] for i in (1, 2, 3))}


class Reader(HTMLParser):
    """Collects tags with attributes and text, and checks that what opens closes."""

    VOID = frozenset({"meta", "br", "input", "link", "img"})

    def __init__(self, html: str) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[tuple[str, str]] = []  # class of the element, text
        self.open: list[tuple[str, str]] = []
        self.feed(html)
        self.close()
        assert not self.open, self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append((tag, dict(attrs).get("class") or ""))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop()[0] == tag, f"</{tag}> closes another element"

    def handle_data(self, data: str) -> None:
        self.texts.append((self.open[-1][1] if self.open else "", data))

    def count(self, tag: str, style: str) -> int:
        return sum(
            name == tag and style in (attrs.get("class") or "").split() for name, attrs in self.tags
        )

    def said(self, style: str) -> str:
        return "".join(text for name, text in self.texts if name == style)


def leaves(value: Any, place: tuple[Any, ...] = ()) -> list[tuple[tuple[Any, ...], float]]:
    """Every number of a JSON value, with the way to it."""
    if isinstance(value, dict):
        return [leaf for key, inner in value.items() for leaf in leaves(inner, (*place, key))]
    if isinstance(value, list):
        return [leaf for i, inner in enumerate(value) for leaf in leaves(inner, (*place, i))]
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return [(place, value)] if number else []


def replaced(value: Any, place: tuple[Any, ...], leaf: float) -> Any:
    changed = copy.deepcopy(value)
    inner = changed
    for key in place[:-1]:
        inner = inner[key]
    inner[place[-1]] = leaf
    return changed


def written_numbers(text: str) -> list[float]:
    plain = re.sub(r"(?<=\d),(?=\d{3})", "", text.replace("\N{MINUS SIGN}", "-"))
    return [float(number) for number in re.findall(r"-?\d+(?:\.\d+)?(?:e-?\d+)?", plain)]


def is_written(value: float, numbers: list[float]) -> bool:
    """At least three decimals or three digits of it; integers whole; tokens/s and seconds to two decimals."""
    near = max(6e-4, 6e-3 * abs(value)) if isinstance(value, float) else 0
    return any(abs(number - value) <= near for number in numbers)


@pytest.fixture(scope="module")
def whole_page() -> str:
    return page(evaluation(), curves(), STAGES)


@pytest.fixture(scope="module")
def rich_page() -> str:
    return page(enriched(evaluation()), curves(), STAGES)


def test_report_json_round_trips(tmp_path):
    told, rows = evaluation(), curves()
    write_report(told, rows, STAGES, tmp_path / "report")
    found = json.loads((tmp_path / "report" / "report.json").read_text(encoding="utf-8"))
    assert found == {"format": 1, "evaluation": told, "curves": rows, "stages": STAGES}
    assert {path.name for path in (tmp_path / "report").iterdir()} == {
        "report.json",
        "report.md",
        "index.html",
    }


def test_another_format_is_refused_and_nothing_is_written(tmp_path):
    with pytest.raises(UserError, match="format 1 or 2; received 3"):
        write_report(evaluation() | {"format": 3}, [], {}, tmp_path / "report")
    assert not (tmp_path / "report").exists()


def rich() -> dict[str, Any]:
    return enriched(evaluation())


def in_written_units(told: dict[str, Any]) -> dict[str, Any]:
    """The costs as the report writes them: milliseconds and per cent."""
    told = copy.deepcopy(told)
    for one in told.get("speed_model", {}).get("costs", {}).get("batches", ()):
        one["target"] = [1000 * seconds for seconds in one["target"]]
        one["observe"] = [1000 * seconds for seconds in one["observe"][1:]]
        one["draft"] *= 1000
        one["noise"] = {part: 100 * share for part, share in one["noise"].items()}
    return told


@pytest.mark.parametrize("make", [evaluation, rich])
def test_every_figure_is_in_the_markdown(make):
    told = make()
    rows = [row for row in curves() if "validation" in row]
    numbers = written_numbers(markdown(told, rows, STAGES))
    told = in_written_units(told)
    wanted = leaves({**told, "examples": []}) + leaves(rows) + leaves(STAGES)
    assert len(wanted) > 600
    assert [(place, value) for place, value in wanted if not is_written(value, numbers)] == []


@pytest.mark.parametrize("make", [evaluation, rich])
def test_every_figure_changes_the_markdown(make):
    """No figure is only there by coincidence: change one, and the text changes."""
    told = make()
    before = markdown(told, [], STAGES)
    for place, value in leaves({**told, "examples": []}):
        if place == ("format",) or place[-2:] == ("observe", 0):  # no draft, no head to observe
            continue
        changed = replaced(told, place, value + 1)
        assert markdown(changed, [], STAGES) != before, place


def test_every_word_of_provenance_is_on_page_and_in_markdown(whole_page):
    told = evaluation()
    texts = " ".join(text for _, text in Reader(whole_page).texts), markdown(told, [], STAGES)
    words = [
        told["target"]["path"],
        told["target"]["hash"],
        told["head"]["sha256"],
        told["data_digest"],
    ]
    words += [told["command"], told["machine"]["cpu"], *told["versions"].values()]
    assert [word for word in words for text in texts if word not in text] == []


@pytest.mark.parametrize("where", ["prompt", "segment", "key", "category", "path"])
def test_what_a_model_or_a_user_wrote_is_escaped(where):
    told = evaluation()
    example = told["examples"][0]
    if where == "segment":
        example["segments"][1]["text"] = HOSTILE
    elif where == "path":
        told["target"]["path"] = HOSTILE
    elif where == "category":
        told["sets"]["heldout"]["greedy"]["categories"][HOSTILE] = told["sets"]["ood"]["greedy"][
            "categories"
        ]["code"]
    else:
        example[where] = HOSTILE
    html = page(told, curves(), STAGES)
    reader = Reader(html)
    assert [tag for tag, _ in reader.tags].count("script") == 1
    assert "img" not in [tag for tag, _ in reader.tags]
    assert "&lt;script&gt;" in html
    assert "<script>" not in markdown(told, curves(), STAGES)


def test_an_example_that_ends_the_answer_element_stays_inside_it():
    told = evaluation()
    told["examples"] = [example_of("</p></article></main><h1>new page</h1>")]
    reader = Reader(page(told, [], {}))
    assert [tag for tag, _ in reader.tags].count("h1") == 1


def example_of(text: str) -> dict[str, Any]:
    return {
        "key": "a",
        "category": "b",
        "prompt": "c",
        "segments": [{"text": text, "kind": "accepted"}],
    }


def test_examples_keep_their_whitespace_and_mark_each_kind(whole_page):
    reader = Reader(whole_page)
    legend = {"target": "the target's own token", "accepted": "accepted draft"}
    for kind in ("target", "accepted"):
        wanted = [s["text"] for e in examples() for s in e["segments"] if s["kind"] == kind]
        assert reader.said(f"seg {kind}") == legend[kind] + "".join(wanted)
    rejected = [s["text"] for e in examples() for s in e["segments"] if s["kind"] == "rejected"]
    assert reader.said("seg rejected") == "rejected draft" + "".join(rejected).replace("\n", "")
    breaks = sum(
        s["text"].count("\n") for e in examples() for s in e["segments"] if s["kind"] != "target"
    )
    assert reader.count("i", "nl") == breaks > 0


def test_the_page_fetches_nothing(whole_page):
    fetching = {"src", "href", "srcset", "poster", "action", "formaction", "data", "background"}
    found = [
        (tag, name, value)
        for tag, attrs in Reader(whole_page).tags
        for name, value in attrs.items()
        if name in fetching
    ]
    assert {(tag, name) for tag, name, _ in found} == {("a", "href")}
    places = {attrs.get("id") for _, attrs in Reader(whole_page).tags}
    assert [value for _, _, value in found if value[0] != "#" or value[1:] not in places] == []
    assert not re.search(
        r"url\(|@import|https?:|//[a-z]+\.|fetch\(|XMLHttpRequest|import\(", whole_page
    )
    assert "default-src 'none'" in whole_page


def test_the_page_admits_its_own_script_and_no_other(whole_page):
    script = re.search(r"<script>(.*?)</script>", whole_page, re.S).group(1)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}'" in whole_page


def test_intervals_are_drawn(whole_page):
    reader, told = Reader(whole_page), evaluation()
    wholes = [values for modes in told["sets"].values() for values in modes.values()]
    assert reader.count("line", "whisker") == 3 * sum(len(one["per_position_ci"]) for one in wholes)
    greedy = 2 * len(told["sets"])  # on the two headline scales
    by_category = sum(1 + len(one["categories"]) for one in wholes)
    assert reader.count("line", "range") == greedy + by_category


def test_a_whisker_spans_its_interval():
    told = evaluation()
    only = told["sets"]["heldout"]["greedy"]
    only |= {"per_position": [0.5], "per_position_ci": [[0.25, 0.75]], "categories": {}}
    told["sets"] = {"heldout": {"greedy": only}}
    drawn = [
        attrs for _, attrs in Reader(page(told, [], {})).tags if attrs.get("class") == "whisker"
    ]
    assert (drawn[0]["y1"], drawn[0]["y2"]) == ("68.75%", "6.25%")  # of an axis from 0 to 0.8


@pytest.mark.parametrize(
    "missing", ["validation", "lossless", "speed", "examples", "machine", "versions"]
)
def test_a_missing_part_is_left_out(missing):
    told = evaluation()
    del told[missing]
    html = page(told, curves(), STAGES)
    Reader(html)
    section = {
        "validation": "promise",
        "lossless": "lossless",
        "speed": "speed",
        "examples": "examples",
    }.get(missing)
    assert section is None or f'<section id="{section}">' not in html
    assert markdown(told, curves(), STAGES)


def test_the_least_that_can_be_reported():
    told = evaluation()
    for part in ("validation", "lossless", "speed", "examples", "machine", "versions"):
        del told[part]
    greedy = told["sets"]["heldout"]["greedy"]
    told["sets"] = {"heldout": {"greedy": greedy}}
    del greedy["categories"], greedy["tau_ci"], greedy["per_position_ci"], greedy["conditional"]
    reader = Reader(page(told, [], {}))
    assert reader.count("line", "whisker") == reader.count("line", "range") == 0
    assert "temperature 1" not in markdown(told, [], {})
    assert "Stage times" not in markdown(told, [], {})


def test_a_long_draft_and_unknown_parts_are_shown():
    told = evaluation()
    greedy = told["sets"]["heldout"]["greedy"]
    greedy["per_position"] = [0.9**i for i in range(1, 9)]
    told["speed"]["plain"]["seconds"]["page tables"] = 1.25
    text, html = markdown(told, [], {}), page(told, [], {})
    Reader(html)
    assert "page tables" in text and "page tables" in html
    assert "0.430" in text  # the eighth position


def test_a_diverged_loss_still_gives_a_report(tmp_path):
    rows = curves()
    rows[5]["loss"] = float("nan")
    rows[6]["loss"] = float("inf")
    html = page(evaluation(), rows, STAGES)
    assert not re.search(r'="[^"]*\b(nan|inf)\b', html)


def test_the_engines_own_python_is_the_rest_of_the_wall_time():
    text = markdown(evaluation(), [], {})
    row = next(line for line in text.splitlines() if line.startswith("| plain decoding | 58.41"))
    assert row.split("|")[-2].strip() == "5.25"  # 66.03 - 58.41 - 2.37
    assert row.split("|")[3].strip() == "\N{EM DASH}"  # plain decoding has no head


def test_the_held_out_set_leads_whatever_the_order():
    told = evaluation()
    turned = told | {"sets": dict(reversed(told["sets"].items()))}
    assert headline(turned) == headline(told)
    assert tiles(turned) == tiles(told)


def timed_evaluation(best: int | None = None, **changes: Any) -> dict[str, Any]:
    """With rounds, an interval and processor time beside every ratio; `changes` are of k = 2."""
    told = evaluation()
    told["speed"]["rounds"] = 3
    for run in told["speed"]["speculative"].values():
        ratio = run["ratio"]
        run |= {"ratio_ci": [ratio - 0.02, ratio + 0.03], "cpu_ratio": ratio, "warnings": []}
        run |= {"rounds": [ratio] * 3, "tokens_per_step": run["tau"]}
    told["speed"]["speculative"]["2"] |= changes
    if best is not None:
        told["speed_model"] = {"recommended": {"1": best}}
    return told


def test_the_headline_speed_is_that_of_the_recommended_k():
    ratios = {k: run["ratio"] for k, run in speed()["speculative"].items()}
    for best, k in ((1, "1"), (2, "2"), (8, "3")):
        told = timed_evaluation(best)
        assert f"{ratios[k]:.2f}\N{MULTIPLICATION SIGN} as fast" in headline(told)
        assert f"at k = {k}" in headline(told) and tiles(told)[2].value.startswith(
            f"{ratios[k]:.2f}"
        )
    assert "not faster with any k" in headline(timed_evaluation(0))


def test_a_speed_that_is_warned_of_is_no_headline():
    warned = ["the ratio 2.09 exceeds the 1.59 tokens per step, which no schedule can"]
    told = timed_evaluation(2, ratio=2.09, tokens_per_step=1.59, warnings=warned)
    assert "its speed is not measurable here" in headline(told) and "2.09" not in headline(told)
    tile = tiles(told)[2]
    assert tile.unit == "not measurable here" and "2.09" not in tile.value
    assert "exceeds the 1.59 tokens per step" in tile.lines[0]
    del told["speed_model"]
    told["k"] = 2
    html = page(told, [], {})
    assert "k = 2 is not measurable here:" in html and html.count("which no schedule can") >= 2
    assert "k = 1 is not measurable here:" not in html
    assert "which no schedule can" in markdown(told, [], {})


def test_a_set_without_categories_has_one_row_each():
    told = evaluation()
    for modes in told["sets"].values():
        for whole in modes.values():
            whole["categories"] = {"all": {**whole, "categories": {}}}
    rows = report_tables(told, [], {})["acceptance"].rows
    assert len(rows) == len({row[:3] for row in rows}) == 4


def test_a_cut_of_one_bin_is_left_out():
    told = rich()
    for modes in told["sets"].values():
        for whole in modes.values():
            for name in ("by_turn", "by_prompt_length"):
                whole[name] = whole[name][:1]
    assert [view["table"] for view in cut_views(told)] == ["by_output_position"]
    assert not {"by_turn", "by_prompt_length"} & set(report_tables(told, [], {}))


def test_prompt_lookup_is_told_by_tokens_per_step_of_all_steps():
    told = evaluation()
    assert "tokens per step, all steps" not in report_tables(told, [], {})["acceptance"].header
    told["scheme"] = {"kind": "ngram"}
    for modes in told["sets"].values():
        for whole in modes.values():
            whole |= {"steps": 9 * whole["drafts"], "tau": 1.307}
            whole |= {"tokens_per_step": 1.066, "tokens_per_step_ci": [1.05, 1.08]}
    table = report_tables(told, [], {})["acceptance"]
    at = table.header.index("tokens per step, all steps")
    assert table.rows[0][at] == "1.066"
    assert "yields 1.07 tokens" in headline(told)
    assert "1.07" in {tile.value for tile in tiles(told)}


def test_lossless_verdicts():
    tied, broken, lost = lossless(), lossless(), lossless()
    broken["different"] = [{"key": "a", "position": 3, "plain": 11, "speculative": 12}]
    broken["equal"] = 62
    lost["equal"] = 62  # neither equal nor explained
    assert [lossless_tile(one).value for one in (tied, broken, lost)] == ["Yes", "No", "No"]
    assert "63 of 64 prompts, 1 tied within rounding" in lossless_tile(tied).lines[0]
    assert "not the same" in headline(evaluation() | {"lossless": broken})
    assert "plain 11, speculative 12" in markdown(evaluation() | {"lossless": broken}, [], {})


def test_a_slow_head_is_called_slow():
    told = evaluation()
    for run in told["speed"]["speculative"].values():
        run["ratio"] = 0.87
    tile = next(tile for tile in tiles(told) if tile.name == "Speed")
    assert (tile.value, tile.state) == ("0.87\N{MULTIPLICATION SIGN}", "bad")


def test_the_markdown_cell_defuses_markup():
    assert cell("a|b\n<b> `c` *d* [e](f)") == "a\\|b &lt;b> \\`c\\` \\*d\\* [e\\](f)"


@pytest.mark.parametrize(
    "values", [[0.0], [0.5, 0.5], [], [1e-9, 3e-9], [-2.0, 7.3], [1234567.0, 3.0]]
)
def test_an_axis_holds_its_values_between_few_ticks(values):
    scale = fit(values)
    assert scale.low <= min(values, default=0) and max(values, default=0) <= scale.high
    assert 2 <= len(scale.ticks()) <= 8
    assert len({label for _, label in scale.ticks()}) == len(scale.ticks())


def test_an_axis_of_steps_ends_where_the_run_ends():
    scale = whole_steps(60, 960)
    assert (scale.low, scale.high, scale.step) == (60, 960, 200)


def test_thinning_keeps_the_last_point_and_smoothing_the_mean():
    points = [(i, float(i)) for i in range(1000)]
    assert len(thin(points)) <= 301 and thin(points)[-1] == points[-1]
    assert thin(points[:7]) == points[:7]
    assert trailing_mean([(1, 1.0), (2, 3.0), (3, 5.0)], 2) == [(1, 1.0), (2, 2.0), (3, 4.0)]


def test_format_2_has_its_sections_and_format_1_has_not(rich_page, whole_page):
    added = ("cuts", "grid", "model")
    for name in added:
        assert f'<section id="{name}">' in rich_page and f'href="#{name}"' in rich_page
        assert f'id="{name}"' not in whole_page and f'"#{name}"' not in whole_page
    Reader(rich_page)


@pytest.mark.parametrize(
    "part", ["by_output_position", "by_prompt_length", "by_turn", "alpha_expected"]
)
def test_a_missing_cut_is_left_out(part):
    told = rich()
    for modes in told["sets"].values():
        for whole in modes.values():
            del whole[part]
    Reader(page(told, [], {}))
    assert part not in [view["table"] for view in cut_views(told)]
    assert len(cut_views(told)) == (3 if part == "alpha_expected" else 2)


def test_an_empty_bin_is_not_drawn_as_a_measurement():
    told = rich()
    for modes in told["sets"].values():
        for whole in modes.values():
            whole["by_output_position"][3] |= {"prompts": 0, "tau": None, "tau_ci": None}
    chart = cut_views(told)[0]["panels"][0]["chart"]
    assert "1k\N{EN DASH}4k" in chart and "4k+" not in chart


def test_bins_are_ordered_by_their_tokens_and_tell_their_prompts():
    told = rich()
    told["sets"]["heldout"]["greedy"]["by_output_position"].reverse()
    chart = cut_views(told)[0]["panels"][0]["chart"]
    labels = [text for style, text in Reader(chart).texts if style == "tick middle"]
    assert labels[::2] == ["0\N{EN DASH}256", "256\N{EN DASH}1k", "1k\N{EN DASH}4k", "4k+"]
    prompts = [row["prompts"] for row in rich()["sets"]["heldout"]["greedy"]["by_output_position"]]
    assert labels[1::2] == [f"n = {one}" for one in prompts]


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0"), (256, "256"), (1000, "1k"), (1024, "1k"), (1500, "1.5k"), (16384, "16k")],
)
def test_a_bins_bound_is_short(value, text):
    assert rounded(value) == text
    assert rounded(1048576) == "1M"


def test_every_temperature_is_named_where_its_line_ends():
    panels = grid_panels(rich())
    assert [panel["title"] for panel in panels] == ["held-out", "out of domain"]
    names = [text for style, text in Reader(panels[0]["chart"]).texts if "name" in style.split()]
    assert sorted(names) == ["T = 0", "T = 0.6", "T = 1"]


@pytest.mark.parametrize("heights", [[50.0, 51.0, 52.0], [97.0, 98.0, 99.0], [0.0], []])
def test_names_are_pushed_apart_and_stay_in_order(heights):
    moved = spaced(heights)
    assert moved == sorted(moved) and all(0 <= y <= 100 for y in moved)
    gaps = [b - a for a, b in pairwise(moved)]
    assert all(gap >= NAME_GAP - 1e-9 for gap in gaps)


def test_a_point_stands_at_its_value_with_its_interval():
    series = [Series("a", "held", [Point(0, 1.5, [1.25, 1.75]), Point(1, 1.0)])]
    chart = place_chart("title", [Place("x"), Place("y")], series, fit([1.0, 2.0]))
    tags = [attrs for _, attrs in Reader(chart).tags]
    dots = [(one["cx"], one["cy"]) for one in tags if one.get("class") == "dot held"]
    assert dots == [("25.00%", "50.00%"), ("75.00%", "100.00%")]
    spans = [(one["y1"], one["y2"]) for one in tags if one.get("class") == "range held"]
    assert spans == [("75.00%", "25.00%")]


def test_the_recommended_k_is_told_in_words():
    model = {"recommended": {"1": 3, "2": 3, "16": 1, "32": 0, "4": 1, "64": 0}}
    said = "Serve k = 3 at batch 1 to 2, k = 1 at batch 4 to 16, plain decoding at batch 32 to 64."
    assert advice(model) == said


def test_what_is_extrapolated_is_marked():
    model = rich()["speed_model"]
    cells = {row[0]: row[2:] for row in predicted_table(model).rows}
    assert [cell.endswith("*") for cell in cells["1"]] == [False] * 3 + [True] * 5
    assert all(cell.endswith("*") for cell in cells["64"])


def test_many_sets_get_a_panel_each():
    reader = Reader(page(many_sets(rich()), [], {}))
    assert "2 more below" in " ".join(text for _, text in reader.texts)
    titles = [text for style, text in reader.texts if text == "humaneval"]
    assert titles and reader.count("rect", "hollow") == 5 * 3  # the sampled bars of five sets


def test_the_heads_configuration_is_part_of_provenance():
    text = markdown(rich(), [], {})
    assert "| head: config.loss.kl | 1 |" in text and "| head: config.enorm | yes |" in text
    assert (anything([1, 2]), anything(None), anything(False)) == ("1, 2", "\N{EM DASH}", "no")


def test_what_became_of_the_prompts_is_told():
    text = markdown(rich(), [], {})
    assert "| held-out | refused.longer than the model | 3 |" in text
    assert "| held-out | examples.longer than the model | heldout/12, heldout/40 |" in text


def comparison_texts(told: dict[str, Any]) -> tuple[str, str]:
    evaluations = [evaluation()] * len(told["runs"])
    return comparison_page(told, evaluations), comparison_markdown(told, evaluations)


def test_a_comparison_is_written_as_page_markdown_and_json(tmp_path):
    told = comparison()
    write_comparison(told, [evaluation()] * 3, tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {
        "index.html",
        "comparison.md",
        "comparison.json",
    }
    found = json.loads((tmp_path / "comparison.json").read_text(encoding="utf-8"))
    assert found == {"format": 1, **told}
    Reader((tmp_path / "index.html").read_text(encoding="utf-8"))


def test_a_run_is_better_only_when_the_interval_says_so():
    told = comparison()
    first = told["pairs"][0]
    assert findings(told)[0].startswith(f"{NAMES[1]} is better than {NAMES[0]} on held-out")
    first["ci"] = [-0.01, 0.33]  # whatever verdict stands beside it
    assert pairs(told)[0].verdict == "no difference shown"
    assert findings(told)[0].startswith("No difference shown")
    html, text = comparison_texts(told)
    assert "No difference shown: three-step rollout against baseline" in text
    assert html.count("three-step rollout is better than") == 1  # than the third, still


def test_too_few_prompts_have_no_winner_whatever_the_interval():
    told = comparison()
    told["pairs"][0]["verdict"] = "too few prompts to say"
    assert pairs(told)[0].winner is None
    assert findings(told)[0].startswith("Too few prompts to say: three-step rollout against")


def test_the_better_run_is_named_whichever_stands_first():
    found = [pair for pair in pairs(comparison(), "tau") if pair.where == "held-out, greedy"]
    assert [pair.winner and pair.winner.letter for pair in found] == ["B", None, "B"]


def test_every_figure_of_a_comparison_is_in_its_markdown():
    told = comparison()
    numbers = written_numbers(comparison_texts(told)[1])
    assert len(leaves(told)) > 250
    assert [one for one in leaves(told) if not is_written(one[1], numbers)] == []


def test_a_comparison_tells_what_was_left_out_and_what_differs():
    told = comparison()
    text = comparison_texts(told)[1]
    assert "the whole set: B has it, A has not" in text
    assert "B against A: 2 of A: not the same prompt in the other run" in text
    tables = all_tables(told, [evaluation()] * 3)
    assert [row[0] for row in tables["runs"].rows] == ["name", "path", "head.parameters"]
    assert "target.hash" in [row[0] for row in tables["common"].rows]


def test_runs_of_other_targets_or_k_are_warned_of():
    told = comparison()
    assert warnings(told) == []
    told["runs"][1]["target"]["hash"] = "another"
    told["runs"][2]["k"] = 5
    assert ["target" in one or "k:" in one for one in warnings(told)] == [True, True]


def test_runs_that_share_nothing_still_give_a_page():
    told = comparison() | {"pairs": []}
    html, text = comparison_texts(told)
    assert "The runs share no prompts." in html and "The runs share no prompts." in text
    assert '<section id="differences">' not in html


def test_a_runs_name_is_escaped():
    told = comparison()
    for one in (*told["runs"], *told["pairs"]):
        for key, value in one.items():
            if value == NAMES[1]:
                one[key] = HOSTILE
    html, text = comparison_texts(told)
    assert [tag for tag, _ in Reader(html).tags].count("script") == 1
    assert "<script>" not in text
