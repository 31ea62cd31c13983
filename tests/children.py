"""What tests run in processes of their own, to be killed or to be one rank of two.

The processes are forked from a server that has imported the package once and computed nothing: quick, and each one
is killed by its own id. Their target is slowed down, so that a kill lands in the middle of the work.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import evaluations
import torch
from accelerate import Accelerator
from torch.distributed import TCPStore
from toys import conversations, make_lively_target, make_store, make_target, make_tokenizer

from mtp_train.core.dist import Ranks
from mtp_train.core.records import Accounting
from mtp_train.dialogue.journal import Journal
from mtp_train.engine.engine import Engine, EngineConfig
from mtp_train.heads.mtp import MtpConfig, build
from mtp_train.precompute import stage as precomputing
from mtp_train.precompute.sources import EngineStates
from mtp_train.precompute.stage import PrecomputeConfig, precompute
from mtp_train.regenerate import stage as answering
from mtp_train.regenerate.stage import RegenerateConfig, regenerate
from mtp_train.store import manifest, places
from mtp_train.store.shards import FeatureStore
from mtp_train.text.template import ChatTemplate
from mtp_train.train import loop
from mtp_train.train.config import TrainConfig
from mtp_train.train.loop import train

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(
    [
        "mtp_train.train.loop",
        "mtp_train.precompute.stage",
        "mtp_train.regenerate.stage",
        "transformers.models.llama.modeling_llama",
    ]
)

SLOW = 0.01  # seconds per forward or pack
CHATS = conversations(24, seed=5)
FEATURES = PrecomputeConfig(rows_per_shard=32, rows_per_forward=20)
ANSWERING = EngineConfig(max_batch=3, cache_rows=2048, page_size=4)
TRAINING = TrainConfig(
    epochs=2, rows=32, accumulation=2, rollout_steps=2, warmup_steps=2, validations=2, checkpoints=4
)


def run(
    work: Callable[..., None], *args: Any, kill_when: Callable[[], bool] | None = None
) -> int | None:
    """Run `work(*args)` in a process; kill it (SIGKILL) as soon as `kill_when` says so. Returns its exit status."""
    process = CONTEXT.Process(target=work, args=args)
    process.start()
    while kill_when and process.is_alive():
        if kill_when():
            process.kill()
            break
        time.sleep(0.001)
    process.join()
    return process.exitcode


def die() -> None:
    """End this process as `kill -9` does."""
    os.kill(os.getpid(), signal.SIGKILL)


def dies_at(
    call: int, function: Callable[..., Any], before: Callable[..., None] | None = None
) -> Callable[..., Any]:
    """`function`, but its call number `call` (from 1) ends the process, after `before` was called in its place."""
    count = 0

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        nonlocal count
        count += 1
        if count == call:
            if before:
                before(*args, **kwargs)
            die()
        return function(*args, **kwargs)

    return wrapped


def half(_tensors: object, path: Path, **_kwargs: object) -> None:
    """What a killed writer leaves: the beginning of a file."""
    Path(path).write_bytes(b"\x40\x00\x00\x00\x00\x00\x00\x00{")


def launch(work: Callable[..., None], world: int, *args: Any) -> list[Any]:
    """Start `work(rank, world, port, *args)` on each rank, with a store to meet at, as a launcher does."""
    store = TCPStore("127.0.0.1", 0, is_master=True)
    ranks = [
        CONTEXT.Process(target=work, args=(rank, world, store.port, *args)) for rank in range(world)
    ]
    for rank in ranks:
        rank.start()
        rank.store = store  # alive as long as its ranks  # type: ignore[attr-defined]
    return ranks


def kill_after(ranks: list[Any], seconds: float, first: int) -> None:
    """SIGKILL the rank `first`, then the others, as a launcher does when one is gone; or none, if all are done."""
    time.sleep(seconds)
    for rank in [ranks[first], *ranks]:
        rank.kill()
    for rank in ranks:
        rank.join()


def precompute_on_ranks(rank: int, world: int, port: int, out: Path) -> None:
    """One rank of several that make the features of CHATS."""
    store = TCPStore("127.0.0.1", port, is_master=False)
    precompute_slowly(out, ranks=Ranks(rank, world, store=store))


def precompute_slowly(out: Path, fate: str = "", ranks: Ranks | None = None) -> None:
    """Make the features of CHATS. `fate`: where the process kills itself, if anywhere."""
    torch.set_num_threads(1)
    target = make_target()
    forward = target.forward

    def slow(*args: Any) -> torch.Tensor:
        time.sleep(SLOW)
        return forward(*args)

    target.forward = slow  # type: ignore[method-assign]
    if fate == "half a shard":
        places.save_bytes = dies_at(
            6, places.save_bytes, half
        )  # contract, 2 x (shard, note), shard
    if fate == "before a note":
        precomputing._Worker._gate = dies_at(3, precomputing._Worker._gate)  # type: ignore[method-assign]
    if fate == "before the manifest":
        manifest.Manifest.save = dies_at(1, manifest.Manifest.save)  # type: ignore[method-assign]
    if fate == "before the contract":
        precomputing._prepare = dies_at(1, precomputing._prepare)
    accounting = Accounting(used=len(CHATS)).as_dict()
    source = EngineStates(target)
    precompute(source, CHATS, FEATURES, out, accounting, ranks or Ranks())


def regenerate_slowly(config: RegenerateConfig, out: Path, fate: str = "") -> None:
    """Answer the training prompts. `fate`: where the process kills itself, if anywhere."""
    torch.set_num_threads(1)
    target = make_lively_target()
    forward = target.forward

    def slow(*args: Any) -> torch.Tensor:
        time.sleep(SLOW)
        return forward(*args)

    target.forward = slow  # type: ignore[method-assign]
    if fate == "half a line":
        Journal.append = dies_at(4, Journal.append, half_line)  # type: ignore[method-assign]
    if fate == "before the answers are whole":
        answering.atomic_path = dies_at(1, answering.atomic_path)
    if fate == "before the journal goes":
        Journal.close = dies_at(1, Journal.close)  # type: ignore[method-assign]
    engine = Engine(target, None, ANSWERING)
    regenerate(engine, ChatTemplate(make_tokenizer()), frozenset({2}), config, "train", out)


def evaluate_slowly(out: Path) -> None:
    """Measure the toy head; `found.json` has the figures, `asked` how many completions this process made."""
    torch.set_num_threads(1)
    append, asked = Journal.append, []

    def slow(journal: Journal, row: dict[str, Any]) -> None:
        time.sleep(SLOW)
        asked.append(row["id"])
        append(journal, row)

    Journal.append = slow  # type: ignore[method-assign]
    found = evaluations.measure(out)
    (out / "asked").write_text(str(len(asked)))
    (out / "found.json").write_text(json.dumps({"sets": found.sets, "grid": found.grid}))


def half_line(journal: Journal, row: dict[str, Any]) -> None:
    """What a killed writer leaves: the beginning of a line."""
    journal._file.write(json.dumps(row).encode()[:30])
    journal._file.flush()


def train_slowly(
    features: Path, out: Path, log: Path, fate: str = "", config: TrainConfig = TRAINING
) -> None:
    """Train on the features, one line in `log` per pack. `fate`: where the process kills itself, if anywhere."""
    torch.set_num_threads(1)
    target = make_target()
    load_pack = loop.load_pack

    def slow(*args: Any) -> Any:
        time.sleep(SLOW)
        with open(log, "a") as file:
            file.write("pack\n")
        return load_pack(*args)

    loop.load_pack = slow
    if fate == "half a checkpoint":
        from mtp_train.checkpoint import heads

        heads.save_tensors = dies_at(
            4, heads.save_tensors, half
        )  # the second checkpoint's optimiser
    if fate == "after a best":  # before the checkpoint that would know of it
        loop._Trainer._checkpoint = dies_at(1, loop._Trainer._checkpoint)  # type: ignore[method-assign]
    if fate == "before the head":
        loop._Trainer._finish = dies_at(1, loop._Trainer._finish)  # type: ignore[method-assign]
    store = FeatureStore(features)
    train(target, build(target, MtpConfig()), store, store, config, Accelerator(cpu=True), out)


def make_features(folder: Path) -> FeatureStore:
    return make_store(folder, make_target(), CHATS, rows_per_shard=FEATURES.rows_per_shard)
