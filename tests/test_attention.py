"""Packed and paged attention are the same attention, and the same as transformers' own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from transformers import AutoModelForCausalLM, LlamaConfig

from mtp_train.attention import chain, reference
from mtp_train.attention.interface import AttentionRule
from mtp_train.attention.packed import PackedContext, RolloutContext
from mtp_train.attention.paged import PagedContext, PagedKV, plan_batch
from mtp_train.core.errors import UserError
from mtp_train.models.target import Target

PAGE = 4
PLAIN = AttentionRule(0.3)


@pytest.fixture
def documents() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(61, (length,), generator=generator) for length in (3, 17, 8, 1)]


def packed_states(target: Target, documents: list[torch.Tensor]) -> torch.Tensor:
    offsets = [0, *torch.tensor([len(d) for d in documents]).cumsum(0).tolist()]
    positions = torch.cat([torch.arange(len(d)) for d in documents])
    return target.forward(torch.cat(documents), positions, PackedContext(offsets))


def test_a_packed_forward_equals_transformers_one_by_one(
    toy_target: Target, documents: list[torch.Tensor]
) -> None:
    plain = AutoModelForCausalLM.from_config(
        toy_target.config.__class__(**toy_target.config.to_diff_dict()), attn_implementation="eager"
    )
    plain.load_state_dict(toy_target.model.state_dict())
    expected = torch.cat([plain.eval().model(d[None]).last_hidden_state[0] for d in documents])
    torch.testing.assert_close(packed_states(toy_target, documents), expected, atol=1e-5, rtol=1e-5)


def test_documents_of_a_pack_do_not_see_each_other(
    toy_target: Target, documents: list[torch.Tensor]
) -> None:
    before = packed_states(toy_target, documents)
    changed = [(documents[0] + 1) % 61, *documents[1:]]
    after = packed_states(toy_target, changed)
    assert not torch.equal(before[:3], after[:3])
    assert torch.equal(before[3:], after[3:])


@pytest.mark.parametrize("counts", [(2, 2, 2), (1, 1, 1), (3, 1, 2)])
def test_paged_rows_equal_a_packed_forward(toy_target: Target, counts: tuple[int, ...]) -> None:
    """Prefill, then ragged or uniform rows over scattered pages, then one row more."""
    generator = torch.Generator().manual_seed(2)
    documents = [torch.randint(61, (length,), generator=generator) for length in (9, 14, 30)]
    expected = packed_states(toy_target, documents).split([9, 14, 30])
    cache = PagedKV(
        2,
        30,
        PAGE,
        dtype=torch.float32,
        device=torch.device("cpu"),
    )
    pages = [list(range(start, 30, 3)) for start in (2, 0, 1)]
    lengths = [9, 14, 30]
    starts = [0, 0, 0]
    for rows in (
        [n - c - 1 for n, c in zip(lengths, counts, strict=True)],
        list(counts),
        [1, 1, 1],
    ):
        plan = plan_batch(pages, starts, rows, PAGE, torch.device("cpu"))
        tokens = torch.cat([d[s : s + r] for d, s, r in zip(documents, starts, rows, strict=True)])
        states = toy_target.forward(tokens, plan.positions, PagedContext(cache, plan)).split(rows)
        for got, want, start, count in zip(states, expected, starts, rows, strict=True):
            torch.testing.assert_close(got, want[start : start + count], atol=1e-5, rtol=1e-5)
        starts = [s + r for s, r in zip(starts, rows, strict=True)]


def test_a_plan_has_flashinfers_arrays() -> None:
    plan = plan_batch([[5, 7], [1]], [3, 0], [3, 4], PAGE, torch.device("cpu"))
    assert plan.qo_indptr.tolist() == [0, 3, 7]
    assert plan.kv_page_indptr.tolist() == [0, 2, 3]
    assert plan.kv_page_indices.tolist() == [5, 7, 1]
    assert plan.kv_last_page_len.tolist() == [2, 4]
    assert plan.positions.tolist() == [3, 4, 5, 0, 1, 2, 3]
    assert plan.slots.tolist() == [5 * PAGE + 3, 7 * PAGE, 7 * PAGE + 1, 4, 5, 6, 7]
    assert plan.kv_lengths.tolist() == [6, 4]


def test_the_slow_equation_is_dense_attention_over_what_the_chain_sees() -> None:
    generator = torch.Generator().manual_seed(3)
    rows, heads, groups, width = 6, 4, 2, 8
    query = torch.randn(rows, heads, width, generator=generator)
    keys = [torch.randn(rows, groups, width, generator=generator) for _ in range(3)]
    values = [torch.randn(rows, groups, width, generator=generator) for _ in range(3)]
    out = reference.chain_attention(query, keys, values, AttentionRule(0.3))
    for start in range(rows):
        seen_k = torch.cat(
            [keys[0][: start + 1], keys[1][start : start + 1], keys[2][start : start + 1]]
        ).repeat_interleave(2, 1)
        seen_v = torch.cat(
            [values[0][: start + 1], values[1][start : start + 1], values[2][start : start + 1]]
        ).repeat_interleave(2, 1)
        weights = torch.einsum("hd,jhd->hj", query[start], seen_k).mul(0.3).softmax(-1)
        torch.testing.assert_close(
            out[start], torch.einsum("hj,jhd->hd", weights, seen_v), atol=1e-6, rtol=1e-5
        )


class ByReference:
    """A rollout's attention by the slow equation, document by document."""

    def __init__(self, offsets: list[int]) -> None:
        self.spans = list(pairwise(offsets))
        self.cached: list[tuple[torch.Tensor, torch.Tensor]] = []

    def __call__(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        rule: AttentionRule,
    ) -> torch.Tensor:
        self.cached.append((key, value))
        outs = []
        for a, b in self.spans:
            keys, values = zip(*[(k[a:b], v[a:b]) for k, v in self.cached], strict=True)
            outs.append(reference.chain_attention(query[a:b], keys, values, rule))
        return torch.cat(outs)


Steps = list[tuple[torch.Tensor, ...]]  # per step: query, key, value, gradient of the output


def rollout_steps(
    rows: int, steps: int, heads: int = 4, groups: int = 2, width: int = 8, value_width: int = 8
) -> Steps:
    generator = torch.Generator().manual_seed(rows)
    shapes = ((heads, width), (groups, width), (groups, value_width), (heads, value_width))
    return [
        tuple(torch.randn(rows, *shape, generator=generator).double() for shape in shapes)
        for _ in range(steps)
    ]


def values_and_gradients(
    context: Callable[..., torch.Tensor],
    steps: Steps,
    dtype: torch.dtype = torch.float64,
    rule: AttentionRule = PLAIN,
) -> list[torch.Tensor]:
    """Outputs of all steps, then the gradients of every step's query, key and value."""
    inputs = [[rows.to(dtype).requires_grad_() for rows in step[:3]] for step in steps]
    outs = []
    for step in inputs:
        outs.append(context(0, *step, rule))
        context = context.then() if isinstance(context, RolloutContext) else context
    grads = [step[3].to(out.dtype) for step, out in zip(steps, outs, strict=True)]
    leaves = [rows for step in inputs for rows in step]
    if rule.sinks is not None and rule.sinks.requires_grad:
        leaves.append(rule.sinks)
    return [*(out.detach() for out in outs), *torch.autograd.grad(outs, leaves, grads)]


@pytest.mark.parametrize("tile", [(4, 2**24, 16), (4, 2**24, 2), (4, 90, 16), (128, 2**24, 16)])
@pytest.mark.parametrize(("heads", "groups", "value_width"), [(4, 2, 8), (3, 3, 8), (4, 1, 5)])
def test_a_rollouts_values_and_gradients_are_the_slow_equations(
    tile: tuple[int, int, int],
    heads: int,
    groups: int,
    value_width: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Documents of one row, two, and around the edges of a tile; up to five steps."""
    for name, number in zip(("TILE_ROWS", "TILE_SCORES", "TILE_WIDTHS"), tile, strict=True):
        monkeypatch.setattr(chain, name, number)
    offsets = [0, 1, 3, 6, 10, 15, 22, 31]
    steps = rollout_steps(31, 5, heads, groups, value_width=value_width)
    for count in (1, 2, 5):
        ours = values_and_gradients(RolloutContext(offsets), steps[:count])
        slow = values_and_gradients(ByReference(offsets), steps[:count])
        assert len(ours) == 4 * count
        for got, want in zip(ours, slow, strict=True):
            torch.testing.assert_close(got, want, atol=1e-12, rtol=1e-10)


SINKS = torch.linspace(-1.0, 2.0, 4).double()
RULES = {
    "window 1": AttentionRule(0.3, window=1),
    "window 2": AttentionRule(0.3, window=2),
    "window 6": AttentionRule(0.3, window=6),
    "window 500": AttentionRule(0.3, window=500),
    "softcap": AttentionRule(0.8, softcap=1.5),
    "sinks": AttentionRule(0.3, sinks=SINKS),
    "window and softcap": AttentionRule(0.8, window=6, softcap=1.5),
    "window and sinks": AttentionRule(0.3, window=3, sinks=SINKS),
}


@pytest.mark.parametrize("rows", [4, 128])
@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_a_rule_is_the_slow_equations(
    rule: AttentionRule, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Windows shorter than a chain, than a tile, and longer than all; the sinks' gradients too."""
    monkeypatch.setattr(chain, "TILE_ROWS", rows)
    offsets = [0, 1, 3, 10, 31]
    steps = rollout_steps(31, 5, value_width=5)
    plain = values_and_gradients(RolloutContext(offsets), steps)
    for count in (1, 2, 5):
        found = []
        for context in (RolloutContext, ByReference):
            sinks = None if rule.sinks is None else rule.sinks.clone().requires_grad_()
            own = replace(rule, sinks=sinks)
            found.append(values_and_gradients(context(offsets), steps[:count], rule=own))
        assert len(found[0]) == 4 * count + (rule.sinks is not None)
        for got, want in zip(*found, strict=True):
            torch.testing.assert_close(got, want, atol=1e-12, rtol=1e-10)
        assert (rule.window == 500) == torch.equal(found[0][0], plain[0])


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_packed_and_paged_attention_under_a_rule_are_the_slow_equation(rule: AttentionRule) -> None:
    """Prefill, then ragged pieces, then single rows, over scattered pages."""
    lengths, edges = [9, 23, 40], ([0, 0, 0], [2, 20, 7], [5, 21, 8], [8, 22, 39], [9, 23, 40])
    generator = torch.Generator().manual_seed(5)
    texts = [
        tuple(
            torch.randn(n, *size, generator=generator).double() for size in ((4, 8), (2, 8), (2, 5))
        )
        for n in lengths
    ]
    expected = [reference.chain_attention(q, [k], [v], rule) for q, k, v in texts]
    packed = [torch.cat(rows) for rows in zip(*texts, strict=True)]
    out = PackedContext([0, 9, 32, 72])(0, *packed, rule)
    torch.testing.assert_close(out, torch.cat(expected), atol=1e-12, rtol=1e-10)
    cache = PagedKV(1, 30, PAGE, dtype=torch.float64, device=torch.device("cpu"))
    pages = [list(range(start, 30, 3)) for start in (2, 0, 1)]
    for starts, ends in pairwise(edges):
        rows = [end - start for start, end in zip(starts, ends, strict=True)]
        plan = plan_batch(pages, starts, rows, PAGE, torch.device("cpu"))
        spans = list(zip(texts, starts, ends, strict=True))
        piece = [torch.cat([text[kind][a:b] for text, a, b in spans]) for kind in range(3)]
        found = PagedContext(cache, plan)(0, *piece, rule)
        want = torch.cat([o[a:b] for o, a, b in zip(expected, starts, ends, strict=True)])
        torch.testing.assert_close(found, want, atol=1e-12, rtol=1e-10)


def test_a_window_costs_no_more_than_itself() -> None:
    """Keys that no row of a tile sees take no part in its products."""
    rule = AttentionRule(0.3, window=100)
    steps = rollout_steps(4096, 1, heads=2, groups=1)
    with LargestTensor() as seen:
        values_and_gradients(RolloutContext([0, 4096]), steps, torch.bfloat16, rule)
    widest = 100 + chain.TILE_ROWS + 2 * 4096 // chain.TILE_WIDTHS  # whole grains at both ends
    assert seen.elements <= max(2 * chain.TILE_ROWS * widest, 4096 * 2 * 8)


@pytest.mark.parametrize("rule", [RULES["window 6"], RULES["softcap"], RULES["sinks"]])
def test_bfloat16_under_a_rule_errs_no_more_than_the_slow_equation_does(
    rule: AttentionRule,
) -> None:
    steps = [tuple(rows.bfloat16().double() for rows in step) for step in rollout_steps(150, 3)]
    exact = values_and_gradients(ByReference([0, 20, 150]), steps, rule=rule)
    ours, slow = (
        values_and_gradients(context([0, 20, 150]), steps, torch.bfloat16, rule)
        for context in (RolloutContext, ByReference)
    )
    for got, plain, want in zip(ours, slow, exact, strict=True):
        error, bar = ((rows.double() - want).norm() / want.norm() for rows in (got, plain))
        assert error <= 1.25 * bar


def test_a_rollouts_documents_do_not_see_each_other() -> None:
    steps = rollout_steps(12, 3)
    changed = [tuple(torch.cat([rows[:5] + 1, rows[5:]]) for rows in step) for step in steps]
    before = values_and_gradients(RolloutContext([0, 5, 12]), steps)
    after = values_and_gradients(RolloutContext([0, 5, 12]), changed)
    for one, other in zip(before, after, strict=True):
        assert not torch.equal(one[:5], other[:5])
        assert torch.equal(one[5:], other[5:])


@pytest.mark.parametrize("offset", [0.0, 12.0])
def test_bfloat16_errs_no_more_than_the_slow_equation_does(offset: float) -> None:
    """Also where all scores of a row share a large part, as with key biases: 12 * 12 * 8 * 0.3 = 346 here."""
    steps = [
        (query + offset, key + offset, value, grad)
        for query, key, value, grad in rollout_steps(150, 3)
    ]
    steps = [tuple(rows.bfloat16().double() for rows in step) for step in steps]
    exact = values_and_gradients(ByReference([0, 20, 150]), steps)
    ours, slow = (
        values_and_gradients(context([0, 20, 150]), steps, torch.bfloat16)
        for context in (RolloutContext, ByReference)
    )
    for got, plain, want in zip(ours, slow, exact, strict=True):
        error, bar = ((rows.double() - want).norm() / want.norm() for rows in (got, plain))
        assert error <= 1.25 * bar


def test_under_autocast_a_rollout_computes_in_bfloat16_whatever_it_is_given() -> None:
    """RoPE may leave queries and keys in float32 beside values in bfloat16."""
    steps = rollout_steps(20, 2)
    plain = values_and_gradients(RolloutContext([0, 20]), steps, torch.bfloat16)

    contexts = [RolloutContext([0, 20])]

    def under_autocast(layer: int, query: Any, key: Any, value: Any, rule: AttentionRule) -> Any:
        with torch.autocast("cpu", torch.bfloat16):
            out = contexts[-1](layer, query.float(), key.float(), value, rule)
        contexts.append(contexts[-1].then())
        return out

    ours = values_and_gradients(under_autocast, steps, torch.bfloat16)
    assert all(torch.equal(got, want) for got, want in zip(ours, plain, strict=True))


class LargestTensor(TorchDispatchMode):
    """Remembers the most elements that any tensor had."""

    elements = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> torch.Tensor:
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else [out]:
            if isinstance(tensor, torch.Tensor):
                self.elements = max(
                    self.elements, tensor.untyped_storage().nbytes() // tensor.itemsize
                )
        return out


def largest_tensor(context: Callable[..., torch.Tensor], rows: int, value_width: int = 8) -> int:
    """Of two steps, forward and backward, over one document with 2 heads in bfloat16."""
    steps = rollout_steps(rows, 2, heads=2, groups=1, value_width=value_width)
    with LargestTensor() as seen:
        values_and_gradients(context, steps, torch.bfloat16)
    return seen.elements


def test_a_long_documents_scores_are_never_held_at_once() -> None:
    rows = 16_384
    assert largest_tensor(RolloutContext([0, rows]), rows) <= 2 * chain.TILE_ROWS * (rows + 8)
    assert largest_tensor(ByReference([0, 512]), 512) >= 2 * 512 * 512, "the measure sees a matrix"


@pytest.mark.parametrize("value_width", [8, 5])
def test_a_long_documents_prefill_holds_no_scores(value_width: int) -> None:
    """Also with values narrower than keys, as in latent attention."""
    assert largest_tensor(PackedContext([0, 4096]), 4096, value_width) <= 4096 * 2 * 8


def test_a_tile_is_bounded_however_long_the_document(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chain, "TILE_SCORES", 2**15)
    assert largest_tensor(RolloutContext([0, 1000]), 1000) <= 2**15


def test_a_rollouts_first_step_is_plain_causal_attention() -> None:
    generator = torch.Generator().manual_seed(4)
    query, key = (torch.randn(7, 2, 8, generator=generator) for _ in range(2))
    for width in (8, 5):
        value = torch.randn(7, 2, width, generator=generator)
        first = RolloutContext([0, 4, 7])(0, query, key, value, AttentionRule(0.5))
        plain = PackedContext([0, 4, 7])(0, query, key, value, AttentionRule(0.5))
        torch.testing.assert_close(first, plain, atol=1e-6, rtol=1e-5)


def test_what_no_context_computes_is_refused_by_name() -> None:
    from mtp_train.attention.interface import _attend

    module = torch.nn.Module()
    with pytest.raises(UserError, match="position_bias"):
        _attend(
            module,
            *(torch.zeros(1, 1, 1, 1) for _ in range(3)),
            None,
            scaling=1.0,
            position_bias=4,
        )


def test_a_toy_target_is_reproducible(toy_target: Target) -> None:
    config = LlamaConfig(**toy_target.config.to_diff_dict())
    again = Target.from_config(config)
    assert all(
        torch.equal(a, b)
        for a, b in zip(
            toy_target.model.state_dict().values(), again.model.state_dict().values(), strict=True
        )
    )


def test_a_step_leaves_what_it_was_given_as_it_was() -> None:
    """So that it can be run again: checkpointed, its outputs and gradients are the same bits."""
    steps = rollout_steps(12, 3)
    plain = values_and_gradients(RolloutContext([0, 5, 12]), steps)
    context = RolloutContext([0, 5, 12])
    inputs = [[rows.requires_grad_() for rows in step[:3]] for step in steps]
    outs = []
    for step in inputs:
        before = dict(context.earlier)
        now = context
        outs.append(
            checkpoint(lambda *rows, now=now: now(0, *rows, PLAIN), *step, use_reentrant=False)
        )
        assert context.earlier == before
        context = context.then()
    grads = torch.autograd.grad(
        outs, [rows for step in inputs for rows in step], [step[3] for step in steps]
    )
    assert all(map(torch.equal, [*outs, *grads], plain))
