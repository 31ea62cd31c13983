"""One rank of several that hold a toy target together, two by two, under torchrun.

torchrun --nproc-per-node 2 (or 4) tensor_ranks.py TARGET FOLDER
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from children import CHATS, FEATURES
from torch import distributed

from mtp_train.core.dist import launched_ranks, leave
from mtp_train.core.records import Accounting
from mtp_train.models.target import Target
from mtp_train.precompute.sources import EngineStates
from mtp_train.precompute.stage import precompute

STATES = ["post_norm", "layer_1"]


def main(path: Path, folder: Path) -> None:
    torch.set_num_threads(1)
    alone = launched_ranks()
    ranks = alone.grouped(2)
    target = Target.load(path, "float32", tensor_parallel=2)
    query = target.base.layers[0].self_attn.q_proj.weight
    accounting = Accounting(used=len(CHATS)).as_dict()
    precompute(
        EngineStates(target, STATES), CHATS, FEATURES, folder / "features", accounting, ranks
    )
    record = {
        "rank": ranks.rank,
        "unit": ranks.unit,
        "units": ranks.units,
        "world": ranks.world,
        "group": distributed.get_world_size(),
        "backend": distributed.get_backend(),
        "query_rows": query.to_local().shape[0],
        "of": query.shape[0],
    }
    (folder / f"rank-{ranks.rank}.json").write_text(json.dumps(record))
    ranks.wait()


if __name__ == "__main__":
    try:
        main(Path(sys.argv[1]), Path(sys.argv[2]))
    finally:
        leave()
