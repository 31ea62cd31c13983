"""Targets of every type that is admitted: states, greedy tokens, a head, and what the export says of its block."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from toys import toy_config
from transformers import AutoModelForCausalLM, GemmaConfig, MistralConfig, Qwen2Config, Qwen3Config
from transformers import PreTrainedConfig as Config

from mtp_train.attention.packed import PackedContext
from mtp_train.core.errors import UserError
from mtp_train.engine.engine import Engine, EngineConfig
from mtp_train.engine.propose import ChainProposer
from mtp_train.engine.sequences import Request
from mtp_train.export import mimo
from mtp_train.export.stage import ExportConfig, export_head
from mtp_train.heads.eagle import EagleConfig
from mtp_train.heads.eagle3 import Eagle3Config
from mtp_train.heads.families import build_head
from mtp_train.heads.mtp import MtpConfig, build
from mtp_train.models.target import MODEL_TYPES, Target

SIZES = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
}
CONFIGS = {
    "llama": toy_config(),
    "mistral": MistralConfig(**SIZES, sliding_window=None),
    "qwen2": Qwen2Config(**{key: SIZES[key] for key in SIZES if key != "head_dim"}),
    "qwen3": Qwen3Config(**SIZES),
}


def test_every_admitted_type_is_tried() -> None:
    assert set(CONFIGS) == set(MODEL_TYPES)


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_states_and_speculation_are_transformers_own(config: Config) -> None:
    target = Target.from_config(config, seed=1)
    plain = AutoModelForCausalLM.from_config(
        type(config)(**config.to_diff_dict()), attn_implementation="eager"
    ).eval()
    plain.load_state_dict(target.model.state_dict())
    text = torch.arange(1, 30)
    states = target.forward(text, torch.arange(29), PackedContext([0, 29]))
    torch.testing.assert_close(
        states, plain.base_model(text[None]).last_hidden_state[0], atol=1e-5, rtol=1e-5
    )
    requests = [Request(str(n), tuple(range(1, n)), 12) for n in (3, 9, 20)]
    small = EngineConfig(max_batch=3, cache_rows=256, page_size=4)
    expected = Engine(target, None, small).generate(requests)
    head = build(target, MtpConfig())
    done = Engine(target, ChainProposer(target, head, 3), small).generate(requests)
    assert [c.tokens for c in done] == [c.tokens for c in expected]


def test_a_block_with_biases_is_exported_with_them() -> None:
    target = Target.from_config(CONFIGS["qwen2"], seed=1)
    head = build(target, MtpConfig())
    torch.nn.init.normal_(head.block.self_attn.q_proj.bias)
    tensors = mimo.export_tensors(head, torch.float32)
    name = f"{mimo.PREFIX}self_attn.q_proj.bias"
    assert torch.equal(tensors[name], head.block.self_attn.q_proj.bias)
    again = build(target, MtpConfig(init="random"))
    mimo.import_tensors(tensors, again)
    assert torch.equal(again.block.self_attn.q_proj.bias, tensors[name])


def test_a_block_that_the_layout_cannot_hold_is_refused() -> None:
    target = Target.from_config(CONFIGS["qwen3"], seed=1)
    with pytest.raises(UserError, match=r"q_norm"):
        mimo.export_tensors(build(target, MtpConfig()), torch.float32)


FAMILIES = pytest.mark.parametrize("config", [MtpConfig, EagleConfig, Eagle3Config])


@FAMILIES
@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_a_llama_block_begins_as_a_last_layer_that_it_can_hold(family: str, config: Any) -> None:
    target = Target.from_config(CONFIGS[family], seed=1)
    counts = torch.arange(target.vocab_size)
    own, plain = (
        build_head(target, config(block=block), 3, counts) for block in ("target", "llama")
    )
    assert type(plain.block).__name__ == "LlamaDecoderLayer"
    expected = own.state_dict()
    assert plain.state_dict().keys() == expected.keys()
    assert all(torch.equal(value, expected[name]) for name, value in plain.state_dict().items())
    rows = torch.randn(2, 9, 32, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        outs = [
            head(rows[0], rows[1], torch.arange(9), PackedContext([0, 9])) for head in (own, plain)
        ]
    torch.testing.assert_close(outs[1], outs[0], atol=1e-6, rtol=1e-6)


@FAMILIES
def test_a_llama_block_does_not_begin_as_a_layer_that_it_cannot_hold(config: Any) -> None:
    target = Target.from_config(CONFIGS["qwen2"], seed=1)
    counts = torch.arange(target.vocab_size)
    with pytest.raises(UserError, match=r"received qwen2 with .*q_proj.bias.*init=random"):
        build_head(target, config(block="llama"), 3, counts)
    build_head(target, config(block="llama", init="random"), 3, counts)


@FAMILIES
def test_a_llama_block_begins_near_a_layer_with_q_and_k_norms(config: Any) -> None:
    """The control leaves the norms out and keeps the matrices."""
    target = Target.from_config(
        Qwen3Config(**SIZES | {"head_dim": 32}, initializer_range=0.3), seed=1
    )
    generator = torch.Generator().manual_seed(3)
    for name, weight in target.model.named_parameters():
        if "norm" in name:
            weight.copy_(torch.rand(weight.shape, generator=generator) * 3 + 0.2)
    counts = torch.arange(target.vocab_size)
    own, near, far = (
        build_head(target, config(block=block, embedding_noise=0.0), 3, counts)
        for block in ("target", "llama", "llama")
    )
    kept = far.block.state_dict()
    plain = {n: v for n, v in own.block.state_dict().items() if n in kept}
    far.block.load_state_dict(plain)
    text = torch.arange(1, 41)
    position, context = torch.arange(40), PackedContext([0, 40])
    states = target.capture(text, position, context, own.states)
    with torch.no_grad():
        logits = [
            head.logits(
                target, head(target.embed(text), head.fuse(states), position, context), 0
            ).log_softmax(-1)
            for head in (own, near, far)
        ]
    found, control = (
        float((logits[0].exp() * (logits[0] - other)).sum(-1).mean()) for other in logits[1:]
    )
    assert 0 < found < 0.5 * control


def test_a_llama_block_of_a_qwen3_target_is_exported(tmp_path: Path) -> None:
    """The layout has no q and k norms: this is the head that such a target is served with."""
    target = Target.from_config(CONFIGS["qwen3"], seed=1)
    head = build(target, MtpConfig(block="llama", init="random"), 3)
    check = export_head(head, target, ExportConfig(), tmp_path / "out", {})
    assert check and not any(check.values())


def test_a_llama_block_turns_as_the_target_does() -> None:
    rope = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0}
    rope |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 64}
    target = Target.from_config(toy_config(rope_parameters=rope))
    own, plain = (build(target, MtpConfig(block=block)) for block in ("target", "llama"))
    assert torch.equal(plain.rotary.inner.inv_freq, own.rotary.inner.inv_freq)


@FAMILIES
def test_an_unknown_block_lists_those_known(config: Any) -> None:
    with pytest.raises(UserError, match=r"target, llama.*received gemma"):
        config(block="gemma")


def test_other_types_are_refused_by_name() -> None:
    with pytest.raises(UserError, match="gemma"):
        Target.from_config(GemmaConfig(**SIZES))
    stretched = toy_config(
        rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    )
    with pytest.raises(UserError, match="dynamic"):
        Target.from_config(stretched)


def test_a_cast_head_keeps_its_rope_frequencies() -> None:
    """A head served in bfloat16 must turn as far as the head that was trained."""
    head = build(Target.from_config(toy_config()), MtpConfig())
    frequencies = head.rotary.inner.inv_freq.clone()
    head.to(torch.bfloat16)
    assert head.eh_proj.weight.dtype == torch.bfloat16
    assert head.rotary.inner.inv_freq.dtype == torch.float32
    assert torch.equal(head.rotary.inner.inv_freq, frequencies)
