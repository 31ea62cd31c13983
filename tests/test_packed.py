"""Packed linear layers say the same bits as plain ones, and never a stale weight's."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from toys import toy_config
from transformers import AutoModelForCausalLM

from mtp_train.attention.packed import PackedContext
from mtp_train.models import packed
from mtp_train.models.packed import PackedLinear, pack_linears, packable
from mtp_train.models.target import Target

KERNELS = pytest.mark.skipif(not packed._has_kernels(), reason="a CPU without bfloat16 kernels")


def linear(inside: int = 96, outside: int = 160, *, bias: bool = False, seed: int = 0) -> nn.Linear:
    torch.manual_seed(seed)
    return nn.Linear(inside, outside, bias=bias).bfloat16().requires_grad_(False)


@KERNELS
@pytest.mark.parametrize("shape", [(1, 96), (3, 96), (1, 40, 96), (2, 7, 96), (300, 96)])
@pytest.mark.parametrize("bias", [False, True])
def test_outputs_are_the_plain_layers_bits(shape: tuple[int, ...], bias: bool) -> None:
    plain = linear(bias=bias)
    layer = PackedLinear.like(plain)
    rows = torch.randn(shape).bfloat16()
    with torch.no_grad():
        assert torch.equal(layer(rows), plain(rows))
        sliced = torch.randn(4, 200).bfloat16()[:, 50:146]
        assert torch.equal(layer(sliced), plain(sliced))
    assert layer._packed is not None


@KERNELS
def test_a_written_or_moved_weight_is_packed_again() -> None:
    plain = linear()
    layer = PackedLinear.like(plain)
    rows = torch.randn(2, 96).bfloat16()
    with torch.inference_mode():
        layer(rows)
    with torch.no_grad():
        layer.weight.mul_(2)
        assert torch.equal(layer(rows), plain(rows)), "they share the weight"
        layer.weight = nn.Parameter(linear(seed=1).weight, requires_grad=False)
        assert torch.equal(layer(rows), linear(seed=1)(rows))
        again = copy.deepcopy(layer)
        again.weight.zero_()
        assert not again(rows).any() and layer(rows).any()
        assert layer.float()(rows.float()).dtype == torch.float32


@KERNELS
def test_gradients_go_through_the_plain_product() -> None:
    layer = PackedLinear.like(linear())
    rows = torch.randn(2, 96).bfloat16().requires_grad_()
    layer(rows).sum().backward()
    assert rows.grad is not None and layer._packed is None


@KERNELS
def test_a_models_names_and_ties_stay_and_its_states_are_the_same() -> None:
    config = toy_config(
        hidden_size=128, intermediate_size=160, vocab_size=256, tie_word_embeddings=True
    )
    target = Target.from_config(config, dtype=torch.bfloat16)
    layers = [m for m in target.model.modules() if isinstance(m, PackedLinear)]
    assert len(layers) == 2 * 7 + 1, "every projection and the lm_head"
    assert target.lm_head.weight is target.base.get_input_embeddings().weight
    token, position = torch.arange(12), torch.arange(12)
    with torch.inference_mode():
        state = target.forward(token, position, PackedContext([0, 12]))
    assert all(layer._packed is not None for layer in layers[:-1])
    with torch.enable_grad():  # the plain products
        plain = target.forward(token, position, PackedContext([0, 12]))
    assert torch.equal(state, plain)
    names = AutoModelForCausalLM.from_config(config).state_dict()
    assert set(target.model.state_dict()) == set(names)


@KERNELS
def test_a_layer_that_a_library_holds_is_left_to_it() -> None:
    whole = nn.Sequential(linear(), linear())
    whole[0].register_forward_hook(lambda *_: None)
    pack_linears(whole)
    assert [type(layer) for layer in whole] == [nn.Linear, PackedLinear]


def test_float32_is_left_alone() -> None:
    whole = nn.Sequential(linear().float(), nn.ReLU())
    assert not packable(whole[0])  # type: ignore[arg-type]
    pack_linears(whole)
    assert type(whole[0]) is nn.Linear
