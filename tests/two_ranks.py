"""One rank of two, under `torchrun --nproc-per-node 2`: features and three training runs, one of them live.

torchrun --nproc-per-node 2 two_ranks.py FOLDER
"""

from __future__ import annotations

import json
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import InitProcessGroupKwargs
from children import CHATS, FEATURES
from toys import VOCABULARY, conversation, make_store, make_target

from mtp_train.batches.pack import Pack
from mtp_train.core.dist import launched_ranks, leave
from mtp_train.core.errors import UserError
from mtp_train.core.records import Accounting
from mtp_train.heads.mtp import MtpConfig, build
from mtp_train.precompute import stage
from mtp_train.precompute.live import LiveFeatures, prepare_live
from mtp_train.precompute.sources import EngineStates
from mtp_train.store.corpus import write_corpus
from mtp_train.store.shards import FeatureStore
from mtp_train.train import loop
from mtp_train.train.config import TrainConfig
from mtp_train.train.loop import train
from mtp_train.train.online import OnlineConfig

TRAINING = TrainConfig(
    epochs=1,
    rows=60,
    rollout_steps=2,
    warmup_steps=0,
    beta1=0.0,
    clip=1e9,
    validations=1,
    checkpoints=100,
    online_eval=OnlineConfig(every=3, prompts=3, drafts=2, max_new_tokens=8),
)
LONG = [conversation(f"long-{index}", [index], [index + 1] * 99) for index in range(VOCABULARY - 1)]
EVEN = LONG[:40]  # two packs of 2,000 tokens: a rank validates one each
UNEVEN = LONG[:3]  # one pack: the second rank has none


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    accelerator = Accelerator(
        cpu=True, kwargs_handlers=[InitProcessGroupKwargs(timeout=timedelta(seconds=20))]
    )
    ranks = launched_ranks()
    target = make_target()

    def record(what: str, **values: Any) -> None:
        """Only a rank that got this far leaves a record, and the group's own word on its size."""
        group = {"rank": torch.distributed.get_rank(), "world": torch.distributed.get_world_size()}
        values |= group | {"backend": torch.distributed.get_backend()}
        (folder / f"{what}-{ranks.rank}.json").write_text(json.dumps(values))

    written: list[str] = []
    write_shard = stage.write_shard
    stage.write_shard = lambda path, *rest: (
        written.append(Path(path).name),
        write_shard(path, *rest),
    )[1]
    accounting = Accounting(used=len(CHATS)).as_dict()
    source = EngineStates(target)
    stage.precompute(source, CHATS, FEATURES, folder / "features", accounting, ranks)
    record("precompute", shards=written)
    stored = FeatureStore(folder / "features")
    corpus = write_corpus(folder / f"text-{ranks.rank}", CHATS, "inputs", Accounting())
    live = LiveFeatures(target, corpus, prepare_live(target, corpus, FEATURES))

    for name, features, chats in (
        ("even", stored, EVEN),
        ("uneven", stored, UNEVEN),
        ("live", live, EVEN),
    ):
        held_out = make_store(folder / f"held-out-{name}-{ranks.rank}", target, chats)
        train(
            target,
            build(target, MtpConfig()),
            features,
            held_out,
            TRAINING,
            accelerator,
            folder / name,
        )
        record(name, processes=accelerator.num_processes)

    load_pack = loop.load_pack

    def spoilt(*args: Any) -> Pack:
        pack = load_pack(*args)
        if ranks.rank == 1:
            pack.states["post_norm"][0] = float("nan")
        return pack

    loop.load_pack = spoilt
    loop._Trainer._validate = lambda _self: None  # type: ignore[method-assign]
    try:
        train(
            target,
            build(target, MtpConfig()),
            features,
            held_out,
            TRAINING,
            accelerator,
            folder / "alarm",
        )
    except UserError as error:
        record("alarm", message=str(error))


if __name__ == "__main__":
    try:
        main(Path(sys.argv[1]))
    finally:
        leave()
