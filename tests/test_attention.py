"""Packed and paged attention are the same attention, and the same as transformers' own."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from mtp_train.attention.packed import PackedContext, RolloutContext, chain_attention
from mtp_train.attention.paged import PagedContext, PagedKV, plan_batch
from mtp_train.core.errors import UserError
from mtp_train.models.target import Target

PAGE = 4


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
        toy_target.kv_heads,
        toy_target.head_width,
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


def test_chain_attention_equals_dense_attention_over_what_the_chain_sees() -> None:
    generator = torch.Generator().manual_seed(3)
    rows, heads, groups, width = 6, 4, 2, 8
    query = torch.randn(rows, heads, width, generator=generator)
    keys = [torch.randn(rows, groups, width, generator=generator) for _ in range(3)]
    values = [torch.randn(rows, groups, width, generator=generator) for _ in range(3)]
    out = chain_attention(query, keys, values, 0.3)
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


def test_a_rollouts_first_step_is_plain_causal_attention() -> None:
    generator = torch.Generator().manual_seed(4)
    query, key, value = (torch.randn(7, 2, 8, generator=generator) for _ in range(3))
    first = RolloutContext([0, 4, 7])(0, query, key, value, 0.5)
    assert torch.equal(first, PackedContext([0, 4, 7])(0, query, key, value, 0.5))


def test_what_no_context_computes_is_refused_by_name() -> None:
    from mtp_train.attention.interface import _attend

    module = torch.nn.Module()
    with pytest.raises(UserError, match="sliding_window"):
        _attend(
            module,
            *(torch.zeros(1, 1, 1, 1) for _ in range(3)),
            None,
            scaling=1.0,
            sliding_window=4,
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
