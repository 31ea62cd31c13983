"""Precompute against the bare target and against a one-by-one loop, side by side in one run.

    python tools/bench_precompute.py DATA --target FOLDER [--conversations 500] [--rows 2048] [--out FILE]

DATA is any source of conversations. They are dealt into rounds; in every round each way of work reads the same
conversations, in turns, so that a slow minute of the machine slows all of them:

    bare         the target's forward on the packed batches, nothing kept
    precompute   the whole stage: reading, forward, encoding, writing, gate, index
    one by one   transformers' base model (no lm_head), a conversation at a time, nothing kept
    as published the loop of public trainers: the whole model, a conversation at a time, all hidden states asked for

Ratios are of tokens per second. Peak memory is that of a process of its own per way, over the first 40 conversations.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import tempfile
import time
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from mtp_train.batches.pack import fill
from mtp_train.core.dist import Ranks
from mtp_train.core.provenance import versions, write_json
from mtp_train.core.records import Accounting, TokenizedConversation
from mtp_train.models.target import Target, load_tokenizer
from mtp_train.precompute.sources import EngineStates
from mtp_train.precompute.stage import PrecomputeConfig, precompute
from mtp_train.text.sources import SourceConfig, tokenized
from mtp_train.text.template import ChatTemplate

Chats = list[TokenizedConversation]


class Bench:
    """The three ways of work, over one target."""

    def __init__(self, folder: Path, rows: int, codec: str, scratch: Path) -> None:
        self.folder, self.scratch, self.made = folder, scratch, 0
        self.config = PrecomputeConfig(codec=codec, rows_per_forward=rows)

    @cached_property
    def source(self) -> EngineStates:
        return EngineStates(Target.load(self.folder, "bfloat16"))

    @cached_property
    def plain(self) -> Any:
        return AutoModelForCausalLM.from_pretrained(
            self.folder, dtype=torch.bfloat16, attn_implementation="sdpa"
        ).eval()

    def bare(self, chats: Chats) -> None:
        for pack in fill([(c, len(c.tokens)) for c in chats], self.config.rows_per_forward):
            self.source.capture(pack)

    def precompute(self, chats: Chats) -> None:
        self.made += 1
        out = self.scratch / str(self.made)
        accounting = Accounting(used=len(chats)).as_dict()
        precompute(self.source, chats, self.config, out, accounting, Ranks())

    def one_by_one(self, chats: Chats) -> None:
        for chat in chats:
            self.plain.model(input_ids=torch.tensor([chat.tokens]), use_cache=False)

    def as_published(self, chats: Chats) -> None:
        for chat in chats:
            ids = torch.tensor([chat.tokens])
            self.plain(input_ids=ids, use_cache=False, output_hidden_states=True)

    @property
    def ways(self) -> dict[str, Callable[[Chats], None]]:
        return {
            "bare": self.bare,
            "precompute": self.precompute,
            "one by one": self.one_by_one,
            "as published": self.as_published,
        }


@torch.inference_mode()
def timed(bench: Bench, rounds: list[Chats]) -> dict[str, list[float]]:
    """Seconds of each way per round; who begins takes turns."""
    seconds: dict[str, list[float]] = {name: [] for name in bench.ways}
    for work in bench.ways.values():
        work(rounds[0][:8])
    names = list(bench.ways)
    for number, chats in enumerate(rounds):
        for shift in range(len(names)):
            name = names[(number + shift) % len(names)]
            begin = time.perf_counter()
            bench.ways[name](chats)
            seconds[name].append(time.perf_counter() - begin)
    return seconds


def peak_memory(name: str, arguments: argparse.Namespace, chats: Chats) -> int:
    """Peak resident bytes of a fresh process that works one way."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(_peak, (name, arguments, chats))


@torch.inference_mode()
def _peak(name: str, arguments: argparse.Namespace, chats: Chats) -> int:
    with tempfile.TemporaryDirectory() as scratch:
        bench = Bench(arguments.target, arguments.rows, arguments.codec, Path(scratch))
        bench.ways[name](chats)
    # VmHWM and not ru_maxrss, which a process inherits from the one that started it.
    (line,) = [row for row in Path("/proc/self/status").read_text().splitlines() if "VmHWM" in row]
    return int(line.split()[1]) * 1024


def read(arguments: argparse.Namespace) -> Chats:
    template = ChatTemplate(load_tokenizer(arguments.target))
    source = SourceConfig(arguments.data, length="truncate", max_tokens=arguments.max_tokens)
    chats = []
    for chat in tokenized([source], template, Accounting()):
        chats.append(chat)
        if len(chats) == arguments.conversations:
            break
    return chats


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("data")
    parser.add_argument("--target", type=Path, required=True)
    parser.add_argument("--conversations", type=int, default=500)
    parser.add_argument("--max-tokens", type=int, default=1024)
    parser.add_argument("--rows", type=int, default=2048)
    parser.add_argument("--codec", default="raw")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    chats = read(arguments)
    size = -(-len(chats) // arguments.rounds)
    rounds = [chats[start : start + size] for start in range(0, len(chats), size)]
    with tempfile.TemporaryDirectory() as scratch:
        bench = Bench(arguments.target, arguments.rows, arguments.codec, Path(scratch))
        seconds = timed(bench, rounds)
    tokens = sum(len(chat.tokens) for chat in chats)
    total = {name: sum(values) for name, values in seconds.items()}
    result = {
        "conversations": len(chats),
        "tokens": tokens,
        "mean_tokens": tokens / len(chats),
        "rows_per_forward": arguments.rows,
        "codec": arguments.codec,
        "threads": torch.get_num_threads(),
        "tokens_per_second": {name: tokens / value for name, value in total.items()},
        "precompute_over_bare": total["bare"] / total["precompute"],
        "precompute_over_one_by_one": total["one by one"] / total["precompute"],
        "precompute_over_as_published": total["as published"] / total["precompute"],
        "seconds_by_round": seconds,
        "peak_bytes": {name: peak_memory(name, arguments, rounds[0][:40]) for name in total},
        "versions": versions(),
    }
    print(json.dumps(result, indent=2))
    if arguments.out:
        write_json(arguments.out, result)


if __name__ == "__main__":
    main()
