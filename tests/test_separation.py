"""What is trained on and what is measured on: no file is both, and no conversation, at any door."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from toys import make_target, make_tokenizer

from mtp_train.cli.main import SWEEP, dispatch, guarded
from mtp_train.cli.separation import trained_among
from mtp_train.core.errors import UserError
from mtp_train.core.records import Accounting, Conversation, TokenizedConversation
from mtp_train.dialogue.plans import read_plans
from mtp_train.precompute.corpus import make_corpus
from mtp_train.store.corpus import Corpus
from mtp_train.text.overlap import LATER, OPENING, REASON, offered, overlap, require_few
from mtp_train.text.sources import DataConfig, SourceConfig, items, read_sources
from mtp_train.text.template import ChatTemplate

TEMPLATE = ChatTemplate(make_tokenizer())


def chat(*users: str, system: str = "") -> list[dict[str, str]]:
    """Each user's turn, and a reply to it."""
    said = [{"role": "system", "content": system}] if system else []
    for user in users:
        said += [{"role": "user", "content": user}, {"role": "assistant", "content": "well."}]
    return said


def write(path: Path, chats: list[list[dict[str, str]]]) -> Path:
    rows = [{"id": f"{path.stem}-{i}", "messages": said} for i, said in enumerate(chats)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("separation") / "target"
    make_target().model.save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return folder


# --- files ----------------------------------------------------------------------------------------------------


def copied(file: Path) -> Path:
    return Path(shutil.copy(file, file.with_name("copy.jsonl")))


def hard_linked(file: Path) -> Path:
    other = file.with_name("link.jsonl")
    other.hardlink_to(file)
    return other


def within_a_folder(file: Path) -> Path:
    return file.parent


def itself(file: Path) -> Path:
    return file


SAME = {
    "the file": itself,
    "a copy": copied,
    "a link": hard_linked,
    "its folder": within_a_folder,
}
DOORS = {
    "regenerate": ("regenerate", "regenerate.prompts.train", "regenerate.prompts.heldout"),
    "precompute": ("precompute", "data.sets.train", "data.sets.heldout"),
    "both kinds": ("precompute", "regenerate.prompts.train", "data.sets.heldout"),
    "train": ("train", "data.sets.train", "data.sets.heldout"),
    "evaluate": ("evaluate", "data.sets.train", "evaluate.sets.mine"),
    "out of domain": ("regenerate", "regenerate.prompts.train", "regenerate.prompts.ood"),
    "run": ("run", "data.sets.train", "evaluate.sets.mine"),
    "plan": ("plan", "data.sets.train", "data.sets.heldout"),
    "sweep": ("train", "data.sets.train", "data.sets.heldout", SWEEP[0], "train.seed=1,2"),
}


@pytest.mark.parametrize(
    ("door", "same"),
    [*((door, "the file") for door in DOORS), *(("precompute", same) for same in [*SAME][1:])],
)
def test_a_file_in_both_roles_is_refused_at_every_door(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, target: Path, door: str, same: str
) -> None:
    stage, trained, measured, *more = DOORS[door]
    file = write(tmp_path / "rows.jsonl", [chat("one"), chat("two")])
    lines = [f"target.path={target}", f"run={tmp_path / 'run'}", *more]
    lines += [f"{trained}={file}", f"{measured}={SAME[same](file)}"]
    assert guarded(lambda: dispatch(stage, lines)) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert f"{measured} must not be the data of {trained}" in line
    assert str(file) in line
    assert not (tmp_path / "run").exists()


def test_other_files_of_one_size_are_no_mistake(tmp_path: Path) -> None:
    from mtp_train.text.files import same_data

    one, other = write(tmp_path / "1.jsonl", [chat("a")]), write(tmp_path / "2.jsonl", [chat("b")])
    assert one.stat().st_size == other.stat().st_size
    assert not same_data((str(one), "train", ""), (str(other), "train", ""))
    assert not same_data((str(one), "train", ""), (str(tmp_path / "none"), "train", ""))
    assert not same_data(("hub:a/b", "train", ""), ("hub:a/b", "test", ""))
    assert same_data(("hub:a/b", "train", ""), ("hub:a/b", "train", "")) == "hub:a/b"


# --- conversations --------------------------------------------------------------------------------------------

QUESTION = "how do rivers find the sea?"
FOLLOWING = "and which of them carries the most water in spring?"


@pytest.mark.parametrize(
    ("held", "train", "why"),
    [
        (chat(QUESTION), chat("hello", QUESTION), "a held-out prompt is a later turn of a train chat"),
        (chat("hello", QUESTION), chat(QUESTION), "and the other way round"),
        (chat("hello", FOLLOWING), chat("good day", FOLLOWING), "a later turn that tells itself apart"),
        (chat(QUESTION), chat(f"  {QUESTION.upper()}\n"), "case and white space"),
        (chat(QUESTION, system="Be brief."), chat(QUESTION), "whatever the system prompt"),
        (chat("hi"), chat("Hi!"), "the whole conversation, however short"),
    ],
)  # fmt: skip
def test_conversations_that_overlap(held: Any, train: Any, why: str) -> None:
    others = offered([Conversation("h", tuple(held))], "heldout")
    assert overlap(Conversation("t", tuple(train)), others) == f"{REASON}heldout", why


@pytest.mark.parametrize(
    ("held", "train"),
    [
        (chat(QUESTION, "thanks, go on"), chat("name a bird.", "thanks, go on")),
        (chat("hi"), chat("hi", "what next?")),
        (chat("hi", system="You are a pirate."), chat("hi", system="You are a poet.")),
        (chat("add: 2 + 2 = ?"), chat("add: 2 - 2 = ?")),
        (chat(QUESTION), chat(FOLLOWING)),
    ],
    ids=["a courtesy", "a greeting", "another system prompt", "a sign", "other questions"],
)
def test_conversations_that_only_share_courtesies_stay(held: Any, train: Any) -> None:
    assert not overlap(
        Conversation("t", tuple(train)), offered([Conversation("h", tuple(held))], "heldout")
    )


def test_an_opening_that_all_chats_share_tells_none_apart() -> None:
    """As the fixed instruction of agents' traces; the same chat three times is one."""
    opening = "you are asked to repair this repository."
    held = [Conversation(str(i), tuple(chat(opening, f"issue number {i}"))) for i in range(3)]
    train = Conversation("t", tuple(chat(opening, "another issue")))
    assert not overlap(train, offered(held, "heldout"))
    assert overlap(held[1], offered(held, "heldout"))
    assert overlap(train, offered([held[0]] * 3, "heldout"))


def test_token_ids_overlap_by_what_stands_before_their_first_reply() -> None:
    one, same, other = (
        TokenizedConversation("k", (5, 6, *rest), (0, 0, *(1 for _ in rest)))
        for rest in ((7,), (8, 9), (9,))
    )
    other = TokenizedConversation("k", (5, 7, 9), (0, 0, 1))
    assert overlap(same, offered([one], "heldout"))
    assert not overlap(other, offered([one], "heldout"))


def test_the_thresholds_are_in_bytes() -> None:
    turn = "\u6cb3" * (OPENING // 3)
    others = offered([Conversation("h", tuple(chat(turn)))], "heldout")
    assert overlap(Conversation("t", tuple(chat("hello", turn))), others)
    assert not overlap(Conversation("t", tuple(chat("hello", turn[1:]))), others)
    turn = "\u6cb3" * (LATER // 3 + 1)
    others = offered([Conversation("h", tuple(chat("a", turn)))], "heldout")
    assert overlap(Conversation("t", tuple(chat("b", turn))), others)
    assert not overlap(Conversation("t", tuple(chat("b", turn[1:]))), others)


def test_most_of_a_set_in_another_is_a_wrong_split() -> None:
    accounting = Accounting(used=1)
    accounting.refuse(f"{REASON}heldout", "f:1")
    require_few(accounting, "train")
    accounting.refuse(f"{REASON}heldout", "f:2")
    with pytest.raises(UserError, match=r"at most half.*2 of 3.*f:1.*hold out whole"):
        require_few(accounting, "train")


@pytest.fixture
def held_out(tmp_path: Path) -> list[SourceConfig]:
    """20 held-out prompts, 10 of which are later turns of train's chats."""
    fresh = [chat(f"what is the name of the river number {i}?") for i in range(10)]
    known = [chat(f"who has seen the mountain number {i}?") for i in range(10)]
    write(tmp_path / "train.jsonl", [
        *(chat("hello", f"Who has seen the mountain  number {i}?", "thanks") for i in range(10)),
        *(chat("hello", f"which of the lakes is the number {i}?", "thanks") for i in range(15)),
    ])  # fmt: skip
    return read_sources(str(write(tmp_path / "heldout.jsonl", fresh + known)))


def test_prompts_of_train_that_hold_a_held_out_turn_are_skipped_and_counted(
    tmp_path: Path, held_out: list[SourceConfig]
) -> None:
    accounting = Accounting()
    train = read_sources(str(tmp_path / "train.jsonl"))
    plans = read_plans(train, 0, "", accounting, offered(items(held_out), "heldout"))
    assert len(plans) == 15
    assert accounting.refused == {f"{REASON}heldout": 10}
    assert accounting.examples[f"{REASON}heldout"] == f"{tmp_path / 'train.jsonl'}:1"


def test_own_chats_that_hold_a_held_out_turn_are_not_trained(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, target: Path, held_out: list[SourceConfig]
) -> None:
    """Through the command: told on screen, kept in the corpus; the held-out chats stay whole."""
    lines = [f"target.path={target}", "target.dtype=float32", f"run={tmp_path / 'run'}"]
    lines += [f"data.sets.{name}={tmp_path / name}.jsonl" for name in ("train", "heldout")]
    assert guarded(lambda: dispatch("precompute", lines)) == 0
    assert f"refused 10: {REASON}heldout (first: {tmp_path}" in capsys.readouterr().err
    train, held = (Corpus(tmp_path / "run/precompute" / f"{n}.text") for n in ("train", "heldout"))
    assert (len(train), len(held)) == (15, 20)
    assert train.note.accounting["refused"] == {f"{REASON}heldout": 10}
    assert train.note.accounting["input"] == 25


def test_regenerate_counts_the_prompts_that_it_skips(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, target: Path
) -> None:
    """Through the command: in accounting.json, on screen, and not answered; most of a set is an error at once."""
    write(tmp_path / "train.jsonl", [chat("hello", QUESTION), chat("hello", "why?"), chat("so?")])
    write(tmp_path / "heldout.jsonl", [chat(QUESTION)])
    lines = [f"target.path={target}", "target.dtype=float32", f"run={tmp_path / 'run'}"]
    lines += [f"regenerate.prompts.{n}={tmp_path / n}.jsonl" for n in ("train", "heldout")]
    lines += ["regenerate.max_new_tokens=2", "engine.cache_rows=1024"]
    assert guarded(lambda: dispatch("regenerate", lines)) == 0
    assert f"skipped 1: {REASON}heldout (first: {tmp_path}" in capsys.readouterr().err
    folder = tmp_path / "run" / "regenerate"
    counts = json.loads((folder / "accounting.json").read_text())["train"]
    assert (counts["input"], counts["success"], counts["skipped"]) == (3, 2, 1)
    assert counts["refused"] == {f"{REASON}heldout": 1}
    keys = [json.loads(line)["id"] for line in (folder / "train.jsonl").read_text().splitlines()]
    assert keys == ["train-1", "train-1#1", "train-2"]
    write(tmp_path / "train.jsonl", [chat("hello", QUESTION), chat("hi", QUESTION), chat("so?")])
    assert guarded(lambda: dispatch("regenerate", lines)) == 2
    assert "2 of 3" in capsys.readouterr().err


def test_answers_to_a_conversation_that_overlaps_are_left_out_together(tmp_path: Path) -> None:
    """Its first answer too, though only a later turn is held out."""
    rows = []
    for name, second in (("a", QUESTION), ("b", "and then, what came of it?")):
        said = chat("hello", second)
        for turn, key in enumerate((name, f"{name}#1")):
            ids = {"prompt_ids": [1, 5, *([2, 6] * turn)], "output_ids": [2]}
            before = {"category": "c", "messages": said[: 2 * turn + 1]}
            rows.append({"id": key, **before, **ids, "finish": "stop"})
    answered = tmp_path / "answers.jsonl"
    answered.write_text("".join(json.dumps(row) + "\n" for row in rows))
    others = offered([Conversation("h", tuple(chat(QUESTION)))], "heldout")
    folder = tmp_path / "train.text"
    corpus = make_corpus(folder, "train", answered, DataConfig(), TEMPLATE, "t", 61, others)
    assert [sequence.key for sequence in corpus] == ["b"]
    assert corpus.note.accounting["refused"] == {f"{REASON}heldout": 2}
    assert corpus.note.accounting["input"] == 4
    again = make_corpus(folder, "train", answered, DataConfig(), TEMPLATE, "t", 61)
    assert len(again) == 2, "other held-out chats, another corpus"


def test_a_prompt_set_leaves_out_what_was_trained(
    tmp_path: Path, held_out: list[SourceConfig]
) -> None:
    data = DataConfig({"train": str(tmp_path / "train.jsonl")})
    trained = trained_among(held_out, data, tmp_path / "no answers")
    accounting = Accounting()
    plans = read_plans(held_out, 0, "", accounting, trained)
    assert len(plans) == 10
    assert accounting.refused == {f"{REASON}train": 10}
