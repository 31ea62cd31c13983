"""A target of which only the ends are loaded: training is the same, and the layers are not in memory."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator
from head_variants import VARIANTS
from toys import conversations, make_store, make_target
from transformers import MixtralConfig, Qwen3Config

from mtp_train.attention.packed import PackedContext
from mtp_train.cli.job import Job
from mtp_train.heads.families import build_head
from mtp_train.models.partial import DISK, ends_only
from mtp_train.models.target import Target
from mtp_train.train.config import TrainConfig
from mtp_train.train.loop import train

DEEP = {"num_hidden_layers": 4, "initializer_range": 0.2}


def save(folder: Path, *, tied: bool = False, shard: str = "5GB", dtype: str = "float32") -> Path:
    target = make_target(tie_word_embeddings=tied, **DEEP)
    target.model.to(getattr(torch, dtype)).save_pretrained(folder, max_shard_size=shard)  # type: ignore[operator]
    return folder


def in_memory(target: Target) -> int:
    """Bytes of parameters that have storage."""
    found = {id(p): p for p in target.model.parameters() if p.device.type != "meta"}
    return sum(p.numel() * p.element_size() for p in found.values())


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp("partial"))


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("shard", ["5GB", "20KB"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_ends_are_those_of_the_whole_target(
    tmp_path: Path, tied: bool, shard: str, dtype: str
) -> None:
    """Tied or not, one file or many, in the files' dtype or another: the same ends, the same forward."""
    save(tmp_path, tied=tied, shard=shard)
    assert (len(list(tmp_path.glob("*.safetensors"))) > 1) == (shard == "20KB")
    whole, ends = (Target.load(tmp_path, dtype, ends=some) for some in (False, True))
    between = list(ends.base.layers[0].parameters())
    assert between and all(parameter.is_meta for parameter in between)
    tokens, position = torch.arange(1, 40), torch.arange(39)
    assert torch.equal(ends.embed(tokens), whole.embed(tokens))
    assert torch.equal(ends.lm_head.weight, whole.lm_head.weight)
    assert ends.lm_head.weight.dtype == getattr(torch, dtype)
    states = ("layer_2", "pre_norm", "post_norm")
    for name, value in ends.capture(tokens, position, PackedContext([0, 39]), states).items():
        expected = whole.capture(tokens, position, PackedContext([0, 39]), states)[name]
        assert torch.equal(value, expected), name
    assert ends.base.layers[0].self_attn.q_proj.weight.is_meta, "read again at the next forward"


def test_the_layers_between_are_not_in_memory(folder: Path) -> None:
    whole, ends = (Target.load(folder, "float32", ends=some) for some in (False, True))
    layer = sum(p.numel() for p in whole.base.layers[0].parameters()) * 4
    assert in_memory(ends) == in_memory(whole) - 3 * layer


def trained(
    target: Target, whole: Target, family: str, out: Path
) -> tuple[dict[str, torch.Tensor], str]:
    """A head's tensors after a few steps on features of the whole target, and the curves."""
    names = tuple(dict.fromkeys(("post_norm", *MADE[family])))
    chats = conversations(6)
    stores = [make_store(out / name, whole, chats, states=names) for name in ("train", "heldout")]
    config = VARIANTS[family]
    head = build_head(target, config, 0, torch.arange(target.vocab_size))
    loss = {"kl": 1.0} if head.own_output() is not None else {"kl": 1.0, "smooth_l1": 0.1}
    how = TrainConfig(epochs=1, rows=32, warmup_steps=1, validations=1, checkpoints=1, loss=loss)
    train(target, head, *stores, how, Accelerator(cpu=True), out / "train")
    rows = [json.loads(line) for line in (out / "train" / "curves.jsonl").read_text().splitlines()]
    curves = [{key: value for key, value in row.items() if key != "seconds"} for row in rows]
    return head.state_dict(), json.dumps(curves)


MADE: dict[str, tuple[str, ...]] = {
    "mtp": (),
    "eagle": (),
    "eagle3": ("layer_1", "layer_2", "layer_3"),
    "peagle": ("layer_1", "layer_2", "layer_3"),
    "medusa": (),
}


@pytest.mark.parametrize("family", MADE)
def test_training_is_that_with_the_whole_target(
    folder: Path, tmp_path: Path, family: str, fresh_accelerate: None
) -> None:
    """From the fresh head on, which looks at the last layer and at states of the target."""
    whole = Target.load(folder, "float32")
    results = []
    for ends in (False, True):
        target = Target.load(folder, "float32", ends=ends)
        results.append(trained(target, whole, family, tmp_path / str(ends)))
    (expected, whole_curves), (ends_only_, ends_curves) = results
    assert expected.keys() == ends_only_.keys()
    assert all(torch.equal(expected[name], ends_only_[name]) for name in expected)
    assert whole_curves == ends_curves


SMALL = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def test_a_target_whose_files_hold_other_tensors_is_loaded_whole() -> None:
    assert ends_only(MixtralConfig(**SMALL), "cpu", trust_remote_code=False) == {}
    places = ends_only(Qwen3Config(**SMALL), "cpu", trust_remote_code=False)
    assert [name for name, place in places.items() if place == DISK] == ["model.layers.0"]


def test_a_job_loads_either_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path)
    asked: list[bool] = []
    load = Target.load
    monkeypatch.setattr(Target, "load", lambda *a, **k: (asked.append(k["ends"]), load(*a, **k))[1])
    job = Job([f"target.path={tmp_path}", f"run={tmp_path / 'run'}", "target.dtype=float32"])
    ends = job.target(ends=True)
    assert job.target(ends=True) is ends
    whole = job.target()
    assert whole is not ends and job.target(ends=True) is whole, "the whole one has its ends too"
    assert asked == [True, False]


@pytest.mark.parametrize(
    ("more", "runs"),
    [
        ((), False),
        (("train.online_eval.every=5",), True),
        (("precompute.live=true",), True),
    ],
)
def test_training_that_runs_the_target_has_the_whole_of_it(
    folder: Path, more: tuple[str, ...], runs: bool
) -> None:
    assert Job([f"target.path={folder}", "run=runs/none", *more]).training_runs_target == runs
