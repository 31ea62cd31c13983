"""Our side of tools/bench_engine.py: the engine, with every drafting scheme by its name.

    python tools/sides/engine_ours.py SPEC

A line is `SCHEME BATCH ROUND`: answered with what the run gave. `costs` is answered with the cost curve.
"""

from __future__ import annotations

import copy
import json
import sys
from pathlib import Path
from typing import Any

import torch
from protocol import answer_all, prompts_of

from mtp_train.checkpoint.heads import load_head
from mtp_train.engine.engine import Engine, EngineConfig
from mtp_train.engine.schemes import SchemeConfig, make_proposer
from mtp_train.engine.sequences import Request
from mtp_train.evaluate.costs import costs_as_json, measure_costs
from mtp_train.models.target import Target

PLAIN = "plain"
SCHEMES = {
    "chain_1": SchemeConfig("chain", 1),
    "chain_2": SchemeConfig("chain", 2),
    "chain_3": SchemeConfig("chain", 3),
    "fixed_4": SchemeConfig("fixed", 4, depth=2, top_k=3),
    "dynamic_4": SchemeConfig("dynamic", 4, depth=2, top_k=3),
    "dynamic_8": SchemeConfig("dynamic", 8, depth=3, top_k=4),
    "ngram_3": SchemeConfig("ngram", 3),
}


class Ours:
    """The target, and an engine for each scheme, made when it is first asked for."""

    def __init__(self, spec: dict[str, Any]) -> None:
        self.spec = spec
        self.target = Target.load(spec["target"])
        self.head = load_head(Path(spec["head"]), self.target)[0] if spec["head"] else None
        self.engines: dict[str, Engine] = {}

    def answer(self, line: str) -> dict[str, Any]:
        if line == "costs":
            return self._costs()
        scheme, batch, number = line.split()
        return self._run(self._engine(scheme), int(batch), int(number))

    def _run(self, engine: Engine, batch: int, number: int) -> dict[str, Any]:
        requests = [
            Request(str(index), tuple(prompt), self.spec["max_new_tokens"])
            for index, prompt in enumerate(prompts_of(self.spec, batch, number))
        ]
        done = engine.generate(requests)
        accepted = [step.accepted for completion in done for step in completion.steps]
        return {
            "tokens": engine.stats.tokens,
            "wall": engine.stats.wall,
            "parts": engine.stats.seconds,
            "tau": 1 + sum(accepted) / max(len(accepted), 1),
            "outputs": [completion.tokens for completion in done],
        }

    def _engine(self, scheme: str) -> Engine:
        if scheme not in self.engines:
            proposer = None
            if scheme != PLAIN:
                assert self.head is not None, "a scheme needs --head"
                proposer = make_proposer(self.target, copy.deepcopy(self.head), SCHEMES[scheme])
            config = EngineConfig(cache_rows=self.spec["cache_rows"], share_prefixes=False)
            self.engines[scheme] = Engine(self.target, proposer, config)
        return self.engines[scheme]

    def _costs(self) -> dict[str, Any]:
        wanted = self.spec["costs"]
        costs = measure_costs(
            self.target, self.head, wanted["batches"], wanted["cached"], wanted["repeats"]
        )
        return {"costs": costs_as_json(costs, wanted["cached"], wanted["repeats"])}


def main() -> None:
    spec = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    torch.set_num_threads(spec["threads"])
    ours = Ours(spec)
    schemes = list(SCHEMES) if ours.head is not None else []
    answer_all(ours.answer, {"schemes": schemes, "torch": torch.__version__})


if __name__ == "__main__":
    main()
