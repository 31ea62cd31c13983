"""Packed linear layers say the same bits as plain ones, and never a stale weight's."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from toys import toy_config
from transformers import AutoConfig, AutoModelForCausalLM

from mtp_train.attention.packed import PackedContext
from mtp_train.heads.mtp import MtpConfig, build
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
    assert layer._product is not None and layer._product.packed is not None


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
def test_a_layer_that_was_copied_in_inference_mode() -> None:
    plain, rows = linear(), torch.randn(2, 96).bfloat16()
    with torch.inference_mode():
        layer = copy.deepcopy(PackedLinear.like(plain))
        assert torch.equal(layer(rows), plain(rows)) and torch.equal(layer(rows), plain(rows))


@KERNELS
def test_gradients_go_through_the_plain_product() -> None:
    layer = PackedLinear.like(linear())
    rows = torch.randn(2, 96).bfloat16().requires_grad_()
    layer(rows).sum().backward()
    assert rows.grad is not None and layer._product is None


SIZES = {
    "hidden_size": 128,
    "intermediate_size": 160,
    "vocab_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "tie_word_embeddings": True,
}


@KERNELS
@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3", "gemma2", "mixtral", "gpt_oss"])
def test_a_models_states_are_the_plain_products_bits(kind: str) -> None:
    config = AutoConfig.for_model(kind, **SIZES)
    target = Target.from_config(config, dtype=torch.bfloat16)
    packed_names = {n for n, m in target.model.named_modules() if isinstance(m, PackedLinear)}
    assert {f"model.layers.1.self_attn.{x}_proj" for x in "qkvo"} | {"lm_head"} <= packed_names
    assert target.lm_head.weight is target.base.get_input_embeddings().weight
    token, position = torch.arange(12), torch.arange(12)
    with torch.enable_grad():  # the plain products
        plain = target.logits(target.forward(token, position, PackedContext([0, 12])))
    for _ in range(2):
        with torch.inference_mode():
            found = target.logits(target.forward(token, position, PackedContext([0, 12])))
        assert torch.equal(found, plain)
    assert set(target.model.state_dict()) == set(
        AutoModelForCausalLM.from_config(config).state_dict()
    )


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj = (linear(seed=seed) for seed in range(3))


@KERNELS
def test_projections_of_the_same_rows_are_one_product() -> None:
    whole = Attention()
    plain = copy.deepcopy(whole)
    pack_linears(whole)
    rows, other = torch.randn(2, 5, 96).bfloat16()
    shared = whole.q_proj._shared
    assert isinstance(shared, packed._Shared)
    with torch.no_grad():
        for x in (rows, other, rows):
            for name in ("q_proj", "k_proj", "v_proj"):
                assert torch.equal(getattr(whole, name)(x), getattr(plain, name)(x))
        assert whole.k_proj._product is None, "none was computed alone"
        assert shared.rows is None and not shared.outputs, "nothing is kept"
        # Out of turn, about other rows, or after a weight was written: still right.
        assert torch.equal(whole.q_proj(rows), plain.q_proj(rows))
        assert torch.equal(whole.v_proj(other), plain.v_proj(other))
        assert torch.equal(whole.k_proj(rows), plain.k_proj(rows))
        assert torch.equal(whole.k_proj(rows), plain.k_proj(rows))
        whole.v_proj.weight.mul_(2)
        whole.q_proj(rows)
        assert torch.equal(whole.v_proj(rows), 2 * plain.v_proj(rows))
        again = copy.deepcopy(whole)
        assert again.q_proj._shared is None
        assert torch.equal(again.q_proj(rows), plain.q_proj(rows))


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


@KERNELS
def test_a_weight_of_inference_mode_is_left_plain() -> None:
    layer = PackedLinear.like(linear().float())
    rows = torch.randn(2, 96).bfloat16()
    with torch.inference_mode():
        layer.bfloat16()
        assert torch.equal(layer(rows), linear()(rows))
        layer.weight.zero_()
        assert not layer(rows).any(), "its versions are not counted"


@KERNELS
def test_a_served_head_says_the_plain_products_bits() -> None:
    target = Target.from_config(toy_config(**SIZES), dtype=torch.bfloat16)
    head = build(target, MtpConfig())
    served = copy.deepcopy(head).serving(target)
    assert sum(isinstance(module, PackedLinear) for module in served.modules()) == 7 + 1
    rows, position, context = (
        torch.randn(2, 6, 128).bfloat16(),
        torch.arange(6),
        PackedContext([0, 6]),
    )
    with torch.inference_mode():
        found = served(rows[0], rows[1], position, context)
    with torch.enable_grad():
        assert torch.equal(found, served(rows[0], rows[1], position, context))
    assert all(parameter.dtype == torch.float32 for parameter in head.parameters())
