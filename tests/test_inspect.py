"""What inspect tells of a data set: figures counted by hand, masks shown where they are, and nothing that executes."""

from __future__ import annotations

import base64
import hashlib
import io
import json
import random
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path

import pytest
from rich.console import Console
from transformers import PreTrainedTokenizerBase

from mtp_train.cli.inspect import load_tokenizer, read_vocabulary, tool
from mtp_train.cli.main import guarded, main
from mtp_train.core.errors import UserError
from mtp_train.core.records import Accounting, Conversation, TokenizedConversation
from mtp_train.inspection.bins import binned
from mtp_train.inspection.collect import Collector, Inspection, collect, quantile
from mtp_train.inspection.page import page
from mtp_train.inspection.pieces import Piece, Vocabulary, pieces, shortened, visible
from mtp_train.inspection.tables import all_tables, checks, headline, rows_table, share
from mtp_train.inspection.terminal import bar, marked, write
from mtp_train.text.template import ChatTemplate

END = 9  # of a toy turn
HOSTILE = "</p></article><script>alert('owned')</script><img src=x onerror=alert(1)>"
TOY = Vocabulary(
    size=20,
    special=frozenset({END}),
    ends=frozenset({END}),
    decode=lambda ids: "".join("<end>" if token == END else f"{token}," for token in ids),
)


def sequence(key: str, *runs: Sequence[int], category: str = "all") -> TokenizedConversation:
    """Runs in turn: not trained, trained, not trained, ..."""
    tokens = tuple(token for run in runs for token in run)
    mask = tuple(index % 2 for index, run in enumerate(runs) for _ in run)
    return TokenizedConversation(key, tokens, mask, category)


def inspected(
    sequences: Sequence[TokenizedConversation],
    accounting: Accounting | None = None,
    show: int = 5,
    seed: int = 0,
    max_tokens: int | None = None,
) -> Inspection:
    collector = Collector(TOY.size, TOY.ends, show=show, seed=seed, max_tokens=max_tokens)
    return collect(sequences, collector, accounting or Accounting(used=len(sequences)))


def small_set() -> list[TokenizedConversation]:
    return [
        sequence("a", [1, 2], [3, END], [1], [4, 5, END]),
        sequence("b", [1, 2], [6, END]),
        sequence("a-again", [1, 2], [3, END], [1], [4, 5, END]),
        sequence("cut", [1, 7], [3, 4]),
        sequence("empty", [1, 2, 8], [END]),
        sequence("silent", [1, 2, 3]),
        sequence("alien", [1, 25], [3, END]),
    ]


# --- statistics -----------------------------------------------------------------------------------------------


def test_the_figures_are_those_counted_by_hand() -> None:
    told = inspected(small_set())
    assert (told.sequences, told.tokens, told.trained) == (7, 35, 17)
    assert told.lengths == Counter({8: 2, 4: 4, 3: 1})
    assert told.replies == Counter({2: 5, 3: 2, 1: 1})
    assert told.turns == Counter({2: 2, 1: 4, 0: 1})
    assert told.longest[:2] == ((8, "a-again"), (8, "a"))
    assert told.trained_ids == len({3, 4, 5, 6, END})
    assert told.before[(1, 2)] == 3
    assert told.last == Counter({END: 7, 4: 1})


def test_the_signs_of_a_wrong_mask_are_found_with_their_keys() -> None:
    signs = inspected(small_set()).signs
    assert (signs.untrained.count, signs.untrained.keys) == (1, ["silent"])
    assert (signs.unended.count, signs.unended.keys) == (1, ["cut"])
    assert (signs.empty.count, signs.empty.keys) == (1, ["empty"])
    assert (signs.last_only.count, signs.last_only.keys) == (1, ["empty"])
    assert (signs.outside.count, signs.outside.keys) == (1, ["alien"])


def test_a_sound_set_has_no_findings() -> None:
    told = inspected([sequence("a", [1], [2, END]), sequence("b", [2], [2, END])])
    assert [check.name for check in checks(told) if check.flagged] == []


def test_duplicates_are_counted_beyond_the_first_of_their_kind() -> None:
    told = inspected(small_set())
    assert (told.equal.repeated, told.equal.groups) == (1, 1)
    assert told.equal.largest == ((2, ("a", "a-again")),)
    assert (told.prompts.repeated, told.prompts.groups) == (2, 1)
    assert told.prompts.largest == ((3, ("a", "b", "a-again")),)


def test_sequences_of_one_key_are_still_compared_by_content() -> None:
    """Two files may use the same row numbers as keys."""
    told = inspected([sequence("1", [1], [2]), sequence("1", [1], [2]), sequence("1", [2], [2])])
    assert told.equal.repeated == 1


def test_a_prompt_that_only_begins_alike_is_no_duplicate() -> None:
    told = inspected([sequence("a", [1, 2], [3]), sequence("b", [1, 2, 3], [4])])
    assert told.prompts.repeated == told.equal.repeated == 0


def test_what_lies_beyond_a_length_is_counted() -> None:
    told = inspected(small_set(), max_tokens=6)
    assert told.signs.too_long.keys == ["a", "a-again"]
    assert (told.tokens_beyond, told.trained_beyond) == (4, 4)
    told = inspected([sequence("a", [1, 2], [3, 4], [5, 6, 7])], max_tokens=3)
    assert (told.tokens_beyond, told.trained_beyond) == (4, 1)
    assert inspected(small_set()).tokens_beyond == 0


def test_the_sample_is_seeded_uniform_and_in_the_datas_order() -> None:
    chats = [sequence(f"{index:03}", [1], [2, END]) for index in range(40)]
    keys = [one.key for one in inspected(chats, show=5, seed=3).sample]
    assert keys == [one.key for one in inspected(chats, show=5, seed=3).sample] == sorted(keys)
    assert keys != [one.key for one in inspected(chats, show=5, seed=4).sample]
    drawn = Counter(
        one.key for seed in range(800) for one in inspected(chats, show=5, seed=seed).sample
    )
    assert len(drawn) == 40
    assert min(drawn.values()) > 60 and max(drawn.values()) < 145, "100 expected of each"
    assert [one.key for one in inspected(chats[:3], show=5).sample] == ["000", "001", "002"]
    assert inspected(chats, show=0).sample == ()


def test_the_stream_is_not_held() -> None:
    """Only the sample outlives its turn."""
    import weakref

    alive: list[weakref.ref[TokenizedConversation]] = []

    def stream() -> Iterator[TokenizedConversation]:
        for index in range(200):
            one = sequence(f"{index}", [1, 2], [3, END])
            alive.append(weakref.ref(one))
            yield one

    told = collect(stream(), Collector(20, TOY.ends, show=4), Accounting())
    assert told.sequences == 200
    assert sum(one() is not None for one in alive) <= 5


def test_the_accounting_is_read_after_the_stream() -> None:
    accounting = Accounting()

    def stream() -> Iterator[TokenizedConversation]:
        accounting.used += 1
        yield sequence("a", [1], [2])
        accounting.refuse("no assistant turn", "f:2")

    told = collect(stream(), Collector(20, TOY.ends), accounting)
    assert "0 rows refused" not in headline(told)
    assert ("refused", "no assistant turn", "f:2", "1", "50.0 %") in rows_table(told).rows


def test_rows_of_the_table_sum_to_the_input() -> None:
    accounting = Accounting(used=5)
    accounting.repair("roles merged")
    for line in range(4):
        accounting.refuse("no text", f"f:{line}")
    rows = rows_table(inspected([], accounting)).rows
    numbers = [int(row[3]) for row in rows]
    assert sum(numbers[:-1]) == numbers[-1] == 10


@pytest.mark.parametrize("share_of", [0.01, 0.05, 0.5, 0.75, 0.99, 1.0])
def test_quantiles_are_nearest_ranks(share_of: float) -> None:
    rng = random.Random(1)
    values = sorted(rng.randrange(50) for _ in range(137))
    rank = next(i for i in range(1, 138) if i >= share_of * 137)
    assert quantile(Counter(values), share_of) == values[rank - 1]


@pytest.mark.parametrize(
    "values",
    [[0], [5], [100, 101], [7, 120], [0, 3, 9], [1, 40_000], [1023, 1024, 1025], [64, 512]],
    ids=str,
)
def test_bins_hold_every_value_once_between_few_round_edges(values: list[int]) -> None:
    bins = binned(Counter(values))
    assert sum(one.count for one in bins) == len(values)
    for one in bins:
        assert one.count == sum(one.low <= value <= one.high for value in values)
    assert bins[0].count and bins[-1].count
    assert all(b.low == a.high + 1 for a, b in pairwise(bins))
    assert len(bins) <= 36
    assert binned(Counter()) == []


def test_a_rare_thing_is_not_written_as_none() -> None:
    assert [share(*pair) for pair in ((0, 9), (1, 10**6), (1, 1000), (1, 3), (0, 0))] == [
        "0.0 %",
        "< 0.01 %",
        "0.10 %",
        "33.3 %",
        "\N{EM DASH}",
    ]


# --- pieces ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tokenizer(smollm2_path: Path) -> PreTrainedTokenizerBase:
    return load_tokenizer(smollm2_path)


@pytest.fixture(scope="module")
def vocabulary(tokenizer: PreTrainedTokenizerBase, smollm2_path: Path) -> Vocabulary:
    return read_vocabulary(tokenizer, smollm2_path)


def chat(template: ChatTemplate, *contents: str, key: str = "k") -> TokenizedConversation:
    turns = tuple(
        {"role": ("user", "assistant")[index % 2], "content": content}
        for index, content in enumerate(contents)
    )
    found = template.tokenize(Conversation(key, turns))
    assert isinstance(found, list)
    return found[0]


def test_pieces_are_the_rendered_text_cut_at_the_mask(
    tokenizer: PreTrainedTokenizerBase, vocabulary: Vocabulary
) -> None:
    one = chat(
        ChatTemplate(tokenizer),
        "Hi",
        "Gr\u00fc\u00dfe \U0001f600 \u65e5\u672c",
        "Bye",
        " See you.\n",
    )
    found = pieces(one, vocabulary)
    assert "".join(piece.text for piece in found) == tokenizer.decode(list(one.tokens))
    trained = [(piece.text, piece.kind) for piece in found if piece.trained]
    assert trained == [
        ("Gr\u00fc\u00dfe \U0001f600 \u65e5\u672c", "text"),
        ("<|im_end|>", "special"),
        (" See you.\n", "text"),
        ("<|im_end|>", "special"),
    ]
    assert ("<|im_start|>", "special") in [(p.text, p.kind) for p in found if not p.trained]


def test_a_mask_that_cuts_a_character_shows_it(
    tokenizer: PreTrainedTokenizerBase, vocabulary: Vocabulary
) -> None:
    ids = tokenizer("\U0001f9ff", add_special_tokens=False)["input_ids"]
    assert len(ids) > 1, "a character of several tokens"
    cut = sequence("k", ids[:1], ids[1:])
    assert all("\N{REPLACEMENT CHARACTER}" in piece.text for piece in pieces(cut, vocabulary))
    whole = sequence("k", [], ids)
    assert pieces(whole, vocabulary) == [Piece("\U0001f9ff", True)]


def test_a_decoder_that_drops_the_first_space_keeps_those_between_runs() -> None:
    words = [" one", " two", " three"]
    stripping = Vocabulary(
        3, frozenset(), frozenset(), lambda ids: "".join(words[i] for i in ids).removeprefix(" ")
    )
    found = pieces(sequence("k", [0], [1], [2]), stripping)
    assert [piece.text for piece in found] == ["one", " two", " three"]


def test_letters_that_a_terminal_obeys_are_shown() -> None:
    assert visible("a\x1b[31m\x07\x9b\u202eb\n\t") == "a\u241b[31m\u2407\\x9b\\u202eb\n\t"


def test_a_long_piece_keeps_both_ends_and_says_what_is_missing() -> None:
    text = "begin" + "x" * 5_000 + "end"
    head, remark, tail = shortened([Piece(text, True)], 100)
    assert head.text.startswith("begin") and tail.text.endswith("end")
    assert remark.kind == "cut" and "4,908 characters" in remark.text
    assert len(head.text) + len(tail.text) + 4_908 == len(text)
    assert list(shortened([Piece("short", False)], 100)) == [Piece("short", False)]


# --- terminal -------------------------------------------------------------------------------------------------


def printed(told: Inspection, **settings: object) -> str:
    out = io.StringIO()
    console = Console(file=out, markup=False, highlight=False, emoji=False, **settings)
    write(told, TOY, console)
    return out.getvalue()


def test_without_colour_what_is_trained_stands_in_brackets() -> None:
    told = inspected([sequence("a", [1, 2], [3, END], [4], [5])])
    for settings in ({"width": 100}, {"width": 100, "force_terminal": True, "no_color": True}):
        text = printed(told, **settings)
        assert "1,2,\u27e63,<end>\u27e74,\u27e65,\u27e7" in re.sub(r"\x1b\[[\d;]*m", "", text)
        assert not re.search(r"\x1b\[[\d;]*[34]8;", text)
    assert "\x1b" not in printed(told, width=100)


def test_with_colour_only_what_is_trained_has_a_background() -> None:
    text = marked(pieces(sequence("a", [1, 2], [3, END], [4]), TOY), plain=False)
    coloured = [
        text.plain[span.start : span.end]
        for span in text.spans
        if getattr(span.style, "bgcolor", None)
    ]
    assert coloured == ["3,", "<end>"]
    out = printed(
        inspected([sequence("a", [1, 2], [3])]), force_terminal=True, color_system="256", width=90
    )
    assert "\u27e6" not in out and "\x1b[38;5;194;48;5;22m3,\x1b[0m" in out


def test_a_trained_line_break_has_a_sign() -> None:
    assert marked([Piece("a\nb", True), Piece("c\nd", False)], plain=True).plain == (
        "\u27e6a\u21b5\nb\u27e7c\nd"
    )


def test_data_cannot_steer_the_terminal() -> None:
    told = inspected([sequence("\x1b]0;owned\x07[bold]k", [1], [2, END])])
    text = printed(told, width=100)
    assert "\x1b" not in text and "\x07" not in text
    assert "[bold]k" in text, "no markup of its own"


def test_all_is_told_on_a_narrow_terminal_too() -> None:
    told = inspected(small_set(), max_tokens=6)
    for width in (40, 200):
        text = printed(told, width=width)
        for title in ("Rows", "Worth a look", "Duplicates", "Sequences by length"):
            assert title in text
        assert max(map(len, text.splitlines())) <= width


def test_bars_grow_by_eighths() -> None:
    assert [bar(part) for part in (0, 1e-6, 1 / 320, 7 / 320, 1 / 40)] == [
        "",
        "\u258f",
        "\u258f",
        "\u2589",
        "\u2588",
    ]
    assert bar(1.0) == "\u2588" * 40


# --- page -----------------------------------------------------------------------------------------------------


class Reader(HTMLParser):
    """Tags with attributes, and text with the elements around it; checks that what opens closes."""

    VOID = frozenset({"meta", "br", "input", "img"})

    def __init__(self, html: str) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[tuple[tuple[str, ...], str]] = []
        self.open: list[str] = []
        self.feed(html)
        self.close()
        assert not self.open, self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag, f"</{tag}> closes another element"

    def handle_data(self, data: str) -> None:
        self.texts.append((tuple(self.open), data))

    def names(self) -> list[str]:
        return [tag for tag, _ in self.tags]

    def chat(self, trained: bool) -> str:
        """The conversations' text that is marked as trained, or not."""
        return "".join(
            text
            for at, text in self.texts
            if "article" in at and "p" in at and ("mark" in at) == trained
        )


def test_the_page_marks_what_is_trained_and_keeps_every_token() -> None:
    reader = Reader(page(inspected([sequence("a", [1, 2], [3, END], [4], [5])]), TOY, "data"))
    assert reader.chat(trained=True) == "3,<end>5,"
    assert reader.chat(trained=False) == "1,2,4,"


def test_the_page_tells_what_the_terminal_tells() -> None:
    accounting = Accounting(used=7)
    accounting.refuse("a message without text", "rows.jsonl:4")
    told = inspected(small_set(), accounting, max_tokens=6)
    text = " ".join(text for _, text in Reader(page(told, TOY, "data")).texts)
    cells = [cell for table in all_tables(told, TOY) for row in table.rows for cell in row]
    assert len(cells) > 90
    assert [cell for cell in cells if cell not in text] == []


@pytest.mark.parametrize("where", ["text", "key", "category", "reason", "example", "title"])
def test_what_the_data_says_does_not_execute(where: str) -> None:
    words = Vocabulary(3, frozenset({2}), frozenset({2}), lambda ids: HOSTILE * len(ids))
    key, category = (HOSTILE if where == name else "k" for name in ("key", "category"))
    accounting = Accounting(used=1)
    accounting.refuse(*(HOSTILE if where == name else "r" for name in ("reason", "example")))
    chats = [sequence(key, [0], [1, 2], category=category)] * 2
    told = inspected(chats, accounting)
    vocabulary = words if where == "text" else TOY
    reader = Reader(page(told, vocabulary, HOSTILE if where == "title" else "data"))
    assert reader.names().count("script") == 1
    assert "img" not in reader.names()
    assert reader.names().count("article") == 2
    assert any(HOSTILE in text for _, text in reader.texts)
    handlers = [name for _, attrs in reader.tags for name in attrs if name.startswith("on")]
    assert handlers == []


def test_the_page_needs_no_network_and_admits_its_own_script_alone() -> None:
    html = page(inspected(small_set()), TOY, "data")
    fetching = {"src", "href", "srcset", "poster", "action", "formaction", "data", "background"}
    assert [name for _, attrs in Reader(html).tags for name in attrs if name in fetching] == []
    assert not re.search(r"url\(|@import|https?:|fetch\(|XMLHttpRequest|import\(", html)
    script = re.search(r"<script>(.*?)</script>", html, re.S)
    assert script
    digest = base64.b64encode(hashlib.sha256(script.group(1).encode()).digest()).decode()
    assert f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'" in html


def test_every_bin_is_drawn_and_told_by_the_table() -> None:
    told = inspected(small_set())
    reader = Reader(page(told, TOY, "data"))
    bars = [attrs for tag, attrs in reader.tags if tag == "rect"]
    assert len(bars) == len(binned(told.lengths)) + len(binned(told.replies))
    assert {"8 tokens: 2", "4 tokens: 4", "3 tokens: 1"} <= {one["data-tip"] for one in bars}


def test_a_page_about_nothing_still_tells_the_rows() -> None:
    accounting = Accounting()
    accounting.refuse("no assistant turn", "prompts.jsonl:1")
    html = page(inspected([], accounting), TOY, "prompts.jsonl")
    text = " ".join(text for _, text in Reader(html).texts)
    assert "Nothing to train on: 1 of 1 rows were refused." in text
    assert "mtp-train regenerate" in text and "prompts.jsonl:1" in text


# --- command --------------------------------------------------------------------------------------------------


def write_rows(path: Path, rows: Sequence[object]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def turns(*contents: str) -> dict[str, object]:
    roles = ("user", "assistant")
    return {"messages": [{"role": roles[i % 2], "content": c} for i, c in enumerate(contents)]}


def test_the_command_tells_terminal_and_page(
    tmp_path: Path, smollm2_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one = write_rows(tmp_path / "one.jsonl", [turns("Hi", "Hello."), turns("Hi"), {"text": "?"}])
    two = write_rows(tmp_path / "two.jsonl", [turns("Hi", "Hello.")])
    html = tmp_path / "out" / "inspect.html"
    tool([str(one), str(two), "--tokenizer", str(smollm2_path), "--html", str(html)])
    out = capsys.readouterr().out
    assert "from 2 rows; 2 rows refused" in out
    assert "\u27e6Hello.<|im_end|>\u27e7" in out
    assert "no assistant turn" in out and "rendered text" in out
    assert "one.jsonl:1, two.jsonl:1" in " ".join(out.split()), "duplicates across files"
    reader = Reader(html.read_text(encoding="utf-8"))
    assert reader.chat(trained=True) == "Hello.<|im_end|>" * 2


def test_prompts_alone_are_told_and_are_an_error(
    tmp_path: Path, smollm2_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_rows(tmp_path / "prompts.jsonl", [turns("Hi"), turns("Why?")])
    html = tmp_path / "inspect.html"
    arguments = [str(path), "--tokenizer", str(smollm2_path), "--html", str(html)]
    assert guarded(lambda: tool(arguments)) == 2
    told = capsys.readouterr()
    assert "Nothing to train on: 2 of 2 rows were refused." in told.out
    assert "mtp-train regenerate" in told.out
    assert "a reply to train on" in told.err
    assert html.is_file()


def test_a_row_that_the_template_refuses_costs_only_itself(
    tmp_path: Path, smollm2_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "tokenizer"
    tokenizer = load_tokenizer(smollm2_path)
    tokenizer.chat_template = (
        "{% if messages[0].content == 'no' %}{{ raise_exception('never no') }}{% endif %}"
        + tokenizer.chat_template
    )
    tokenizer.save_pretrained(folder)
    path = write_rows(tmp_path / "rows.jsonl", [turns("no", "ok"), turns("yes", "ok")])
    tool([str(path), "--tokenizer", str(folder)])
    out = " ".join(capsys.readouterr().out.split())
    assert "1 row; 1 row refused" in out and "never no" in out


@pytest.mark.parametrize(
    ("extra", "rule"),
    [
        (["--show", "-1"], "--show must be 0 or more"),
        (["--max-tokens", "0"], "--max-tokens must be 1 or more"),
        (["--html", "."], "--html must name a file"),
        (["--tokenizer", "nowhere"], "--tokenizer must be a folder"),
        (["--tokenizer", "."], "--tokenizer must be a folder that holds a tokenizer"),
    ],
)
def test_mistakes_are_one_line(
    extra: list[str], rule: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_rows(tmp_path / "rows.jsonl", [turns("Hi", "Hello.")])
    tokenizer = [] if "--tokenizer" in extra else ["--tokenizer", "unused"]
    with pytest.raises(UserError, match=rule):
        tool(["rows.jsonl", *tokenizer, *extra])


def test_a_missing_file_is_named(tmp_path: Path, smollm2_path: Path) -> None:
    with pytest.raises(UserError, match=r"a data file must exist.*gone\.jsonl"):
        tool([str(tmp_path / "gone.jsonl"), "--tokenizer", str(smollm2_path)])


def test_help_is_the_tools_own(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["mtp-train", "inspect", "--help"])
    with pytest.raises(SystemExit) as left:
        main()
    assert left.value.code == 0
    assert "--max-tokens" in capsys.readouterr().out
    monkeypatch.setattr("sys.argv", ["mtp-train", "--help"])
    assert main() == 0
    assert "inspect" in capsys.readouterr().out
