"""What the serving check makes of measurements: each verdict with data that must pass and data that must fail."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

TOOLS = Path(__file__).parents[1] / "tools"
sys.path.insert(0, str(TOOLS))
import serving_figures as figures  # noqa: E402

KNOWN = next(iter(figures.SAMPLING_FAULTS))


def of(drafts: int, *accepted: int) -> dict[str, Any]:
    return figures.Counters(drafts, accepted).figures()


def test_figures_are_the_engines_own_definitions() -> None:
    found = of(200, 100, 40, 10)
    assert found["tau"] == pytest.approx(1 + 150 / 200)
    assert found["per_position"] == pytest.approx([0.5, 0.2, 0.05])
    assert found["acceptance_rate"] == pytest.approx(150 / 600)
    assert of(0, 0, 0)["tau"] == 1


def test_runs_add_up() -> None:
    assert figures.Counters(10, (4, 1)).plus(figures.Counters(5, (5, 5))) == figures.Counters(
        15, (9, 6)
    )


@pytest.mark.parametrize(
    ("ours", "failures"),
    [
        (of(1000, 500, 200), 0),
        (of(1000, 520, 210), 0),  # tau off by 0.03, position 1 by 0.02
        (of(1000, 531, 200), 1),  # position 1 by 0.031
        (of(1000, 529, 229), 1),  # tau by 0.058, no position by more than 0.029
        (of(1000, 400, 100), 3),
        ({"tau": float("nan"), "per_position": [0.5, 0.2]}, 1),
    ],
)
def test_counters_that_differ_by_more_than_rounding_fail(ours: Any, failures: int) -> None:
    assert len(figures.gaps(of(1000, 500, 200), ours)) == failures


def spread(middle: float, width: float = 0.2, count: int = 16) -> list[float]:
    """Made-up mean log-likelihoods per prompt."""
    return [middle + width * ((7 * index) % count / (count - 1) - 0.5) for index in range(count)]


def test_the_same_distribution_is_equal_and_noise_is_different() -> None:
    plain = spread(-1.5)
    again = [value + 0.05 * (-1) ** index for index, value in enumerate(spread(-1.52))]
    assert figures.likelihood(plain, again).verdict == "equal"
    noise = figures.likelihood(plain, spread(-4.1, 0.8))
    assert noise.verdict == "different"
    assert noise.difference == pytest.approx(-2.6, abs=1e-6)
    # Too likely a text is no sample either: greedy text at temperature 1.
    assert figures.likelihood(plain, spread(-0.6)).verdict == "different"


def test_few_and_scattered_prompts_decide_nothing() -> None:
    found = figures.likelihood([-1.0, -2.0, -1.5], [-2.5, -1.0, -1.5])
    assert found.verdict == "undecided"
    assert "too few" in figures.sampling_failures("engine", "1", found)[0]


@pytest.mark.parametrize(
    ("engine", "middle", "said"),
    [
        (("mtp_train", "0"), -1.5, ""),
        (("mtp_train", "0"), -4.1, "not the target's distribution"),
        (KNOWN, -4.1, ""),
        (KNOWN, -1.5, "was not found"),  # a check that passes it is wrong
        ((KNOWN[0], "99.0"), -4.1, "not the target's distribution"),
        ((KNOWN[0], "99.0"), -1.5, ""),
    ],
)
def test_a_wrong_sampler_fails_unless_it_is_known_and_a_known_one_must_be_found(
    engine: tuple[str, str], middle: float, said: str
) -> None:
    found = figures.likelihood(spread(-1.5), spread(middle, 0.3))
    failures = figures.sampling_failures(*engine, found)
    assert bool(failures) == bool(said)
    assert all(said in failure for failure in failures)
    line = figures.sampling_finding(*engine, found)
    assert ("NOT THE TARGET'S" in line) == (middle < -4)


def test_the_table_replaces_what_stood_between_its_marks() -> None:
    rows = [
        figures.Row("eagle", "vLLM", "1", "seen", 3, 1.7, 1.701),
        figures.Row("eagle3", "SGLang", "2", "read a|b"),
    ]
    text = figures.table(rows)
    assert "| `eagle` | vLLM | 1 | seen | 3 | 1.700 | 1.701 |" in text
    assert "| `eagle3` | SGLang | 2 | read a/b |  |  |  |" in text
    page = f"before\n{figures.TABLE_BEGIN}\nold\n{figures.TABLE_END}\nafter"
    made = figures.with_block(page, text)
    assert "old" not in made and made.startswith("before") and made.endswith("after")
    assert figures.with_block(made, text) == made
    with pytest.raises(ValueError, match="must have the lines"):
        figures.with_block("no marks", text)


def test_the_docs_have_the_tables_place() -> None:
    page = (TOOLS.parent / "docs" / "serving.md").read_text(encoding="utf-8")
    assert figures.with_block(page, "new") != page
