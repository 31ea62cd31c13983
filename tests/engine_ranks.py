"""Engines over toy targets, on one rank or on one of several that hold each target together, under torchrun.

torchrun --nproc-per-node 2 engine_ranks.py FOLDER
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import distributed
from torch.distributed.tensor import DTensor
from toys import toy_config

from mtp_train.core.dist import launched_ranks, leave
from mtp_train.engine.branch import TreeConfig, TreeProposer
from mtp_train.engine.chain import ChainProposer
from mtp_train.engine.engine import Engine, EngineConfig
from mtp_train.engine.ngram import NgramProposer
from mtp_train.engine.sampling import Sampling
from mtp_train.engine.sequences import Completion, Request
from mtp_train.heads import dflash, draft_model, dspark, eagle3, medusa, mtp, peagle
from mtp_train.heads.base import DraftHead
from mtp_train.models.target import Target, config_values

SMALL = EngineConfig(max_batch=3, cache_rows=256, page_size=4, prefill_rows=16)
REQUESTS = [Request(str(n), tuple((7 * i + n) % 61 for i in range(n)), 12) for n in (3, 20, 31)]
KINDS = {"greedy": Sampling(), "sampled": Sampling(temperature=0.8, seed=4, top_k=20)}


def heads(target: Target) -> dict[str, DraftHead]:
    counts = torch.arange(target.vocab_size)
    made: dict[str, DraftHead] = {
        name: mtp.MtpHead(target, mtp.MtpConfig(modules=modules))
        for name, modules in (("mtp", 1), ("mtp of two modules", 2))
    }
    made["mtp of two layers"] = mtp.MtpHead(target, mtp.MtpConfig(layers=2))
    made["mtp of a part"] = mtp.MtpHead(target, mtp.MtpConfig(draft_vocabulary=40))
    made["mtp of a part"].vocabulary.copy_(counts[:40])
    config = eagle3.settle(eagle3.Eagle3Config(draft_vocabulary=40, block="llama"), target, 40)
    made["eagle3"] = eagle3.Eagle3Head(target, config)
    made["eagle3"].vocabulary.copy_(counts[:40])
    options = peagle.PEagleConfig(draft_vocabulary=40, layers=2, depths=3, block="llama")
    named = eagle3.settle(peagle.settle(options, target, None), target, 40)
    made["peagle"] = peagle.PEagleHead(target, named)
    made["peagle"].vocabulary.copy_(counts[:40])
    for family, made_of, options in (
        ("dflash", dflash.DFlashHead, dflash.DFlashConfig(layers=2, block_size=4, target_states=2)),
        ("dspark", dspark.DSparkHead, dspark.DSparkConfig(layers=1, block_size=3, target_states=1)),
    ):
        made[family] = made_of(target, dflash.settle(options, target, None))
    made["medusa"] = medusa.MedusaHead(target, medusa.MedusaConfig(steps=3))
    model = config_values(toy_config(num_hidden_layers=1))
    made["draft_model"] = draft_model.DraftModelHead(
        target, draft_model.DraftModelConfig(model=model)
    )
    for head in made.values():
        fill(head)
    return made


def fill(head: DraftHead) -> None:
    """Parameters that are the same on every rank and in every process."""
    generator = torch.Generator().manual_seed(8)
    with torch.no_grad():
        for name, value in head.named_parameters():
            noise = 0.25 * torch.randn(value.shape, generator=generator)
            value.copy_(1 + noise if "norm" in name else noise)


def proposers(target: Target) -> dict[str, Any]:
    made = heads(target)
    dynamic = TreeConfig(drafts=6, depth=3, top_k=3)
    return {
        "plain": None,
        "ngram": NgramProposer(3, longest=2, shortest=1),
        **{name: ChainProposer(target, head, 3) for name, head in made.items()},
        "mtp, one token": ChainProposer(target, made["mtp"], 1),
        "mtp, tree": TreeProposer(target, made["mtp"], dynamic),
        "draft_model, tree": TreeProposer(target, made["draft_model"], dynamic),
    }


def outputs(target: Target, rank: int = 0) -> dict[str, list[list[Any]]]:
    """Of every proposer and sampling: each request's tokens, and what was drafted and accepted on the way.

    Where no head is spread, which has to draw alike, the draws of each rank are its own: it would say something else
    than the lead if it decided anything.
    """
    found = {}
    for name, proposer in proposers(target).items():
        shift = 0 if name.startswith(("mtp", "eagle3", "peagle", "medusa")) else rank
        for kind, sampling in KINDS.items():
            own = [replace(r, seed=n + shift) if n % 2 else r for n, r in enumerate(REQUESTS)]
            rules = replace(sampling, seed=sampling.seed + shift)
            done = Engine(target, proposer, SMALL).generate(own, rules)
            found[f"{name}, {kind}"] = [told(one) for one in done]
    return found


def told(one: Completion) -> list[Any]:
    return [list(one.tokens), one.finish, [[list(s.drafted), s.accepted] for s in one.steps]]


def shares(head: DraftHead) -> list[tuple[str, int, int]]:
    """A head's matrices that are spread: name, this rank's numbers, all numbers."""
    return [
        (name, value.to_local().numel(), value.numel())
        for name, value in head.named_parameters()
        if isinstance(value, DTensor)
    ]


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    ranks = launched_ranks()
    ranks = ranks.grouped(ranks.world)
    for path in sorted(path for path in folder.iterdir() if path.is_dir()):
        target = Target.load(path, "float32", tensor_parallel=ranks.world)
        drafting = proposers(target)
        cached = Engine(target, drafting["draft_model"], SMALL).proposer.cache_layers
        record = {
            "world": distributed.get_world_size(),
            "backend": distributed.get_backend(),
            "shares": shares(drafting["mtp"].head),
            "draft model's layers": cached,
            "outputs": outputs(target, ranks.rank),
        }
        (folder / f"{path.name}-{ranks.rank}.json").write_text(json.dumps(record))
    ranks.wait()


if __name__ == "__main__":
    try:
        main(Path(sys.argv[1]))
    finally:
        leave()
