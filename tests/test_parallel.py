"""One head trained by several ranks: every strategy the same curve and head, resume across strategies and ranks."""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.utils.launch import prepare_deepspeed_cmd_env, prepare_multi_gpu_env
from head_variants import FROZEN
from safetensors.torch import load_file
from shared_training import TRAINING, Stopped, run
from toys import conversations, make_store, make_target

from mtp_train.checkpoint.heads import TENSORS, find_checkpoints
from mtp_train.cli.job import Process
from mtp_train.cli.run_folder import RunFolder, run_stage
from mtp_train.cli.train import _launched
from mtp_train.core.errors import UserError
from mtp_train.core.keys import config_inputs
from mtp_train.models.target import eagle3_states
from mtp_train.store.shards import FeatureStore
from mtp_train.train.config import STRATEGIES, TrainConfig
from mtp_train.train.loop import CURVES
from mtp_train.train.order import Order
from mtp_train.train.parallel import launched_strategy, require_library
from mtp_train.train.state import OPTIMIZER

SHARDED = [name for name in STRATEGIES if name != "ddp"]
WHOLE = [f"{name}:{name}" for name in STRATEGIES]
CHAIN = [
    "chain:ddp:2",
    "chain:fsdp2:4",
    "chain:zero1:5",
    "chain:zero2:6",
    "chain:zero3:8",
    "chain:ddp",
]
# Every family but mtp, which all else here trains.
HEADS = ["eagle", "eagle3", "peagle", "medusa", "draft_model", "draft_model-tied", *FROZEN]
# Each is broken off after a step and goes on; only the replicas of a family are trained in one go too.
MATRIX = [
    *(f"{head}-whole:ddp:0:{head}" for head in HEADS),
    *(
        f"{head}-{name}:{name}:{stop}:{head}"
        for head in HEADS
        for name in STRATEGIES
        for stop in (1, 0)
    ),
]
KILLED = f"killed:ddp:-{random.randint(1, 8)}"
HALVES = ["halves:ddp:3", "halves:ddp"]
# Those compared bit for bit come before DeepSpeed is loaded.
TWO_RANKS = [*WHOLE[:1], KILLED, *HALVES, *WHOLE[1:], *CHAIN, "stopped:ddp:2", *MATRIX]
THREE_RANKS = ["three:ddp", "on-three:ddp"]


def launch(
    world: int, features: Path, folder: Path, tasks: Sequence[str], *, dies: bool = False
) -> None:
    """Run tasks on that many ranks; `dies`: one of them is killed."""
    script = Path(__file__).with_name("shared_training.py")
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command = [*launcher, "--nproc-per-node", str(world), str(script), str(features), str(folder)]
    ours = ("ACCELERATE_", "PYTEST_")
    environment = {key: value for key, value in os.environ.items() if not key.startswith(ours)}
    environment |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [*command, *tasks],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=500,
    )
    assert (done.returncode != 0) == dies, done.stderr[-4000:]
    (folder / f"log-{'killed' if dies else world}.txt").write_text(done.stderr)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("features") / "train"


@pytest.fixture(scope="module")
def features(place: Path) -> FeatureStore:
    target = make_target()
    states = ("post_norm", *eagle3_states(target.layers))
    return make_store(place, target, conversations(40, seed=3), states=states)


@pytest.fixture(scope="module")
def runs(features: FeatureStore, place: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Everything that needs ranks of its own, in three launches: starting them costs more than their work."""
    folder = tmp_path_factory.mktemp("runs")
    launch(2, place, folder, [KILLED], dies=True)
    launch(2, place, folder, TWO_RANKS)
    for name in ("on-one", "on-three"):
        shutil.copytree(folder / "stopped", folder / name)
    launch(3, place, folder, THREE_RANKS)
    return folder


def records(folder: Path, task: str) -> list[dict[str, Any]]:
    """What each rank saw of a task."""
    return [json.loads(path.read_text()) for path in sorted(folder.glob(f"{task}-[0-9].json"))]


def steps(out: Path) -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in (out / CURVES).read_text().splitlines()]
    return [row for row in rows if "loss" in row]


def same_curve(out: Path, other: Path, least: int = 6) -> None:
    mine, theirs = steps(out), steps(other)
    assert len(mine) == len(theirs) >= least
    for row, expected in zip(mine, theirs, strict=True):
        assert row["step"] == expected["step"]
        assert row["learning_rate"] == pytest.approx(expected["learning_rate"], rel=1e-12)
        assert row["loss"] == pytest.approx(expected["loss"], rel=1e-5)
        assert row["gradient_norm"] == pytest.approx(expected["gradient_norm"], rel=1e-4)


def same_head(out: Path, other: Path) -> None:
    mine, theirs = (load_file(folder / "head" / TENSORS) for folder in (out, other))
    assert mine.keys() == theirs.keys()
    for name, tensor in theirs.items():
        torch.testing.assert_close(mine[name], tensor, rtol=0, atol=0.02 * TRAINING.learning_rate)


def test_every_task_ran_on_as_many_ranks_as_it_says(runs: Path) -> None:
    for world, tasks in ((2, TWO_RANKS), (3, THREE_RANKS)):
        for task in tasks:
            assert [record["world"] for record in records(runs, task)] == [world] * world, task


@pytest.mark.parametrize("strategy", SHARDED)
def test_a_strategy_trains_as_replicas_do(runs: Path, strategy: str) -> None:
    same_curve(runs / strategy, runs / "ddp")
    same_head(runs / strategy, runs / "ddp")
    names = {"fsdp2": "Shards"}
    for record in records(runs, f"{strategy}:{strategy}"):
        assert record["strategy"] == names.get(strategy, "Zero")


@pytest.mark.parametrize(("world", "task"), [(2, "ddp"), (3, "three")])
def test_ranks_train_as_one_does_with_as_much_accumulation(
    runs: Path, features: FeatureStore, tmp_path: Path, world: int, task: str
) -> None:
    record = run(Accelerator(cpu=True), features, tmp_path, "ddp", accumulation=world)
    assert record["world"] == 1
    norms = [row["gradient_norm"] for row in steps(tmp_path)]
    assert max(norms) > TRAINING.clip, "clipping is part of what is compared"
    same_curve(runs / task, tmp_path)
    same_head(runs / task, tmp_path)


def test_ranks_hold_what_their_strategy_says(runs: Path) -> None:
    """Nothing of the target is in the wrapped module, and shards are shards."""
    held = {name: [row["held"] for row in records(runs, f"{name}:{name}")] for name in STRATEGIES}
    whole = sum(tensor.numel() for tensor in load_file(runs / "ddp" / "head" / TENSORS).values())
    assert held["ddp"] == held["zero1"] == held["zero2"] == [whole, whole]
    assert sum(held["fsdp2"]) == whole
    assert max(held["fsdp2"] + held["zero3"]) < 0.6 * whole
    head = load_file(runs / "ddp" / "head" / TENSORS)
    for name in STRATEGIES:
        for row in records(runs, f"{name}:{name}"):
            assert {full.removeprefix("head.") for full in row["names"]} == set(head)


def test_a_checkpoint_is_the_same_whoever_wrote_it(runs: Path) -> None:
    newest = {name: find_checkpoints(runs / name / "checkpoints")[-1] for name in STRATEGIES}
    expected = load_file(newest["ddp"] / OPTIMIZER)
    for name in SHARDED:
        found = load_file(newest[name] / OPTIMIZER)
        assert found.keys() == expected.keys()
        for key, tensor in expected.items():
            scale = float(tensor.abs().max())
            torch.testing.assert_close(found[key], tensor, rtol=1e-3, atol=1e-4 * scale)


def test_a_run_goes_on_under_any_other_strategy(runs: Path) -> None:
    """Six legs: replicas, FSDP2, ZeRO-1, 2 and 3, replicas again."""
    same_curve(runs / "chain", runs / "ddp")
    same_head(runs / "chain", runs / "ddp")


def test_two_halves_on_two_ranks_are_the_whole_bit_for_bit(runs: Path) -> None:
    halves, whole = (runs / name / "head" / TENSORS for name in ("halves", "ddp"))
    assert halves.read_bytes() == whole.read_bytes()


def test_two_ranks_of_which_one_is_killed_end_with_the_same_bytes(runs: Path) -> None:
    """kill -9 of the second rank in the middle of a random step; torchrun ends the first one."""
    killed, whole = (runs / name / "head" / TENSORS for name in ("killed", "ddp"))
    assert "exitcode: -9" in (runs / "log-killed.txt").read_text(), KILLED
    resumed = f"resumed after step {KILLED.split('-')[-1]} "
    assert resumed in (runs / "log-2.txt").read_text(), KILLED
    assert killed.read_bytes() == whole.read_bytes(), KILLED


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("head", HEADS)
def test_every_head_under_every_strategy_broken_off_and_gone_on(
    runs: Path, head: str, strategy: str
) -> None:
    """Frozen parts have no moments; lm_heads are read outside of the forward of the module that holds them."""
    out, whole = runs / f"{head}-{strategy}", runs / f"{head}-whole"
    same_curve(out, whole, least=3)
    same_head(out, whole)
    for stop in (1, 0):
        found = records(runs, f"{head}-{strategy}:{strategy}:{stop}:{head}")
        assert [record["world"] for record in found] == [2, 2]
        assert {record["begun"] for record in found} == {0 if stop else 1}, "gone on from there"


@pytest.mark.parametrize("world", [1, 3])
def test_a_run_goes_on_with_another_number_of_ranks(
    runs: Path, features: FeatureStore, capsys: pytest.CaptureFixture[str], world: int
) -> None:
    """Two ranks stopped after two steps: every sequence is trained once per epoch all the same."""
    before = [key for row in records(runs, "stopped:ddp:2") for key in row["keys"]]
    if world == 1:
        after = run(Accelerator(cpu=True), features, runs / "on-one", "ddp")["keys"]
        log = capsys.readouterr().err
    else:
        after = [key for row in records(runs, "on-three:ddp") for key in row["keys"]]
        log = (runs / "log-3.txt").read_text()
    # the third step was computed and never stepped: it is not in the checkpoint, and is done again
    order = Order(features.lengths(), features.loss_tokens(), TRAINING)
    stepped = [features[index].key for pack in order.epochs[0][:4] for index in pack]
    assert set(stepped) < set(before)
    expected = Counter({features[index].key: 2 for index in range(len(features))})
    assert Counter(stepped) + Counter(after) == expected
    assert "resumed after step 2 (epoch 1, 4 of its packs done)" in log
    assert f"on {world} ranks after 2" in log.replace("1 rank ", "1 ranks ")


CONFIGS = Path(__file__).parents[1] / "recipes" / "accelerate"


def launched(config: Path, *options: str) -> dict[str, str]:
    """The environment that `accelerate launch` gives its processes, by its own code."""
    line = ["--config_file", str(config), *options, "script.py"]
    args, *_ = _validate_launch_command(launch_command_parser().parse_args(line))
    if args.use_deepspeed:
        args.deepspeed_fields_from_accelerate_config = ""  # as the command itself does
        return dict(prepare_deepspeed_cmd_env(args)[1])
    return dict(prepare_multi_gpu_env(args))


def test_the_accelerate_configs_choose_each_strategy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 8)
    assert {path.stem for path in CONFIGS.glob("*.yaml")} == set(STRATEGIES)
    for name in STRATEGIES:
        environment = launched(CONFIGS / f"{name}.yaml")
        assert (launched_strategy(environment) or "ddp") == name
        left = {key for key in environment if key.startswith("ACCELERATE_USE_")}
        assert left == set(), "accelerate would wrap the head by itself"


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("fsdp2", ["--fsdp_version", "1"]),
        ("fsdp2", ["--fsdp_offload_params", "true"]),
        ("zero2", ["--offload_optimizer_device", "cpu"]),
    ],
)
def test_what_an_accelerate_config_asks_beyond_is_refused(
    name: str, options: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 8)
    with pytest.raises(UserError, match="fsdp_version 2 or a zero_stage, and no more"):
        launched_strategy(launched(CONFIGS / f"{name}.yaml", *options))


def test_half_done_work_may_go_on_with_other_settings_and_finished_work_may_not(
    tmp_path: Path,
) -> None:
    """A run folder, as `train` uses it: accumulation may change while a run is not done."""
    folder = RunFolder(tmp_path)
    checkpoint = folder.stage("train") / "checkpoints" / "step-00000001" / "head.json"

    def broken_off() -> None:
        checkpoint.parent.mkdir(parents=True)
        checkpoint.write_text("half")
        raise Stopped

    def run(accumulation: int, work: Callable[[], None] = lambda: None) -> None:
        config = config_inputs("train", TrainConfig(accumulation=accumulation))
        run_stage(folder, "train", config, work)

    with pytest.raises(Stopped):
        run(accumulation=1, work=broken_off)
    run(accumulation=2)
    assert checkpoint.exists(), "went on"
    run(accumulation=4)
    assert not checkpoint.exists(), "a finished run of another setting was set aside"
    kept = tmp_path / "train.before-1" / checkpoint.relative_to(folder.stage("train"))
    assert kept.read_text() == "half"


def test_the_launchers_strategy_is_not_contradicted(monkeypatch: pytest.MonkeyPatch) -> None:
    for wanted in ("ddp", "zero2"):
        monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")
        monkeypatch.setenv("ACCELERATE_DEEPSPEED_ZERO_STAGE", "2")
        assert _launched(TrainConfig(parallel=wanted), Process()).parallel == "zero2"
        assert "ACCELERATE_USE_DEEPSPEED" not in os.environ
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")
    with pytest.raises(UserError, match=r"train\.parallel must be zero2"):
        _launched(TrainConfig(parallel="fsdp2"), Process())
    assert _launched(TrainConfig(parallel="fsdp2"), Process()).parallel == "fsdp2"


def test_every_job_of_a_process_has_the_launchers_strategy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A sweep under `accelerate launch --config_file fsdp2.yaml`."""
    for name, value in (("ACCELERATE_USE_FSDP", "true"), ("FSDP_VERSION", "2")):
        monkeypatch.setenv(name, value)
    process = Process()
    jobs = [_launched(TrainConfig(seed=seed), process) for seed in range(3)]
    assert [job.parallel for job in jobs] == ["fsdp2"] * 3
    assert "ACCELERATE_USE_FSDP" not in os.environ


def test_a_missing_deepspeed_is_known_before_the_target_is_loaded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("mtp_train.train.parallel.find_spec", lambda _name: None)
    for name in ("ddp", "fsdp2"):
        require_library(name)
    with pytest.raises(UserError, match="need DeepSpeed"):
        require_library("zero1")


def test_an_unknown_strategy_is_refused() -> None:
    with pytest.raises(UserError, match=r"train\.parallel must be one of ddp, fsdp2"):
        TrainConfig(parallel="zero4")
