"""The `peagle` head: all depths in one pass, subsets of its chains, one forward for all drafts."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from head_variants import VARIANTS, make_variant
from test_parity import captured_states
from toy_families import CONFIGS, toy

from mtp_train.attention.packed import RolloutContext
from mtp_train.batches.align import Blocks
from mtp_train.core.errors import UserError
from mtp_train.engine.chain import ChainProposer
from mtp_train.engine.engine import Engine, EngineConfig
from mtp_train.engine.sequences import Request
from mtp_train.heads.families import build_head
from mtp_train.heads.peagle import PEagleConfig, PEagleHead
from mtp_train.models.target import Target

STEPS = 3
OFFSETS = (0, 40, 63, 94)
TOKENS = torch.randint(61, (94,), generator=torch.Generator().manual_seed(5))


def states_of(target: Target, head: PEagleHead) -> dict[str, torch.Tensor]:
    texts = [TOKENS[a:b] for a, b in pairwise(OFFSETS)]
    return captured_states(target, texts, head.states)


def twin(
    target: Target, head: PEagleHead, aligned: Blocks, states: dict[str, torch.Tensor]
) -> list[torch.Tensor]:
    """What the lm_head of each depth reads of a chain from every row: all rows at every depth [T, D]."""
    context = RolloutContext(OFFSETS)
    rows = len(aligned.token_T)
    inputs = head.embed(target, aligned.token_T), head.fuse(states)
    found = []
    for depth in range(STEPS):
        out_TD = head(*inputs, aligned.position_T + depth, context)
        context, inputs = context.then(), head.masks(target, rows)
        found.append(head.readout(out_TD, depth))
    return found


@pytest.mark.parametrize("least", [1.0, 0.3])
@pytest.mark.parametrize("name", ["peagle", "peagle-llama", "mistral"])
def test_one_pass_over_ragged_chains_is_a_pass_per_depth_over_all_rows(
    toy_target: Target, name: str, least: float
) -> None:
    """Outputs and gradients, of subsets too: a dropped chain changes nothing but its own."""
    target = toy_target if name in VARIANTS else toy(name)
    if name in VARIANTS:
        head: Any = make_variant(target, name)
    else:
        config = PEagleConfig(layers=2, depths=STEPS, draft_vocabulary=0)
        head = build_head(target, config, 3, torch.arange(target.vocab_size))
    head.config = replace(head.config, depth_share=0.6 if least < 1 else 1.0, least_share=least)
    mask_T = (torch.arange(94) % 11 > 3).long()
    aligned = head.align(TOKENS, mask_T, OFFSETS, STEPS, seed=4)
    states = states_of(target, head)
    valid_SN = aligned.valid_SN
    assert valid_SN[0].sum() > valid_SN[2].sum() * (2 if least < 1 else 1) > 10
    weight_SN = torch.rand(valid_SN.shape, generator=torch.Generator().manual_seed(1)) * valid_SN

    def gradients(read_SND: torch.Tensor) -> list[torch.Tensor]:
        total = (torch.sin(read_SND).sum(-1) * weight_SN).sum()
        return list(torch.autograd.grad(total, list(head.parameters()), allow_unused=True))

    ours = head.unroll(target, aligned, states).read_SNE
    theirs = torch.stack(
        [out_TD[aligned.start_N] for out_TD in twin(target, head, aligned, states)]
    )
    torch.testing.assert_close(ours[valid_SN], theirs[valid_SN], atol=2e-5, rtol=1e-4)
    for (parameter, _), mine, other in zip(
        head.named_parameters(), gradients(ours), gradients(theirs), strict=True
    ):
        assert (mine is None) == (other is None) == (parameter == "lm_head.weight"), parameter
        if mine is not None:
            torch.testing.assert_close(mine, other, atol=3e-4, rtol=1e-3, msg=parameter)


def test_a_depth_trains_a_part_of_the_chains_of_the_depth_before(toy_target: Target) -> None:
    config = PEagleConfig(depths=6, layers=1, draft_vocabulary=0)
    head = build_head(toy_target, config, 0, torch.arange(61))
    mask_T = torch.ones_like(TOKENS)

    def kept(seed: int | None) -> torch.Tensor:
        """Bool [S, T]: rows whose chains are trained at each depth."""
        aligned = head.align(TOKENS, mask_T, OFFSETS, 6, seed=seed)
        found = torch.zeros(6, len(TOKENS), dtype=torch.bool)
        found[:, aligned.start_N] = aligned.valid_SN
        return found

    whole, some = kept(None), kept(1)
    assert torch.equal(some, kept(1)) and not torch.equal(some, kept(2))
    assert torch.equal(some[0], whole[0])
    chains = int(whole[0].sum())
    for depth in range(1, 6):
        share = max(0.7**depth, 0.2)
        assert not (some[depth] & ~some[depth - 1] & whole[depth - 1]).any()
        assert not (some[depth] & ~whole[depth]).any()
        lost = int((~whole[depth] & whole[0]).sum())  # past a document's end
        assert share * chains - lost - 1 <= some[depth].sum() <= share * chains + 1
    assert int((kept(1)[5] & kept(2)[5]).sum()) < int(some[5].sum())


def test_rows_are_run_only_where_a_depth_is_trained(toy_target: Target) -> None:
    head: Any = make_variant(toy_target, "peagle")
    head.config = replace(head.config, depth_share=0.5, least_share=0.1)
    aligned = head.align(TOKENS, torch.ones_like(TOKENS), OFFSETS, STEPS, seed=0)
    seen: list[int] = []
    head.later[0].register_forward_pre_hook(lambda module, args: seen.append(args[0].shape[1]))
    head.unroll(toy_target, aligned, states_of(toy_target, head))
    assert seen == [94, int(aligned.valid_SN[1:].sum())]


def test_a_pack_without_a_deeper_draft(toy_target: Target) -> None:
    head: Any = make_variant(toy_target, "peagle")
    token_T = TOKENS[:2]
    aligned = head.align(token_T, torch.ones_like(token_T), (0, 2), STEPS)
    states = {name: torch.randn(2, 32) for name in head.states}
    found = head.unroll(toy_target, aligned, states).read_SNE
    assert found.shape == (STEPS, len(aligned.start_N), 32) and not found[1:].any()


@pytest.mark.parametrize("drafts", [1, 2, 3])
def test_a_step_of_the_engine_is_one_forward_of_verified_rows_and_one_of_masks(
    toy_target: Target, drafts: int
) -> None:
    head: Any = make_variant(toy_target, "peagle")
    rows: list[int] = []
    proposer = ChainProposer(toy_target, head, drafts)
    proposer.head.later[0].register_forward_pre_hook(
        lambda module, args: rows.append(args[0].shape[1])
    )
    served = Engine(toy_target, proposer, EngineConfig(max_batch=1, cache_rows=64, page_size=4))
    served.generate([Request("0", (1, 2, 3, 4, 5), 2, script=(7, 8))])
    assert rows[: 1 + (drafts > 1)] == [5, drafts - 1][: 1 + (drafts > 1)]
    if drafts == 1:
        assert 0 not in rows


def test_what_a_fresh_head_begins_with(toy_target: Target) -> None:
    config = PEagleConfig(draft_vocabulary=40, depths=3, layers=3, embedding_noise=0.0)
    head: Any = build_head(toy_target, config, 0, torch.arange(61))
    assert torch.equal(head.embed_tokens.weight, toy_target.embed(torch.arange(61)).float())
    assert head.steps == 3 and head.cache_layers == 3 and head.config.mask_token == 0
    again: Any = build_head(toy_target, replace(config, init="random"), 0, torch.arange(61))
    assert head.mask_hidden.std() > 0 and 0.7 < again.mask_hidden.std() < 1.3
    assert head.mask_hidden.shape == (96,) and head.mask_hidden.requires_grad


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"depths": 1}, r"head\.depths must be 2 or more; received 1"),
        ({"depth_share": 0.0}, r"head\.depth_share must lie in \(0, 1\]; received 0\.0"),
        ({"least_share": 1.5}, r"head\.least_share must lie in \(0, 1\]; received 1\.5"),
        ({"states": ["post_norm"]}, r"head\.states must be 3 states or none"),
    ],
)
def test_options_that_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        PEagleConfig(**options)


def test_a_layer_with_sinks_is_refused() -> None:
    target = Target.from_config(CONFIGS["gpt_oss"], seed=1)
    counts = torch.arange(target.vocab_size)
    with pytest.raises(UserError, match=r"without attention sinks; .*set head\.block=llama"):
        build_head(target, PEagleConfig(init="random"), 0, counts)
    build_head(target, PEagleConfig(init="random", block="llama"), 0, counts)
