"""`mtp-train store verify | stat | sample`: look into a feature store. Needs no run folder and no Hydra."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from typing import Any

from mtp_train.core.progress import progress
from mtp_train.store.checks import Report, delete_damaged, sample, stat, verify
from mtp_train.store.shards import REMAKE, FeatureStore


def tool(arguments: list[str]) -> None:
    """Run one of the three; a damaged store is a `UserError`."""
    options = _parser().parse_args(arguments)
    options.work(options)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="mtp-train store",
        description="Look into a feature store: a folder or an fsspec address.",
    )
    commands = parser.add_subparsers(required=True, metavar="verify | stat | sample")
    check = commands.add_parser("verify", help="hashes, counts, the gate's result, every row")
    check.add_argument("address", nargs="+")
    check.add_argument(
        "--delete-damaged",
        action="store_true",
        help="remove damaged shards and the manifest: precompute makes just these again",
    )
    check.set_defaults(work=_verify)
    count = commands.add_parser("stat", help="sequences, tokens, bytes, lengths; as JSON")
    count.add_argument("address", nargs="+")
    count.set_defaults(work=_stat)
    show = commands.add_parser("sample", help="the text of sequences beside their mask")
    show.add_argument("address")
    show.add_argument("--tokenizer", required=True, metavar="FOLDER")
    show.add_argument("--sequence", type=int, nargs="+", default=[0], metavar="NUMBER")
    show.set_defaults(work=_sample)
    return parser


def _verify(options: argparse.Namespace) -> None:
    reports = {}
    for address in options.address:
        store = FeatureStore(address)
        with progress(store.manifest.shards, f"verify {address}", "shard") as bar:
            reports[address] = verify(store, bar.update)
        print(_summary(address, reports[address]))
        if options.delete_damaged:
            delete_damaged(store, reports[address])
    remedy = "they were removed: run precompute again" if options.delete_damaged else REMAKE
    for address, report in reports.items():
        report.require_whole(address, remedy)


def _summary(address: str, report: Report) -> str:
    norms = "; ".join(
        f"{state} norms {norm.mean:.4g} ({norm.least:.4g} to {norm.most:.4g})"
        for state, norm in report.norms.items()
    )
    lines = [
        f"{address}: {report.shards} shards whole, {len(report.damages)} files damaged",
        f"  {report.sequences} sequences, {report.tokens} tokens, {report.loss_tokens} trained; {norms}",
        f"  gate: {report.gate}",
        *(f"  damaged: {damage}" for damage in report.damages),
    ]
    return "\n".join(lines)


def _stat(options: argparse.Namespace) -> None:
    found: dict[str, Any] = {}
    for address in options.address:
        store = FeatureStore(address)
        stats = stat(store)
        ratios = {
            state: round(size / max(stats.raw_bytes, 1), 4)
            for state, size in stats.state_bytes.items()
        }
        contract = store.manifest.contract.as_dict()
        found[address] = asdict(stats) | {"ratio_to_raw": ratios, "contract": contract}
    print(json.dumps(found, indent=2))


def _sample(options: argparse.Namespace) -> None:
    from mtp_train.models.target import load_tokenizer  # the other two should not wait for it

    store = FeatureStore(options.address)
    tokenizer = load_tokenizer(options.tokenizer)
    for number in options.sequence:
        sequence = store[number]
        trained = int(sequence.loss_mask.sum())
        print(f"--- {number}: {sequence.key}: {len(sequence.tokens)} tokens, {trained} trained")
        for learned, text in sample(store, number, lambda ids: str(tokenizer.decode(ids))):
            for line in text.splitlines():
                print("T |" if learned else "  |", line)
