"""One rank of several that measure a toy head together, under torchrun.

torchrun --nproc-per-node 2 evaluate_ranks.py FOLDER
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path

import torch
from evaluations import measure
from torch import distributed

from mtp_train.core.dist import launched_ranks, leave
from mtp_train.dialogue.journal import Journal

ANSWERED: list[str] = []


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    ranks = launched_ranks()
    append = Journal.append

    def noted(journal: Journal, row: dict[str, object]) -> None:
        ANSWERED.append(f"{journal.path.name.split('.rank')[0]} {row['id']}")
        append(journal, row)

    Journal.append = noted  # type: ignore[method-assign]
    found = measure(folder, ranks)
    distributed.init_process_group("gloo")
    shares: list[list[str]] = [[] for _ in range(distributed.get_world_size())]
    distributed.all_gather_object(shares, ANSWERED)
    record = {
        "world": distributed.get_world_size(),
        "backend": distributed.get_backend(),
        "shares": shares,
        "sets": found.sets,
        "grid": found.grid,
        "greedy": {name: len(asdict(run)["completions"]) for name, run in found.greedy.items()},
    }
    (folder / f"rank-{ranks.rank}.json").write_text(json.dumps(record))
    distributed.barrier()


if __name__ == "__main__":
    try:
        main(Path(sys.argv[1]))
    finally:
        leave()
