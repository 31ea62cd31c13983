"""A target's identity: what changes its forward or its text changes a named field; nothing else does."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from accelerate import Accelerator
from test_accounting import retell
from toys import conversations, make_store, make_target, make_tokenizer

from mtp_train.checkpoint.heads import HeadCard, load_head, save_checkpoint, warm_start
from mtp_train.cli.job import Job
from mtp_train.core.errors import UserError
from mtp_train.core.provenance import read_json, write_json
from mtp_train.core.records import Accounting
from mtp_train.evaluate.compare import compare_runs
from mtp_train.export.stage import ExportConfig, export_head, import_head
from mtp_train.heads.mtp import MtpConfig, build
from mtp_train.models.identity import differences, folder_identity, require_same
from mtp_train.models.readout import Readout
from mtp_train.models.target import Target, stop_tokens
from mtp_train.precompute.live import LiveFeatures, LiveManifest, prepare_live
from mtp_train.precompute.stage import PrecomputeConfig
from mtp_train.store.corpus import Corpus, write_corpus
from mtp_train.store.shards import FeatureStore
from mtp_train.train.config import TrainConfig
from mtp_train.train.loop import train

CHATS = conversations(4)
TURNED = r"rope_parameters.rope_theta 10000 -> 100"
Edit = Callable[[Path], object]


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("identity") / "target"
    make_target().model.save_pretrained(folder)  # type: ignore[operator]
    make_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture
def folder(original: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(original, tmp_path / "target"))


def edited(name: str, **values: object) -> Edit:
    """A JSON file of the folder with other values; `None` takes one away."""

    def work(folder: Path) -> None:
        path = folder / name
        told = json.loads(path.read_text()) if path.is_file() else {}
        kept = {key: value for key, value in told.items() if key not in values}
        new = {key: value for key, value in values.items() if value is not None}
        path.write_text(json.dumps(kept | new))

    return work


def turned(folder: Path) -> None:
    """Other positions: the weights stay as they are."""
    retell(folder, rope_parameters={"rope_type": "default", "rope_theta": 100.0})


def add_token(folder: Path) -> None:
    tokenizer = make_tokenizer()
    tokenizer.add_tokens(["<new>"])
    tokenizer.save_pretrained(folder)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (turned, TURNED),
        (edited("config.json", rms_norm_eps=1e-5), "rms_norm_eps 1e-06 -> 1e-05"),
        (edited("config.json", attention_bias=True), "attention_bias False -> True"),
        (edited("config.json", sliding_window=7), "sliding_window absent -> 7"),
        (edited("config.json", of_tomorrow=[1]), r"of_tomorrow absent -> \[1\]"),
        (add_token, "tokenizer [0-9a-f]{16} -> [0-9a-f]{16}"),
        (
            edited("tokenizer_config.json", bos_token="</s>"),
            "tokenizer [0-9a-f]{16} -> [0-9a-f]{16}",
        ),
        (
            edited("tokenizer_config.json", add_bos_token=True),
            "tokenizer [0-9a-f]{16} -> [0-9a-f]{16}",
        ),
        (
            lambda f: (f / "chat_template.jinja").write_text("{{ messages }}"),
            "chat_template [0-9a-f]{16} -> [0-9a-f]{16}",
        ),
        (edited("generation_config.json", eos_token_id=[2, 7]), r"end_tokens \[2\] -> \[2, 7\]"),
    ],
)
def test_what_changes_forward_or_text_changes_a_named_field(
    folder: Path, edit: Edit, message: str
) -> None:
    before = folder_identity(folder)
    edit(folder)
    with pytest.raises(UserError, match=f"features must be of the target.*; received {message}; "):
        require_same(before, folder_identity(folder), "features", "make them again")


def test_kwargs_of_the_template_are_a_field(original: Path) -> None:
    one, other = folder_identity(original), folder_identity(original, {"enable_thinking": False})
    assert differences(one, other) == [
        "chat_template_kwargs {} -> absent",
        "chat_template_kwargs.enable_thinking absent -> False",
    ]


def reformat(folder: Path) -> None:
    values = read_json(folder / "config.json")
    (folder / "config.json").write_text(json.dumps(dict(reversed(values.items())), indent=7))


def move_template(folder: Path) -> None:
    text = (folder / "chat_template.jinja").read_text()
    (folder / "chat_template.jinja").unlink()
    edited("tokenizer_config.json", chat_template=text)(folder)


@pytest.mark.parametrize(
    "edit",
    [
        lambda f: os.utime(f / "config.json", (1, 1)),
        reformat,
        edited("config.json", transformers_version="4.0.0", architectures=["Another"]),
        edited("config.json", torch_dtype="float16", dtype=None, use_cache=False),
        edited("config.json", attention_bias=False, head_dim=8),
        edited("config.json", rope_theta=10000, rope_parameters=None),
        edited("tokenizer_config.json", model_max_length=9, padding_side="left"),
        edited("tokenizer.json", truncation={"max_length": 9}, padding={"pad_id": 0}),
        edited("generation_config.json", temperature=0.3),
        lambda f: (f / "generation_config.json").unlink(),
        move_template,
        edited("manifest.json", written="beside it"),
    ],
    ids=range(12),
)
def test_what_changes_neither_is_the_same_target(folder: Path, edit: Edit) -> None:
    before = folder_identity(folder)
    edit(folder)
    assert folder_identity(folder) == before
    job = [f"target.path={folder}", f"run={folder / 'run'}"]
    assert Job(job).target_inputs == {
        **before,
        "hash": Target.load(folder).hash,
        "dtype": "bfloat16",
    }


def test_a_record_is_read_as_this_version_would_write_it(original: Path) -> None:
    """An earlier version of transformers wrote the same config otherwise."""
    now = folder_identity(original)
    config = {key: value for key, value in now["config"].items() if key != "rope_parameters"}
    assert differences(now | {"config": config | {"rope_theta": 10000.0}}, now) == []
    assert differences(now | {"config": config | {"rope_theta": 7.0}}, now) == [
        "rope_parameters.rope_theta 7 -> 10000"
    ]
    assert differences({"config": {"model_type": "of_tomorrow"}}, {"config": {"a": 1}}) == [
        "model_type of_tomorrow -> absent",
        "a absent -> 1",
    ]


def test_a_type_that_transformers_does_not_know_is_recorded_as_it_stands(folder: Path) -> None:
    """States of such a target come from vLLM."""
    retell(folder, model_type="of_tomorrow", use_cache=False)
    one = folder_identity(folder)
    assert one["config"]["model_type"] == "of_tomorrow" and "use_cache" not in one["config"]
    turned(folder)
    assert differences(one, folder_identity(folder)) == ["rope_parameters.rope_theta 10000 -> 100"]


# --- who refuses what -----------------------------------------------------------------------------------------


@pytest.fixture
def made(folder: Path, tmp_path: Path) -> Iterator[tuple[Path, Path]]:
    """A target's features and head, made before its config was changed."""
    target = Target.load(folder, "float32")
    make_store(tmp_path / "features", target, CHATS)
    head = build(target, MtpConfig())
    sizes = target.hidden_size, target.vocab_size
    card = HeadCard("mtp", target.hash, target.state, *sizes, step=3, identity=target.identity)
    save_checkpoint(tmp_path / "head", head, card)
    export_head(head, target, ExportConfig(), tmp_path / "export", {})
    corpus = write_corpus(tmp_path / "text", CHATS, "inputs", Accounting())
    prepare_live(target, corpus, PrecomputeConfig())
    turned(folder)
    yield folder, tmp_path


def test_store_training_head_and_export_refuse_a_changed_config(
    made: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    folder, out = made
    target = Target.load(folder, "float32")
    store, config = FeatureStore(out / "features"), TrainConfig(epochs=1, rows=64)
    with pytest.raises(UserError, match=f"shards in .*features must be of.*{TURNED}; restore"):
        make_store(out / "features", target, CHATS)
    with pytest.raises(UserError, match=f"features must be of.*{TURNED}"):
        train(target, build(target, MtpConfig()), store, store, config, Accelerator(cpu=True), out)
    with pytest.raises(UserError, match=f"live features must be of.*{TURNED}"):
        LiveFeatures(target, Corpus(out / "text"), LiveManifest.load(out / "text"))
    with pytest.raises(UserError, match=f"a head must be of.*{TURNED}"):
        load_head(out / "head", target)
    with pytest.raises(UserError, match=f"an export must be of.*{TURNED}"):
        import_head(out / "export", target)
    assert FeatureStore(out / "features").manifest == store.manifest, "nothing was removed"
    warm_start(out / "head", target, MtpConfig())
    assert "its target or text was another: rope_parameters.rope_theta" in capsys.readouterr().err


def test_training_does_not_go_on_for_a_changed_target(folder: Path, tmp_path: Path) -> None:
    config = TrainConfig(epochs=1, rows=64, warmup_steps=1, validations=1, checkpoints=1)

    def fit() -> None:
        target = Target.load(folder, "float32")
        name = target.config.rope_parameters["rope_theta"]
        store = make_store(tmp_path / f"features-{name}", target, CHATS)
        head = build(target, MtpConfig())
        train(target, head, store, store, config, Accelerator(cpu=True), tmp_path / "train")

    fit()
    turned(folder)
    with pytest.raises(UserError, match=f"a head must be of.*{TURNED}"):
        fit()


def test_a_head_of_another_template_is_used_and_said(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = Target.load(folder, "float32")
    sizes = target.hidden_size, target.vocab_size
    card = HeadCard("mtp", target.hash, target.state, *sizes, step=3, identity=target.identity)
    save_checkpoint(tmp_path / "head", build(target, MtpConfig()), card)
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    load_head(tmp_path / "head", target)
    assert "its target or text was another: chat_template " in capsys.readouterr().err
    add_token(folder)
    with pytest.raises(UserError, match=r"a head must be of.*tokenizer .* -> "):
        load_head(tmp_path / "head", target)


def test_text_that_is_the_same_after_all_keeps_its_shards(folder: Path, tmp_path: Path) -> None:
    """The data's digest proves tokens and masks: another template that gives the same ones changes nothing."""
    target = Target.load(folder, "float32")
    make_store(tmp_path / "features", target, CHATS)
    shard = tmp_path / "features" / "shard-000000.safetensors"
    before = shard.stat().st_mtime_ns
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    store = make_store(tmp_path / "features", target, CHATS)
    assert shard.stat().st_mtime_ns == before
    assert store.manifest.contract.identity == target.identity


def test_what_earlier_versions_wrote_is_compared_by_what_it_recorded(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = Target.load(folder, "float32")
    make_store(tmp_path / "features", target, CHATS)
    for name in ("manifest.json", "contract.json"):
        values = read_json(tmp_path / "features" / name)
        del values.get("contract", values)["identity"]
        values.pop("seal", None)
        write_json(tmp_path / "features" / name, values)
    store = make_store(tmp_path / "features", target, CHATS)
    assert store.manifest.contract.identity == {}, "nobody knows what their config was"
    sizes = target.hidden_size, target.vocab_size
    save_checkpoint(
        tmp_path / "head",
        build(target, MtpConfig()),
        HeadCard("mtp", target.hash, target.state, *sizes, step=3),
    )
    capsys.readouterr()
    head, card = load_head(tmp_path / "head", target)
    assert capsys.readouterr().err.count("compared by weights alone") == 1
    with pytest.raises(UserError, match=r"own target .*received another"):
        save_checkpoint(tmp_path / "other", head, replace(card, target_hash="another"))
        load_head(tmp_path / "other", target)


def test_evaluations_of_one_target_under_two_configs_are_not_compared(
    folder: Path, tmp_path: Path
) -> None:
    told: dict[str, Any] = {"format": 2, "target": {"path": "t", "hash": "0"}, "sets": {}}
    told |= {"head": {}, "k": 1, "dtype": "float32", "max_new_tokens": 1}
    names = ("before", "after", "other", "earlier")
    for name in names:
        if name == "after":
            turned(folder)
        hash_ = "1" if name == "other" else "0"
        identity = {} if name == "earlier" else {"identity": folder_identity(folder)}
        (tmp_path / name / "evaluate").mkdir(parents=True)
        values = told | identity | {"target": {"path": "t", "hash": hash_}}
        write_json(tmp_path / name / "evaluate" / "evaluation.json", values)
    before, after, other, earlier = (tmp_path / name for name in names)
    with pytest.raises(UserError, match=f"evaluations before and after must be of.*{TURNED}"):
        compare_runs([before, after])
    compare_runs([before, other])
    compare_runs([after, earlier])


def test_states_of_another_engine_carry_the_same_identity(original: Path) -> None:
    readout, target = Readout.load(original, "float32"), Target.load(original, "float32")
    assert readout.identity == target.identity and readout.hash == target.hash


@pytest.mark.parametrize(
    ("generation", "config", "expected"),
    [
        (None, {"eos_token_id": [2, 7]}, {2, 7}),
        (None, {"eos_token_id": None}, {2}),
        ({"eos_token_id": [5]}, {"eos_token_id": [2, 7]}, {2, 5}),
        ({"eos_token_id": 5}, {}, {2, 5}),
        ({}, {"eos_token_id": [2, 7]}, {2}),
    ],
)
def test_end_tokens_stand_in_either_config(
    folder: Path,
    generation: dict[str, object] | None,
    config: dict[str, object],
    expected: set[int],
) -> None:
    """As transformers and vLLM read them: config.json's count where there is no generation_config.json."""
    retell(folder, **config)
    (folder / "generation_config.json").unlink()
    if generation is not None:
        write_json(folder / "generation_config.json", generation)
    assert stop_tokens(make_tokenizer(), folder) == expected
