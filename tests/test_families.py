"""Targets of every type that is admitted: states, greedy tokens, a head, and what the export says of its block."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from toy_families import CONFIGS, SIZES, reference_model, toy
from toys import toy_config
from transformers import FalconConfig, Gemma3TextConfig, Qwen3Config

from mtp_train.attention.packed import PackedContext
from mtp_train.attention.paged import PagedContext, PagedKV, plan_batch
from mtp_train.core.errors import UserError
from mtp_train.engine.chain import ChainProposer
from mtp_train.engine.engine import Engine, EngineConfig
from mtp_train.engine.sequences import Request
from mtp_train.export import mimo
from mtp_train.export.stage import ExportConfig, export_head
from mtp_train.heads.eagle import EagleConfig
from mtp_train.heads.eagle3 import Eagle3Config
from mtp_train.heads.families import build_head
from mtp_train.heads.mtp import MtpConfig, build
from mtp_train.models.target import MODEL_TYPES, Target


def test_every_admitted_type_is_tried() -> None:
    assert {config.model_type for config in CONFIGS.values()} == set(MODEL_TYPES)


@torch.no_grad()
@pytest.mark.parametrize("name", CONFIGS)
def test_states_logits_and_embeddings_are_transformers_own(name: str) -> None:
    """A packed batch, then the same rows in pieces over pages."""
    target, plain = toy(name), reference_model(toy(name))
    texts = [torch.arange(1, 30), torch.tensor([7]), torch.arange(60, 12, -1)]
    lengths = [len(text) for text in texts]
    outs = [plain(text[None], output_hidden_states=True) for text in texts]
    expected = [plain.base_model(text[None]).last_hidden_state[0] for text in texts]
    positions = torch.cat([torch.arange(rows) for rows in lengths])
    context = PackedContext([0, 29, 30, 78])
    states = target.capture(torch.cat(texts), positions, context, ("layer_0", "post_norm"))
    close = {"atol": 2e-5, "rtol": 1e-4}
    torch.testing.assert_close(states["post_norm"], torch.cat(expected), **close)
    logits = target.logits(states["post_norm"])
    torch.testing.assert_close(logits, torch.cat([out.logits[0] for out in outs]), **close)
    torch.testing.assert_close(states["layer_0"], target.embed(torch.cat(texts)))
    torch.testing.assert_close(target.embed(texts[0]), outs[0].hidden_states[0][0])
    cache = PagedKV(target.layers, 30, 4, dtype=torch.float32, device=torch.device("cpu"))
    pages = [[*range(0, 16, 2)], [29], [*range(1, 25, 2)]]
    for piece in (
        [(0, 11), (0, 1), (0, 20)],
        [(11, 28), (20, 45)],
        [(28, 29), (45, 46)],
        [(46, 48)],
    ):
        members = [0, 1, 2] if len(piece) == 3 else [0, 2] if len(piece) == 2 else [2]
        starts = [start for start, _ in piece]
        rows = [end - start for start, end in piece]
        plan = plan_batch([pages[one] for one in members], starts, rows, 4, torch.device("cpu"))
        tokens = torch.cat([texts[m][a:b] for m, (a, b) in zip(members, piece, strict=True)])
        found = target.forward(tokens, plan.positions, PagedContext(cache, plan))
        want = torch.cat([expected[m][a:b] for m, (a, b) in zip(members, piece, strict=True)])
        torch.testing.assert_close(found, want, **close)


@pytest.mark.parametrize("name", CONFIGS)
def test_greedy_tokens_are_transformers_own_with_a_head_and_without(name: str) -> None:
    target = toy(name)
    requests = [Request(str(n), tuple(range(1, n)), 20) for n in (3, 9, 20)]
    small = EngineConfig(max_batch=3, cache_rows=256, page_size=4)
    plain = Engine(target, None, small).generate(requests)
    done = Engine(target, ChainProposer(target, build(target, MtpConfig()), 3), small)
    assert [c.tokens for c in done.generate(requests)] == [c.tokens for c in plain]
    theirs = reference_model(target)
    for one in plain:
        prompt = torch.tensor([one.prompt])
        out = theirs.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            do_sample=False,
            max_new_tokens=20,
            eos_token_id=None,
            pad_token_id=0,
        )
        assert tuple(out[0, prompt.shape[1] :].tolist()) == one.tokens


@pytest.mark.parametrize("name", CONFIGS)
def test_a_folder_in_the_published_layout_is_the_same_target(name: str, tmp_path: Path) -> None:
    """Some publish one matrix per expert, transformers keeps a stack; ties and types as the config says."""
    target = toy(name)
    target.model.save_pretrained(tmp_path)  # type: ignore[operator]
    again = Target.load(tmp_path, "float32")
    kept = target.model.state_dict()
    assert again.model.state_dict().keys() == kept.keys()
    for tensor, value in again.model.state_dict().items():
        assert torch.equal(value, kept[tensor]), tensor
    small = EngineConfig(max_batch=3, cache_rows=256, page_size=4)
    requests = [Request(str(n), tuple(range(1, n)), 12) for n in (3, 9, 20)]
    found, expected = (Engine(one, None, small).generate(requests) for one in (again, target))
    assert [one.tokens for one in found] == [one.tokens for one in expected]


def test_a_block_with_biases_is_exported_with_them() -> None:
    target = Target.from_config(CONFIGS["qwen2"], seed=1)
    head = build(target, MtpConfig())
    torch.nn.init.normal_(head.block.self_attn.q_proj.bias)
    layout = mimo.MimoMtp()
    tensors = layout.tensors(head, target, torch.float32)
    name = f"{mimo.PREFIX}self_attn.q_proj.bias"
    assert torch.equal(tensors[name], head.block.self_attn.q_proj.bias)
    again: Any = layout.read(tensors, layout.config(head, target), target)
    assert torch.equal(again.block.self_attn.q_proj.bias, tensors[name])


def test_a_block_that_the_layout_cannot_hold_is_refused() -> None:
    target = Target.from_config(CONFIGS["qwen3"], seed=1)
    assert "q_norm" in mimo.MimoMtp().not_held(MtpConfig(), target)
    assert not mimo.MimoMtp().not_held(MtpConfig(block="llama"), target)


@pytest.mark.parametrize(
    ("name", "block", "message"),
    [
        ("mistral-window", "target", "a sliding window.*head.block=llama"),
        ("gemma", "target", "does not multiply by its weight.*head.block=llama"),
        ("gemma2", "llama", "a cap on the target's logits"),
    ],
)
def test_what_engines_would_compute_otherwise_is_not_exported(
    name: str, block: str, message: str, tmp_path: Path
) -> None:
    """Their tensors have the layout's names."""
    head = build(toy(name), MtpConfig(block=block, init="random"))
    with pytest.raises(UserError, match=message):
        export_head(head, toy(name), ExportConfig(), tmp_path / "mimo_mtp", {})


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
    with pytest.raises(UserError, match="falcon"):
        Target.from_config(FalconConfig(vocab_size=61, hidden_size=32, num_hidden_layers=1))
    with pytest.raises(UserError, match="use_bidirectional_attention"):
        Target.from_config(Gemma3TextConfig(**SIZES, use_bidirectional_attention=True))
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
