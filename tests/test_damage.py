"""One flipped bit in any artifact of a run is found by the stage that reads it next, before it is used."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file
from test_cli import overrides, save_target, write_prompts

from mtp_train.checkpoint.heads import CARD, load_head, read_card
from mtp_train.cli.main import dispatch, guarded
from mtp_train.core.errors import UserError
from mtp_train.core.provenance import (
    SEAL,
    file_digest,
    read_json,
    sealed,
    unsealed,
    write_json,
)
from mtp_train.export.stage import import_head
from mtp_train.models.target import Target
from mtp_train.store.corpus import Corpus

# What is flipped, the stage that reads it, and what of the run is gone, so that this stage has work to do.
FOUND_BY = [
    ("regenerate/train.jsonl", "precompute", ["precompute"]),
    ("regenerate/heldout.jsonl", "precompute", ["precompute"]),
    ("regenerate/heldout.jsonl", "evaluate", ["evaluate"]),
    ("regenerate/ood.jsonl", "evaluate", ["evaluate"]),
    ("precompute/train.text/tokens.i32", "precompute", ["precompute/train"]),
    ("precompute/train.text/mask.u8", "precompute", ["precompute/train"]),
    ("precompute/train.text/offsets.i64", "precompute", ["precompute/train"]),
    ("precompute/train.text/corpus.json", "precompute", ["precompute/train"]),
    ("precompute/train/contract.json", "precompute", ["precompute/train/manifest.json"]),
    ("precompute/train/shard-000001.json", "precompute", ["precompute/train/manifest.json"]),
    ("precompute/train/reference.json", "precompute", ["precompute/train/manifest.json"]),
    ("precompute/train/manifest.json", "train", ["train"]),
    ("precompute/train/index.safetensors", "train", ["train"]),
    ("precompute/train/shard-000000.safetensors", "train", ["train"]),
    ("precompute/heldout/shard-000000.safetensors", "train", ["train"]),
    ("train/checkpoints/*/head.safetensors", "train", ["train/head", "train/stage.json"]),
    ("train/checkpoints/*/head.json", "train", ["train/head", "train/stage.json"]),
    ("train/checkpoints/*/optimizer.safetensors", "train", ["train/head", "train/stage.json"]),
    ("train/checkpoints/*/progress.json", "train", ["train/head", "train/stage.json"]),
    ("train/head/head.safetensors", "evaluate", ["evaluate"]),
    ("train/head/head.json", "evaluate", ["evaluate"]),
    ("train/head/head.safetensors", "export", ["export"]),
    ("train/curves.jsonl", "report", ["report"]),
    ("evaluate/evaluation.json", "report", ["report"]),
    ("evaluate/evaluation.json", "export", ["export"]),
]
EXPORTED = ["model.safetensors", "config.json", "export.json"]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A finished run on a toy target."""
    folder = tmp_path_factory.mktemp("damage")
    save_target(folder / "target")
    write_prompts(folder / "prompts")
    assert guarded(lambda: dispatch("run", overrides(folder))) == 0
    yield folder


def flip(path: Path, bit: int | None = None) -> None:
    """Turn one bit of a file over; of its middle byte unless another is named."""
    data = bytearray(path.read_bytes())
    bit = len(data) // 2 * 8 if bit is None else bit
    data[bit // 8] ^= 1 << bit % 8
    path.write_bytes(bytes(data))


@pytest.mark.parametrize(
    ("artifact", "stage", "gone"), FOUND_BY, ids=[f"{name}-{stage}" for name, stage, _ in FOUND_BY]
)
def test_the_next_stage_names_a_damaged_artifact_and_a_remedy(
    artifact: str,
    stage: str,
    gone: list[str],
    finished: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder = Path(shutil.copytree(finished, tmp_path / "copy"))
    for name in gone:
        path = folder / "run" / name
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    (folder / "run" / stage / "stage.json").unlink(missing_ok=True)
    path = sorted((folder / "run").glob(artifact))[-1]
    flip(path)
    capsys.readouterr()
    assert guarded(lambda: dispatch(stage, overrides(folder))) == 2
    lines = [line for line in capsys.readouterr().err.splitlines() if "error: " in line]
    assert len(lines) == 1, lines
    assert path.name in lines[0] or "last precompute" in lines[0], lines[0]
    assert lines[0].count("; ") >= 2, "a rule, what was received, a remedy"
    assert not (folder / "run" / stage / "stage.json").exists()


def test_every_artifact_that_a_stage_reads_is_in_the_table(finished: Path) -> None:
    """A new kind of file must be named here, or be one that nothing reads back."""
    unread = {
        "stage.json",  # a stage with another stamp is done again
        "inputs.json",
        "mtp_train.json",  # a mark, whose name is enough
        ".mtp_train.lock",
        "accounting.json",
        "speed.json",
        "README.md",
        "report.md",
        "report.json",
        "index.html",
        "keys.utf8",  # with the other files of a corpus
        "key_offsets.i64",
    }
    named = {Path(name).name for name, _, _ in FOUND_BY} | set(EXPORTED)
    unread |= {path.name for path in (finished / "run" / "evaluate" / "completions").iterdir()}
    found = {
        path.name
        for path in (finished / "run").rglob("*")
        if path.is_file() and not path.name.startswith("shard-00000")
    }
    assert found - unread <= named, sorted(found - unread - named)


@pytest.mark.parametrize("name", ["heldout.t0.k2.jsonl", "validation.jsonl"])
def test_a_comparison_names_damaged_completions(
    name: str, finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = Path(shutil.copytree(finished / "run", tmp_path / "copy"))
    runs = [str(finished / "run"), str(folder)]
    command = ["compare", *runs, "--out", str(tmp_path / "out")]
    assert guarded(lambda: dispatch("report", command)) == 0
    flip(folder / "evaluate" / "completions" / name)
    assert guarded(lambda: dispatch("report", command)) == 2
    assert name in capsys.readouterr().err


@pytest.mark.parametrize("name", EXPORTED)
def test_an_import_names_a_damaged_file(name: str, finished: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(finished / "run" / "export" / "mimo_mtp", tmp_path / "out"))
    target = Target.load(finished / "target", "float32")
    import_head(folder, target)
    flip(folder / name)
    with pytest.raises(UserError, match=name.replace(".", r"\.")):
        import_head(folder, target)


def test_any_bit_of_a_card_is_noticed(finished: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(finished / "run" / "train" / "head", tmp_path / "head"))
    path, whole = folder / CARD, (finished / "run" / "train" / "head" / CARD).read_bytes()
    card, noticed = read_card(folder), 0
    for bit in range(0, 8 * len(whole), 37):
        path.write_bytes(whole)
        flip(path, bit)
        try:
            assert read_card(folder) == card, f"bit {bit} changed the card unnoticed"
        except UserError:
            noticed += 1
    assert noticed > 0.99 * len(range(0, 8 * len(whole), 37))


def test_a_seal_outlasts_json_and_notices_a_changed_value(tmp_path: Path) -> None:
    value = {"a": {2: 1.5, 10: None}, "b": ["ü", True], "c": (1, 2)}
    path = tmp_path / "x.json"
    write_json(path, sealed(value))
    assert unsealed(read_json(path), path, "") == json.loads(json.dumps(value))
    changed = read_json(path)
    changed["b"][1] = False
    with pytest.raises(UserError, match=r"x\.json with other values; mend it"):
        unsealed(changed, path, "mend it")
    assert unsealed({"a": 1}, path, "") == {"a": 1}


def test_bytes_that_are_no_text_are_a_users_error(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_bytes(b'{"a": "\xff"}')
    with pytest.raises(UserError, match=r"well-formed.*x\.json"):
        read_json(tmp_path / "x.json")


@pytest.mark.parametrize("name", ["tokens.i32", "keys.utf8", "key_offsets.i64"])
def test_a_corpus_that_is_trained_live_is_checked(
    name: str, finished: Path, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(finished / "run" / "precompute" / "train.text", tmp_path / "t"))
    Corpus(folder).require_same()
    flip(folder / name)
    with pytest.raises(UserError, match=name.replace(".", r"\.")):
        Corpus(folder).require_same()


# --- heads for something else ---------------------------------------------------------------------------------


def poisoned(folder: Path) -> None:
    tensors = load_file(folder / "head.safetensors")
    tensors["enorm.weight"][0] = float("nan")
    save_file(tensors, folder / "head.safetensors")


def retold(folder: Path, **changes: object) -> None:
    """A card that says something else, with its seal and the digest of the present tensors."""
    value = read_json(folder / CARD)
    value.pop(SEAL)
    value |= {"sha256": file_digest(folder / "head.safetensors")} | changes
    write_json(folder / CARD, sealed(value))


def truncated(folder: Path) -> None:
    path = folder / "head.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


@pytest.mark.parametrize(
    ("how", "message"),
    [
        (lambda f: retold(f, target_hash="0" * 16), r"own target \(target_hash .*; name the targ"),
        (lambda f: retold(f, vocab_size=60), r"own target \(vocab_size 61\); received 60; name"),
        (lambda f: retold(f, state="pre_norm"), r"\(state post_norm\); received pre_norm; name"),
        (truncated, r"bytes.*head\.safetensors has other bytes; use another checkpoint"),
        (lambda f: (truncated(f), retold(f)), r"whole safetensors file.*; use another checkpoint"),
        (lambda f: (poisoned(f), retold(f)), r"finite; received enorm\.weight in .*; use an earl"),
    ],
    ids=["target", "vocabulary", "state", "truncated", "truncated and named", "nan"],
)
def test_a_head_that_is_not_the_targets_is_refused_in_one_line(
    how: Callable[[Path], object], message: str, finished: Path, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(finished / "run" / "train" / "head", tmp_path / "head"))
    target = Target.load(finished / "target", "float32")
    load_head(folder, target)
    how(folder)
    with pytest.raises(UserError, match=message) as error:
        load_head(folder, target)
    assert len(str(error.value).splitlines()) == 1


def test_an_export_of_another_target_is_refused(finished: Path, tmp_path: Path) -> None:
    other = Target.load(save_target(tmp_path / "other", seed=7), "float32")
    with pytest.raises(UserError, match=r"own target \(target_hash .*; name the target"):
        import_head(finished / "run" / "export" / "mimo_mtp", other)


def test_a_damaged_target_is_another_target(finished: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(finished / "target", tmp_path / "target"))
    flip(folder / "model.safetensors")
    target = Target.load(folder, "float32")
    with pytest.raises(UserError, match="target_hash"):
        load_head(finished / "run" / "train" / "head", target)
