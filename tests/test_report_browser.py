"""The report's pages in a real browser: narrow and wide, light and dark, with the keyboard and without a network.

Skipped only where there is no Chromium.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, sync_playwright
from report_samples import comparison, enriched, many_sets
from test_report import STAGES, curves, evaluation

from mtp_train.report.comparison_page import comparison_page
from mtp_train.report.page import page

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
CHROMIUM = next((path for name in NAMES if (path := shutil.which(name))), None)
pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(CHROMIUM is None, reason=f"no Chromium found (tried {', '.join(NAMES)})"),
]

PAGES = {
    "format 1": lambda: page(evaluation(), curves(), STAGES),
    "format 2": lambda: page(enriched(evaluation()), curves(), STAGES),
    "many sets": lambda: page(many_sets(enriched(evaluation())), [], {}),
    "comparison": lambda: comparison_page(comparison(), [evaluation()] * 3),
}
WIDTHS = (380, 1400)
SCHEMES = ("light", "dark")

# Ratios of WCAG 2: text against what is behind it, marks against their panel.
CONTRASTS = r"""
() => {
  const channels = (text) => text.match(/[\d.]+/g).map(Number);
  const light = (text) => {
    const [r, g, b] = channels(text).map((value) => {
      const share = value / 255;
      return share <= 0.04045 ? share / 12.92 : ((share + 0.055) / 1.055) ** 2.4;
    });
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const ratio = (one, other) => {
    const [low, high] = [light(one), light(other)].sort((a, b) => a - b);
    return (high + 0.05) / (low + 0.05);
  };
  const behind = (element) => {
    for (let up = element; up; up = up.parentElement) {
      const color = getComputedStyle(up).backgroundColor;
      if (channels(color).at(-1) > 0 || channels(color).length === 3) return color;
    }
    return "rgb(255, 255, 255)";
  };
  const found = [];
  const note = (element, kind, value) => {
    found.push([kind, element.textContent.trim().slice(0, 40) || element.getAttribute("class"), value]);
  };
  for (const element of document.querySelectorAll("body *:not(script):not(option)")) {
    const own = [...element.childNodes].some((node) => node.nodeType === 3 && node.data.trim());
    if (!own || !element.checkVisibility()) continue;
    const svg = element.closest("svg") !== null;
    const ink = svg ? getComputedStyle(element).fill : getComputedStyle(element).color;
    const inside = svg && element.classList.contains("inside");
    const ground = inside ? getComputedStyle(element.previousElementSibling).fill : behind(element);
    note(element, "text", ratio(ink, ground));
  }
  for (const mark of document.querySelectorAll(".bar, .dot")) {
    if (!mark.checkVisibility()) continue;
    const style = getComputedStyle(mark);
    note(mark, "mark", ratio(style.stroke === "none" ? style.fill : style.stroke, behind(mark)));
  }
  return found;
}
"""

# Written figures that lie on one another, within one drawing.
TOUCHING = """
() => [...document.querySelectorAll("svg")].flatMap((svg) => {
  const texts = [...svg.querySelectorAll(":scope > text")].filter((text) => text.checkVisibility());
  const boxes = texts.map((text) => [text.textContent, text.getBoundingClientRect()]);
  return boxes.flatMap(([one, a], i) => boxes.slice(i + 1)
    .filter(([, b]) => Math.min(a.right, b.right) - Math.max(a.left, b.left) > 1
      && Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top) > 4)
    .map(([other]) => `${svg.getAttribute("aria-label")}: ${one} on ${other}`));
})
"""

# What sticks out of its section, tables that scroll by themselves excepted.
STICKING_OUT = """
() => [...document.querySelectorAll("section *, header *")].filter((element) => {
  if (element.closest(".scroll") || !element.checkVisibility()) return false;
  const box = element.getBoundingClientRect();
  const panel = element.closest("section, header").getBoundingClientRect();
  return box.width > 0 && (box.right > panel.right + 0.5 || box.left < panel.left - 0.5);
}).map((element) => `${element.tagName} ${element.textContent.trim().slice(0, 40)}`)
"""


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    unboxed = ["--no-sandbox"] if os.geteuid() == 0 else []  # Chromium's own rule for root
    with sync_playwright() as play:
        found = play.chromium.launch(executable_path=CHROMIUM, args=unboxed)
        yield found
        found.close()


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("pages")
    written = {name: folder / f"{name.replace(' ', '-')}.html" for name in PAGES}
    for name, path in written.items():
        path.write_text(PAGES[name](), encoding="utf-8")
    return written


@pytest.fixture
def shown(browser: Browser, files: dict[str, Path], request: pytest.FixtureRequest):
    """Opens a page and closes it after the test; the test fails if the page complained or asked for anything."""
    complaints: list[str] = []
    contexts = []

    def show(name: str, width: int = 1400, scheme: str = "light") -> Page:
        context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)
        contexts.append(context)
        opened = context.new_page()
        address = files[name].as_uri()
        opened.on("console", lambda said: complaints.append(f"console: {said.text}"))
        opened.on("pageerror", lambda error: complaints.append(f"error: {error}"))
        opened.on(
            "request",
            lambda asked: asked.url == address or complaints.append(f"request: {asked.url}"),
        )
        opened.goto(address)
        return opened

    yield show
    for context in contexts:
        context.close()
    assert complaints == []


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("name", PAGES)
def test_nothing_sticks_out_or_scrolls_sideways(shown, name: str, width: int) -> None:
    opened = shown(name, width)
    assert opened.evaluate("document.documentElement.scrollWidth") == width
    assert opened.evaluate(STICKING_OUT) == []


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("name", PAGES)
def test_no_label_lies_on_another(shown, name: str, width: int) -> None:
    assert shown(name, width).evaluate(TOUCHING) == []


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("name", PAGES)
def test_text_and_marks_stand_out_from_what_is_behind(shown, name: str, scheme: str) -> None:
    found = shown(name, scheme=scheme).evaluate(CONTRASTS)
    assert {kind for kind, _, _ in found} == {"text", "mark"}
    weakest = {"text": 4.5, "mark": 3.0}
    assert [one for one in found if one[2] < weakest[one[0]]] == []


@pytest.mark.parametrize(
    ("rule", "check"),
    [
        (":root { --muted: #c8c8c8 }", lambda p: [v for *_, v in p.evaluate(CONTRASTS) if v < 4.5]),
        (":root { --ood: #f4e0c8 }", lambda p: [v for *_, v in p.evaluate(CONTRASTS) if v < 3]),
        ("svg text { font-size: 40px }", lambda p: p.evaluate(TOUCHING)),
        (".bar { transform: translate(900px) }", lambda p: p.evaluate(STICKING_OUT)),
    ],
)
def test_the_checks_see_a_spoilt_page(shown, rule: str, check) -> None:
    opened = shown("format 1")
    opened.evaluate(
        "rule => document.styleSheets[0].insertRule(rule, document.styleSheets[0].cssRules.length)",
        rule,
    )
    assert check(opened)


def test_the_scheme_is_the_systems_until_the_reader_chooses(shown) -> None:
    opened = shown("format 2", scheme="dark")

    def ground() -> str:
        return opened.evaluate("getComputedStyle(document.body).backgroundColor")

    dark = ground()
    opened.click("#theme")
    assert ground() != dark
    opened.click("#theme")
    assert ground() == dark


def example_shown(opened: Page) -> str:
    return opened.locator(".example:visible h3").inner_text()


def test_the_reader_changes_its_example(shown) -> None:
    opened = shown("format 2")
    assert opened.locator(".example:visible").count() == 1
    assert example_shown(opened).startswith("heldout/3")
    opened.click("#on")
    assert example_shown(opened).startswith("heldout/9")
    opened.click("#back")
    assert example_shown(opened).startswith("heldout/3")
    opened.select_option("#pick", "1")
    assert example_shown(opened).startswith("heldout/9")


def test_the_reader_hides_rejected_drafts(shown) -> None:
    opened = shown("format 2")
    rejected = opened.locator(".example:visible .rejected")
    assert rejected.first.is_visible()
    opened.uncheck("#drafts")
    assert not rejected.first.is_visible()
    assert opened.locator(".legend .rejected").is_visible()


@pytest.mark.parametrize(
    ("kind", "said"),
    [("target", "own token"), ("accepted", "accepted draft"), ("rejected", "not in the output")],
)
def test_a_piece_says_what_it_is_under_the_pointer(shown, kind: str, said: str) -> None:
    opened = shown("format 2")
    opened.hover(f".example:visible .answer .{kind} >> nth=1")
    assert said in opened.locator("#tip").inner_text()


def test_the_keyboard_goes_through_the_pieces(shown) -> None:
    opened = shown("format 2")
    opened.focus("#drafts")
    opened.keyboard.press("Tab")
    opened.keyboard.press("ArrowRight")
    said = opened.locator(".piece")
    assert "Piece 1 of" in said.inner_text() and "own token" in said.inner_text()
    opened.keyboard.press("ArrowRight")
    assert "\N{LEFT DOUBLE QUOTATION MARK}clean" in said.inner_text()
    assert "accepted draft" in said.inner_text()
    assert opened.locator(".answer .current").inner_text().strip() == "clean"
    opened.keyboard.press("ArrowLeft")
    assert "Piece 1 of" in said.inner_text()


def test_the_keyboard_skips_what_is_hidden(shown) -> None:
    opened = shown("format 2")
    opened.uncheck("#drafts")
    opened.focus(".example:visible .answer")
    for _ in range(4):  # To, clean, a, (cast) wooden
        opened.keyboard.press("ArrowRight")
    assert opened.locator(".answer .current").inner_text().strip() == "wooden"


def test_a_chart_tells_its_figures_under_the_pointer(shown) -> None:
    opened = shown("format 2")
    opened.hover("#model .dot.ood >> nth=0")
    assert "batch 1, k = 1\nmeasured" in opened.locator("#tip").inner_text()
    opened = shown("comparison")
    opened.hover("#differences .dot >> nth=0")
    assert "three-step rollout" in opened.locator("#tip").inner_text()


def test_links_lead_to_their_sections(shown) -> None:
    opened = shown("format 2")
    opened.click("nav a:has-text('Which k')")
    assert opened.evaluate("document.querySelector('#model').getBoundingClientRect().top") < 50


def test_without_scripts_every_example_can_be_read(
    browser: Browser, files: dict[str, Path]
) -> None:
    context = browser.new_context(java_script_enabled=False)
    opened = context.new_page()
    opened.goto(files["format 2"].as_uri())
    assert opened.locator(".example:visible").count() == 2
    assert not opened.locator("#theme").is_visible()
    context.close()
