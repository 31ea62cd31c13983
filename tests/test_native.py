"""MTP weights that targets are published with: every layout, held against its published equation."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from toys import make_target
from transformers import DeepseekV3Config
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3DecoderLayer
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextRMSNorm

from mtp_train.attention.packed import PackedContext
from mtp_train.checkpoint.heads import HeadCard, load_head, save_checkpoint
from mtp_train.core.errors import UserError
from mtp_train.engine.chain import ChainProposer
from mtp_train.engine.engine import Engine, EngineConfig
from mtp_train.engine.sequences import Request
from mtp_train.heads.eagle import EagleConfig
from mtp_train.heads.mtp import MtpConfig, MtpHead, build
from mtp_train.heads.native import adds_one, stack_experts, whole
from mtp_train.models.target import Target
from mtp_train.models.weights import INDEX

WIDTH, MIDDLE, HEADS, GROUPS, EPSILON = 32, 48, 4, 2, 1e-6
TEXT = torch.arange(1, 14)

Tensors = dict[str, Tensor]


def block(prefix: str, random: Callable[..., Tensor]) -> Tensors:
    """A Llama block's tensors; norms near 0, for layouts that add 1."""
    sizes = {"q": WIDTH, "k": WIDTH * GROUPS // HEADS, "v": WIDTH * GROUPS // HEADS, "o": WIDTH}
    made = {f"self_attn.{name}_proj": random(rows, WIDTH) for name, rows in sizes.items()}
    made |= {f"mlp.{name}_proj": random(MIDDLE, WIDTH) for name in ("gate", "up")}
    made |= {"mlp.down_proj": random(WIDTH, MIDDLE)}
    made |= {name: random(WIDTH) for name in ("input_layernorm", "post_attention_layernorm")}
    return {f"{prefix}{name}.weight": value for name, value in made.items()}


def published(layout: str, depth: int, random: Callable[..., Tensor]) -> Tensors:
    """Module `depth` beside a target of 2 layers, names as published."""
    prefix = {
        "deepseek": f"model.layers.{2 + depth}.",
        "mimo": f"model.mtp_layers.{depth}.",
        "qwen3_next": f"mtp.layers.{depth}.",
    }[layout]
    own = {
        "deepseek": ("enorm", "hnorm", "shared_head.norm", "eh_proj"),
        "mimo": ("token_layernorm", "hidden_layernorm", "final_layernorm", "input_proj"),
        "qwen3_next": ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm", "fc"),
    }[layout]
    at = "mtp." if layout == "qwen3_next" else prefix
    made = {f"{at}{name}.weight": random(WIDTH) for name in own[:3]}
    made |= {f"{at}{own[3]}.weight": random(WIDTH, 2 * WIDTH)}
    return made | block(prefix, random)


def make_folder(folder: Path, layout: str, depths: int = 1) -> Tensors:
    """A toy target's folder with MTP modules in it; returns their tensors."""
    make_target(rms_norm_eps=EPSILON).model.save_pretrained(folder)  # type: ignore[operator]
    generator = torch.Generator().manual_seed(4)

    def random(*shape: int) -> Tensor:
        middle = 1.0 if len(shape) == 1 and layout != "qwen3_next" else 0.0
        return middle + 0.3 * torch.randn(shape, generator=generator)

    made: Tensors = {}
    for depth in reversed(range(depths)):  # what qwen3_next's modules share is written once
        made |= published(layout, depth, random)
    change(folder, lambda tensors: tensors.update(made))
    return made


def change(folder: Path, how: Callable[[Tensors], object]) -> None:
    tensors = load_file(folder / "model.safetensors")
    how(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def reference(
    layout: str, depth: int, weight: Tensors, embedding: Tensor, state: Tensor, first: int
) -> Tensor:
    """The published equation in float64, rows at positions first, first + 1, ...; one document."""
    weight = {name: value.double() for name, value in weight.items()}
    embedding, state = embedding.double(), state.double()
    one = 1.0 if layout == "qwen3_next" else 0.0

    def norm(rows: Tensor, name: str) -> Tensor:
        scaled = rows / (rows.square().mean(-1, keepdim=True) + EPSILON).sqrt()
        return scaled * (weight[f"{name}.weight"] + one)

    def linear(rows: Tensor, name: str) -> Tensor:
        return rows @ weight[f"{name}.weight"].T

    position = torch.arange(first, first + len(state), dtype=torch.float64)
    embedding = torch.where(position[:, None] == 0, 0.0, embedding)
    if layout == "deepseek":
        at = f"model.layers.{2 + depth}."
        halves = norm(embedding, f"{at}enorm"), norm(state, f"{at}hnorm")
        x, last = linear(torch.cat(halves, -1), f"{at}eh_proj"), f"{at}shared_head.norm"
    elif layout == "mimo":
        at = f"model.mtp_layers.{depth}."
        halves = norm(state, f"{at}hidden_layernorm"), norm(embedding, f"{at}token_layernorm")
        x, last = linear(torch.cat(halves, -1), f"{at}input_proj"), f"{at}final_layernorm"
    else:
        at = f"mtp.layers.{depth}."
        halves = norm(embedding, "mtp.pre_fc_norm_embedding"), norm(state, "mtp.pre_fc_norm_hidden")
        x, last = linear(torch.cat(halves, -1), "mtp.fc"), "mtp.norm"

    read = norm(x, f"{at}input_layernorm")
    width = WIDTH // HEADS
    query, key, value = (
        linear(read, f"{at}self_attn.{name}_proj").unflatten(-1, (-1, width)).transpose(0, 1)
        for name in "qkv"
    )
    angle = position[:, None] / 10000.0 ** (torch.arange(0, width, 2) / width).double()
    query, key = (turn(rows, torch.cat([angle, angle], -1)) for rows in (query, key))
    key, value = (rows.repeat_interleave(HEADS // GROUPS, 0) for rows in (key, value))
    score = query @ key.transpose(1, 2) / width**0.5
    hidden = torch.ones(len(state), len(state)).triu(1).bool()
    out = score.masked_fill(hidden, float("-inf")).softmax(-1) @ value
    x = x + linear(out.transpose(0, 1).flatten(1), f"{at}self_attn.o_proj")
    read = norm(x, f"{at}post_attention_layernorm")
    gate = torch.nn.functional.silu(linear(read, f"{at}mlp.gate_proj"))
    x = x + linear(gate * linear(read, f"{at}mlp.up_proj"), f"{at}mlp.down_proj")
    return norm(x, last)


def turn(rows: Tensor, angle: Tensor) -> Tensor:
    half = rows.shape[-1] // 2
    swapped = torch.cat([-rows[..., half:], rows[..., :half]], -1)
    return rows * angle.cos() + swapped * angle.sin()


LAYOUTS = pytest.mark.parametrize("layout", ["deepseek", "mimo", "qwen3_next"])


@LAYOUTS
def test_a_head_begins_as_the_published_modules(layout: str, tmp_path: Path) -> None:
    weight = make_folder(tmp_path, layout, depths=2)
    target = Target.load(tmp_path, "float32")
    head = build(target, MtpConfig(init="native", modules=2))
    state = target.forward(TEXT, torch.arange(13), PackedContext([0, 13]))
    rows = slice(0, 11)  # row p of module k has token p + 1 + k
    for depth in range(2):
        embedding = target.embed(TEXT[1 + depth : 12 + depth])
        position = torch.arange(11) + depth
        with torch.no_grad():
            out = head.at(depth)(embedding, state[rows], position, PackedContext([0, 11]))
        expected = reference(layout, depth, weight, embedding, state[rows], first=depth)
        torch.testing.assert_close(out, expected.float(), atol=2e-5, rtol=1e-4)
        state = out


@LAYOUTS
def test_one_recurrent_module_begins_as_the_first(layout: str, tmp_path: Path) -> None:
    make_folder(tmp_path, layout, depths=2)
    target = Target.load(tmp_path, "float32")
    two, one = (build(target, MtpConfig(init="native", modules=count)) for count in (2, 1))
    mine = one.state_dict()
    assert all(torch.equal(value, two.state_dict()[name]) for name, value in mine.items())
    requests = [Request(str(n), tuple(range(1, n)), 12) for n in (3, 9, 20)]
    small = EngineConfig(max_batch=3, cache_rows=256, page_size=4)
    plain = Engine(target, None, small).generate(requests)
    done = Engine(target, ChainProposer(target, two, 3), small).generate(requests)
    assert [c.tokens for c in done] == [c.tokens for c in plain]
    card = HeadCard("mtp", target.hash, target.state, target.hidden_size, target.vocab_size, step=0)
    save_checkpoint(tmp_path / "head", two, card)
    again, _ = load_head(tmp_path / "head", target)
    assert isinstance(again, MtpHead)
    assert all(torch.equal(v, two.state_dict()[n]) for n, v in again.state_dict().items())


@LAYOUTS
def test_later_layers_add_nothing_to_the_published_modules(layout: str, tmp_path: Path) -> None:
    make_folder(tmp_path, layout, depths=2)
    target = Target.load(tmp_path, "float32")
    one, two = (build(target, MtpConfig(init="native", modules=2, layers=n)) for n in (1, 2))
    assert set(one.state_dict()) < set(two.state_dict())
    rows = torch.randn(2, 5, target.hidden_size, generator=torch.Generator().manual_seed(1))
    for depth in (0, 1):
        with torch.no_grad():
            outs = [
                head.at(depth)(*rows, torch.arange(5), PackedContext([0, 5])) for head in (one, two)
            ]
        torch.testing.assert_close(outs[1], outs[0], atol=1e-6, rtol=1e-5)


def test_more_modules_than_the_target_has_are_refused(tmp_path: Path) -> None:
    make_folder(tmp_path, "deepseek")
    with pytest.raises(UserError, match=r"as many modules as the target has: 1; received 2"):
        build(Target.load(tmp_path, "float32"), MtpConfig(init="native", modules=2))


def test_a_target_without_mtp_weights_is_refused(tmp_path: Path, toy_target: Target) -> None:
    with pytest.raises(UserError, match=r"needs a target's folder"):
        build(toy_target, MtpConfig(init="native"))
    toy_target.model.save_pretrained(tmp_path)  # type: ignore[operator]
    with pytest.raises(UserError, match=r"deepseek, mimo, qwen3_next"):
        build(Target.load(tmp_path, "float32"), MtpConfig(init="native"))
    with pytest.raises(UserError, match=r"received native"):
        EagleConfig(init="native")


@pytest.mark.parametrize(
    ("how", "message"),
    [
        (lambda t: t.pop("model.layers.2.hnorm.weight"), "other hnorm.weight"),
        (lambda t: t.update({"model.layers.2.odd.weight": torch.ones(2)}), "block.odd.weight"),
        (
            lambda t: t.update({"model.layers.2.self_attn.q_proj.bias": torch.ones(WIDTH)}),
            "self_attn.q_proj.bias",
        ),
        (
            lambda t: t.update({"model.layers.2.enorm.weight": torch.ones(31)}),
            r"enorm.weight \(31,\) for \(32,\)",
        ),
        (
            lambda t: t.update({"model.layers.2.embed_tokens.weight": torch.ones(61, WIDTH)}),
            "another embedding",
        ),
    ],
)
def test_other_tensors_than_the_heads_are_refused(
    how: Callable[[Tensors], object], message: str, tmp_path: Path
) -> None:
    make_folder(tmp_path, "deepseek")
    change(tmp_path, how)
    with pytest.raises(UserError, match=message):
        build(Target.load(tmp_path, "float32"), MtpConfig(init="native"))


def test_a_head_without_a_norm_is_not_begun_as_one_that_has_it(tmp_path: Path) -> None:
    make_folder(tmp_path, "mimo")
    with pytest.raises(UserError, match=r"other hnorm.weight"):
        build(Target.load(tmp_path, "float32"), MtpConfig(init="native", hnorm=False))


def test_copies_of_embedding_and_lm_head_and_zero_biases_are_no_obstacle(tmp_path: Path) -> None:
    make_folder(tmp_path, "deepseek")

    def add(tensors: Tensors) -> None:
        at = "model.layers.2."
        tensors[f"{at}embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
        tensors[f"{at}shared_head.head.weight"] = tensors["lm_head.weight"].clone()
        tensors[f"{at}self_attn.q_proj.bias"] = torch.zeros(WIDTH)
        tensors[f"{at}self_attn.rotary_emb.inv_freq"] = torch.ones(4)

    before = build(Target.load(tmp_path, "float32"), MtpConfig(init="native")).state_dict()
    change(tmp_path, add)
    after = build(Target.load(tmp_path, "float32"), MtpConfig(init="native")).state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(value, after[name]) for name, value in before.items())


def test_shards_are_read_through_their_index(tmp_path: Path) -> None:
    import json

    make_folder(tmp_path, "qwen3_next")
    one = build(Target.load(tmp_path, "float32"), MtpConfig(init="native")).state_dict()
    tensors = load_file(tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors").unlink()
    files = {}
    for number, part in enumerate((list(tensors)[::2], list(tensors)[1::2])):
        files |= dict.fromkeys(part, f"model-{number}.safetensors")
        shard = {name: tensors[name] for name in part}
        save_file(shard, tmp_path / f"model-{number}.safetensors", metadata={"format": "pt"})
    (tmp_path / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": files}))
    again = build(Target.load(tmp_path, "float32"), MtpConfig(init="native")).state_dict()
    assert all(torch.equal(value, again[name]) for name, value in one.items())


def test_published_experts_become_transformers_stacks() -> None:
    """Each expert by its published equation, down(silu(gate x) * up x), through the stacks that are made of them."""
    config = DeepseekV3Config(
        hidden_size=16,
        intermediate_size=24,
        moe_intermediate_size=8,
        n_routed_experts=4,
        n_group=1,
        topk_group=1,
        num_experts_per_tok=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        kv_lora_rank=8,
        q_lora_rank=8,
        first_k_dense_replace=0,
    )
    layer = DeepseekV3DecoderLayer(config, layer_idx=1)
    generator = torch.Generator().manual_seed(0)
    shapes = {"gate": (8, 16), "up": (8, 16), "down": (16, 8)}
    experts = {
        f"block.mlp.experts.{at}.{name}_proj.weight": torch.randn(shape, generator=generator)
        for at in range(4)
        for name, shape in shapes.items()
    }
    others = {
        f"block.{name}": value
        for name, value in layer.state_dict().items()
        if ".experts." not in name
    }
    made = stack_experts(others | experts)
    assert made.keys() == {f"block.{name}" for name in layer.state_dict()}
    layer.load_state_dict({name.removeprefix("block."): value for name, value in made.items()})
    x = torch.randn(1, 16, generator=generator)
    for at in range(4):
        gate, up, down = (experts[f"block.mlp.experts.{at}.{name}_proj.weight"] for name in shapes)
        expected = (torch.nn.functional.silu(x @ gate.T) * (x @ up.T)) @ down.T
        with torch.no_grad():
            found = layer.mlp.experts(x, torch.tensor([[at]]), torch.ones(1, 1))
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


def test_fp8_matrices_are_multiplied_by_their_blocks_scales() -> None:
    stored = torch.tensor([[1.0, 2.0, 4.0], [0.5, 1.0, 8.0], [2.0, 2.0, 2.0]])
    scale = torch.tensor([[10.0, 100.0], [1.0, 0.5]])
    made = whole(
        {
            "a.weight": stored.to(torch.float8_e4m3fn),
            "a.weight_scale_inv": scale,
            "b.weight": stored,
        },
        (2, 2),
    )
    expected = [[10.0, 20.0, 400.0], [5.0, 10.0, 800.0], [2.0, 2.0, 1.0]]
    assert made["a.weight"].tolist() == expected
    assert list(made) == ["a.weight", "b.weight"]
    assert torch.equal(made["b.weight"], stored)


def test_norms_that_add_one_are_known() -> None:
    for norm, adds in ((LlamaRMSNorm(8), False), (Qwen3NextRMSNorm(8), True)):
        torch.nn.init.normal_(norm.weight, mean=0.4)
        assert adds_one(norm) == adds
