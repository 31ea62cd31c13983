"""The command line: a user's mistakes are one line each, stages find each other, and nothing is done twice."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from toys import conversations, make_store, make_target, make_tokenizer
from transformers import PreTrainedTokenizerFast

from mtp_train.checkpoint.heads import load_head
from mtp_train.cli.config import conf_folder, load_config, section
from mtp_train.cli.job import SECTIONS
from mtp_train.cli.main import STAGES, dispatch, guarded
from mtp_train.core.errors import UserError
from mtp_train.core.owned import LOCK
from mtp_train.dialogue.journal import Journal
from mtp_train.engine.engine import EngineConfig
from mtp_train.evaluate.stage import EvaluateConfig
from mtp_train.export.formats import LAYOUTS
from mtp_train.heads.families import FAMILIES
from mtp_train.models.target import Target
from mtp_train.precompute import estimate
from mtp_train.precompute.stage import PrecomputeConfig
from mtp_train.regenerate.stage import RegenerateConfig
from mtp_train.store.shards import FeatureStore
from mtp_train.train.config import TrainConfig

REPOSITORY = Path(__file__).parents[1]
PROMPTS = {
    "train": ["what is 2 + 2?", "name a bird.", "say hello", "count to 3", "why?", "is it late?"],
    "heldout": ["what is 3 + 1?", "name a fish.", "say bye"],
    "ood": ["x: 1, y: 2", "sum of 4 and 5?"],
}


def save_target(folder: Path, seed: int = 0) -> Path:
    make_target(seed=seed).model.save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return folder


def write_prompts(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, texts in PROMPTS.items():
        rows = [
            {
                "id": f"{name}-{number}",
                "category": f"c{number % 2}",
                "messages": [{"role": "user", "content": text}],
            }
            for number, text in enumerate(texts)
        ]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def overrides(folder: Path, *more: str) -> list[str]:
    prompts = [f"+regenerate.prompts.{name}={folder / 'prompts' / name}.jsonl" for name in PROMPTS]
    quick = [
        "regenerate.max_new_tokens=10",
        "precompute.rows_per_shard=64",
        "train.epochs=2",
        "train.rows=64",
        "train.warmup_steps=1",
        "train.validations=1",
        "train.checkpoints=1",
        "engine.cache_rows=1024",
        "engine.max_batch=4",
        "evaluate.drafts=2",
        "evaluate.max_new_tokens=8",
        "evaluate.speed_prompts=1",
        "evaluate.speed_batches=[1]",
        "evaluate.cost_batches=[1,2]",
        "evaluate.cost_repeats=1",
        "evaluate.lossless_prompts=2",
        "evaluate.reference_prompts=1",
        "evaluate.examples=2",
    ]
    return [
        f"target.path={folder / 'target'}",
        "target.dtype=float32",
        f"run={folder / 'run'}",
        *prompts,
        *quick,
        *more,
    ]


@pytest.fixture(scope="module")
def target_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_target(tmp_path_factory.mktemp("cli-target") / "toy")


# --- mistakes -------------------------------------------------------------------------------------------------


def mistake(capsys: pytest.CaptureFixture[str], name: str, *arguments: str) -> str:
    """The one line that a user gets; the status is 2 and there is no traceback."""
    capsys.readouterr()
    status = guarded(lambda: dispatch(name, list(arguments)))
    err = capsys.readouterr().err
    lines = err.splitlines()
    assert status == 2, err
    assert len(lines) == 1, err
    assert lines[0].startswith("mtp-train: error: ")
    return lines[0]


def held_out(folder: Path) -> Path:
    """A held-out file with nothing wrong in it."""
    path = folder / "held.jsonl"
    path.write_text(json.dumps({"messages": [{"role": "user", "content": "held out"}]}) + "\n")
    return path


def test_a_misspelt_key_is_answered_with_the_right_one(capsys: pytest.CaptureFixture[str]) -> None:
    line = mistake(capsys, "train", "target.path=x", "train.epoch=1", "run=runs/none")
    assert "did you mean train.epochs?" in line
    assert "target.path is needed" in mistake(capsys, "train", "run=runs/none")


def test_a_run_folder_that_no_export_could_be_served_from(
    capsys: pytest.CaptureFixture[str], target_folder: Path, tmp_path: Path
) -> None:
    line = mistake(capsys, "train", f"target.path={target_folder}", f"run={tmp_path / 'eagle-1'}")
    assert "eagle-" in line


def test_a_stage_that_is_none(capsys: pytest.CaptureFixture[str]) -> None:
    line = mistake(capsys, "trian")
    assert "trian" in line
    assert all(stage in line for stage in STAGES)


def test_a_recipe_that_is_none(capsys: pytest.CaptureFixture[str]) -> None:
    line = mistake(capsys, "train", "recipe=nonsense")
    assert "nonsense" in line
    assert "smollm2_mtp_cpu" in line, "the choices are listed"


@pytest.mark.parametrize(
    ("override", "parts"),
    [
        ("train.epoch=3", ["train.epoch"]),
        ("trian.epochs=3", ["trian"]),
        ("+train.nonsense=3", ["nonsense", "learning_rate"]),
        ("train.epochs", ["train.epochs"]),
        ("train.epochs=many", ["train.epochs must be of type int", "many"]),
        ("train.epochs=1.5", ["train.epochs must be of type int", "1.5"]),
        ("train.epochs=true", ["train.epochs must be of type int", "True"]),
        ("train.learning_rate=fast", ["train.learning_rate must be of type float", "fast"]),
        ("train.epochs=0", ["train.epochs must be 1 or more", "0"]),
        ("head.init=3", ["head.init must be one of last_layer, random", "3"]),
        ("target=nowhere", ["nowhere"]),
        ("threads=many", ["threads", "many"]),
        ("threads=-1", ["threads", "-1"]),
    ],
)
def test_a_wrong_override(
    capsys: pytest.CaptureFixture[str],
    target_folder: Path,
    tmp_path: Path,
    override: str,
    parts: list[str],
) -> None:
    stamp(tmp_path / "run", "precompute")
    line = mistake(
        capsys, "train", f"target.path={target_folder}", f"run={tmp_path / 'run'}", override
    )
    assert all(part in line for part in parts), line


def stamp(run: Path, stage: str) -> None:
    """A stage that is done, as far as the next one can see."""
    (run / stage).mkdir(parents=True, exist_ok=True)
    (run / stage / "stage.json").write_text(
        json.dumps({"inputs": "", "outputs": "", "seconds": 1.0})
    )


@pytest.mark.parametrize(
    ("stage", "override", "parts"),
    [
        ("train", "precision=float8", ["precision must be one of", "float8"]),
        ("train", "head.init=zeros", ["head.init must be one of last_layer, random", "zeros"]),
        ("train", "head.family=eagle9", ["family", "mtp", "eagle9"]),
        ("train", "train.decay=2.0", ["decay", "2.0"]),
        ("train", "train.loss.kl=-1.0", ["loss weights must be 0 or more", "-1.0"]),
        ("train", "train.step_weights=linear", ["one of geometric, fastmtp, uniform", "linear"]),
        ("train", "trackers=wandb", ["trackers"]),
        ("train", "target.dtype=int8", ["dtype must be one of", "int8"]),
        ("train", "target.device=abacus", ["target.device", "abacus"]),
        ("train", "target.trust_remote_code=no", ["trust_remote_code must be of type bool", "no"]),
        ("export", "export.format=gguf", ["export.format must be one of auto, mimo_mtp", "gguf"]),
    ],
)
def test_a_value_out_of_range(
    capsys: pytest.CaptureFixture[str],
    target_folder: Path,
    tmp_path: Path,
    stage: str,
    override: str,
    parts: list[str],
) -> None:
    run = tmp_path / "run"
    for name in ("precompute", "train"):
        stamp(run, name)
    features(target_folder, run)
    line = mistake(
        capsys,
        stage,
        f"target.path={target_folder}",
        f"run={run}",
        "target.dtype=float32",
        override,
    )
    assert all(part in line for part in parts), line


def features(target_folder: Path, run: Path) -> None:
    """What precompute would have left."""
    target = Target.load(target_folder, "float32")
    for name in ("train", "heldout"):
        make_store(run / "precompute" / name, target, conversations(3))


@pytest.mark.parametrize(
    ("cls", "values"),
    [
        (EngineConfig, {"max_batch": 0}),  # would wait forever for room in the batch
        (EngineConfig, {"page_size": 0}),
        (EngineConfig, {"cache_rows": -1}),
        (EvaluateConfig, {"drafts": 0}),
        (EvaluateConfig, {"max_new_tokens": 0}),
        (EvaluateConfig, {"temperature": -1.0}),
        (PrecomputeConfig, {"gate_sequences": 0}),  # would leave the gate open without a word
        (PrecomputeConfig, {"rows_per_shard": 0}),
        (RegenerateConfig, {"prompts": {}, "limits": {}, "max_new_tokens": 0}),
        (RegenerateConfig, {"prompts": {}, "limits": {"train": -2}}),
        (RegenerateConfig, {"prompts": {}, "limits": {}, "temperature": -1.0}),
        (TrainConfig, {"learning_rate": -1.0}),
        (TrainConfig, {"beta1": 2.0}),
        (TrainConfig, {"clip": 0.0}),  # would clip every gradient to nothing
        (TrainConfig, {"loss_vocabulary": -5}),
    ],
)
def test_a_size_that_can_not_work_is_refused_by_name(cls: type, values: dict) -> None:
    name = list(values)[-1]
    with pytest.raises(UserError, match=name):
        cls(**values)


def test_a_target_path_that_was_not_given(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert "target.path" in mistake(capsys, "train", f"run={tmp_path}")


def test_a_missing_target_folder(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "prompts.jsonl").write_text("{}\n")
    line = mistake(
        capsys,
        "regenerate",
        "target.path=/no/such/folder",
        f"run={tmp_path}",
        f"regenerate.prompts.train={tmp_path}/prompts.jsonl",
        f"regenerate.prompts.heldout={held_out(tmp_path)}",
    )
    assert "/no/such/folder" in line


@pytest.mark.parametrize(
    ("damage", "part"),
    [
        (lambda folder: [path.unlink() for path in folder.glob("*.safetensors")], "safetensors"),
        (lambda folder: (folder / "model.safetensors").write_bytes(b"\x08"), "/target"),
        (lambda folder: (folder / "config.json").write_text("{"), "config"),
        (
            lambda folder: (folder / "config.json").write_text('{"model_type": "unheard-of"}'),
            "unheard-of",
        ),
        (lambda folder: [path.unlink() for path in folder.glob("tokenizer*")], "tokenizer"),
        (lambda folder: (folder / "tokenizer.json").write_text("{"), "tokenizer"),
        (lambda folder: (folder / "chat_template.jinja").unlink(), "chat template"),
        (lambda folder: (folder / "chat_template.jinja").write_text("{% if %}"), "template"),
        (
            lambda folder: (folder / "chat_template.jinja").write_text(
                "{{ raise_exception('not here') }}"
            ),
            "not here",
        ),
    ],
    ids=[
        "no weights",
        "cut weights",
        "cut config",
        "unknown model",
        "no tokenizer",
        "cut tokenizer",
        "no template",
        "bad template",
        "template fails",
    ],
)
def test_a_damaged_target_folder(
    capsys: pytest.CaptureFixture[str],
    target_folder: Path,
    tmp_path: Path,
    damage: object,
    part: str,
) -> None:
    shutil.copytree(target_folder, tmp_path / "target")
    damage(tmp_path / "target")  # type: ignore[operator]
    write_prompts(tmp_path / "prompts")
    assert part in mistake(capsys, "regenerate", *overrides(tmp_path))


@pytest.mark.parametrize(
    ("change", "part"),
    [
        ([], "regenerate.prompts must name"),
        (
            [f"regenerate.prompts.{name}=/no/such.jsonl" for name in ("train", "heldout")],
            "/no/such.jsonl",
        ),
        (["regenerate.prompts.train=/no/such.jsonl"], "heldout"),
        (
            [f"regenerate.prompts.{name}=x" for name in ("train", "heldout", "held_out")],
            "held_out",
        ),
        (["regenerate.prompts=prompts.jsonl"], "prompts"),
        (["+regenerate.prompts.train=3"], "prompts"),
    ],
    ids=["none", "missing file", "no held-out set", "unknown set", "no names", "no path"],
)
def test_prompts_that_can_not_be_read(
    capsys: pytest.CaptureFixture[str],
    target_folder: Path,
    tmp_path: Path,
    change: list[str],
    part: str,
) -> None:
    assert part in mistake(
        capsys, "regenerate", f"target.path={target_folder}", f"run={tmp_path}", *change
    )


@pytest.mark.parametrize(
    "rows", ["", "not json\n", '{"messages": []}\n'], ids=["empty", "no JSON", "no turns"]
)
def test_a_prompts_file_without_a_usable_row(
    capsys: pytest.CaptureFixture[str], target_folder: Path, tmp_path: Path, rows: str
) -> None:
    (tmp_path / "p.jsonl").write_text(rows)
    line = mistake(
        capsys,
        "regenerate",
        f"target.path={target_folder}",
        f"run={tmp_path / 'run'}",
        f"regenerate.prompts.train={tmp_path / 'p.jsonl'}",
        f"regenerate.prompts.heldout={held_out(tmp_path)}",
    )
    assert "at least one usable row" in line


def test_a_run_folder_that_can_not_be_written(
    capsys: pytest.CaptureFixture[str],
    target_folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A file is in the way (that stops root too), and the target is not loaded to find out."""
    monkeypatch.setattr(
        Target, "load", lambda *_args, **_kwargs: pytest.fail("the target was loaded")
    )
    (tmp_path / "file").write_text("")
    write_prompts(tmp_path / "prompts")
    line = mistake(
        capsys,
        "regenerate",
        *overrides(tmp_path),
        f"target.path={target_folder}",
        f"run={tmp_path / 'file' / 'run'}",
    )
    assert "must be writable" in line
    assert f"{tmp_path}/file/run" in line


@pytest.mark.parametrize(
    ("stage", "before"),
    [
        ("train", "precompute"),
        ("evaluate", "regenerate"),
        ("report", "evaluate"),
        ("export", "train"),
    ],
)
def test_a_stage_before_its_turn(
    capsys: pytest.CaptureFixture[str], target_folder: Path, tmp_path: Path, stage: str, before: str
) -> None:
    line = mistake(capsys, stage, f"target.path={target_folder}", f"run={tmp_path}")
    assert f"stage {before} must be done first" in line


def test_evaluate_without_prompts_says_where_they_could_come_from(
    capsys: pytest.CaptureFixture[str], target_folder: Path, tmp_path: Path
) -> None:
    line = mistake(capsys, "evaluate", f"target.path={target_folder}", f"run={tmp_path}")
    assert "run `mtp-train regenerate`" in line and "evaluate.sets.NAME=FILE" in line


def test_libraries_that_tell_of_themselves_are_quiet() -> None:
    """torchao, which transformers imports where it is installed, tells of kernels for other machines."""
    script = "import mtp_train.cli.main, transformers.quantizers.auto"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, cwd=REPOSITORY, check=True
    )
    assert done.stderr == ""


def test_precompute_without_text_says_where_it_could_come_from(
    capsys: pytest.CaptureFixture[str], target_folder: Path, tmp_path: Path
) -> None:
    line = mistake(capsys, "precompute", f"target.path={target_folder}", f"run={tmp_path}")
    assert "run regenerate with regenerate.prompts.train, or name data.sets.train" in line


def test_a_damaged_stamp_is_named(
    capsys: pytest.CaptureFixture[str], target_folder: Path, tmp_path: Path
) -> None:
    stamp(tmp_path, "precompute")
    (tmp_path / "precompute" / "stage.json").write_text("{")
    assert "stage.json" in mistake(
        capsys, "train", f"target.path={target_folder}", f"run={tmp_path}"
    )


def test_the_command_itself_in_a_process(tmp_path: Path) -> None:
    """From another folder, as installed: status, the one line, and nothing on standard output."""

    def command(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "mtp_train.cli.main", *arguments],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=False,
            timeout=120,
        )

    wrong = command("nonsense")
    assert (wrong.returncode, wrong.stdout) == (2, "")
    assert len(wrong.stderr.splitlines()) == 1
    assert "Traceback" not in wrong.stderr
    usage = command("--help")
    assert (usage.returncode, usage.stderr) == (0, "")
    assert all(stage in usage.stdout for stage in STAGES)
    assert command().returncode == 2


def test_an_interruption_says_how_to_go_on(capsys: pytest.CaptureFixture[str]) -> None:
    def work() -> None:
        raise KeyboardInterrupt

    assert guarded(work) == 130
    assert "goes on from here" in capsys.readouterr().err


def test_our_own_mistakes_keep_their_traceback() -> None:
    def work() -> None:
        raise AssertionError("ours")

    with pytest.raises(AssertionError, match="ours"):
        guarded(work)


# --- configurations -------------------------------------------------------------------------------------------


def test_every_recipe_parses_into_every_component() -> None:
    names = sorted(path.parent.name for path in REPOSITORY.glob("recipes/*/config.yaml"))
    assert len(names) >= 1
    assert "smollm2_mtp_cpu" in names
    folders = {path.name for path in REPOSITORY.glob("recipes/*") if path.is_dir()}
    assert set(names) == folders - {"accelerate"}, "a recipe without a config"
    for name in names:
        config = load_config([f"recipe={name}"])
        assert {key: type(section(config, key, cls)) for key, cls in SECTIONS.items()} == SECTIONS
        prompts = section(config, "regenerate", RegenerateConfig).prompts
        assert {"train", "heldout"} <= set(prompts)
        own = [path for path in prompts.values() if path.startswith("recipes/")]
        assert all(Path(path).is_file() for path in own)


def test_the_command_line_stands_over_the_recipe_and_the_recipe_over_the_defaults() -> None:
    default = section(load_config(["target.path=x"]), "train", TrainConfig)
    recipe = section(load_config(["recipe=smollm2_mtp_cpu"]), "train", TrainConfig)
    line = section(load_config(["recipe=smollm2_mtp_cpu", "train.epochs=7"]), "train", TrainConfig)
    assert recipe != default
    assert line.epochs == 7
    assert line.learning_rate == recipe.learning_rate


def test_every_default_is_the_dataclasss_own_and_every_file_is_used() -> None:
    files = sorted(
        path.relative_to(conf_folder()).as_posix() for path in conf_folder().rglob("*.yaml")
    )
    assert len(files) >= 11
    for file in files:
        assert yaml.safe_load((conf_folder() / file).read_text(encoding="utf-8")), file
    config = load_config(["target.path=x"])
    groups = {file.split("/")[0] for file in files if "/" in file}
    assert groups == set(SECTIONS) | {"target", "head"}
    for name, cls in SECTIONS.items():
        values = section(config, name, cls)
        known = {key for key, item in cls.__dataclass_fields__.items()}
        assert set(config[name]) == known, f"conf/{name} shows every option"
        if name != "regenerate":  # its prompts have no default in the dataclass
            assert values == cls(), f"conf/{name} and {cls.__name__} agree"


# --- a team's own data, and a look ahead ------------------------------------------------------------------------


def write_chats(folder: Path) -> tuple[Path, Path]:
    """Training chats in two forms, held-out chats in a third."""
    folder.mkdir(parents=True, exist_ok=True)
    turns = [{"from": "human", "value": "name a bird."}, {"from": "gpt", "value": "a wren."}]
    sharegpt = [{"conversations": turns}, {"conversations": []}]
    alpaca = [{"instruction": "add", "input": "2 and 3", "output": "5"}]
    train = folder / "train"
    train.mkdir()
    (train / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in sharegpt))
    (train / "b.json").write_text(json.dumps(alpaca))
    heldout = folder / "heldout.jsonl"
    heldout.write_text(json.dumps({"prompt": "name a fish.", "completion": "a pike."}) + "\n")
    return train, heldout


def own_data(folder: Path, target: Path, *more: str) -> list[str]:
    train, heldout = write_chats(folder / "data")
    return [
        f"target.path={target}",
        "target.dtype=float32",
        f"run={folder / 'run'}",
        f"data.sets.train={train}",
        f"data.sets.heldout={{path: {heldout}, category: fish}}",
        "precompute.rows_per_shard=32",
        *more,
    ]


def test_features_of_own_data_without_regenerating(
    capsys: pytest.CaptureFixture[str], target_folder: Path, tmp_path: Path
) -> None:
    lines = own_data(tmp_path, target_folder, "precompute.states=[post_norm, layer_1]")
    assert guarded(lambda: dispatch("precompute", lines)) == 0
    told = capsys.readouterr().err
    assert "train: 3 rows = 2 used + 0 repaired + 1 refused" in told
    assert "a.jsonl:2" in told, "the refused row is named"
    assert told.index("plan:") < told.index("precompute train"), "the estimate comes first"
    store = FeatureStore(tmp_path / "run" / "precompute" / "train")
    assert len(store) == 2 and store.states == ("post_norm", "layer_1")
    assert store.manifest.accounting["input"] == 3
    assert store.manifest.accounting["used"] == 2
    assert guarded(lambda: dispatch("precompute", lines)) == 0
    assert "precompute: done before" in capsys.readouterr().err
    assert (
        guarded(lambda: dispatch("train", [*lines, "train.epochs=1", "train.warmup_steps=0"])) == 0
    )


def test_plan_shows_disk_memory_and_time_and_loads_no_target(
    capsys: pytest.CaptureFixture[str],
    target_folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """DEFECTS 24."""
    monkeypatch.setattr(Target, "load", lambda *_a, **_k: pytest.fail("the target was loaded"))
    lines = own_data(tmp_path, target_folder, "precompute.states=[post_norm, layer_1]")
    assert guarded(lambda: dispatch("plan", lines)) == 0
    told = capsys.readouterr().out
    assert "free" in told and "unknown; give plan.tokens_per_second" in told
    measured = [*lines, "plan.tokens_per_second=100", "plan.tokens=36_000_000", "plan.ranks=4"]
    assert guarded(lambda: dispatch("plan", measured)) == 0
    told = capsys.readouterr().out
    assert "about 25.0 hours" in told, "36 million tokens at 4 x 100 a second"
    width = 2 * 32 * 4
    assert f"{36_000_000 * (width + 5) / 1e9:.1f} GB" in told


def test_a_disk_too_small_is_an_error_before_the_target_is_loaded(
    capsys: pytest.CaptureFixture[str],
    target_folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lines = own_data(tmp_path, target_folder)
    monkeypatch.setattr(estimate, "free_bytes", lambda _path: 100)
    with monkeypatch.context() as context:
        context.setattr(Target, "load", lambda *_a, **_k: pytest.fail("the target was loaded"))
        for stage in ("plan", "precompute"):
            assert guarded(lambda stage=stage: dispatch(stage, lines)) == 2
            line = capsys.readouterr().err.splitlines()[-1]
            assert "must fit on the disk" in line and "100 B free" in line
            assert "precompute.codec=lossless" in line
    assert guarded(lambda: dispatch("precompute", [*lines, "plan.allow_shortfall=true"])) == 0


def test_features_at_an_address(
    capsys: pytest.CaptureFixture[str], target_folder: Path, tmp_path: Path
) -> None:
    lines = own_data(tmp_path, target_folder, "precompute.out=memory://features/cli")
    assert guarded(lambda: dispatch("precompute", lines)) == 0
    assert len(FeatureStore("memory://features/cli/train")) == 2
    assert "free space unknown" in capsys.readouterr().err
    assert (
        guarded(lambda: dispatch("train", [*lines, "train.epochs=1", "train.warmup_steps=0"])) == 0
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_a_head_is_chosen_by_its_family(family: str) -> None:
    """conf/head holds a file for each family and no other; it shows every option at its default."""
    assert {path.stem for path in (conf_folder() / "head").glob("*.yaml")} == set(FAMILIES)
    config = load_config(["target.path=x", f"head={family}"])
    cls = FAMILIES[family].config
    assert set(config["head"]) == set(cls.__dataclass_fields__)
    assert section(config, "head", cls) == cls()
    assert cls().family == family
    states, terms = config["precompute"]["states"], config["train"]["loss"]
    others = {"eagle3": ["eagle3"], "peagle": ["eagle3"]}
    others |= {"dflash": ["spread_5"], "dspark": ["spread_5"]}
    assert states == ["post_norm", *others.get(family, [])]
    assert (terms["smooth_l1"] == 0) == (family not in ("mtp", "eagle"))


# --- the whole pipeline ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def pipeline(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A finished run on a toy target: all stages, by one command."""
    folder = tmp_path_factory.mktemp("pipeline")
    save_target(folder / "target")
    write_prompts(folder / "prompts")
    assert guarded(lambda: dispatch("run", overrides(folder))) == 0
    yield folder


def copied(pipeline: Path, tmp_path: Path) -> Path:
    """A copy of the finished run that a test may change."""
    return Path(shutil.copytree(pipeline, tmp_path / "copy"))


def again(
    capsys: pytest.CaptureFixture[str], folder: Path, *more: str, stage: str = "run"
) -> dict[str, bool]:
    """Run once more; which stages did their work."""
    capsys.readouterr()
    status = guarded(lambda: dispatch(stage, overrides(folder, *more)))
    err = capsys.readouterr().err
    assert status == 0, err
    return {
        name: f"{name}: done before, inputs unchanged" not in err
        for name in STAGES
        if f"{name}: done" in err
    }


def test_the_pipeline_leaves_every_output(pipeline: Path) -> None:
    run = pipeline / "run"
    for stage in STAGES:
        assert json.loads((run / stage / "stage.json").read_text())["seconds"] > 0
    for name, texts in PROMPTS.items():
        rows = [
            json.loads(line)
            for line in (run / "regenerate" / f"{name}.jsonl").read_text().splitlines()
        ]
        assert [row["id"] for row in rows] == [f"{name}-{number}" for number in range(len(texts))]
        assert all(0 < len(row["output_ids"]) <= 10 for row in rows)
    assert json.loads((run / "regenerate" / "accounting.json").read_text())["train"] == {
        "input": 6,
        "success": 6,
        "skipped": 0,
        "error": 0,
        "used": 6,
        "repaired": {},
        "refused": {},
        "errors": {},
        "examples": {},
        "answers": {"length": 6},
        "notes": {},
    }
    assert [len(FeatureStore(run / "precompute" / name)) for name in ("train", "heldout")] == [6, 3]
    assert (run / "train" / "curves.jsonl").stat().st_size
    assert list((run / "train" / "checkpoints").glob("step-*/optimizer.safetensors"))
    load_head(run / "train" / "head", Target.load(pipeline / "target", "float32"))
    evaluation = json.loads((run / "evaluate" / "evaluation.json").read_text())
    assert set(evaluation["sets"]) == {"heldout", "ood"}
    assert evaluation["sets"]["heldout"]["greedy"]["prompts"] == 3
    assert evaluation["lossless"]["different"] == []
    assert evaluation["lossless"]["transformers"]["different"] == []
    assert evaluation["speed"]["plain"]["tokens_per_s"] > 0
    assert len(evaluation["speed_model"]["measured"]) == evaluation["k"]
    assert len(evaluation["examples"]) == 2
    validation = evaluation["validation"]
    assert {"kl/1", "kl/2", "kl/3", "agree/3", "tau_teacher_forced"} <= set(validation["engine"])
    assert validation["engine"] == pytest.approx(validation["training"], rel=1e-3, abs=1e-4)
    assert validation["difference"] == pytest.approx(
        dict.fromkeys(validation["engine"], 0.0), abs=1e-3
    )
    assert evaluation["format"] == 2 and evaluation["machine"]["ranks"] == 1
    assert evaluation["accounting"]["heldout"]["used"] == 3
    assert [(row["set"], row["temperature"], row["k"]) for row in evaluation["grid"]] == [
        (name, temperature, 2) for name in ("heldout", "ood") for temperature in (0.0, 1.0)
    ]
    assert all(
        (run / "report" / name).stat().st_size
        for name in ("index.html", "report.md", "report.json")
    )
    assert sorted(path.name for path in (run / "export" / "mimo_mtp").iterdir()) == [
        "README.md",
        "config.json",
        "export.json",
        "model.safetensors",
    ]
    assert not [path for path in run.rglob("*") if path.name.endswith((".part", ".journal"))], (
        "nothing half-done is left"
    )


def test_a_second_run_does_nothing_again(
    capsys: pytest.CaptureFixture[str], pipeline: Path, tmp_path: Path
) -> None:
    folder = copied(pipeline, tmp_path)
    files = modified(folder)
    assert again(capsys, folder) == dict.fromkeys(STAGES, False)
    assert modified(folder) == files


def modified(folder: Path) -> dict[Path, int]:
    """When each file of the run was last written."""
    files = (path for path in (folder / "run").rglob("*") if path.is_file() and path.name != LOCK)
    return {path: path.stat().st_mtime_ns for path in files}


def test_a_second_run_loads_no_target(
    capsys: pytest.CaptureFixture[str], pipeline: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        Target, "load", lambda *_args, **_kwargs: pytest.fail("the target was loaded")
    )
    again(capsys, pipeline)


def test_a_change_is_felt_by_the_stages_below_it_alone(
    capsys: pytest.CaptureFixture[str], pipeline: Path, tmp_path: Path
) -> None:
    folder = copied(pipeline, tmp_path)
    done = again(capsys, folder, "evaluate.seed=1")
    assert [done[name] for name in ("regenerate", "precompute", "train", "evaluate")] == [
        False,
        False,
        False,
        True,
    ]


def head_bytes(folder: Path) -> bytes:
    return (folder / "run" / "train" / "head" / "head.safetensors").read_bytes()


@pytest.mark.parametrize(
    "change",
    [
        "train.epochs=1",
        "train.seed=1",
        "head.init=random",
        "head.embedding_noise=0.5",
        "precision=float32",
    ],
)
def test_a_changed_setting_of_training_trains_again(
    capsys: pytest.CaptureFixture[str], pipeline: Path, tmp_path: Path, change: str
) -> None:
    """The result is the one that a fresh folder gives: nothing of the old run stays in it."""
    folder = copied(pipeline, tmp_path)
    before = head_bytes(folder)
    assert again(capsys, folder, change, stage="train") == {"train": True}
    redone = head_bytes(folder)
    assert redone != before
    shutil.rmtree(folder / "run" / "train")
    again(capsys, folder, change, stage="train")
    assert head_bytes(folder) == redone


def test_a_change_that_is_undone_gives_the_first_result_again(
    capsys: pytest.CaptureFixture[str], pipeline: Path, tmp_path: Path
) -> None:
    folder = copied(pipeline, tmp_path)
    before = head_bytes(folder)
    again(capsys, folder, "train.epochs=1", stage="train")
    assert head_bytes(folder) != before
    again(capsys, folder, stage="train")
    assert head_bytes(folder) == before


def test_an_export_shows_no_figures_of_an_earlier_head(
    capsys: pytest.CaptureFixture[str], pipeline: Path, tmp_path: Path
) -> None:
    """The evaluation in the folder is the old head's: the new one's card must not carry it."""
    folder = copied(pipeline, tmp_path)
    card = folder / "run" / "export" / "mimo_mtp" / "README.md"
    assert "tau" in card.read_text()
    shutil.rmtree(folder / "run" / "train")
    again(capsys, folder, "train.epochs=1", stage="train")
    again(capsys, folder, "train.epochs=1", stage="export")
    assert "tau" not in card.read_text()


def test_a_set_of_prompts_that_was_dropped_is_not_measured(
    capsys: pytest.CaptureFixture[str], pipeline: Path, tmp_path: Path
) -> None:
    folder = copied(pipeline, tmp_path)
    shutil.rmtree(folder / "run" / "train")
    arguments = [item for item in overrides(folder) if "prompts.ood" not in item]
    assert guarded(lambda: dispatch("run", arguments)) == 0
    evaluation = json.loads((folder / "run" / "evaluate" / "evaluation.json").read_text())
    assert set(evaluation["sets"]) == {"heldout"}


def counted_rows(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Keys of the answers and completions that are made from now on."""
    append, made = Journal.append, []

    def counted(journal: Journal, row: dict) -> None:
        made.append(row["id"])
        append(journal, row)

    monkeypatch.setattr(Journal, "append", counted)
    return made


def test_a_higher_limit_asks_the_further_prompts_alone(
    pipeline: Path, fresh: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limited = "+regenerate.limits.train=4"
    assert guarded(lambda: dispatch("regenerate", overrides(fresh, limited))) == 0
    made = counted_rows(monkeypatch)
    assert guarded(lambda: dispatch("regenerate", overrides(fresh))) == 0
    assert len(made) == 2
    answers = [folder / "run" / "regenerate" / "train.jsonl" for folder in (fresh, pipeline)]
    assert answers[0].read_bytes() == answers[1].read_bytes()


def test_changed_prompts_are_answered_again(
    capsys: pytest.CaptureFixture[str], pipeline: Path, tmp_path: Path
) -> None:
    folder = copied(pipeline, tmp_path)
    path = folder / "prompts" / "train.jsonl"
    path.write_text(path.read_text().replace("name a bird.", "name a tree."))
    done = again(capsys, folder, stage="regenerate")
    assert done == {"regenerate": True}
    rows = [
        json.loads(line)
        for line in (folder / "run" / "regenerate" / "train.jsonl").read_text().splitlines()
    ]
    assert rows[1]["messages"][0]["content"] == "name a tree."
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder / "target")
    assert "name a tree." in tokenizer.decode(rows[1]["prompt_ids"])


def test_a_changed_chat_template_is_felt(
    capsys: pytest.CaptureFixture[str], pipeline: Path, tmp_path: Path
) -> None:
    """DEFECTS 23: the prompts are made with it, so it is an input like the weights."""
    folder = copied(pipeline, tmp_path)
    template = folder / "target" / "chat_template.jinja"
    template.write_text(template.read_text().replace("assistant", "bot"))
    assert again(capsys, folder, stage="regenerate") == {"regenerate": True}
    answers = (folder / "run" / "regenerate" / "train.jsonl").read_text().splitlines()
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder / "target")
    assert tokenizer.decode(json.loads(answers[0])["prompt_ids"]).endswith("<s>bot\n")


def test_another_target_does_every_stage_again(
    capsys: pytest.CaptureFixture[str], pipeline: Path, tmp_path: Path
) -> None:
    folder = copied(pipeline, tmp_path)
    before = head_bytes(folder)
    shutil.rmtree(folder / "target")
    save_target(folder / "target", seed=9)
    assert again(capsys, folder) == dict.fromkeys(STAGES, True)
    assert head_bytes(folder) != before
    load_head(folder / "run" / "train" / "head", Target.load(folder / "target", "float32"))


def test_a_changed_config_is_refused_and_a_touched_one_is_not_felt(
    capsys: pytest.CaptureFixture[str],
    pipeline: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The weights' files are the same, so only the identity can tell."""
    folder = copied(pipeline, tmp_path)
    path = folder / "target" / "config.json"
    values = json.loads(path.read_text())
    told = json.loads((folder / "run" / "evaluate" / "evaluation.json").read_text())
    assert told["identity"]["config"]["rope_parameters"]["rope_theta"] == 10000
    path.write_text(json.dumps(dict(reversed((values | {"use_cache": False}).items()))))
    assert again(capsys, folder) == dict.fromkeys(STAGES, False)
    rope = {"rope_type": "default", "rope_theta": 100.0}
    path.write_text(json.dumps(values | {"rope_parameters": rope}))
    files = modified(folder)
    monkeypatch.setattr(
        Target, "load", lambda *_args, **_kwargs: pytest.fail("the target was loaded")
    )
    for stage in ("precompute", "train", "evaluate", "export"):
        line = mistake(capsys, stage, *overrides(folder))
        assert "rope_parameters.rope_theta 10000 -> 100" in line, stage
    assert {path for path in files if path.suffix == ".safetensors"} <= modified(folder).keys()


def test_a_quantised_target_is_another_target(
    capsys: pytest.CaptureFixture[str], pipeline: Path, tmp_path: Path
) -> None:
    """Text, features, head and figures are then those of the quantised one, held to transformers' own quantised one."""
    folder = copied(pipeline, tmp_path)
    plain, run = Target.load(folder / "target", "float32"), folder / "run"
    int8 = "target.quantisation=int8"
    load_head(run / "train" / "head", plain)
    assert guarded(lambda: dispatch("evaluate", overrides(folder, int8))) == 2
    assert "own target (quantisation int8); received none" in capsys.readouterr().err
    assert again(capsys, folder, int8) == dict.fromkeys(STAGES, True)
    target = Target.load(folder / "target", "float32", quantisation="int8")
    load_head(run / "train" / "head", target)
    for name in ("train", "heldout"):
        contract = FeatureStore(run / "precompute" / name).manifest.contract
        assert (contract.quantisation, contract.target_hash) == ("int8", target.hash)
    evaluation = json.loads((run / "evaluate" / "evaluation.json").read_text())
    assert evaluation["target"]["quantisation"] == "int8"
    assert evaluation["lossless"]["different"] == []
    assert evaluation["lossless"]["transformers"]["different"] == []
    assert "int8" in (run / "export" / "mimo_mtp" / "README.md").read_text()


def test_ranks_that_hold_the_target_together_measure_what_one_does(
    capsys: pytest.CaptureFixture[str], pipeline: Path, tmp_path: Path
) -> None:
    folder = copied(pipeline, tmp_path)
    record = folder / "run" / "evaluate" / "evaluation.json"
    alone = json.loads(record.read_text())
    two = overrides(folder, "engine.tensor_parallel=2")
    assert guarded(lambda: dispatch("evaluate", two)) == 2
    assert "1 ranks, tensor_parallel 2; launch with torchrun" in capsys.readouterr().err
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", "2", "-m", "mtp_train.cli.evaluate", *two]
    environment = {key: value for key, value in os.environ.items() if "PYTEST" not in key}
    environment |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=500, cwd=REPOSITORY
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(record.read_text())
    assert (alone["machine"]["ranks"], found["machine"]["ranks"]) == (1, 2)
    for name in ("heldout", "ood"):
        for kind in ("greedy", "sampled"):
            figures, expected = (one["sets"][name][kind] for one in (found, alone))
            for key in ("prompts", "tokens", "drafts", "tau", "per_position"):
                assert figures[key] == expected[key], (name, kind, key)
    assert found["lossless"]["different"] == found["lossless"]["transformers"]["different"] == []
    assert found["validation"]["engine"] == pytest.approx(alone["validation"]["engine"], rel=1e-3)


# --- regenerate, broken off -----------------------------------------------------------------------------------


class Stop(Exception):
    """Stands for a kill between two answers: no one catches it."""


def break_off(folder: Path, monkeypatch: pytest.MonkeyPatch, answers: int) -> None:
    """Answer a few prompts, then die without a word."""
    original = Journal.append

    def append(journal: Journal, row: dict) -> None:
        if len(journal) == answers:
            raise Stop
        original(journal, row)

    with monkeypatch.context() as patch:
        patch.setattr(Journal, "append", append)
        with pytest.raises(Stop):
            dispatch("regenerate", overrides(folder))


@pytest.fixture
def fresh(pipeline: Path, tmp_path: Path) -> Path:
    folder = tmp_path / "fresh"
    shutil.copytree(pipeline / "target", folder / "target")
    shutil.copytree(pipeline / "prompts", folder / "prompts")
    return folder


def test_answers_go_on_where_they_were_broken_off(
    capsys: pytest.CaptureFixture[str], pipeline: Path, fresh: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    break_off(fresh, monkeypatch, 2)
    journal = fresh / "run" / "regenerate" / "train.journal"
    with open(journal, "a") as file:
        file.write('{"id": "train-5", "cut sho')  # the line that the kill cut short
    capsys.readouterr()
    assert guarded(lambda: dispatch("regenerate", overrides(fresh))) == 0
    assert "2 answers found, 4 to go" in capsys.readouterr().err
    for name in PROMPTS:
        answers = [folder / "run" / "regenerate" / f"{name}.jsonl" for folder in (fresh, pipeline)]
        assert answers[0].read_bytes() == answers[1].read_bytes()


@pytest.mark.parametrize("change", ["prompts", "settings", "target"])
def test_answers_of_a_broken_off_run_with_other_inputs_are_not_used(
    capsys: pytest.CaptureFixture[str], fresh: Path, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    """What was answered before belongs to other inputs: it is left as it is, or set aside and all is answered again."""
    break_off(fresh, monkeypatch, 2)
    more = []
    if change == "prompts":
        path = fresh / "prompts" / "train.jsonl"
        path.write_text(
            "".join(
                line.replace("?", "!").replace(".", "!")
                for line in path.read_text().splitlines(keepends=True)
            )
        )
    if change == "settings":
        more = ["regenerate.max_new_tokens=6"]
    if change == "target":
        shutil.rmtree(fresh / "target")
        save_target(fresh / "target", seed=9)
    journal = (fresh / "run" / "regenerate" / "train.journal").read_bytes()
    capsys.readouterr()
    assert guarded(lambda: dispatch("regenerate", overrides(fresh, *more))) == 2
    said = capsys.readouterr().err
    named = {
        "prompts": "regenerate.prompts.train",
        "settings": "regenerate.max_new_tokens 10 -> 6",
        "target": "target.hash",
    }
    assert f"received {named[change]}" in said and "add restart=true to set it aside" in said
    assert (fresh / "run" / "regenerate" / "train.journal").read_bytes() == journal
    assert guarded(lambda: dispatch("regenerate", overrides(fresh, *more, "restart=true"))) == 0
    assert (fresh / "run" / "regenerate.before-1" / "train.journal").read_bytes() == journal
    broken = (fresh / "run" / "regenerate" / "train.jsonl").read_text()
    shutil.rmtree(fresh / "run")
    assert guarded(lambda: dispatch("regenerate", overrides(fresh, *more))) == 0
    assert broken == (fresh / "run" / "regenerate" / "train.jsonl").read_text()


def test_a_thread_count_is_obeyed(capsys: pytest.CaptureFixture[str], pipeline: Path) -> None:
    before = torch.get_num_threads()
    try:
        again(capsys, pipeline, "threads=1", stage="train")
        assert torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(before)


def test_an_eagle3_run_and_another_one_that_begins_from_its_head(
    capsys: pytest.CaptureFixture[str], pipeline: Path, tmp_path: Path
) -> None:
    """Its states are captured, its vocabulary is chosen and kept, and it is exported in its own layout."""
    folder = copied(pipeline, tmp_path)
    options = ("head=eagle3", "head.draft_vocabulary=20")
    assert guarded(lambda: dispatch("run", overrides(folder, *options))) == 0
    said = capsys.readouterr().err
    assert re.search(r"export: inputs changed \(.*train\.outputs", said)
    assert (folder / "run" / "export.before-1" / "mimo_mtp").is_dir()
    assert re.search(r"\d+ draft tokens.* cover [\d.]+% of the trained text", said)
    assert [path.name for path in (folder / "run" / "export").iterdir() if path.is_dir()] == [
        "eagle3"
    ]
    first, _ = load_head(
        folder / "run" / "train" / "head", Target.load(folder / "target", "float32")
    )
    assert FeatureStore(folder / "run" / "precompute" / "train").states == (
        "post_norm",
        *first.states,
    )
    evaluation = json.loads((folder / "run" / "evaluate" / "evaluation.json").read_text())
    assert evaluation["head"]["family"] == "eagle3" and evaluation["lossless"]["different"] == []
    ours, theirs = (evaluation["validation"][name] for name in ("engine", "training"))
    assert ours["alpha/1"] == pytest.approx(theirs["alpha/1"], abs=0.01)

    kept = shutil.copytree(folder / "run" / "train" / "head", tmp_path / "kept")
    warm = (*options, f"train.warm_start={kept}", "train.learning_rate=1e-5")
    assert guarded(lambda: dispatch("train", overrides(folder, *warm))) == 0
    said = capsys.readouterr().err
    assert f"begins as {kept} after step" in said
    again, _ = load_head(
        folder / "run" / "train" / "head", Target.load(folder / "target", "float32")
    )
    assert first.vocabulary is not None and again.vocabulary is not None
    assert torch.equal(first.vocabulary, again.vocabulary)
    moved = max(
        float((value - first.state_dict()[name]).abs().max())
        for name, value in again.state_dict().items()
    )
    assert 0 < moved < 1e-3


@pytest.mark.parametrize(
    ("options", "formats"),
    [
        (("head=mtp", "head.block=llama"), ("mimo_mtp",)),
        (("head=eagle",), ("eagle", "eagle_sglang")),
        (
            ("head=eagle3", "head.draft_vocabulary=20", "head.fc_norm=true", "head.window=6"),
            ("eagle3", "speculators"),
        ),
        (("head=mtp", "head.layers=2"), ("mtp_train_vllm",)),
        (("head=eagle", "head.layers=2", "head.draft_vocabulary=20"), ("eagle_sglang",)),
    ],
    ids=["mtp", "eagle", "eagle3", "mtp-layers", "eagle-part"],
)
def test_a_head_is_exported_imported_measured_and_trained_further(
    capsys: pytest.CaptureFixture[str],
    pipeline: Path,
    tmp_path: Path,
    options: tuple[str, ...],
    formats: tuple[str, ...],
) -> None:
    folder = copied(pipeline, tmp_path)
    for stage in ("precompute", "train"):
        assert guarded(lambda stage=stage: dispatch(stage, overrides(folder, *options))) == 0
    for name in formats:
        again(capsys, folder, *options, f"export.format={name}", stage="export")
    exports = folder / "run" / "export"
    assert {path.name for path in exports.iterdir() if path.is_dir()} == {*formats}, (
        "one layout leaves the others"
    )
    target = Target.load(folder / "target", "float32")
    trained, _ = load_head(folder / "run" / "train" / "head", target)
    for name in formats:
        run = tmp_path / name
        theirs = [f"target.path={folder / 'target'}", "target.dtype=float32", f"run={run}"]
        assert guarded(lambda: dispatch("import", [str(exports / name), *theirs])) == 0  # noqa: B023
        head, card = load_head(run / "train" / "head", target)
        assert card.config["layout"] == name
        assert all(
            torch.equal(value, head.state_dict()[key])
            for key, value in trained.state_dict().items()
        )
    shutil.copytree(folder / "run" / "regenerate", run / "regenerate")
    more = [*overrides(folder, *options), f"run={run}", "evaluate.lossless_prompts=0"]
    for stage in ("evaluate", "report"):
        assert guarded(lambda stage=stage: dispatch(stage, more)) == 0, capsys.readouterr().err
    evaluation = json.loads((run / "evaluate" / "evaluation.json").read_text())
    assert evaluation["head"]["family"] == trained.family
    warm = [f"train.warm_start={run / 'train' / 'head'}", "head.block=target"]
    assert guarded(lambda: dispatch("train", overrides(folder, *options, *warm))) == 0
    assert f"begins as {run / 'train' / 'head'}" in capsys.readouterr().err


def test_what_import_refuses(
    capsys: pytest.CaptureFixture[str], pipeline: Path, tmp_path: Path
) -> None:
    target = f"target.path={pipeline / 'target'}"
    export = pipeline / "run" / "export" / "mimo_mtp"
    run = f"run={tmp_path / 'run'}"
    assert "one head folder" in mistake(capsys, "import", target, run)
    line = mistake(capsys, "import", str(tmp_path / "nowhere"), target, run)
    assert "must be a local one that is there" in line and "nowhere" in line
    save_target(tmp_path / "other", seed=9)
    other = f"target.path={tmp_path / 'other'}"
    assert "target_hash" in mistake(capsys, "import", str(export), other, run)
    broken = Path(shutil.copytree(export, tmp_path / "broken"))
    (broken / "export.json").unlink()
    tensors = broken / "model.safetensors"
    tensors.write_bytes(tensors.read_bytes()[:-9])
    assert "whole safetensors" in mistake(capsys, "import", str(broken), target, run)
    assert not (tmp_path / "run" / "train" / "head").exists()


def test_the_list_says_where_a_head_goes_and_why_not(
    capsys: pytest.CaptureFixture[str], pipeline: Path, tmp_path: Path
) -> None:
    assert guarded(lambda: dispatch("export", ["--list"])) == 0
    said = capsys.readouterr().out
    assert all(name in said for name in LAYOUTS)
    assert guarded(lambda: dispatch("export", ["--list", *overrides(pipeline, "head=eagle")])) == 0
    said = capsys.readouterr().out
    assert re.search(r"head of family mtp \(.*train/head\)", said), "the trained one"
    assert re.search(r"mimo_mtp +yes \(the usual one\)", said)
    assert re.search(r"eagle3 +no: head\.family=mtp", said)
    fresh = [*overrides(pipeline, "head=mtp", "head.enorm=false"), f"run={tmp_path / 'fresh'}"]
    assert guarded(lambda: dispatch("export", ["--list", *fresh])) == 0
    said = capsys.readouterr().out
    assert "not trained yet" in said and re.search(r"mimo_mtp +no: head\.enorm=false", said)


def test_a_draft_models_run(
    capsys: pytest.CaptureFixture[str], pipeline: Path, tmp_path: Path
) -> None:
    """A folder's model is trained on the features that are there, measured, and trained anew if its weights change."""
    folder = copied(pipeline, tmp_path)
    shutil.rmtree(folder / "run" / "export")
    small = make_target(seed=8, num_hidden_layers=1, hidden_size=24, num_key_value_heads=4)
    small.model.save_pretrained(folder / "small")
    make_tokenizer().save_pretrained(folder / "small")
    options = ("head=draft_model", f"head.path={folder / 'small'}")
    for wrong, named in (
        (("head=draft_model",), "head.path must"),
        ((*options, "train.rollout_steps=3"), "train.rollout_steps must be 1"),
    ):
        assert guarded(lambda more=wrong: dispatch("train", overrides(folder, *more))) == 2
        assert f"error: {named}" in capsys.readouterr().err
    assert guarded(lambda: dispatch("run", overrides(folder, *options))) == 0
    assert (folder / "run" / "export" / "draft_model" / "config.json").is_file()
    evaluation = json.loads((folder / "run" / "evaluate" / "evaluation.json").read_text())
    assert evaluation["head"]["family"] == "draft_model"
    assert evaluation["lossless"]["different"] == []
    ours, theirs = (evaluation["validation"][name] for name in ("engine", "training"))
    assert ours["alpha/1"] == pytest.approx(theirs["alpha/1"], abs=0.01)
    assert not again(capsys, folder, *options, stage="train")["train"]
    make_target(
        seed=9, num_hidden_layers=1, hidden_size=24, num_key_value_heads=4
    ).model.save_pretrained(folder / "small")
    assert again(capsys, folder, *options, stage="train")["train"]


def test_a_head_alone_is_measured_on_prompt_sets(
    capsys: pytest.CaptureFixture[str], pipeline: Path, tmp_path: Path
) -> None:
    """No stage was run here: a checkpoint was copied, and questions are named."""
    run = tmp_path / "other"
    shutil.copytree(pipeline / "run" / "train" / "head", run / "train" / "head")
    rows = [
        {"question_id": 81, "category": "a", "turns": ["why?", "and then?"]},
        {"question_id": 82, "category": "b", "turns": ["name a bird."]},
        {"question_id": 83, "turns": ["FULL BENCHMARK DATA SHOULD BE FETCHED FROM THE SOURCE"]},
    ]
    questions = tmp_path / "question.jsonl"
    questions.write_text("".join(json.dumps(row) + "\n" for row in rows))
    arguments = [
        *(item for item in overrides(pipeline) if "regenerate.prompts" not in item),
        f"run={run}",
        f"evaluate.sets.talks={questions}",
        "evaluate.sets.same={path: " + str(questions) + ", limit: 1}",
        "evaluate.ks=[1,2]",
    ]
    capsys.readouterr()
    assert guarded(lambda: dispatch("evaluate", arguments)) == 0
    said = capsys.readouterr().err
    assert "evaluate talks: 2 used + 0 repaired + 1 refused = 3 conversations" in said
    assert "refused 1: a placeholder instead of the benchmark's text" in said
    evaluation = json.loads((run / "evaluate" / "evaluation.json").read_text())
    assert set(evaluation["sets"]) == {"talks", "same"}
    assert evaluation["sets"]["talks"]["greedy"]["prompts"] == 3
    assert [row["turn"] for row in evaluation["sets"]["talks"]["greedy"]["by_turn"]] == [1, 2]
    assert not {"validation", "data_digest"} & set(evaluation)
    assert {row["k"] for row in evaluation["grid"]} == {1, 2}
    first = evaluation["examples"][0]
    assert first["prompt"] in ("why?", "and then?", "name a bird.") and first["segments"]
    assert guarded(lambda: dispatch("evaluate", arguments)) == 0
    assert "done before" in capsys.readouterr().err
    questions.write_text(questions.read_text().replace("bird", "fish"))
    assert guarded(lambda: dispatch("evaluate", arguments)) == 0
    assert "inputs changed" in capsys.readouterr().err
    shutil.rmtree(run / "train")
    assert "must hold head.json" in mistake(capsys, "evaluate", *arguments)


def test_the_served_target_is_gone_before_the_exact_one_is_loaded(
    pipeline: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder = copied(pipeline, tmp_path)
    alive: weakref.WeakSet[Target] = weakref.WeakSet()
    before: list[tuple[str, int]] = []
    load = Target.load

    def noted(path: Path, dtype: str = "bfloat16", **more: Any) -> Target:
        before.append((dtype, len(alive)))
        target = load(path, dtype, **more)
        alive.add(target)
        return target

    monkeypatch.setattr(Target, "load", noted)
    less = ["target.dtype=bfloat16", "evaluate.speed_prompts=0", "evaluate.reference_prompts=0"]
    assert guarded(lambda: dispatch("evaluate", [*overrides(folder), *less])) == 0
    assert before == [("bfloat16", 0), ("float32", 0)]
    assert not alive
    assert re.search(r"evaluate: loading \d+ s, .*acceptance \d+ s", capsys.readouterr().err)


def test_a_report_without_speed_and_losslessness(pipeline: Path, tmp_path: Path) -> None:
    folder = copied(pipeline, tmp_path)
    less = [*overrides(folder), "evaluate.speed_prompts=0", "evaluate.lossless_prompts=0"]
    for name in ("evaluate", "report"):
        assert guarded(lambda name=name: dispatch(name, less)) == 0
    found = json.loads((folder / "run" / "evaluate" / "evaluation.json").read_text())
    assert not {"speed", "speed_model", "lossless"} & set(found) and "sets" in found
    assert (folder / "run" / "report" / "index.html").stat().st_size
