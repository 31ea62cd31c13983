"""The gate: stored rows must be the states by which the engine itself would choose its tokens.

For a sample of sequences per shard the engine's paged path (prefill of the first part, then the rest over the cache)
computes the rows once more, and the store gives back what it holds. A wrong norm, layer, order or file shows here,
before anything is trained on it. Four rules:

1. argmax(lm_head(captured post-norm row)) is the engine's token (a tie within rounding is counted);
2. any other captured state is the engine's own, up to rounding;
3. what is read back from the shard is what was captured, up to the codec's stated error;
4. at a target's first use, the rows of a short text are those of transformers' own model with transformers' own
   attention on the same weights, up to rounding: states and logits.

Knows no file.

Shapes: L rows of a sequence, R of them compared (the last ones), D hidden width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor

from mtp_train.attention.packed import PackedContext
from mtp_train.attention.paged import PagedContext, PagedKV, plan_batch
from mtp_train.core.errors import UserError
from mtp_train.core.progress import say
from mtp_train.models.reference import reference_rows
from mtp_train.models.target import POST_NORM, Target, layer_of

PAGE = 16
PIECE = 512  # rows computed or projected at a time: bounds the mask [PIECE, L] and the logits [PIECE, V]
TIE_ULPS = (
    4  # choices whose logits are closer than this many units of the dtype's precision are a tie
)
STATE_ERROR = 0.05  # median over rows of |captured - engine's| / |engine's|; a neighbouring layer is several times that
REFERENCE_ROWS = 64  # of one text: rule 4
REFERENCE_EPS = 3  # rule 4: units of the dtype's precision times the root of the layers; 0.5 was seen on SmolLM2
EXACT_ERROR = 1e-3  # rule 4: at least this; where activations are rounded to integers, STATE_ERROR
FIRST_LAYER = "layer_1"  # always compared: there least rounding has added up
CODEC_ERROR = {
    "raw": 0.0,
    "lossless": 0.0,
    "fp8": 0.06,
}  # of a row, relative; e4m3 rounds by 2^-4 at most


@dataclass(frozen=True)
class Sample:
    """A sequence, or its beginning, that the gate looks at."""

    key: str
    tokens: Sequence[int]  # [L]
    captured: dict[str, Tensor]  # [L, D] by state


@dataclass
class GateResult:
    """Rows compared; `ties` of them chose another token within rounding. Anything else stops the run."""

    sequences: int = 0
    rows: int = 0
    ties: int = 0


def check_rows(states: dict[str, Tensor], keys: Sequence[str], offsets: Sequence[int]) -> None:
    """Raise if a row is not finite or all zero, naming its sequence."""
    for name, state_TD in states.items():
        bad = ~state_TD.isfinite().all(dim=-1) | (state_TD == 0).all(dim=-1)
        if bool(bad.any()):
            row = int(bad.nonzero()[0])
            sequence = max(index for index, start in enumerate(offsets[:-1]) if start <= row)
            raise UserError(
                "every stored state must be finite and not zero",
                f"{name} of row {row - offsets[sequence]} of sequence {keys[sequence]!r}: "
                f"{state_TD[row, :4].tolist()}...",
                "try dtype float32 or bfloat16, and check the target",
            )


def check_stored(
    key: str, captured: dict[str, Tensor], stored: dict[str, Tensor], codec: str
) -> None:
    """Rule 3. Both [L, D] by state; `stored` as a reader of the shard gets it."""
    for name, state_LD in captured.items():
        same = stored[name].shape == state_LD.shape and stored[name].dtype == state_LD.dtype
        error = _relative_error(stored[name], state_LD).max() if same else float("inf")
        if not error <= CODEC_ERROR[codec]:
            raise UserError(
                f"a shard must give back the {name} states written into it, to {CODEC_ERROR[codec]}",
                f"sequence {key!r} with a relative error of {float(error):.3g}",
                "check the disk, and run precompute again",
            )


def check_reference(target: Target, tokens: Sequence[int], states: Sequence[str]) -> dict[str, Any]:
    """Rule 4, on the first rows of a set; what was compared, for the manifest.

    The median over rows of the relative error, of the first layer, each state and the logits. A target that several
    ranks hold is not compared: transformers' model of it would have to be spread in the same way.
    """
    if target.tensor_parallel > 1:
        say("gate: a target held by several ranks is not compared with transformers' own model")
        return {}
    return _compared(target, torch.tensor(tokens[:REFERENCE_ROWS]), tuple(states))


def _compared(target: Target, token_T: Tensor, states: tuple[str, ...]) -> dict[str, Any]:
    rows, token_T = len(token_T), token_T.to(target.device)
    position_T = torch.arange(rows, device=target.device)
    wanted = tuple(dict.fromkeys((FIRST_LAYER, *states, POST_NORM)))
    ours = target.capture(token_T, position_T, PackedContext([0, rows]), wanted)
    theirs, logits_TV = reference_rows(target, token_T)
    pairs = {name: (ours[name], theirs[name]) for name in wanted if name in theirs}
    for name in set(wanted) - set(pairs):  # of the last stream transformers gives the normed one
        pairs[name] = target.base.norm(ours[name]), theirs[POST_NORM]
    pairs["logits"] = target.logits(ours[POST_NORM]), logits_TV
    told = {}
    for name, pair in pairs.items():
        error, tolerance = float(_relative_error(*pair).median()), _tolerance(target, name)
        told[name] = {"error": error, "tolerance": tolerance}
        if not error <= tolerance:
            raise UserError(
                f"a target's {name} must be those of transformers' own model, to {tolerance:.2g}",
                f"a median relative error of {error:.3g} over {rows} rows",
                "check the target's config.json and the attention backend; report it otherwise",
            )
    return {"rows": rows, "compared": told}


def _tolerance(target: Target, name: str) -> float:
    """Of a state's relative error: rounding adds up over layers as in a random walk."""
    above = name in (POST_NORM, "logits")
    layer = target.layers if above else layer_of(name, target.layers)
    rounding = REFERENCE_EPS * torch.finfo(target.dtype).eps * max(layer, 1) ** 0.5
    return max(rounding, STATE_ERROR if target.quantisation.endswith("_dynamic") else EXACT_ERROR)


def check_choices(target: Target, samples: Sequence[Sample], result: GateResult) -> None:
    """Rules 1 and 2 for a few sequences, in one batch; adds to `result`."""
    states = tuple(samples[0].captured)
    texts = [torch.tensor(sample.tokens, device=target.device) for sample in samples]
    for sample, engine in zip(samples, paged_states(target, texts, states), strict=True):
        rows = len(engine[states[0]])
        first = len(sample.tokens) - rows
        for name, own_RD in engine.items():
            captured_RD = sample.captured[name][first:].to(own_RD.device)
            if name == POST_NORM:
                result.ties += _compare_choices(target, sample.key, first, captured_RD, own_RD)
            else:
                compare_states(name, sample.key, captured_RD, own_RD)
        result.sequences += 1
        result.rows += rows


def paged_states(
    target: Target, texts: Sequence[Tensor], states: Sequence[str]
) -> list[dict[str, Tensor]]:
    """States of each text's later part, computed as the engine does: piece by piece over a cache of what came before.

    A text's first piece (half of a short one) only fills the cache; the rows of the others are returned.
    """
    edges = [_edges(len(token_L)) for token_L in texts]
    pages = _pages([len(token_L) for token_L in texts])
    cache = PagedKV(
        target.layers,
        pages[-1][-1] + 1,
        PAGE,
        dtype=target.dtype,
        device=target.device,
    )
    found: list[list[dict[str, Tensor]]] = [[] for _ in texts]
    for turn in range(max(map(len, edges)) - 1):
        here = [index for index, edge in enumerate(edges) if turn + 1 < len(edge)]
        starts = [edges[index][turn] for index in here]
        rows = [edges[index][turn + 1] - start for index, start in zip(here, starts, strict=True)]
        plan = plan_batch([pages[index] for index in here], starts, rows, PAGE, target.device)
        token_T = torch.cat(
            [
                texts[i][start : start + count]
                for i, start, count in zip(here, starts, rows, strict=True)
            ]
        )
        piece = target.capture(token_T, plan.positions, PagedContext.of(cache, plan), states)
        split = {name: state_TD.split(rows) for name, state_TD in piece.items()}
        for place, index in enumerate(here):
            found[index].append({name: parts[place] for name, parts in split.items()})
    return [_joined(pieces[1:] or pieces, states) for pieces in found]


def _edges(rows: int) -> list[int]:
    return [0, *range(min(max(rows // 2, 1), PIECE), rows, PIECE), rows]


def _pages(lengths: Sequence[int]) -> list[list[int]]:
    """Pages of their own for each text, one after the other."""
    ends = [0, *accumulate(-(-length // PAGE) for length in lengths)]
    return [list(range(start, end)) for start, end in pairwise(ends)]


def _joined(pieces: Sequence[dict[str, Tensor]], states: Sequence[str]) -> dict[str, Tensor]:
    """A text of one row has one piece, which is all there is to compare."""
    return {name: torch.cat([piece[name] for piece in pieces]) for name in states}


def _compare_choices(
    target: Target, key: str, first: int, captured_RD: Tensor, engine_RD: Tensor
) -> int:
    """Rows that tie; raises where captured and engine's states choose different tokens."""
    ties = 0
    for start in range(0, len(captured_RD), PIECE):
        part = slice(start, start + PIECE)
        captured_RV = target.logits(captured_RD[part])
        chosen = choices(captured_RV)
        expected = choices(target.logits(engine_RD[part]))
        differ, wrong = compare_logits(captured_RV, chosen, expected)
        if bool(wrong.any()):
            row = int(wrong.nonzero()[0])
            raise UserError(
                "argmax(lm_head(stored row)) must be the engine's own token",
                f"row {first + start + row} of sequence {key!r}: stored chooses {int(chosen[row])}, "
                f"engine {int(expected[row])}",
                "check that the store holds post-final-norm states of this target",
            )
        ties += int(differ.sum())
    return ties


def choices(logits_RV: Tensor) -> Tensor:
    """argmax [R]; on the CPU `argmax` itself is several times slower in bfloat16."""
    return logits_RV.max(-1).indices


def compare_logits(
    captured_RV: Tensor, chosen_R: Tensor, expected_R: Tensor
) -> tuple[Tensor, Tensor]:
    """Rows whose choices differ, and those that differ by more than rounding explains, [R] each."""
    differ = chosen_R != expected_R
    gap = captured_RV.gather(1, chosen_R[:, None]) - captured_RV.gather(1, expected_R[:, None])
    size = captured_RV.amax(-1).abs().float().clamp(min=1)
    tolerance = TIE_ULPS * torch.finfo(captured_RV.dtype).eps * size
    return differ, differ & (gap.squeeze(1).float() > tolerance)


def compare_states(name: str, key: str, captured_RD: Tensor, engine_RD: Tensor) -> None:
    error = float(_relative_error(captured_RD, engine_RD).median())
    if not error <= STATE_ERROR:
        raise UserError(
            f"captured {name} states must be the engine's own",
            f"sequence {key!r} with a median relative error of {error:.3g}",
            "check the layer numbers and the backend",
        )


def _relative_error(state_LD: Tensor, reference_LD: Tensor) -> Tensor:
    """|difference| / |reference| of each row [L]."""
    difference = (state_LD.float() - reference_LD.float()).norm(dim=-1)
    return difference / reference_LD.float().norm(dim=-1).clamp(min=torch.finfo(torch.float32).tiny)
