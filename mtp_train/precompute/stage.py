"""Text to features: packed prefill, shard by shard, resumable, behind the gate.

A shard is a unit of work fixed by the data's order and the row budget: the same bytes whichever rank makes it.
Files that a killed run finished are kept; the manifest, written last, makes the store whole.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate
from pathlib import Path

import torch
from torch import Tensor

from mtp_train.attention.packed import PackedContext
from mtp_train.batches.pack import fill
from mtp_train.core.dist import Ranks
from mtp_train.core.errors import UserError
from mtp_train.core.progress import progress, say
from mtp_train.core.provenance import digest, read_json, require_writable, write_json
from mtp_train.core.records import Accounting, TokenizedConversation
from mtp_train.models.target import Target
from mtp_train.precompute.gate import GateResult, check_choices, check_rows
from mtp_train.store.manifest import NAME, Contract, Manifest
from mtp_train.store.shards import describe_shard, open_shard, shard_name, write_shard
from mtp_train.text.sources import Answer
from mtp_train.text.turns import join_turns


@dataclass(frozen=True)
class PrecomputeConfig:
    """How features are made.

    Attributes:
        rows_per_shard: row budget of a shard (one longer sequence makes a shard of its own).
        rows_per_forward: row budget of one packed prefill.
        max_tokens: longest sequence; longer ones are refused and counted.
        gate_sequences: sequences per shard whose choices are compared with the engine's.
    """

    rows_per_shard: int = 16384
    rows_per_forward: int = 2048
    max_tokens: int = 4096
    gate_sequences: int = 2

    def __post_init__(self) -> None:
        for name in ("rows_per_shard", "rows_per_forward", "max_tokens", "gate_sequences"):
            if getattr(self, name) < 1:
                raise UserError(
                    f"precompute.{name} must be 1 or more", getattr(self, name), "raise it"
                )


def from_answers(
    answers: Sequence[Answer], config: PrecomputeConfig, accounting: Accounting
) -> list[TokenizedConversation]:
    """The target's answers as sequences: prompt ids masked out, its own ids trained, as they were said.

    Turns of a conversation share a sequence where their tokens allow it.
    """
    kept = []
    for answer in answers:
        if len(answer.prompt_ids) + len(answer.output_ids) > config.max_tokens:
            accounting.used -= 1
            accounting.refuse(f"longer than {config.max_tokens} tokens", answer.key)
            continue
        kept.append(answer)
    if not kept:
        raise UserError(
            "precompute needs at least one sequence",
            accounting.as_dict(),
            "raise precompute.max_tokens or add data",
        )
    return join_turns(kept)


def contract_for(
    target: Target, sequences: Sequence[TokenizedConversation], config: PrecomputeConfig
) -> Contract:
    """What the store will say of itself."""
    return Contract(
        target_hash=target.hash,
        state=target.state,
        hidden_size=target.hidden_size,
        vocab_size=target.vocab_size,
        dtype=str(target.dtype).removeprefix("torch."),
        data_digest=digest(
            [[sequence.key, sequence.tokens, sequence.loss_mask] for sequence in sequences]
        ),
        rows_per_shard=config.rows_per_shard,
        rows_per_forward=config.rows_per_forward,
    )


def plan_shards(
    sequences: Sequence[TokenizedConversation], budget: int
) -> list[list[TokenizedConversation]]:
    """Consecutive sequences whose rows fit the budget."""
    return list(fill([(sequence, len(sequence.tokens)) for sequence in sequences], budget))


@torch.inference_mode()
def precompute(
    target: Target,
    sequences: Sequence[TokenizedConversation],
    config: PrecomputeConfig,
    out: Path,
    accounting: Accounting,
    ranks: Ranks,
) -> None:
    """Write the store of `sequences` to `out`; each rank makes its share of the shards."""
    contract = contract_for(target, sequences, config)
    if ranks.main:
        _prepare(out, contract)
    ranks.wait()
    shards = plan_shards(sequences, config.rows_per_shard)
    todo = {index for index in range(len(shards)) if not (out / shard_name(index)).is_file()}
    done = sum(
        len(sequence.tokens)
        for index, shard in enumerate(shards)
        if index not in todo
        for sequence in shard
    )
    total = sum(len(sequence.tokens) for sequence in sequences)
    gate = GateResult()
    with progress(total, f"precompute {out.name}", "token", initial=done, shown=ranks.main) as bar:
        # Shares go by number, not by what a rank finds undone: ranks look at the folder at different times.
        for index in ranks.mine(list(range(len(shards)))):
            if index not in todo:
                continue
            hidden = torch.cat(
                [_states(target, pack) for pack in _packs(shards[index], config.rows_per_forward)]
            )
            check_rows(
                hidden,
                [sequence.key for sequence in shards[index]],
                [0, *accumulate(len(s.tokens) for s in shards[index])],
            )
            write_shard(out / shard_name(index), shards[index], hidden)
            bar.update(len(hidden))
    ranks.wait()
    if ranks.main:
        for index, shard in enumerate(shards):
            _gate_shard(target, out / shard_name(index), shard, config.gate_sequences, gate)
        entries = tuple(describe_shard(out / shard_name(index)) for index in range(len(shards)))
        Manifest(contract, entries, asdict(gate), accounting.as_dict()).save(out)
        say(
            f"precompute {out.name}: {total} tokens, {len(shards)} shards; gate: {gate.rows} rows, {gate.ties} ties"
        )
    ranks.wait()


def _prepare(out: Path, contract: Contract) -> None:
    """Make the folder ready: shards of another contract are removed, of the same one kept."""
    require_writable(out)
    note = out / "contract.json"
    if not note.is_file() or read_json(note) != asdict(contract):
        shutil.rmtree(out)
        require_writable(out)
        write_json(note, asdict(contract))
    (out / NAME).unlink(missing_ok=True)
    for left in out.glob(".*.part"):  # half-written by a killed run
        left.unlink()


def _packs(
    shard: list[TokenizedConversation], budget: int
) -> Iterator[list[TokenizedConversation]]:
    return fill([(sequence, len(sequence.tokens)) for sequence in shard], budget)


def _states(target: Target, pack: list[TokenizedConversation]) -> Tensor:
    """One packed prefill: the sequences' states end to end [T, D]."""
    offsets = [0, *accumulate(len(sequence.tokens) for sequence in pack)]
    tokens = torch.tensor(
        [token for sequence in pack for token in sequence.tokens], device=target.device
    )
    positions = torch.cat(
        [torch.arange(len(sequence.tokens), device=target.device) for sequence in pack]
    )
    return target.forward(tokens, positions, PackedContext(offsets)).cpu()


def _gate_shard(
    target: Target, path: Path, shard: list[TokenizedConversation], count: int, result: GateResult
) -> None:
    """Read sequences back from the file, spread over the shard, and hold them against the engine."""
    file = open_shard(path)
    offsets = file.get_tensor("offsets").tolist()
    for index in {round(step * (len(shard) - 1) / max(count - 1, 1)) for step in range(count)}:
        hidden = file.get_slice("hidden")[offsets[index] : offsets[index + 1]].to(target.device)
        tokens = torch.tensor(shard[index].tokens, device=target.device)
        check_choices(target, shard[index].key, tokens, hidden, result)
