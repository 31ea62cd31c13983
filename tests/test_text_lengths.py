"""Sequences that are too long: properties of the windows, over many shapes."""

from __future__ import annotations

from random import Random

import pytest

from mtp_train.core.errors import UserError
from mtp_train.core.records import TokenizedConversation
from mtp_train.text.lengths import LengthPolicy, apply_length, count_windows
from mtp_train.text.mix import interleave, mix, quotas
from mtp_train.text.refusal import Refusal


def record(mask: list[int]) -> TokenizedConversation:
    """Token t is 100 + t, so that a window shows where it comes from."""
    return TokenizedConversation("k", tuple(range(100, 100 + len(mask))), tuple(mask), "c")


def test_a_window_by_hand() -> None:
    """tokens a b c d e f g h; d, e and h are trained; four at a time, two of them context."""
    found = apply_length(record([0, 0, 0, 1, 1, 0, 0, 1]), LengthPolicy("split", 4, 2))
    assert found == [
        TokenizedConversation("k", (100, 101, 102, 103), (0, 0, 0, 1), "c"),
        TokenizedConversation("k@1", (102, 103, 104, 105), (0, 0, 1, 0), "c"),
        TokenizedConversation("k@2", (104, 105, 106, 107), (0, 0, 0, 1), "c"),
    ]


def test_every_trained_token_is_trained_in_exactly_one_window() -> None:
    random = Random(0)
    left_out = 0
    for _ in range(500):
        size, limit = random.randint(1, 80), random.randint(3, 30)
        policy = LengthPolicy("split", limit, random.randint(2, limit - 1))
        density = random.choice([0.05, 0.5, 1.0])
        whole = record([int(random.random() < density) for _ in range(size)])
        found = apply_length(whole, policy)
        assert isinstance(found, list)
        trained = [t for w in found for t, flag in zip(w.tokens, w.loss_mask, strict=True) if flag]
        wanted = [t for t, flag in zip(whole.tokens, whole.loss_mask, strict=True) if flag]
        assert trained == wanted, "each once, in the sequence's order"
        for window in found:
            assert len(window.tokens) <= limit
            first = window.tokens[0]
            assert window.tokens == tuple(range(first, first + len(window.tokens))), "unbroken"
            assert first == 100 or window.loss_mask[: policy.context] == (0,) * policy.context
            assert any(window.loss_mask) or size <= limit
        assert len({window.key for window in found}) == len(found)
        windows = count_windows(size, policy)
        left_out += windows - len(found)
        assert len(found) <= windows
        if density == 1.0:
            assert len(found) == windows
    assert left_out > 100


@pytest.mark.parametrize("rule", ["refuse", "truncate", "split"])
def test_what_fits_stays_as_it_is(rule: str) -> None:
    whole = record([0, 0, 1, 0])
    assert apply_length(whole, LengthPolicy(rule, 4, 2)) == [whole]


def test_what_does_not_fit_is_refused_or_cut() -> None:
    whole = record([0, 0, 1, 1, 1])
    assert apply_length(whole, LengthPolicy("refuse", 4)) == Refusal("longer than 4 tokens")
    (cut,) = apply_length(whole, LengthPolicy("truncate", 4))  # type: ignore[misc]
    assert (cut.tokens, cut.loss_mask) == (whole.tokens[:4], (0, 0, 1, 1))
    late = record([0, 0, 0, 0, 1])
    assert apply_length(late, LengthPolicy("truncate", 4)) == Refusal(
        "no trained token within 4 tokens"
    )


@pytest.mark.parametrize(
    "wrong", [("cut", 10, 2), ("refuse", 2, 2), ("split", 10, 10), ("split", 10, 1)]
)
def test_a_wrong_policy_is_refused(wrong: tuple[str, int, int]) -> None:
    with pytest.raises(UserError):
        LengthPolicy(*wrong)


def test_quotas_are_as_large_as_the_scarcest_source_allows() -> None:
    assert quotas([30, 100, 60], [0.25, 0.5, 0.25]) == [30, 60, 30]
    assert quotas([10, 10], [3, 1]) == [10, 3]
    assert quotas([0, 10], [1, 1]) == [0, 0]


def test_interleaving_keeps_the_ratio_everywhere() -> None:
    order = list(interleave([30, 60, 10]))
    assert [order.count(index) for index in range(3)] == [30, 60, 10]
    for end in range(1, 101):
        assert abs(order[:end].count(1) - 0.6 * end) <= 1.5


def test_a_mix_gives_every_row_once() -> None:
    rows = [list(range(size)) for size in (7, 20, 0, 13)]
    sources = [rows[0], rows[1], rows[3]]
    found = list(mix([lambda r=r: iter(r) for r in sources], [1, 1, 1], 5))  # type: ignore[misc]
    assert sorted((index, row) for index, row, _ in found) == [
        (index, row) for index, source in enumerate(sources) for row in source
    ]
    assert sum(kept for _, _, kept in found) == 21
    plain = list(mix([lambda r=r: iter(r) for r in rows], [None] * 4, 5))  # type: ignore[misc]
    assert plain == [(index, row, True) for index, source in enumerate(rows) for row in source]
