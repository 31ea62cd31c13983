"""Features without a store: the target computes the states of a pack when training asks for it.

A pack's documents, and no others, go through one packed prefill; tokens and masks come from the corpus. So batches are
those of a store, and states differ by what another packing rounds. The gate is precompute's, on a sample, and every
row is checked as it is computed. Knows no head and no order of training.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from itertools import accumulate, chain, pairwise, repeat
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mtp_train.batches.pack import fill
from mtp_train.core.errors import UserError
from mtp_train.core.progress import say
from mtp_train.core.provenance import read_json, versions, write_json
from mtp_train.models.identity import require_same
from mtp_train.models.target import Target
from mtp_train.precompute.gate import GateResult, Sample, check_choices, check_reference, check_rows
from mtp_train.precompute.sources import expand_states, packed_states
from mtp_train.precompute.stage import GATE_ROWS, WHOLE, WHOLE_ROWS, PrecomputeConfig, plan_shards
from mtp_train.store.corpus import Corpus
from mtp_train.store.manifest import Contract
from mtp_train.store.shards import FeatureSequence

NAME = "live.json"  # beside the text that it speaks of
CODEC = "live"  # in a contract's place for one
REMEDY = "run precompute with precompute.live=true"


@dataclass(frozen=True)
class LiveManifest:
    """What features that lie nowhere say of themselves: a store's manifest without files."""

    contract: Contract
    sequences: int
    tokens: int
    loss_tokens: int
    gate: dict[str, Any]
    accounting: dict[str, Any]
    live: bool = True
    versions: dict[str, str] = field(default_factory=versions)

    @classmethod
    def load(cls, folder: Path) -> LiveManifest:
        """What a live precompute left in a corpus folder."""
        if not (folder / NAME).is_file():
            raise UserError(
                "live features must have passed the gate", f"no {folder / NAME}", REMEDY
            )
        raw = read_json(folder / NAME)
        contract = raw["contract"] | {"states": tuple(raw["contract"]["states"])}
        return cls(**raw | {"contract": Contract(**contract)})


class LiveFeatures:
    """The features of a corpus, computed by `target` for each read: `batches.pack.Features`.

    Args:
        manifest: of the same corpus, target and dtype; else `UserError`.
        states: those to compute, among the manifest's; all of them by default.
    """

    def __init__(
        self,
        target: Target,
        corpus: Corpus,
        manifest: LiveManifest,
        states: Sequence[str] | None = None,
    ) -> None:
        contract = manifest.contract
        contract.require(
            quantisation=target.quantisation,
            target_hash=target.hash,
            dtype=_dtype(target),
            data_digest=corpus.note.digest,
        )
        require_same(contract.identity, target.identity, "live features", REMEDY)
        contract.require_states(*(states or ()))
        self.target, self.corpus, self.manifest = target, corpus, manifest
        self.states: tuple[str, ...] = tuple(states or contract.states)

    def __len__(self) -> int:
        return len(self.corpus)

    def lengths(self) -> np.ndarray:
        """Tokens of every sequence [sequences]."""
        return self.corpus.lengths

    def loss_tokens(self) -> np.ndarray:
        """Tokens with mask 1 of every sequence [sequences]."""
        return self.corpus.loss_tokens

    def token_counts(self, *, trained: bool = False) -> Tensor:
        """How often each token stands in the text, or is trained: int64 [vocabulary]."""
        size = self.manifest.contract.vocab_size
        return torch.from_numpy(self.corpus.token_counts(size, trained=trained))

    def read(self, indices: Sequence[int]) -> list[FeatureSequence]:
        """These sequences, their states by one packed prefill of them all, on the target's device."""
        return compute(self.target, self.corpus, indices, self.states)

    def gate(self, config: PrecomputeConfig, sequences: int) -> GateResult:
        """Hold that many sequences against the engine's own choices; raises where precompute's gate would."""
        return gate(self.target, self.corpus, self.states, config.rows_per_forward, sequences)


@torch.no_grad()
def compute(
    target: Target, corpus: Corpus, indices: Sequence[int], states: Sequence[str]
) -> list[FeatureSequence]:
    """The sequences with the target's states of them, which are finite and not zero.

    In the target's own dtype, whatever autocast the caller trains under. Made without inference mode: autograd keeps
    them for the head's backward.
    """
    chats = [corpus[index] for index in indices]
    with torch.autocast(target.device.type, enabled=False):
        found = packed_states(target, [chat.tokens for chat in chats], states)
    offsets = [0, *accumulate(len(chat.tokens) for chat in chats)]
    check_rows(found, [chat.key for chat in chats], offsets)
    return [
        FeatureSequence(
            chat.key,
            torch.tensor(chat.tokens),
            torch.tensor(chat.loss_mask),
            {name: state_TD[start:stop] for name, state_TD in found.items()},
        )
        for chat, (start, stop) in zip(chats, pairwise(offsets), strict=True)
    ]


@torch.no_grad()
def gate(
    target: Target, corpus: Corpus, states: Sequence[str], rows: int, sequences: int
) -> GateResult:
    """Precompute's gate on a sample of sequences, the same one each time; their first rows, of one up to WHOLE_ROWS.

    Args:
        rows: budget of one packed prefill.
    """
    result = GateResult()
    chosen = np.random.default_rng(0).permutation(len(corpus))[:sequences].tolist()
    limits = chain([WHOLE_ROWS], repeat(GATE_ROWS))
    for members in fill([(index, int(corpus.lengths[index])) for index in chosen], rows):
        samples = [
            Sample(
                sequence.key,
                sequence.tokens[:limit].tolist(),
                {name: state_LD[:limit] for name, state_LD in sequence.states.items()},
            )
            for sequence, limit in zip(
                compute(target, corpus, members, states), limits, strict=False
            )
        ]
        check_choices(target, samples, result)
    return result


def prepare_live(target: Target, corpus: Corpus, config: PrecomputeConfig) -> LiveManifest:
    """Gate a sample of as many sequences as a store of up to WHOLE shards would, and note what the features are."""
    states = expand_states(config.states, target.layers)
    shards = min(len(plan_shards(corpus.lengths, config.rows_per_shard)), WHOLE)
    result = gate(target, corpus, states, config.rows_per_forward, config.gate_sequences * shards)
    reference = check_reference(target, corpus[0].tokens, states) if len(corpus) else {}
    note = corpus.note
    manifest = LiveManifest(
        _contract(target, states, note.digest),
        note.sequences,
        note.tokens,
        note.loss_tokens,
        asdict(result) | {"reference": reference},
        note.accounting,
    )
    write_json(corpus.folder / NAME, asdict(manifest))
    say(
        f"precompute {corpus.folder.stem}: live, {note.tokens} tokens to compute as they are trained; "
        f"gate: {result.rows} rows of {result.sequences} sequences, {result.ties} ties"
    )
    return manifest


def _contract(target: Target, states: tuple[str, ...], data_digest: str) -> Contract:
    return Contract(
        target_hash=target.hash,
        states=states,
        codec=CODEC,
        hidden_size=target.hidden_size,
        vocab_size=target.vocab_size,
        dtype=_dtype(target),
        data_digest=data_digest,
        rows_per_shard=0,  # no shards
        rows_per_forward=0,  # as the packs are
        quantisation=target.quantisation,
        identity=target.identity,
    )


def _dtype(target: Target) -> str:
    return str(target.dtype).removeprefix("torch.")
