"""Half-done work is gone on with whenever its result would be the same; else it is refused by name, or kept aside."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from test_cli import Stop, mistake, save_target

from mtp_train.checkpoint.heads import find_checkpoints, read_card
from mtp_train.cli.features import tell_other_text
from mtp_train.cli.job import Job
from mtp_train.cli.main import dispatch, guarded
from mtp_train.train import loop

TEXTS = [
    "what is 2 + 2? four",
    "name a bird. crow",
    "say hello. hello",
    "why? so",
    "is it late? no",
]


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A toy target, chats of one's own and their features."""
    folder = tmp_path_factory.mktemp("resume")
    save_target(folder / "target")
    for name, texts in (("train", TEXTS), ("heldout", ["fish? a cod it is", "bye. bye to you"])):
        rows = [dict(zip(("user", "assistant"), text.split(" ", 1), strict=True)) for text in texts]
        chats = [[{"role": role, "content": row[role]} for role in row] for row in rows]
        lines = (json.dumps({"messages": chat}) + "\n" for chat in chats)
        (folder / f"{name}.jsonl").write_text("".join(lines))
    assert guarded(lambda: dispatch("precompute", lines_of(folder))) == 0
    return folder


@pytest.fixture
def folder(prepared: Path, tmp_path: Path) -> Path:
    """A copy that a test may change."""
    return Path(shutil.copytree(prepared, tmp_path / "copy"))


def lines_of(folder: Path, *more: str) -> list[str]:
    return [
        f"target.path={folder / 'target'}",
        "target.dtype=float32",
        "precision=float32",
        f"run={folder / 'run'}",
        f"data.sets.train={folder / 'train.jsonl'}",
        f"data.sets.heldout={folder / 'heldout.jsonl'}",
        "train.rows=16",
        "train.epochs=4",
        "train.warmup_steps=1",
        "train.validations=1",
        "train.checkpoints=4",
        *more,
    ]


def train(folder: Path, *more: str) -> int:
    return guarded(lambda: dispatch("train", lines_of(folder, *more)))


def break_off(folder: Path, monkeypatch: pytest.MonkeyPatch, checkpoints: int = 2) -> list[Path]:
    """Train until that many checkpoints are there, then die without a word; returns them."""
    written = loop.save_state
    count = 0

    def counted(*args: object) -> None:
        nonlocal count
        written(*args)  # type: ignore[arg-type]
        count += 1
        if count == checkpoints:
            raise Stop

    with monkeypatch.context() as patch:
        patch.setattr(loop, "save_state", counted)
        with pytest.raises(Stop):
            dispatch("train", lines_of(folder))
    found = find_checkpoints(folder / "run" / "train" / "checkpoints")
    assert len(found) == checkpoints
    return found


def content(folder: Path) -> dict[str, bytes]:
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


def head(folder: Path, stage: str = "train") -> bytes:
    return (folder / "run" / stage / "head" / "head.safetensors").read_bytes()


@pytest.fixture(scope="module")
def unbroken(prepared: Path, tmp_path_factory: pytest.TempPathFactory) -> bytes:
    folder = Path(shutil.copytree(prepared, tmp_path_factory.mktemp("unbroken") / "copy"))
    assert train(folder) == 0
    return head(folder)


def test_keys_that_change_no_step_let_half_done_training_go_on(
    folder: Path,
    unbroken: bytes,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    newest = break_off(folder, monkeypatch)[-1]
    step = int(newest.name.removeprefix("step-"))
    assert guarded(lambda: dispatch("plan", lines_of(folder))) == 0
    assert "plan: train: half done: it would go on" in capsys.readouterr().err
    other = ("train.validations=3", "train.checkpoints=2", "train.explode=50", "threads=1")
    online = (
        "train.online_eval.every=2",
        "train.online_eval.prompts=1",
        "train.online_eval.max_new_tokens=4",
    )
    assert train(folder, *other, *online) == 0
    assert f"train: resumed after step {step} " in capsys.readouterr().err
    assert head(folder) == unbroken
    assert train(folder) == 0
    assert "train: done before" in capsys.readouterr().err


@pytest.mark.parametrize(
    "change", ["train.seed=1", "head.embedding_noise=0.5", "precision=bfloat16"]
)
def test_keys_that_change_the_result_are_refused_by_name_and_nothing_is_removed(
    change: str, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    break_off(folder, monkeypatch)
    before = content(folder / "run" / "train")
    assert guarded(lambda: dispatch("plan", lines_of(folder, change))) == 0
    assert (
        f"plan: train: half done with other values ({change.split('=')[0]} "
        in capsys.readouterr().err
    )
    line = mistake(capsys, "train", *lines_of(folder, change))
    name, value = change.split("=")
    assert f"{name} " in line and " -> " in line and value in line
    assert "restart=true" in line and "go_on" not in line
    assert content(folder / "run" / "train") == before


def test_restart_keeps_each_half_done_generation_apart(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    break_off(folder, monkeypatch)
    first = content(folder / "run" / "train")
    with monkeypatch.context() as patch:
        patch.setattr(loop._Trainer, "_finish", lambda _self: (_ for _ in ()).throw(Stop))
        with pytest.raises(Stop):
            dispatch("train", lines_of(folder, "train.seed=1", "restart=true"))
    assert "kept as" in capsys.readouterr().err
    second = content(folder / "run" / "train")
    assert train(folder, "train.seed=2", "restart=true") == 0
    assert content(folder / "run" / "train.before-1") == first
    assert content(folder / "run" / "train.before-2") == second
    assert train(folder, "train.seed=3") == 0, (
        "finished work is set aside without a word from the user"
    )
    assert head(folder, "train.before-3") != head(folder)


def test_restart_takes_nothing_from_half_done_work_of_the_same_values(
    folder: Path, unbroken: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a command that is started again after each kill would never end."""
    break_off(folder, monkeypatch)
    assert train(folder, "restart=true") == 0
    assert head(folder) == unbroken
    assert not list((folder / "run").glob("train.before*"))


def test_what_changed_before_anything_was_half_done_needs_no_leave(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A first try that fails at once is no work to be kept."""
    with monkeypatch.context() as patch:
        patch.setattr("mtp_train.cli.train._work", lambda *_: (_ for _ in ()).throw(Stop))
        with pytest.raises(Stop):
            dispatch("train", lines_of(folder))
    assert train(folder, "train.epochs=1") == 0
    assert not list((folder / "run").glob("train.before*"))


def test_the_alarms_advice_works(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The loss explodes; a lower learning rate alone is refused, with what the alarm names it goes on."""
    config = lines_of(folder)

    def late(_loss: float, curves: list[dict], _factor: float) -> bool:
        return sum("loss" in row for row in curves) >= 8

    with monkeypatch.context() as patch:
        patch.setattr(loop, "exploded", late)
        assert guarded(lambda: dispatch("train", config)) == 2
    told = capsys.readouterr().err
    assert "lower train.learning_rate and add go_on=true" in told
    newest = find_checkpoints(folder / "run" / "train" / "checkpoints")[-1]
    step, kept = read_card(newest).step, content(newest)
    line = mistake(capsys, "train", *config, "train.learning_rate=0.0005")
    assert "train.learning_rate 0.001 -> 0.0005" in line and "go_on=true" in line
    assert content(newest) == kept
    assert train(folder, "train.learning_rate=0.0005", "go_on=true") == 0
    told = capsys.readouterr().err
    assert f"resumed after step {step} " in told
    rows = [json.loads(row) for row in (folder / "run/train/curves.jsonl").read_text().splitlines()]
    changed = {"step": step, "changed": {"train.learning_rate": [0.001, 0.0005]}}
    assert [row for row in rows if "changed" in row] == [changed]
    card = read_card(folder / "run" / "train" / "head")
    assert card.changed == [changed] and card.config["learning_rate"] == 0.0005
    assert train(folder, "train.learning_rate=0.0005") == 0
    assert "done before" in capsys.readouterr().err


def test_half_done_training_of_an_earlier_version_is_judged_by_its_checkpoint(
    folder: Path,
    unbroken: bytes,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Its stamp is a digest alone."""
    break_off(folder, monkeypatch)
    (folder / "run" / "train" / "inputs.json").write_text('{"inputs": "0123456789abcdef"}')
    line = mistake(capsys, "train", *lines_of(folder, "train.seed=1"))
    assert "train.seed 0 -> 1" in line
    assert train(folder) == 0
    assert head(folder) == unbroken
    stamp = folder / "run" / "train" / "stage.json"  # and so is a finished one's
    values = json.loads(stamp.read_text())
    stamp.write_text(json.dumps({k: v for k, v in values.items() if k != "values"}))
    assert train(folder) == 0
    assert head(folder) == unbroken
    assert not list((folder / "run").glob("train.before*"))


@pytest.mark.parametrize("change", ["other", "gone", "template", "length"])
def test_training_alone_looks_at_the_text_that_its_features_were_made_of(
    change: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train(folder, "train.epochs=1") == 0
    path, more = folder / "train.jsonl", []
    if change == "other":
        path.write_text(path.read_text().replace("crow", "wren"))
        expected = "data.sets.train "
    elif change == "gone":
        path.unlink()
        expected = str(path)
    elif change == "template":
        template = folder / "target" / "chat_template.jinja"
        template.write_text(template.read_text().replace("assistant", "bot"))
        expected = "chat_template"
    else:
        more, expected = ["data.max_tokens=40"], "data.max_tokens 4096 -> 40"
    assert expected in mistake(capsys, "train", *lines_of(folder, "train.epochs=1", *more))
    if change != "template":
        tell_other_text(Job(lines_of(folder, *more)), "export")
        assert expected in capsys.readouterr().err
