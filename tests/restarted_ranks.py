"""One rank of several, started again once: the last rank dies after the first meeting of the first attempt.

torchrun --standalone --nproc-per-node 2 --max-restarts 1 restarted_ranks.py FOLDER

Each rank leaves how many ranks had come to every meeting by the time that it went on, and how many joined its group.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import torch
from torch import distributed

from mtp_train.core.dist import launched_ranks, leave

MEETINGS = 3


def main(folder: Path) -> None:
    ranks = launched_ranks()
    attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    last = ranks.rank == ranks.world - 1
    ranks.join("gloo")
    met = []
    for meeting in range(MEETINGS):
        time.sleep(0.3 * last)  # a rank that does not wait for the last one goes on without it
        (folder / f"came-{attempt}-{meeting}-{ranks.rank}").touch()
        ranks.wait()
        met.append(len(list(folder.glob(f"came-{attempt}-{meeting}-*"))))
        if last and not attempt:
            os._exit(1)
    joined = torch.ones(1)
    distributed.all_reduce(joined)
    record = {"attempt": attempt, "met": met, "joined": int(joined)}
    (folder / f"rank-{ranks.rank}.json").write_text(json.dumps(record))


if __name__ == "__main__":
    try:
        main(Path(sys.argv[1]))
    finally:
        leave()
