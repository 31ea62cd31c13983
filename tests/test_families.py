"""Targets of every type that is admitted: states, greedy tokens, a head, and what the export says of its block."""

from __future__ import annotations

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
