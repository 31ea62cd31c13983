"""Sweeps: every job once, all of them in one table, whatever became of one; and the same command goes on."""

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from test_cli import mistake, modified, overrides, save_target, write_prompts
from torch.distributed import TCPStore

from mtp_train.cli.config import sweep_alternatives
from mtp_train.cli.job import Job
from mtp_train.cli.main import dispatch, guarded
from mtp_train.cli.overrides import quoted
from mtp_train.cli.sweep import job_name
from mtp_train.cli.sweep_table import Report, Row
from mtp_train.core.dist import Ranks
from mtp_train.models.target import Target
from mtp_train.train import loop

FOUR = ["head=mtp,eagle", "train.loss.lk=0.0,1.0"]
NAMES = {f"head-{head}+train.loss.lk-{lk}" for head in ("mtp", "eagle") for lk in ("0.0", "1.0")}


def write_chats(folder: Path) -> None:
    folder.mkdir()
    for name, count in (("train", 6), ("heldout", 4)):
        chats = [
            {"prompt": f"{name}: {number} + 2?", "completion": f"it is {number + 2}. " * 3}
            for number in range(count)
        ]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(chat) + "\n" for chat in chats))


def lines(folder: Path, *more: str) -> list[str]:
    """A quick run on a toy target: six steps of training a job."""
    return [
        f"target.path={folder / 'target'}",
        "target.dtype=float32",
        f"run={folder / 'run'}",
        *(f"data.sets.{name}={folder / 'data' / name}.jsonl" for name in ("train", "heldout")),
        "precompute.rows_per_shard=64",
        "train.epochs=6",
        "train.warmup_steps=1",
        "train.learning_rate=1e-2",
        "train.validations=2",
        "train.checkpoints=6",
        "train.rollout_steps=2",
        *more,
    ]


@pytest.fixture(scope="module")
def precomputed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that has features and nothing else."""
    folder = tmp_path_factory.mktemp("sweep")
    save_target(folder / "target")
    write_chats(folder / "data")
    assert guarded(lambda: dispatch("precompute", lines(folder))) == 0
    return folder


@pytest.fixture(scope="module")
def finished(precomputed: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with a sweep of four jobs, done in one go."""
    folder = tmp_path_factory.mktemp("finished") / "run-of-four"
    shutil.copytree(precomputed, folder)
    assert guarded(lambda: train(folder)) == 0
    return folder


def train(folder: Path, *more: str, sweep: list[str] = FOUR) -> None:
    dispatch("train", ["-m", *lines(folder), *sweep, *more])


def copied(folder: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(folder, tmp_path / "copy", symlinks=True))


def sweep_folder(folder: Path, name: str = "head+train.loss.lk") -> Path:
    return folder / "run" / "sweeps" / name


def table(folder: Path, name: str = "head+train.loss.lk", file: str = "table") -> dict:
    return json.loads((sweep_folder(folder, name) / f"{file}.json").read_text())


def heads(folder: Path) -> dict[str, bytes]:
    found = sweep_folder(folder).glob("*/train/head/head.safetensors")
    return {path.parents[2].name: path.read_bytes() for path in found}


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Path]]:
    """The folder of the job, for each optimiser step that is taken."""
    taken: list[Path] = []
    optimize = loop._Trainer._optimize

    def counted(trainer: loop._Trainer, window: loop.Window) -> tuple[float, float, float]:
        taken.append(trainer.out.parent)
        return optimize(trainer, window)

    monkeypatch.setattr(loop._Trainer, "_optimize", counted)
    yield taken


# --- what a sweep leaves --------------------------------------------------------------------------------------


def test_four_jobs_and_a_table_best_first(finished: Path) -> None:
    found = table(finished)
    assert {job["folder"] for job in found["jobs"]} == NAMES
    assert {job["status"] for job in found["jobs"]} == {"done"}
    assert found["metric"] == "tau_teacher_forced" and found["better"] == "higher"
    taus = [job["figures"]["tau_teacher_forced"] for job in found["jobs"]]
    assert taus == sorted(taus, reverse=True)
    for job in found["jobs"]:
        rows = (sweep_folder(finished) / job["folder"] / "train" / "curves.jsonl").read_text()
        last = [json.loads(row) for row in rows.splitlines()][-1]
        assert last["validation"] == job["figures"], "of the last validation"
        assert job["seconds"] > 0
    assert len(set(heads(finished).values())) == 4, "each job trained its own head"


def test_jobs_share_the_features_of_the_run(finished: Path) -> None:
    for name in NAMES:
        link = sweep_folder(finished) / name / "precompute"
        assert link.is_symlink() and not link.readlink().is_absolute()
        assert link.resolve() == (finished / "run" / "precompute").resolve()


def test_the_table_in_the_terminal_and_as_markdown(
    capsys: pytest.CaptureFixture[str], finished: Path
) -> None:
    capsys.readouterr()
    assert guarded(lambda: train(finished)) == 0
    told = capsys.readouterr()
    markdown = (sweep_folder(finished) / "table.md").read_text()
    assert str(sweep_folder(finished) / "table.md") in told.err
    header = "head, train.loss.lk, tau_teacher_forced, kl/1, alpha/1, agree/1, seconds, status"
    assert "| " + header.replace(", ", " | ") + " |" in markdown
    for text in (told.out, markdown):
        assert all(word in text for word in header.split(", "))
        assert text.count("done") == 4
        assert "over seeds" not in text
    assert markdown.count("\n| mtp | ") == 2


def test_the_table_is_written_when_some_jobs_still_wait(finished: Path, tmp_path: Path) -> None:
    rows = (Row({"head": "mtp"}, "head-mtp"), Row({"head": "eagle"}, "head-eagle", "done"))
    assert Report("train", "kl/1", rows).markdown().count("waiting") == 1


# --- going on -------------------------------------------------------------------------------------------------


def test_the_same_command_again_trains_nothing(
    finished: Path, tmp_path: Path, steps: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = copied(finished, tmp_path)
    before = modified(folder)
    first = table(folder)
    monkeypatch.setattr(Target, "load", lambda *_a, **_k: pytest.fail("the target was loaded"))
    swapped = ["train.loss.lk=1.0,0.0", "head=eagle,mtp"]  # the order is no matter
    for sweep in (FOUR, swapped):
        assert guarded(lambda sweep=sweep: train(folder, sweep=sweep)) == 0
        assert steps == []
    changed = {path for path, time in modified(folder).items() if before[path] != time}
    assert {path.name for path in changed} == {"table.md", "table.json"}
    ours = {job["folder"]: job["figures"] for job in table(folder)["jobs"]}
    assert ours == {job["folder"]: job["figures"] for job in first["jobs"]}


def test_a_value_more_trains_its_jobs_alone(
    finished: Path, tmp_path: Path, steps: list[Path]
) -> None:
    folder = copied(finished, tmp_path)
    train(folder, sweep=["head=mtp,eagle", "train.loss.lk=0.0,1.0,2.0"])
    assert {path.name for path in steps} == {
        f"head-{head}+train.loss.lk-2.0" for head in ("mtp", "eagle")
    }
    assert len(table(folder)["jobs"]) == 6


@pytest.mark.parametrize("stop", [1, 9, 17])
def test_a_sweep_that_was_killed_ends_as_an_unbroken_one(
    precomputed: Path,
    finished: Path,
    tmp_path: Path,
    steps: list[Path],
    monkeypatch: pytest.MonkeyPatch,
    stop: int,
) -> None:
    folder = copied(precomputed, tmp_path)
    counted = loop._Trainer._optimize

    def killed(trainer: loop._Trainer, window: loop.Window) -> tuple[float, float, float]:
        if len(steps) == stop:
            raise KeyboardInterrupt
        return counted(trainer, window)

    with monkeypatch.context() as patch:
        patch.setattr(loop._Trainer, "_optimize", killed)
        assert guarded(lambda: train(folder)) == 130
    assert len(heads(folder)) < 4
    assert guarded(lambda: train(folder)) == 0
    assert heads(folder) == heads(finished)
    total = len(list((finished / "run").rglob("curves.jsonl"))) * 6
    assert len(steps) == total, "checkpointed at every step: none is taken twice"
    ours, theirs = (
        {j["folder"]: j["figures"] for j in table(f)["jobs"]} for f in (folder, finished)
    )
    assert ours == theirs


# --- what goes wrong ------------------------------------------------------------------------------------------


def test_a_job_that_fails_is_reported_and_the_others_are_done(
    capsys: pytest.CaptureFixture[str],
    precomputed: Path,
    finished: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A loss that is no number in the second job; the same command tries it again."""
    folder = copied(precomputed, tmp_path)
    broken = "head-mtp+train.loss.lk-1.0"
    optimize = loop._Trainer._optimize

    def not_finite(trainer: loop._Trainer, window: loop.Window) -> tuple[float, float, float]:
        if trainer.out.parent.name == broken and trainer.step == 3:
            for parameter in trainer.head.parameters():
                parameter.data.fill_(math.nan)
        return optimize(trainer, window)

    with monkeypatch.context() as patch:
        patch.setattr(loop._Trainer, "_optimize", not_finite)
        assert guarded(lambda: train(folder)) == 2
    told = capsys.readouterr()
    assert f"1 of 4 failed ({broken})" in told.err.splitlines()[-1]
    assert f"{broken}: the training loss must stay finite and must not explode" in told.out
    assert "loss nan at step 4" in told.out
    last = table(folder)["jobs"][-1]
    assert (last["folder"], last["status"], last["figures"]) == (broken, "failed", {})
    assert "at step 4" in last["error"] and last["seconds"] is None
    assert "at step 4" in (sweep_folder(folder) / "table.md").read_text()
    whole = heads(finished)
    assert heads(folder) == {name: whole[name] for name in NAMES - {broken}}

    assert guarded(lambda: train(folder)) == 0
    assert heads(folder) == whole


def test_our_own_mistake_in_a_job_ends_the_sweep(
    precomputed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def wrong(*_args: object) -> None:
        raise AssertionError("ours")

    monkeypatch.setattr(loop._Trainer, "_optimize", wrong)
    with pytest.raises(AssertionError, match="ours"):
        train(copied(precomputed, tmp_path))


@pytest.mark.parametrize(
    ("override", "parts"),
    [
        (["train.loss.lkk=0,1"], ["train.loss.lkk", "did you mean train.loss.lk?"]),
        (["head=mtp,eagel"], ["eagel"]),
        (["train.decay=0.5,2.0"], ["decay", "2.0"]),
        (["head=mtp,eagle", "head.final_norm=true,false"], ["final_norm"]),  # eagle has none
        (["train.epochs=1"], ["a sweep needs a key with several values"]),
        (["precompute.rows_per_shard=1,2"], ["may vary keys of head and train"]),
        (["recipe=one,two"], ["may vary keys of head and train", "recipe"]),
        (["run=a,b"], ["may vary keys of head and train", "run"]),
        (["train.seed=interval(0, 1)"], ["INTERVAL_SWEEP"]),
        (["train.seed=range(0, 0)"], ["must have values", "range(0, 0)"]),
        (["train.seed=0,1", "sweep.metric=kl"], ["one of kl/1", "tau_teacher_forced", "kl;"]),
        (["train.loss.lk=0.0,1.0", "sweep.metric=lk/1"], ["one of kl/1", "lk/1;"]),  # only one job
        (["train.seed=0,1", "sweep.name=../x"], ["sweep.name", "../x"]),
        (
            ["head=mtp,eagle3"],
            ["layer_1", "post_norm;", "mtp-train precompute", "precompute.states="],
        ),
    ],
)
def test_a_mistake_shows_before_the_first_job(
    capsys: pytest.CaptureFixture[str], precomputed: Path, override: list[str], parts: list[str]
) -> None:
    line = mistake(capsys, "train", "-m", *lines(precomputed), *override)
    assert all(part in line for part in parts), line
    assert not (precomputed / "run" / "sweeps").exists()


def test_a_sweep_before_its_turn(
    capsys: pytest.CaptureFixture[str], precomputed: Path, tmp_path: Path
) -> None:
    target = f"target.path={precomputed / 'target'}"
    line = mistake(capsys, "train", "-m", target, f"run={tmp_path / 'run'}", *FOUR)
    assert "stage precompute must be done first" in line
    assert "-m goes with train or evaluate" in mistake(capsys, "run", "-m", target, *FOUR)


def test_several_values_without_the_flag(capsys: pytest.CaptureFixture[str]) -> None:
    line = mistake(capsys, "train", "target.path=x", "train.seed=0,1", "train.epochs=1")
    assert "received train.seed=0,1; add -m" in line


def test_a_job_too_large_for_the_memory_fails_alone(
    capsys: pytest.CaptureFixture[str],
    precomputed: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder = copied(precomputed, tmp_path)
    optimize = loop._Trainer._optimize

    def exhausted(trainer: loop._Trainer, window: loop.Window) -> tuple[float, float, float]:
        if trainer.config.rows == 128:
            raise torch.OutOfMemoryError("CUDA out of memory.\nTried to allocate 2 GiB.")
        return optimize(trainer, window)

    monkeypatch.setattr(loop._Trainer, "_optimize", exhausted)
    sweep = ["train.rows=128,64", "train.epochs=1"]
    assert guarded(lambda: train(folder, sweep=sweep)) == 2
    assert "train.rows-128: CUDA out of memory. Tried to allocate" in capsys.readouterr().out
    assert [job["status"] for job in table(folder, "train.rows")["jobs"]] == ["done", "failed"]


def test_the_target_is_loaded_once_per_dtype(
    precomputed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = copied(precomputed, tmp_path)
    load, loaded = Target.load, []

    def counted(path: str, dtype: str, **options: object) -> Target:
        loaded.append(dtype)
        return load(path, dtype, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(Target, "load", counted)
    sweep = ["target.dtype=float32,bfloat16", "train.seed=0,1", "train.epochs=1"]
    assert guarded(lambda: train(folder, sweep=sweep)) == 0
    assert loaded == ["float32", "bfloat16"]


def test_ranks_learn_whether_all_of_them_say_the_same() -> None:
    stores = [TCPStore("127.0.0.1", 0, is_master=True)]
    stores.append(TCPStore("127.0.0.1", stores[0].port, is_master=False))
    first, second = (Ranks(rank, 2, store=store) for rank, store in enumerate(stores))
    assert not first.all_say("one failed", timedelta(seconds=0.05))
    with ThreadPoolExecutor() as pool:
        told = pool.submit(first.all_say, "two failed", timedelta(seconds=30))
        assert second.all_say("two failed", timedelta(seconds=30))
        assert told.result()
    assert Ranks().all_say("one failed", timedelta(0))


# --- through the engine, and on two ranks -----------------------------------------------------------------------


def test_heads_compared_through_the_engine(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    save_target(tmp_path / "target")
    write_prompts(tmp_path / "prompts")
    ours = [*overrides(tmp_path, "evaluate.lossless_prompts=0"), "head=mtp,eagle,medusa"]
    ours.append("train.rollout_steps=3")
    for stage in ("regenerate", "precompute"):
        dispatch(stage, [item for item in ours if not item.startswith("head=")])
    untrained = [item.replace("eagle,medusa", "eagle") for item in ours]
    dispatch("train", ["-m", *untrained])
    capsys.readouterr()
    assert guarded(lambda: dispatch("evaluate", ["-m", *ours])) == 2
    told = capsys.readouterr()
    assert "1 of 3 failed (head-medusa)" in told.err
    assert "head-medusa: a job must be trained" in told.out and "mtp-train train -m" in told.out

    found = table(tmp_path, "head", "table-evaluate")
    assert found["metric"] == "heldout/greedy/tau"
    assert [job["status"] for job in found["jobs"]] == ["done", "done", "failed"]
    taus = []
    for job in found["jobs"][:2]:
        folder = sweep_folder(tmp_path, "head") / job["folder"]
        evaluation = json.loads((folder / "evaluate" / "evaluation.json").read_text())
        for name in ("heldout", "ood"):
            for mode in ("greedy", "sampled"):
                record = evaluation["sets"][name][mode]
                assert job["figures"][f"{name}/{mode}/tau"] == record["tau"]
        positions = [job["figures"][f"heldout/greedy/per_position/{i}"] for i in (1, 2)]
        assert positions == evaluation["sets"]["heldout"]["greedy"]["per_position"]
        assert evaluation["head"]["family"] == job["swept"]["head"]
        taus.append(job["figures"]["heldout/greedy/tau"])
    assert taus == sorted(taus, reverse=True)
    assert table(tmp_path, "head")["stage"] == "train", "the trainer's table stays"

    before = modified(tmp_path)
    again = ["-m", *untrained, "sweep.metric=ood/sampled/tau_macro"]
    assert guarded(lambda: dispatch("evaluate", again)) == 0
    changed = {path.name for path, time in modified(tmp_path).items() if before[path] != time}
    assert changed == {"table-evaluate.md", "table-evaluate.json"}
    wrong = mistake(capsys, "evaluate", "-m", *untrained, "sweep.metric=tau")
    assert "kl/1" in wrong and "heldout/greedy/per_position/2" in wrong

    best = sweep_folder(tmp_path, "head") / "head-mtp"
    single = [*overrides(tmp_path, "train.rollout_steps=3"), f"run={best}"]
    assert guarded(lambda: dispatch("export", single)) == 0, "a job's folder is a run folder"
    assert (best / "export" / "mimo_mtp" / "config.json").is_file()


def test_two_ranks_share_each_job_and_the_error_of_one(precomputed: Path, tmp_path: Path) -> None:
    """As under `accelerate launch` with a config file of FSDP2, which every job is trained by."""
    folder = copied(precomputed, tmp_path)
    sweep = ["train.learning_rate=1e30,1e-2,1e-3", "train.rows=32"]
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [sys.executable, *launcher, "-m", "mtp_train.cli.train", "-m", *lines(folder), *sweep]
    environment = {k: v for k, v in os.environ.items() if not k.startswith("ACCELERATE_")}
    environment |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    environment |= {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"}
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, check=False, timeout=300
    )
    found = table(folder, "train.learning_rate")
    cards = sorted(sweep_folder(folder, "train.learning_rate").glob("*/train/head/head.json"))
    assert [json.loads(card.read_text())["config"]["parallel"] for card in cards] == ["fsdp2"] * 2
    assert [job["status"] for job in found["jobs"]] == ["done", "done", "failed"], done.stderr
    assert "the training loss must stay finite" in found["jobs"][-1]["error"]
    assert done.returncode != 0
    assert "1 of 3 failed" in done.stderr
    assert done.stdout.count("over seeds") == 0 and done.stdout.count("status") == 1, "one table"


# --- names, grammar, order ------------------------------------------------------------------------------------


def test_the_grammar_is_hydras() -> None:
    found = sweep_alternatives(
        [
            "head=glob(eagle*)",
            "train.seed=range(0, 3)",
            "++train.decay=choice(0.5,0.6)",
            "train.rows=1,2",
            "train.rows=64",
            "trackers=[wandb,tensorboard]",
            "train.warm_start='a,b',c",
        ]
    )
    swept = {choice.key: choice.lines for choice in found if choice.swept}
    assert swept == {
        "head": ("head=eagle", "head=eagle3"),
        "train.seed": ("train.seed=0", "train.seed=1", "train.seed=2"),
        "train.decay": ("++train.decay=0.5", "++train.decay=0.6"),
        "train.warm_start": ("train.warm_start='a,b'", "train.warm_start=c"),
    }
    assert [choice.lines for choice in found if not choice.swept] == [
        ("train.rows=64",),
        ("trackers=[wandb,tensorboard]",),
    ], "the last of a key counts, and a list is a value"


def test_a_jobs_name_is_a_file_name_and_its_own() -> None:
    assert job_name({"train.seed": "1", "head": "mtp"}) == "head-mtp+train.seed-1"
    odd = [
        {"train.warm_start": value} for value in ("a/b", "a b", "'a b'", "ä", "", "x" * 300, "..")
    ]
    names = [job_name(swept) for swept in odd]
    assert len(set(names)) == len(odd)
    assert all("/" not in name and name.isascii() and len(name) <= 100 for name in names)


@pytest.mark.parametrize("name", ["plain", "a, b=c", 'quote" and \\', "[x]", "(y)+z:1"])
def test_a_folder_of_any_name_can_hold_a_run(tmp_path: Path, name: str) -> None:
    path = str(tmp_path / name)
    assert Job(["target.path=x", f"run={quoted(path)}"]).run.run == path


def rows(key: str, values: dict[str, float]) -> tuple[Row, ...]:
    return tuple(Row({"head": name}, name, "done", figures={key: v}) for name, v in values.items())


@pytest.mark.parametrize(
    ("metric", "order"),
    [
        ("kl/1", "bacd"),
        ("smooth_l1/2", "bacd"),
        ("alpha/1", "cabd"),
        ("agree/2", "cabd"),
        ("prefix/1", "cabd"),
        ("tau_teacher_forced", "cabd"),
        ("heldout/greedy/tau", "cabd"),
    ],
)
def test_losses_ascend_and_acceptance_descends_and_what_is_no_number_is_last(
    metric: str, order: str
) -> None:
    values = {"d": math.nan, "a": 1.0, "b": 0.5, "c": 2.0}
    report = Report("train", metric, rows(metric, values))
    assert "".join(row.folder for row in report.ranked) == order
    assert json.loads(json.dumps(report.as_dict(), allow_nan=False))["jobs"][-1]["folder"] == "d"


def test_seeds_are_summed_up_in_a_table_of_their_own(
    capsys: pytest.CaptureFixture[str], precomputed: Path, tmp_path: Path
) -> None:
    folder = copied(precomputed, tmp_path)
    sweep = ["train.learning_rate=1e-3,1e-6", "train.seed=range(0,3)", "sweep.metric=kl/1"]
    train(folder, "sweep.name=rates", sweep=sweep)
    found = table(folder, "rates")
    by_rate: dict[str, list[float]] = {}
    for job in found["jobs"]:
        by_rate.setdefault(job["swept"]["train.learning_rate"], []).append(job["figures"]["kl/1"])
    assert [group["done"] for group in found["over_seeds"]] == [3, 3]
    means = [group["mean"] for group in found["over_seeds"]]
    assert means == sorted(means)
    for group in found["over_seeds"]:
        values = by_rate[group["swept"]["train.learning_rate"]]
        mean = sum(values) / 3
        assert group["mean"] == pytest.approx(mean)
        assert (group["least"], group["most"]) == (min(values), max(values))
        spread = sum((value - mean) ** 2 for value in values) / 2
        assert group["standard_error"] == pytest.approx(math.sqrt(spread / 3))
    told = capsys.readouterr().out
    assert "over seeds" in told and "3 of 3" in told
    assert "over seeds" in (sweep_folder(folder, "rates") / "table.md").read_text()


def test_a_seed_that_failed_is_left_out_of_the_mean() -> None:
    jobs = [
        Row({"head": "mtp", "train.seed": "0"}, "0", "done", figures={"kl/1": 1.0}),
        Row({"head": "mtp", "train.seed": "1"}, "1", "failed", "a | reason"),
        Row({"head": "eagle", "train.seed": "0"}, "2", "failed", "a reason"),
        Row({"head": "eagle", "train.seed": "1"}, "3"),
    ]
    report = Report("train", "kl/1", tuple(jobs))
    first, second = report.groups
    assert (first.swept, first.done, first.jobs, first.mean) == ({"head": "mtp"}, 1, 2, 1.0)
    assert second.done == 0 and math.isnan(second.mean) and math.isnan(first.standard_error)
    assert "| mtp | 1 of 2 | 1.0000 | 1.0000 | 1.0000 | - |" in report.markdown()
