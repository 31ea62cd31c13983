"""What a plan says of training: a head's parameters, and what its forward keeps, are those of real heads."""

from __future__ import annotations

import copy

import pytest
import torch
from head_variants import VARIANTS, make_variant
from toys import make_target, toy_config
from transformers import AutoModelForCausalLM

from mtp_train.attention import interface
from mtp_train.heads.families import outline_head
from mtp_train.models.partial import places_of, resident_bytes
from mtp_train.models.target import Target
from mtp_train.train import cost
from mtp_train.train.config import TrainConfig
from mtp_train.train.optim import make_optimizer

STEPS = 3
LAYERS = {"num_hidden_layers": 4}


def shapes(name: str) -> tuple[Target, object]:
    """The toy target and a head without storage."""
    config = toy_config(**LAYERS)
    config._attn_implementation = interface.register()
    with torch.device("meta"):
        target = Target(AutoModelForCausalLM.from_config(config))
    return target, outline_head(target, VARIANTS[name])


@pytest.mark.parametrize("name", VARIANTS)
def test_an_outline_has_the_shapes_of_the_head(name: str) -> None:
    _, outline = shapes(name)
    real = make_variant(make_target(**LAYERS), name)
    expected = {key: value.shape for key, value in real.state_dict().items()}
    found = {key: value.shape for key, value in outline.state_dict().items()}
    assert found == expected
    assert all(value.is_meta for value in outline.parameters())


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("name", VARIANTS)
def test_what_a_forward_keeps_is_counted_as_it_is(name: str, autocast: bool) -> None:
    """Counted on shapes at two sizes, kept by a real head at a third one."""
    target, outline = shapes(name)
    constant, per_row = cost.kept_for_backward(outline, target, STEPS, autocast)
    real = make_variant(make_target(**LAYERS), name)
    assert cost._kept(real, target, 200, STEPS, autocast) == constant + 200 * per_row


def test_the_parts_of_an_mtp_head() -> None:
    target, head = shapes("mtp")
    real = make_variant(make_target(**LAYERS), "mtp")
    parameters = sum(p.numel() for p in real.parameters())
    config = TrainConfig(rows=512, rollout_steps=STEPS)
    alone = cost.train_bytes(target, head, config, autocast=False)
    optimizer = make_optimizer(real, 1e-3, (0.9, 0.95), 0.0)
    for parameter in real.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    moments = sum(
        value.numel() * value.element_size()
        for state in optimizer.state.values()
        for key, value in state.items()
        if key != "step"
    )
    assert alone["head, float32"] == alone["gradients"] == 4 * parameters
    assert alone["AdamW's moments"] == moments == 8 * parameters
    assert alone["pack's states"] == 512 * 32 * 4
    assert "gradients, exchanged" not in alone and "average of weights" not in alone
    more = cost.train_bytes(
        target,
        head,
        TrainConfig(rows=1024, rollout_steps=STEPS, ema=0.9),
        ranks=2,
        autocast=False,
        whole=True,
    )
    assert more["gradients, exchanged"] == more["average of weights"] == 4 * parameters
    assert more["activations of 3 steps"] == 2 * alone["activations of 3 steps"]
    assert more["target, whole"] == 4 * sum(p.numel() for p in target.model.parameters())


def test_the_ends_are_the_whole_but_for_the_layers_between() -> None:
    target, _ = shapes("mtp")
    layer = sum(p.numel() for p in target.base.layers[0].parameters()) * 4
    whole, ends = (resident_bytes(target.model, whole=some) for some in (True, False))
    assert whole - ends == 3 * layer
    assert list(places_of(copy.copy(target.model)).values()).count("disk") == 3


def test_a_loss_over_part_of_the_vocabulary_needs_less() -> None:
    target, head = shapes("mtp")
    sizes = [
        cost.train_bytes(target, head, TrainConfig(loss_vocabulary=size))["loss"]
        for size in (20, 40, 0)
    ]
    assert sizes[0] < sizes[1]
    assert sizes[0] < sizes[2]


@pytest.mark.parametrize("name", ["mtp", "mtp-3-modules", "medusa", "eagle3"])
def test_arithmetic_of_a_token(name: str) -> None:
    """Held against the matrix products by hand, of the toy sizes: width 32, 48 inside, 61 tokens."""
    target, head = shapes(name)
    flops = cost.train_flops(target, head, TrainConfig(rollout_steps=STEPS))
    attention, mlp = 32 * 32 + 2 * 32 * 16 + 32 * 32, 3 * 32 * 48
    blocks = {
        "mtp": 2 * 32 * 32 + attention + mlp,
        "mtp-3-modules": 2 * 32 * 32 + attention + mlp,
        "eagle3": 3 * 32 * 32 + 2 * (32 * 32 + 2 * 32 * 16) + 32 * 32 + mlp,
        "medusa": 32 * 32,
    }
    vocabulary = 40 if name == "eagle3" else 61
    project = 2 * 32 * vocabulary
    per_step = 6 * blocks[name] + project * (3 if name in ("eagle3", "medusa") else 2)
    assert flops == project + STEPS * per_step
