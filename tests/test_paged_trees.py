"""The torch backend over draft trees: every row sees its ancestors, whatever else is in the batch."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from paged_cases import Heads, Item, make_case, random_tree, rules

from mtp_train.attention.interface import AttentionRule
from mtp_train.attention.paged import PagedContext, TreeRows

BATCHES = {
    "one tree": [random_tree(9, 6, 6, seed=1)],
    "equal sizes, different trees": [random_tree(9, 6, 6, seed=seed) for seed in range(3)],
    "ragged trees": [random_tree(3 * n, 2 + n, 2 + n, seed=n) for n in range(5)],
    "a level of a tree, the others cached": [
        random_tree(11, 7, 3, seed=4),
        random_tree(5, 7, 3, seed=5),
        random_tree(21, 9, 1, seed=6),
    ],
    "trees, a prompt's part, and single rows": [
        random_tree(13, 8, 8, seed=7),
        Item(10, 8),
        Item(30, 1),
        random_tree(6, 8, 8, seed=8),
        Item(0, 5),
    ],
    "no tree": [Item(10, 3), Item(2, 3), Item(7, 1), Item(0, 9)],
    "trees at the start of everything": [random_tree(0, 5, 5, seed=9), Item(0, 5)],
}


@pytest.mark.parametrize("rule", rules(4))
@pytest.mark.parametrize("batch", BATCHES)
def test_rows_see_their_ancestors_and_all_before_the_tree(batch: str, rule: str) -> None:
    case = make_case(BATCHES[batch], Heads(value_width=5))
    chosen = rules(4)[rule]
    out = case.run(PagedContext.of, chosen)
    torch.testing.assert_close(out, case.expected(chosen), atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("heads", [Heads(3, 3), Heads(6, 1), Heads(9, 3, 16, 16)])
def test_random_batches_of_trees(heads: Heads) -> None:
    rule = AttentionRule(0.3, window=7)
    for seed in range(10):
        draw = np.random.default_rng(seed)
        items = []
        for index in range(int(draw.integers(1, 7))):
            tail = int(draw.integers(1, 12))
            rows = int(draw.integers(1, tail + 1))
            items.append(random_tree(int(draw.integers(0, 40)), tail, rows, seed * 100 + index))
        case = make_case(items, heads, seed=seed)
        out = case.run(PagedContext.of, rule)
        torch.testing.assert_close(out, case.expected(rule), atol=1e-6, rtol=1e-6)


def test_a_tree_that_is_a_chain_is_causal() -> None:
    chain = Item(9, 5, parents=(-1, 0, 1, 2, 3))
    trees, causal = make_case([chain]), make_case([replace(chain, parents=None)])
    assert trees.plan.trees is not None and causal.plan.trees is None
    assert trees.plan.positions.tolist() == causal.plan.positions.tolist()
    for rule in rules(4).values():
        torch.testing.assert_close(
            trees.run(PagedContext.of, rule), causal.run(PagedContext.of, rule)
        )


def test_the_comparison_sees_a_wrong_tree() -> None:
    """One row more that is seen, and one depth that is off where a window counts from it."""
    item = random_tree(9, 6, 6, seed=1)
    case, tree = make_case([item]), item.tree
    assert tree is not None
    more = tree.seen.copy()
    more[5] = True
    deeper = tree.depth.copy()
    deeper[5] += 1
    for wrong, rule in (
        (TreeRows(tree.base, tree.depth, more), AttentionRule(0.4)),
        (TreeRows(tree.base, deeper, tree.seen), AttentionRule(0.4, window=4)),
    ):
        changed = replace(case, plan=replace(case.plan, trees=(wrong,), contexts={}))
        out, want = changed.run(PagedContext.of, rule), case.expected(rule)
        torch.testing.assert_close(out[:5], want[:5], atol=1e-6, rtol=1e-6)
        assert (out[5] - want[5]).abs().max() > 1e-3
