"""Codecs, random access and opening of a feature store, side by side in one run; JSON on standard output.

    python tools/bench_store.py --target MODEL_FOLDER --data chats.jsonl     # fresh states of real conversations
    python tools/bench_store.py --store runs/mine/precompute/train           # states of a finished store

Rates are ratios: to what a trainer consumes (`--consumed`, rows per second), and to the bare target forward where
states are fresh. Takes below two minutes on two cores.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import resource
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mtp_train.attention.packed import PackedContext
from mtp_train.batches.pack import epoch_packs, fill, load_pack
from mtp_train.core.provenance import versions
from mtp_train.core.records import TokenizedConversation
from mtp_train.models.target import Target, load_tokenizer
from mtp_train.store.checks import stat
from mtp_train.store.codecs import CODECS
from mtp_train.store.index import shard_name
from mtp_train.store.manifest import Contract
from mtp_train.store.shards import FeatureStore, encode_shard, finish_store, open_shard, write_shard

Shards = list[tuple[list[TokenizedConversation], Tensor]]  # sequences, their rows end to end [T, D]
ROWS_PER_SHARD = 16_384
ROWS_PER_FORWARD = 2_048
ROWS_PER_PACK = 2_048
STATE = "post_norm"
ROLES = {"human": "user", "gpt": "assistant", "system": "system"}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--store", help="a store to take the states from")
    parser.add_argument("--target", help="or the target that makes them")
    parser.add_argument("--data", type=Path, help="JSON lines with messages or conversations")
    parser.add_argument("--conversations", type=int, default=100)
    parser.add_argument("--max-tokens", type=int, default=1024)
    parser.add_argument("--consumed", type=float, default=2500, help="rows/s of the trainer")
    parser.add_argument("--many", type=int, default=100_000, help="sequences of a large store")
    args = parser.parse_args()
    if not args.store and not (args.target and args.data):
        parser.error("name a store, or a target and its data")
    shards, forward = from_store(args.store) if args.store else capture(args)
    lengths = [len(sequence.tokens) for sequences, _ in shards for sequence in sequences]
    result: dict[str, Any] = {
        "rows": sum(lengths),
        "sequences": len(lengths),
        "hidden_size": shards[0][1].shape[1],
        "dtype": str(shards[0][1].dtype).removeprefix("torch."),
        "forward_rows_per_s": forward and round(forward),
        "consumed_rows_per_s": args.consumed,
    }
    with tempfile.TemporaryDirectory() as scratch:
        result["codecs"] = {
            codec: measure_codec(codec, shards, Path(scratch) / codec, args.consumed, forward)
            for codec in CODECS
        }
        result["opening"] = [measure_opening(Path(scratch), count) for count in (10, args.many)]
    result["peak_memory_MB"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
    result["cores"], result["threads"] = os.cpu_count(), torch.get_num_threads()
    print(json.dumps(result | {"versions": versions()}, indent=2))
    return 0


# --- states ---------------------------------------------------------------------------------------------------


def from_store(address: str) -> tuple[Shards, None]:
    """The first state of a store, its shards as they are."""
    store = FeatureStore(address)
    shards: Shards = []
    for number in range(store.manifest.shards):
        members = [store.shard(number)[index] for index in range(len(store.shard(number)))]
        chats = [
            TokenizedConversation(m.key, tuple(m.tokens.tolist()), tuple(m.loss_mask.tolist()))
            for m in members
        ]
        shards.append((chats, torch.cat([member.hidden for member in members])))
    return shards, None


@torch.inference_mode()
def capture(args: argparse.Namespace) -> tuple[Shards, float]:
    """States of the data's first conversations, and rows per second of the bare forward."""
    target = Target.load(args.target, "bfloat16")
    chats = read_chats(args)
    shards: Shards = []
    seconds = 0.0
    for members in fill([(chat, len(chat.tokens)) for chat in chats], ROWS_PER_SHARD):
        states = []
        for pack in fill([(chat, len(chat.tokens)) for chat in members], ROWS_PER_FORWARD):
            tokens = torch.tensor([token for chat in pack for token in chat.tokens])
            positions = torch.cat([torch.arange(len(chat.tokens)) for chat in pack])
            context = PackedContext([0, *accumulate(len(chat.tokens) for chat in pack)])
            started = time.perf_counter()
            states.append(target.forward(tokens, positions, context))
            seconds += time.perf_counter() - started
        shards.append((members, torch.cat(states)))
    return shards, sum(len(chat.tokens) for chat in chats) / seconds


def read_chats(args: argparse.Namespace) -> list[TokenizedConversation]:
    """Rendered by the target's template; masks do not matter here."""
    tokenizer = load_tokenizer(args.target)
    chats = []
    with open(args.data, encoding="utf-8") as lines:
        for number, line in zip(range(args.conversations), lines, strict=False):
            row = json.loads(line)
            messages = row.get("messages") or [
                {"role": ROLES[turn["from"]], "content": turn["value"]}
                for turn in row["conversations"]
            ]
            ids = tokenizer.apply_chat_template(messages, return_dict=False)[: args.max_tokens]
            chats.append(TokenizedConversation(str(number), tuple(ids), (1,) * len(ids)))
    return chats


# --- measures -------------------------------------------------------------------------------------------------


def measure_codec(
    codec: str, shards: Shards, folder: Path, consumed: float, forward: float | None
) -> dict[str, Any]:
    """Bytes and rates of one codec on all shards."""
    rows, row_bytes = sum(len(state) for _, state in shards), row_size(shards)
    encoded, encode_s = timed(
        lambda: [encode_shard(chats, {STATE: state}, codec) for chats, state in shards]
    )
    entries = [
        write_shard(folder / shard_name(number), shard) for number, shard in enumerate(encoded)
    ]
    opened = [open_shard(folder / entry.file) for entry in entries]
    decoded, decode_s = timed(
        lambda: [
            torch.cat([shard[index].hidden for index in range(len(shard))]) for shard in opened
        ]
    )
    finish_store(folder, contract(shards, codec), entries, {"rows": 1}, {})
    store = FeatureStore(folder)
    packs_s, packed = read_packs(store)
    alone = sum(
        tensor.nbytes
        for chat, state in one_by_one(shards)
        for tensor in CODECS[codec].encode(state, [0, len(chat.tokens)]).values()
    )
    return {
        "bytes_to_raw": round(stat(store).state_bytes[STATE] / (rows * row_bytes), 4),
        "bytes_to_raw_without_sharing": round(alone / (rows * row_bytes), 4),
        "exact": all(
            torch.equal(found, state) for found, (_, state) in zip(decoded, shards, strict=True)
        ),
        "relative_error": round(relative_error(decoded, shards), 5),
        "encode_MB_per_s": round(rows * row_bytes / encode_s / 1e6),
        "encode_over_forward": forward and round(rows / encode_s / forward, 1),
        "decode_over_consumed": round(rows / decode_s / consumed, 1),
        "random_packs_over_consumed": round(packed / packs_s / consumed, 1),
    }


def read_packs(store: FeatureStore) -> tuple[float, int]:
    """Seconds and rows of an epoch's packs in shuffled order; the files lie in the system's page cache."""
    packs = epoch_packs(store.lengths(), ROWS_PER_PACK, 0, 0)
    started = time.perf_counter()
    rows = sum(len(load_pack(store, pack, torch.device("cpu")).token_T) for pack in packs)
    return time.perf_counter() - started, rows


def measure_opening(scratch: Path, sequences: int) -> dict[str, Any]:
    """Time and memory of opening a store of so many short sequences, in a process of its own."""
    folder = scratch / f"opening-{sequences}"
    per_shard = min(16, sequences)
    state = torch.ones(4 * per_shard, 8, dtype=torch.bfloat16)
    entries, left = [], sequences
    while left:
        count = min(per_shard, left)
        chats = [
            TokenizedConversation(str(left - index), (1, 2, 3, 4), (0, 0, 1, 1))
            for index in range(count)
        ]
        encoded = encode_shard(chats, {STATE: state[: 4 * count]}, "raw")
        entries.append(write_shard(folder / shard_name(len(entries)), encoded))
        left -= count
    finish_store(
        folder, Contract("", (STATE,), 8, 64, "bfloat16", "raw", "", 1, 1), entries, {}, {}
    )
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        measured: dict[str, Any] = pool.apply(open_once, (str(folder),))
    return {"sequences": sequences, "shards": len(entries)} | measured


def open_once(folder: str) -> dict[str, float]:
    """In the child, after a first opening that loads what Python loads late; ten sequences are read far apart."""
    FeatureStore(folder)[0]
    before, started = resident_kb(), time.perf_counter()
    store = FeatureStore(folder)
    opened = time.perf_counter() - started
    for index in np.linspace(0, len(store) - 1, 10).astype(int).tolist():
        store[index]
    return {"open_ms": round(opened * 1000, 2), "resident_growth_kB": resident_kb() - before}


# --- arithmetic -----------------------------------------------------------------------------------------------


def timed(work: Callable[[], Any], repeats: int = 2) -> tuple[Any, float]:
    """The last result and the least seconds."""
    seconds = []
    for _ in range(repeats):
        started = time.perf_counter()
        result = work()
        seconds.append(time.perf_counter() - started)
    return result, min(seconds)


def row_size(shards: Shards) -> int:
    return shards[0][1].shape[1] * shards[0][1].itemsize


def one_by_one(shards: Shards) -> Sequence[tuple[TokenizedConversation, Tensor]]:
    """Every sequence with its own rows."""
    return [
        (chat, rows)
        for chats, state in shards
        for chat, rows in zip(chats, state.split([len(c.tokens) for c in chats]), strict=True)
    ]


def relative_error(decoded: Sequence[Tensor], shards: Shards) -> float:
    """Mean over rows of |decoded - exact| / |exact|, in Euclidean norms."""
    errors = [
        ((found.float() - state.float()).norm(dim=1) / state.float().norm(dim=1))
        for found, (_, state) in zip(decoded, shards, strict=True)
    ]
    return float(torch.cat(errors).mean())


def contract(shards: Shards, codec: str) -> Contract:
    state = shards[0][1]
    vocabulary = 1 + max(max(chat.tokens) for chats, _ in shards for chat in chats)
    dtype = str(state.dtype).removeprefix("torch.")
    return Contract(
        "", (STATE,), state.shape[1], vocabulary, dtype, codec, "", ROWS_PER_SHARD, ROWS_PER_FORWARD
    )


def resident_kb() -> int:
    """Anonymous resident memory of this process, in kB: pages of mapped files are the system's to drop."""
    with open("/proc/self/status", encoding="ascii") as lines:
        return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon"))


if __name__ == "__main__":
    sys.exit(main())
