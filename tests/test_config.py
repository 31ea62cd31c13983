"""The configuration: recipes merge as YAML says, overrides keep what was typed, misspelt names are answered."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from test_cli import mistake, save_target

from mtp_train.cli.config import load_config, section, sweep_alternatives
from mtp_train.cli.job import Job
from mtp_train.cli.main import dispatch, guarded
from mtp_train.cli.overrides import quoted
from mtp_train.core.errors import UserError
from mtp_train.models.target import Target
from mtp_train.store.shards import FeatureStore
from mtp_train.text.sources import DataConfig

NASTY = [
    "/data/größe",
    "/tmp/a b[1]=#x.jsonl",
    "a=b",
    "a,b",
    "a, b",
    "[1].jsonl",
    "(x)",
    "x(1)",
    "choice(a,b)",
    "range(1,3)",
    "null",
    "none",
    "true",
    "1e3",
    "1_000",
    "007",
    "0x1f",
    "???",
    "${run}",
    "${",
    "$HOME",
    "C:\\temp\\new",
    "back\\\\slash\\",
    "it's",
    'a "quoted" word',
    "#hash",
    "tab\tand\nline",
    " spaces around ",
    "~home",
    "a:b::c",
    "semi;colon&more!",
    "日本語 и русский 🙂",
    "",
]


@pytest.mark.parametrize("text", NASTY)
def test_a_text_is_what_was_typed(text: str) -> None:
    config = load_config([f"target.path={text}", f"run={text}", f"train.warm_start={text}"])
    assert config["target"]["path"] == config["run"] == config["train"]["warm_start"] == text
    assert Job(["target.path=x", f"run={quoted(text)}"]).run.run == text, "and quoted"


@pytest.mark.parametrize("text", [text for text in NASTY if text])
def test_a_source_is_the_path_that_was_typed(text: str) -> None:
    for line in (text, quoted(text), f"[{quoted(text)}]", f"{{path: {quoted(text)}}}"):
        config = load_config(["target.path=x", f"data.sets.train={line}"])
        (source,) = section(config, "data", DataConfig).sources("train")
        assert source.path == text, line
    config = load_config(["target.path=x", f"+regenerate.prompts.train={text}"])
    assert config["regenerate"]["prompts"] == {"train": text}


@pytest.mark.parametrize(
    ("line", "paths"),
    [
        ("[a.jsonl,b c.jsonl]", ["a.jsonl", "b c.jsonl"]),
        ("[/data/größe.jsonl, /data/a=b#c.jsonl]", ["/data/größe.jsonl", "/data/a=b#c.jsonl"]),
        ("['/tmp/a b[1]=#x,y.jsonl', b]", ["/tmp/a b[1]=#x,y.jsonl", "b"]),
        ('["/größe/a.jsonl",{path: "/größe/b.jsonl", weight: 1e-1}]', ["/größe/a.jsonl", 0.1]),
        ("[{path: /größe/a.jsonl, weight: 1e-1}, b]", [0.1, "b"]),
    ],
)
def test_a_list_of_sources(line: str, paths: list[Any]) -> None:
    config = load_config(["target.path=x", f"data.sets.train={line}"])
    found = section(config, "data", DataConfig).sources("train")
    assert [source.weight or source.path for source in found] == paths


@pytest.mark.parametrize(
    ("line", "parts"),
    [
        ("train.epochs=2=3", ["train.epochs must be of type int", "2=3"]),
        ("train.epochs=größe", ["train.epochs must be of type int", "größe"]),
        ("train.epochs=1,2", ["several values", "train.epochs=1,2", "add -m"]),
        ("evaluate.ks=[1,2", ["evaluate.ks must be of type list", "[1,2"]),
        ("data.sets.train=[a,1e3]", ["a source must be a path", "1000.0"]),
        ("data.sets=a.jsonl", ["data.sets holds keys of its own", "a.jsonl", "data.sets.NAME="]),
        ("train=a.jsonl", ["train must be one of default", "train.KEY=VALUE"]),
        ("~train.epochs", ["~ takes away a name that a recipe has given", "train.epochs"]),
        ("train.epochs.more=1", ["train.epochs is a value without keys"]),
        ("--epochs", ["overrides must be key=value", "--epochs"]),
        ("train.online_eval=3", ["train.online_eval holds keys of its own", "every=VALUE"]),
    ],
)
def test_a_value_that_can_not_be(
    capsys: pytest.CaptureFixture[str], line: str, parts: list[str]
) -> None:
    told = mistake(capsys, "train", "target.path=x", "run=runs/none", line)
    assert all(part in told for part in parts), told


@pytest.mark.parametrize(
    ("line", "meant"),
    [
        ("trian.epochs=1", "train.epochs"),
        ("train.epoch=1", "train.epochs"),
        ("train.loss.klx=1", "train.loss.kl"),
        ("train.online_eval.evry=1", "train.online_eval.every"),
        ("epochs=1", "train.epochs"),
        ("seed=1", "data.seed or evaluate.seed or regenerate.seed or train.seed"),
        ("runn=x", "run"),
        ("thread=1", "threads"),
        ("data.set.train=x", "data.sets.train"),
        ("train.kl=1", "train.loss.kl"),
        ("head=egle", "eagle"),
        ("head.family=egle3", "eagle3"),
        ("recipe=smollm2_mtp", "smollm2_mtp_cpu"),
    ],
)
def test_a_misspelt_key_names_the_nearest(
    capsys: pytest.CaptureFixture[str], line: str, meant: str
) -> None:
    told = mistake(capsys, "train", "target.path=x", "run=runs/none", line)
    words = sorted(told.partition("did you mean ")[2].removesuffix("?").split(" or "))
    assert " or ".join(words) == meant, told


@pytest.mark.parametrize(
    ("stage", "meant"), [("trian", "train"), ("evalute", "evaluate"), ("pln", "plan")]
)
def test_a_misspelt_stage_names_the_nearest(
    capsys: pytest.CaptureFixture[str], stage: str, meant: str
) -> None:
    assert f"did you mean {meant}?" in mistake(capsys, stage)


# --- recipes --------------------------------------------------------------------------------------------------


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[Any], str]:
    """Writes a recipe of these values, or of this text; gives the override that names it."""
    monkeypatch.chdir(tmp_path)

    def write(values: Any, style: str | None = None) -> str:
        folder = tmp_path / "recipes" / "mine"
        folder.mkdir(parents=True)
        text = (
            values
            if isinstance(values, str)
            else yaml.safe_dump(values, allow_unicode=True, default_style=style)
        )
        (folder / "config.yaml").write_text(text, encoding="utf-8")
        return "recipe=mine"

    return write


def test_a_recipe_holds_sources_in_every_form(recipe: Callable[[Any], str]) -> None:
    sets = {
        "train": ["{recipe}/a.jsonl", {"path": "{recipe}/b.jsonl", "weight": 1.0}],
        "heldout": {"path": "größe, [1] = #x.jsonl", "limit": 3},
    }
    config = load_config([recipe({"data": {"sets": sets}}), "target.path=x"])
    data = section(config, "data", DataConfig)
    assert [source.path for source in data.sources("train")] == [
        "recipes/mine/a.jsonl",
        "recipes/mine/b.jsonl",
    ]
    assert data.sources("train")[1].weight == 1.0
    assert data.sources("heldout")[0].path == "größe, [1] = #x.jsonl"


@pytest.mark.parametrize("text", [*NASTY, "line1\nline2", "C:\\temp", "\\", "'single'"])
def test_a_recipes_texts_are_what_yaml_says(recipe: Callable[..., str], text: str) -> None:
    values = {"run": text, "target": {"path": text, "chat_template_kwargs": {"system": text}}}
    config = load_config([recipe(values, style='"')])
    assert config["run"] == config["target"]["path"] == text
    assert config["target"]["chat_template_kwargs"] == {"system": text}


def test_the_command_line_replaces_a_recipes_source_whole(recipe: Callable[[Any], str]) -> None:
    sets = {"train": {"path": "a.jsonl", "weight": 2.0}, "heldout": "h.jsonl"}
    line = recipe({"data": {"sets": sets}, "evaluate": {"ks": [1, 2, 3]}, "target": {"path": "x"}})

    def read(*more: str) -> Any:
        return load_config([line, *more])["data"]["sets"]

    assert read("data.sets.train=[b.jsonl]") == sets | {"train": ["b.jsonl"]}
    assert read("data.sets.train={path: b.jsonl}") == sets | {"train": {"path": "b.jsonl"}}
    assert read("data.sets={train: b.jsonl}") == sets | {"train": "b.jsonl"}
    assert read("data.sets.train.weight=3") == sets | {"train": {"path": "a.jsonl", "weight": 3}}
    assert read("~data.sets.heldout") == {"train": sets["train"]}
    assert load_config([line, "evaluate.ks=[4]"])["evaluate"]["ks"] == [4], "lists replace"


def test_a_recipe_chooses_a_head_and_sets_its_keys(recipe: Callable[[Any], str]) -> None:
    line = recipe({"head": "draft_model", "head.path": "a/b", "train": {"loss.kl": 2}})
    config = load_config([line, "target.path=x"])
    assert (config["head"]["family"], config["head"]["path"]) == ("draft_model", "a/b")
    assert config["train"]["loss"]["kl"] == 2 and config["train"]["loss"]["smooth_l1"] == 0.0
    with pytest.raises(UserError, match=r"received head\.path \(in recipe mine\)"):
        load_config([line, "target.path=x", "head=mtp"])


@pytest.mark.parametrize(
    ("values", "parts"),
    [
        ({"trian": {"epochs": 1}}, ["trian", "in recipe mine", "did you mean train?"]),
        ({"train": {"epoch": 1}}, ["train.epoch ", "did you mean train.epochs?"]),
        ({"train": {"loss": {"kll": 1}}}, ["train.loss.kll", "did you mean train.loss.kl?"]),
        ({"train": [1]}, ["train holds keys of its own", "[1]", "train.epochs=VALUE"]),
        ({"train": {"epochs": {"a": 1}}}, ["train.epochs must be of type int", "{'a': 1}"]),
        ({"evaluate": {"ks": {"a": 1}}}, ["evaluate.ks must be of type list", "{'a': 1}"]),
        ({"evaluate": {"ks": 3}}, ["evaluate.ks must be of type list", "3"]),
        ({"train": {"loss": 3}}, ["train.loss holds keys of its own", "train.loss.kl=VALUE"]),
        ({"run": ["a"]}, ["run must be of type str", "['a']"]),
        ("run: a\nrun: b\n", ["a recipe must be YAML", "duplicate key run"]),
        ("run: [a\n", ["a recipe must be YAML", "mine/config.yaml"]),
        ("- a\n", ["a recipe must be a mapping of keys", "['a']"]),
    ],
)
def test_a_recipe_with_a_mistake_is_one_line(
    recipe: Callable[[Any], str],
    capsys: pytest.CaptureFixture[str],
    values: Any,
    parts: list[str],
) -> None:
    told = mistake(capsys, "train", recipe(values), "target.path=x")
    assert all(part in told for part in parts), told


# --- sweeps, and a whole stage ----------------------------------------------------------------------------------


def test_a_sweep_keeps_texts_as_they_were_typed() -> None:
    found = sweep_alternatives(
        ["run=/data/größe=1", "train.warm_start=a b,1e3,null", "train.decay=0.50,0.6"]
    )
    assert [choice.lines for choice in found] == [
        ("run=/data/größe=1",),
        ("train.warm_start=a b", "train.warm_start=1e3", "train.warm_start=null"),
        ("train.decay=0.5", "train.decay=0.6"),
    ]
    assert [choice.swept for choice in found] == [False, True, True]


def test_every_stage_of_files_takes_paths_with_any_character(tmp_path: Path) -> None:
    """The target, the data and the run lie below such a folder; the features are of those very rows."""
    place = tmp_path / "größe a[1]=#x, {y} 'z' ?*"
    place.mkdir()
    save_target(place / "target")
    for name, text in (("train", "a wren."), ("heldout", "a pike.")):
        row = {"prompt": f"{name}: name one.", "completion": text}
        (place / f"{name}.jsonl").write_text(json.dumps(row) + "\n")
    lines = [
        f"target.path={place / 'target'}",
        "target.dtype=float32",
        f"run={place / 'run'}",
        f"data.sets.train={place / 'train.jsonl'}",
        f"data.sets.heldout=[{quoted(str(place / 'heldout.jsonl'))}]",
        "train.epochs=1",
        "train.warmup_steps=0",
    ]
    for stage in ("plan", "precompute", "train"):
        assert guarded(lambda stage=stage: dispatch(stage, lines)) == 0, stage
    store = FeatureStore(place / "run" / "precompute" / "train")
    assert len(store) == 1
    assert {path.name for path in tmp_path.iterdir()} == {place.name}
    assert Target.load(place / "target", "float32").hash
