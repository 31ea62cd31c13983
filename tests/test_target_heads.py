"""Heads whose block is the target's own layer, for every type of target: how they begin, that they train."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from head_variants import NORMS
from toy_families import CONFIGS, toy

from mtp_train.attention.packed import PackedContext
from mtp_train.batches.pack import Pack
from mtp_train.core.errors import UserError
from mtp_train.heads.block import Rotary, run_block
from mtp_train.heads.eagle import EagleConfig
from mtp_train.heads.eagle3 import Eagle3Config
from mtp_train.heads.families import build_head
from mtp_train.heads.mtp import MtpConfig
from mtp_train.models.target import POST_NORM, PRE_NORM, Target
from mtp_train.train.step import RolloutModule

ROWS = 40


def inputs(target: Target) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    text, position = torch.arange(1, ROWS + 1), torch.arange(ROWS)
    names = (PRE_NORM, POST_NORM)
    return text, position, target.capture(text, position, PackedContext([0, ROWS]), names)


@torch.no_grad()
@pytest.mark.parametrize("name", CONFIGS)
def test_a_head_begins_as_the_last_layer_applied_once_more(name: str) -> None:
    """With all norms, up to the length of each row's residual, which the final norm has taken away."""
    target = toy(name)
    text, position, states = inputs(target)
    head = build_head(target, MtpConfig(embedding_noise=0.0))
    out = head(target.embed(text), states[POST_NORM], position, PackedContext([0, ROWS]))
    lengths = states[PRE_NORM].square().mean(-1, keepdim=True).sqrt()
    residual = states[PRE_NORM] / lengths * lengths[ROWS // 4 :].median()
    last, rotary = target.base.layers[-1], Rotary(target)
    again = run_block(last, rotary, residual, position, PackedContext([0, ROWS]))
    expected = target.base.norm(again)
    error = (out - expected).norm() / expected.norm()
    other = (states[POST_NORM] - expected).norm() / expected.norm()
    assert error < 0.1 < other


@torch.no_grad()
@pytest.mark.parametrize("config", [EagleConfig, *NORMS[1:]])
@pytest.mark.parametrize("name", CONFIGS)
def test_a_head_without_norms_begins_near_the_head_that_has_them(name: str, config: Any) -> None:
    target = toy(name)
    text, position, states = inputs(target)
    left_out: Any = (
        MtpConfig(embedding_noise=0.0, **{config: False})
        if isinstance(config, str)
        else EagleConfig(embedding_noise=0.0)
    )
    logits = []
    for one in (MtpConfig(embedding_noise=0.0), left_out):
        head = build_head(target, one)
        out = head(target.embed(text), states[POST_NORM], position, PackedContext([0, ROWS]))
        logits.append(head.logits(target, out, 0).log_softmax(-1))
    kl = (logits[0].exp() * (logits[0] - logits[1])).sum(-1).median()
    spread = ((logits[0].exp() * logits[0]).sum(-1) + torch.log(torch.tensor(61.0))).median()
    assert kl < 0.1 * spread


@pytest.mark.parametrize("name", CONFIGS)
def test_a_head_trains(name: str) -> None:
    """Every parameter of a fresh head gets a gradient, and a few steps lower the loss."""
    target = toy(name)
    generator = torch.Generator().manual_seed(4)
    text = torch.randint(61, (100,), generator=generator)
    offsets = (0, 60, 100)
    position = torch.cat([torch.arange(60), torch.arange(40)])
    with torch.no_grad():
        states = target.capture(text, position, PackedContext(offsets), (POST_NORM,))
    pack = Pack(("a", "b"), offsets, text, torch.ones_like(text), states)
    head = build_head(target, MtpConfig())
    module = RolloutModule(head, target)
    optimizer = torch.optim.AdamW(head.parameters(), lr=3e-3)
    losses = []
    for _ in range(8):
        optimizer.zero_grad()
        loss = module(pack, 3).values.loss / 100
        loss.backward()
        losses.append(float(loss.detach()))
        for parameter_name, parameter in head.named_parameters():
            assert parameter.grad is not None, parameter_name
            assert parameter.grad.isfinite().all() and parameter.grad.any(), parameter_name
        optimizer.step()
    assert losses[-1] < 0.8 * losses[0]


@pytest.mark.parametrize("name", ["gemma2", "gemma3", "deepseek_v2", "deepseek_v3"])
def test_a_layer_that_eagle3_does_not_describe_is_refused(name: str) -> None:
    with pytest.raises(UserError, match=r"q, k and v projections and two norms.*block=llama"):
        build_head(toy(name), Eagle3Config(), 0, torch.arange(61))


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("mistral-window", "a sliding window"),
        ("gemma", "does not multiply by its weight"),
        ("deepseek_v3", "kv_b_proj"),
        ("mixtral", "experts"),
        ("gpt_oss", "sinks"),
    ],
)
def test_a_llama_block_does_not_begin_as_a_layer_that_it_cannot_hold(name: str, what: str) -> None:
    with pytest.raises(UserError, match=what):
        build_head(toy(name), MtpConfig(block="llama"))
