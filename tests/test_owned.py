"""Only names of our own are removed, only places of our own are replaced, and a kill loses neither old nor new."""

from __future__ import annotations

import ast
import fcntl
import json
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from mtp_train.core import owned
from mtp_train.core.dist import Ranks
from mtp_train.core.errors import UserError
from mtp_train.core.owned import (
    LOCK,
    MARK,
    Kind,
    atomic_path,
    claim,
    held,
    recover,
    replaced_folder,
    require_own,
    set_aside,
    usual_mode,
)
from mtp_train.dialogue.shared import SharedJournal, read_rows
from mtp_train.store.tensor_files import save_tensors

ROOT = Path(__file__).parents[1] / "mtp_train"
OWNER = "core/owned.py"
REMOTE = "store/places.py"  # removes objects behind fsspec, one function
REMOVERS = {
    *("rmtree", "unlink", "rmdir", "removedirs", "rename", "renames"),
    *("rm", "rm_file", "rm_files", "delete", "mv"),
}
OF_MODULES = {"os.remove", "os.replace", "shutil.move"}
BOOK = Kind("book", {"book.json": ("title", "files")}, ("page-*.txt", "notes/*.md"))


# --- the sources ----------------------------------------------------------------------------------------------


def removals(source: str) -> list[str]:
    """Calls and references that remove, rename or replace a file."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and node.module in ("os", "shutil"):
            names = {f"{node.module}.{item.name}" for item in node.names}
            found += sorted(
                name for name in names if name.split(".")[1] in {*REMOVERS, "remove", "replace"}
            )
        if isinstance(node, ast.Attribute):
            text = ast.unparse(node)
            if node.attr in REMOVERS or text in OF_MODULES:
                found.append(text)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            # text.replace takes two arguments, a path's one; dataclasses.replace takes keywords
            lone = len(node.args) == 1 and not node.keywords
            if node.func.attr == "replace" and lone:
                found.append(ast.unparse(node))
    return found


def test_one_module_alone_removes_renames_and_replaces_files() -> None:
    files = sorted(path.relative_to(ROOT).as_posix() for path in ROOT.rglob("*.py"))
    assert {OWNER, REMOTE, "serving_plugin/proposer.py"} <= set(files) and len(files) > 150
    assert "precompute/vllm_side/mtp_train_vllm_states.py" in files
    found = {
        name: calls
        for name in files
        if (calls := removals((ROOT / name).read_text(encoding="utf-8"))) and name != OWNER
    }
    assert found == {REMOTE: ["self._files.rm_file"]}


@pytest.mark.parametrize(
    "line",
    [
        "import shutil\nshutil.rmtree(x)",
        "from shutil import rmtree",
        "from os import remove",
        "path.unlink()",
        "os.replace(a, b)",
        "a.replace(b)",
        "a.rename(b)",
        "work(os.remove)",
        "files.rm_file(x)",
    ],
)
def test_the_check_sees_a_removal(line: str) -> None:
    assert removals(line)


def test_the_check_passes_over_texts_and_records() -> None:
    assert (
        removals("'a'.replace('b', 'c')\nreplace(config, x=1)\ndataclasses.replace(a, b=1)") == []
    )


# --- whose a place is -----------------------------------------------------------------------------------------


def write_book(folder: Path, pages: int = 2) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(pages):
        (folder / f"page-{number}.txt").write_text(f"page {number}")
    (folder / "book.json").write_text(json.dumps({"title": "t", "files": {"cover.png": ""}}))
    (folder / "cover.png").write_bytes(b"cover")


def test_a_new_an_empty_and_an_own_folder_are_ours(tmp_path: Path) -> None:
    require_own(tmp_path / "new", BOOK, "go away")
    (tmp_path / "empty").mkdir()
    require_own(tmp_path / "empty", BOOK, "go away")
    write_book(tmp_path / "own")
    (tmp_path / "own" / "mine.txt").write_text("the user's")
    require_own(tmp_path / "own", BOOK, "go away")


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("chats.jsonl", "{}"),
        ("book.json", '{"title": "of the user"}'),
        ("book.json", "[1]"),
        ("page-0.txt", "the user's page"),
        (".hidden", ""),
    ],
)
def test_anything_without_a_mark_is_refused(name: str, text: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(UserError, match=rf"a book must be new, empty.*{name}.*; go away"):
        claim(tmp_path, BOOK, "go away")
    assert os.listdir(tmp_path) == [name]


def test_a_file_in_a_folders_place_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x").write_text("")
    with pytest.raises(UserError, match="a book must be a folder"):
        require_own(tmp_path / "x", BOOK, "go away")


# --- replacing ------------------------------------------------------------------------------------------------


def test_a_replaced_folder_keeps_what_is_not_ours(tmp_path: Path) -> None:
    book = tmp_path / "book"
    write_book(book, pages=3)
    (book / "chats.jsonl").write_text("the user's")
    with replaced_folder(book, BOOK) as new:
        write_book(new, pages=1)
    assert sorted(path.name for path in book.iterdir()) == ["book.json", "cover.png", "page-0.txt"]
    kept = tmp_path / "book.before-1"
    assert [path.name for path in kept.iterdir()] == ["chats.jsonl"]
    assert sorted(os.listdir(tmp_path)) == ["book", "book.before-1"]


def test_a_failed_replacement_leaves_the_old_folder(tmp_path: Path) -> None:
    book = tmp_path / "book"
    write_book(book)
    with pytest.raises(OSError), replaced_folder(book, BOOK) as new:
        write_book(new, pages=1)
        raise OSError("the disk is full")
    assert (book / "page-1.txt").is_file() and os.listdir(tmp_path) == ["book"]


class Killed(BaseException):
    """Stands for kill -9: nothing that would clear up runs after it."""


@pytest.fixture
def killed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """A folder whose replacement was killed between the two renames."""
    book = tmp_path / "book"
    write_book(book, pages=3)
    rename = os.rename

    def first_only(source: Path, to: Path) -> None:
        rename(source, to)
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(owned.os, "rename", first_only)
        patch.setattr(owned, "_clear", lambda *_: None)
        with pytest.raises(Killed), replaced_folder(book, BOOK) as new:
            write_book(new, pages=1)
    assert not book.exists()
    yield book


def test_a_kill_between_the_two_renames_is_undone_at_the_next_start(killed: Path) -> None:
    recover(killed.parent)
    assert (killed / "page-2.txt").is_file() and os.listdir(killed.parent) == ["book"]


def test_a_kill_between_the_two_renames_is_undone_by_the_next_replacement(killed: Path) -> None:
    with pytest.raises(ValueError), replaced_folder(killed, BOOK):
        raise ValueError
    assert (killed / "page-2.txt").is_file()
    with replaced_folder(killed, BOOK) as new:
        write_book(new, pages=1)
    assert not (killed / "page-2.txt").exists() and os.listdir(killed.parent) == ["book"]


def test_a_kill_before_the_old_files_went_is_ended_by_the_next_replacement(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    book = tmp_path / "book"
    write_book(book, pages=3)
    with monkeypatch.context() as patch:
        patch.setattr(owned, "_clear", lambda *_: None)
        with replaced_folder(book, BOOK) as new:
            write_book(new, pages=1)
    recover(tmp_path)
    assert not (book / "page-2.txt").exists(), "the new one stays"
    with replaced_folder(book, BOOK) as new:
        write_book(new, pages=2)
    assert (book / "page-1.txt").is_file() and os.listdir(tmp_path) == ["book"]


def test_generations_that_are_set_aside_stay_apart(tmp_path: Path) -> None:
    for number in (1, 2, 3):
        write_book(tmp_path / "book", pages=number)
        assert set_aside(tmp_path / "book") == tmp_path / f"book.before-{number}"
    (tmp_path / "book.before").mkdir()  # as an earlier version named it
    write_book(tmp_path / "book")
    assert set_aside(tmp_path / "book").name == "book.before-4"
    assert (tmp_path / "book.before-3" / "page-2.txt").is_file()


def test_a_killed_writers_half_file_goes_and_a_users_stays(tmp_path: Path) -> None:
    (tmp_path / ".page.txt.123.part").write_text("half")
    (tmp_path / "mine.part").write_text("the user's")
    (tmp_path / ".user.123.part").mkdir()
    (tmp_path / ".user.123.part" / "file").write_text("the user's")
    recover(tmp_path)
    assert sorted(os.listdir(tmp_path)) == [".user.123.part", "mine.part"]


# --- files ----------------------------------------------------------------------------------------------------


def test_a_file_is_on_disk_before_it_gets_its_name(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    events: list[str] = []
    fsync, replace = os.fsync, os.replace
    monkeypatch.setattr(owned.os, "fsync", lambda fd: (events.append("sync"), fsync(fd))[1])
    monkeypatch.setattr(owned.os, "replace", lambda *a: (events.append("name"), replace(*a))[1])
    with atomic_path(tmp_path / "x") as temporary:
        temporary.write_text("whole")
    assert events == ["sync", "name", "sync"]


def test_the_umask_is_not_touched(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Other threads write at the same time: what is set for a moment is theirs too."""
    monkeypatch.setattr(os, "umask", lambda _mask: pytest.fail("the umask was set"))
    path = tmp_path / "x"
    path.touch(mode=0o600)
    usual_mode(path)
    assert path.stat().st_mode & 0o777 == 0o666 & ~owned.UMASK


def test_a_full_disk_while_tensors_are_written_is_an_os_error(tmp_path: Path) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, before[1]))
        with pytest.raises(OSError):
            save_tensors({"x": torch.zeros(1 << 16)}, tmp_path / "x.safetensors")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, ignored)


# --- locks ----------------------------------------------------------------------------------------------------

HOLD = """
import sys, time
from pathlib import Path
from mtp_train.core.owned import held
with held(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(600)
"""


def test_a_second_process_is_told_who_holds_a_folder_until_that_one_is_dead(tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path)], stdout=subprocess.PIPE, text=True
    ) as child:
        assert child.stdout and child.stdout.readline() == "held\n"
        with pytest.raises(UserError) as caught, held(tmp_path):
            pass
        assert f"held by process {child.pid} on " in str(caught.value)
        assert str(tmp_path) in str(caught.value) and "wait for that process" in str(caught.value)
        child.kill()
        child.wait()
    with held(tmp_path), held(tmp_path):  # the stages of a whole run hold it again
        pass


def test_a_lock_is_let_go_at_the_end_of_its_block(tmp_path: Path) -> None:
    with held(tmp_path):
        pass
    with open(tmp_path / LOCK) as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    assert MARK not in os.listdir(tmp_path)


def test_rows_that_are_not_asked_for_now_are_there_when_they_are_asked_for_again(
    tmp_path: Path,
) -> None:
    path = tmp_path / "set.jsonl"
    for order in (["a", "b", "c"], ["b"], ["a", "c"], ["c", "b", "a"]):
        journal = SharedJournal(path, Ranks())
        missing = [key for key in "abc" if key not in journal]
        assert missing == ([] if path.stat().st_size else ["a", "b", "c"])
        for key in missing:
            journal.append({"id": key, "finish": "stop"})
        journal.finish(order)
        assert [row["id"] for row in read_rows(path)] == order
    assert os.listdir(tmp_path) == ["set.jsonl"]
