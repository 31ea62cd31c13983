"""A tiny DeepSeek-V3 in its published checkpoint's layout: 61 layers and the MTP layer 61, matrices in fp8 by blocks.

The blocks are 8 x 8 here and divide no more matrices than the published 128 x 128 do: kv_a_proj_with_mqa has 14 rows.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from toy_families import LATENT
from transformers import AutoModelForCausalLM, DeepseekV3Config

from mtp_train.attention.packed import PackedContext
from mtp_train.core.errors import UserError
from mtp_train.engine.chain import ChainProposer
from mtp_train.engine.engine import Engine, EngineConfig
from mtp_train.engine.sequences import Request
from mtp_train.heads.mtp import MtpConfig, build
from mtp_train.models.target import Target

Tensors = dict[str, torch.Tensor]
LAYERS, BLOCK = 61, 8
AT = f"model.layers.{LAYERS}."
CONFIG = DeepseekV3Config(
    **LATENT | {"num_hidden_layers": LAYERS, "first_k_dense_replace": 3},
    q_lora_rank=9,
    n_group=2,
    topk_group=1,
    initializer_range=0.2,
)
FP8 = {
    "activation_scheme": "dynamic",
    "fmt": "e4m3",
    "quant_method": "fp8",
    "weight_block_size": [BLOCK, BLOCK],
}
TEXT = torch.arange(1, 30)


def scales(matrix: torch.Tensor) -> torch.Tensor:
    """The largest value of each block over e4m3's largest, [ceil(N/8), ceil(K/8)]."""
    rows, columns = matrix.shape
    padded = torch.nn.functional.pad(matrix, (0, -columns % BLOCK, 0, -rows % BLOCK))
    blocks = padded.unflatten(0, (-1, BLOCK)).unflatten(2, (-1, BLOCK))
    return blocks.abs().amax((1, 3)) / 448


def spread(scale: torch.Tensor, matrix: torch.Tensor) -> torch.Tensor:
    """Each element's scale, by a loop over blocks."""
    made = torch.empty(matrix.shape)
    for row in range(scale.shape[0]):
        for column in range(scale.shape[1]):
            rows = slice(row * BLOCK, (row + 1) * BLOCK)
            made[rows, column * BLOCK : (column + 1) * BLOCK] = scale[row, column]
    return made


def published(plain: Tensors) -> Tensors:
    """A plain checkpoint's tensors as published: projections of the layers in fp8, with weight_scale_inv."""
    made = {}
    for name, value in plain.items():
        made[name] = value
        if "_proj" in name and name.endswith(".weight") and "eh_proj" not in name:
            scale = scales(value)
            made[name] = (value / spread(scale, value)).to(torch.float8_e4m3fn)
            made[f"{name}_scale_inv"] = scale
    return made


def multiplied_out(stored: Tensors) -> Tensors:
    return {
        name: value.float() * spread(stored[f"{name}_scale_inv"], value)
        if f"{name}_scale_inv" in stored
        else value
        for name, value in stored.items()
        if not name.endswith("_scale_inv")
    }


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("deepseek")
    target = Target.from_config(CONFIG, seed=3)
    target.model.save_pretrained(path)  # type: ignore[operator]
    plain = load_file(path / "model.safetensors")
    generator = torch.Generator().manual_seed(5)
    last = f"model.layers.{LAYERS - 1}."
    for name in [name for name in plain if name.startswith(last)]:  # the MTP layer's block
        scale = 0.1 if plain[name].ndim == 1 else 0.3
        noise = torch.randn(plain[name].shape, generator=generator)
        plain[AT + name.removeprefix(last)] = plain[name] + scale * noise
    width = CONFIG.hidden_size
    for name in ("enorm", "hnorm", "shared_head.norm"):
        plain[f"{AT}{name}.weight"] = 1 + 0.3 * torch.randn(width, generator=generator)
    plain[f"{AT}eh_proj.weight"] = 0.3 * torch.randn(width, 2 * width, generator=generator)
    plain[f"{AT}embed_tokens.weight"] = plain["model.embed_tokens.weight"].clone()
    plain[f"{AT}shared_head.head.weight"] = plain["lm_head.weight"].clone()
    save_file(published(plain), path / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"quantization_config": FP8}))
    return path


@pytest.fixture(scope="module")
def stored(folder: Path) -> Tensors:
    return load_file(folder / "model.safetensors")


@pytest.fixture(scope="module")
def target(folder: Path) -> Target:
    return Target.load(folder, "float32")


def test_the_folder_has_the_published_names(stored: Tensors) -> None:
    layer = {name.removeprefix(AT) for name in stored if name.startswith(AT)}
    own = {"enorm.weight", "hnorm.weight", "eh_proj.weight", "shared_head.norm.weight"}
    own |= {"embed_tokens.weight", "shared_head.head.weight"}
    own |= {"mlp.experts.3.down_proj.weight_scale_inv", "mlp.gate.e_score_correction_bias"}
    assert own <= layer
    assert stored[f"{AT}self_attn.kv_a_proj_with_mqa.weight"].dtype == torch.float8_e4m3fn
    assert stored[f"{AT}self_attn.kv_a_proj_with_mqa.weight_scale_inv"].shape == (2, 4)


def test_the_target_is_what_the_fp8_weights_say(
    target: Target, stored: Tensors, tmp_path: Path
) -> None:
    """Held to transformers' own model with the same weights, multiplied out by a loop."""
    assert (target.quantisation, target.layers) == ("fp8", LAYERS)
    assert {parameter.dtype for parameter in target.model.parameters()} == {torch.float32}
    weights = {n: v for n, v in multiplied_out(stored).items() if not n.startswith(AT)}
    CONFIG.save_pretrained(tmp_path)
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    plain = AutoModelForCausalLM.from_pretrained(
        tmp_path, dtype=torch.float32, attn_implementation="eager"
    )
    state = target.forward(TEXT, torch.arange(29), PackedContext([0, 29]))
    with torch.no_grad():
        expected = plain(TEXT[None]).logits[0]
    torch.testing.assert_close(target.logits(state), expected, atol=1e-4, rtol=1e-3)
    (done,) = Engine(target, None, SMALL).generate([Request("0", (1, 2, 3), 16)])
    prompt = torch.tensor([[1, 2, 3]])
    out = plain.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        do_sample=False,
        max_new_tokens=16,
        eos_token_id=None,
        pad_token_id=0,
    )
    assert tuple(out[0, 3:].tolist()) == done.tokens


SMALL = EngineConfig(max_batch=3, cache_rows=256, page_size=4)


def reference(stored: Tensors, embedding: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
    """The published module in float64, one document from position 0: what shared_head.head reads."""
    weight = {
        name.removeprefix(AT): value.double()
        for name, value in multiplied_out(stored).items()
        if name.startswith(AT)
    }
    rows, heads = len(state), CONFIG.num_attention_heads
    flat, turned, wide = CONFIG.qk_nope_head_dim, CONFIG.qk_rope_head_dim, CONFIG.v_head_dim

    def norm(x: torch.Tensor, name: str) -> torch.Tensor:
        length = (x.square().mean(-1, keepdim=True) + CONFIG.rms_norm_eps).sqrt()
        return x / length * weight[f"{name}.weight"]

    def linear(x: torch.Tensor, name: str) -> torch.Tensor:
        return x @ weight[f"{name}.weight"].T

    angle = torch.arange(rows)[:, None] / 10000.0 ** (torch.arange(0, turned, 2) / turned).double()

    def turn(x: torch.Tensor) -> torch.Tensor:
        """Neighbouring pairs as complex numbers, [heads, rows, turned]."""
        pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous())
        return torch.view_as_real(pairs * torch.polar(torch.ones_like(angle), angle)).flatten(-2)

    def mlp(x: torch.Tensor, name: str) -> torch.Tensor:
        gate = torch.nn.functional.silu(linear(x, f"{name}.gate_proj"))
        return linear(gate * linear(x, f"{name}.up_proj"), f"{name}.down_proj")

    embedding = embedding.double() * (torch.arange(rows) != 0)[:, None]
    x = linear(torch.cat([norm(embedding, "enorm"), norm(state.double(), "hnorm")], -1), "eh_proj")
    read = norm(x, "input_layernorm")
    query = norm(linear(read, "self_attn.q_a_proj"), "self_attn.q_a_layernorm")
    query = linear(query, "self_attn.q_b_proj").unflatten(-1, (heads, -1)).transpose(0, 1)
    latent = linear(read, "self_attn.kv_a_proj_with_mqa")
    key_value = norm(latent[:, :-turned], "self_attn.kv_a_layernorm")
    key_value = linear(key_value, "self_attn.kv_b_proj").unflatten(-1, (heads, -1)).transpose(0, 1)
    shared = turn(latent[:, -turned:].unsqueeze(0)).expand(heads, -1, -1)
    key = torch.cat([key_value[..., :flat], shared], -1)
    query = torch.cat([query[..., :flat], turn(query[..., flat:])], -1)
    score = query @ key.transpose(1, 2) / (flat + turned) ** 0.5
    score = score.masked_fill(torch.ones(rows, rows).triu(1).bool(), float("-inf"))
    out = score.softmax(-1) @ key_value[..., flat:]
    assert out.shape[-1] == wide
    x = x + linear(out.transpose(0, 1).flatten(1), "self_attn.o_proj")
    read = norm(x, "post_attention_layernorm")
    chance = linear(read, "mlp.gate").sigmoid()
    choice = (chance + weight["mlp.gate.e_score_correction_bias"]).unflatten(-1, (2, 2))
    group = choice.sum(-1).argmax(-1)  # 1 of 2 groups of 2 experts, of which both are then taken
    added = []
    for row in range(rows):
        two = [2 * int(group[row]), 2 * int(group[row]) + 1]
        share = chance[row, two] / chance[row, two].sum() * CONFIG.routed_scaling_factor
        added.append(
            sum(
                s * mlp(read[row], f"mlp.experts.{expert}")
                for s, expert in zip(share, two, strict=True)
            )
        )
    return norm(x + torch.stack(added) + mlp(read, "mlp.shared_experts"), "shared_head.norm")


@torch.no_grad()
def test_the_mtp_layer_is_read_as_a_head_and_drafts(target: Target, stored: Tensors) -> None:
    head = build(target, MtpConfig(init="native"))
    state = target.forward(TEXT, torch.arange(29), PackedContext([0, 29]))[:28]
    embedding = target.embed(TEXT[1:])
    found = head(embedding, state, torch.arange(28), PackedContext([0, 28]))
    expected = reference(stored, embedding, state)
    torch.testing.assert_close(found, expected.float(), atol=1e-4, rtol=1e-3)
    logits = expected @ stored[f"{AT}shared_head.head.weight"].double().T
    torch.testing.assert_close(head.logits(target, found, 0), logits.float(), atol=1e-3, rtol=1e-3)
    requests = [Request(str(n), tuple(range(1, n)), 20) for n in (3, 9, 20)]
    plain = Engine(target, None, SMALL).generate(requests)
    done = Engine(target, ChainProposer(target, head, 2), SMALL).generate(requests)
    assert [one.tokens for one in done] == [one.tokens for one in plain]
    first = done[2].steps[0].drafted[0]  # drafted from the prompt and the target's first token
    text = torch.tensor([*done[2].prompt, done[2].tokens[0]])
    rows = len(text) - 1
    state = target.forward(text, torch.arange(rows + 1), PackedContext([0, rows + 1]))[:rows]
    read = reference(stored, target.embed(text[1:]), state)[-1]
    assert int((stored[f"{AT}shared_head.head.weight"].double() @ read).argmax()) == first


def test_scales_of_other_blocks_are_refused(folder: Path, tmp_path: Path, stored: Tensors) -> None:
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = FP8 | {"weight_block_size": [16, 16]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    copies = (f"{AT}embed_tokens.weight", f"{AT}shared_head.head.weight")
    only = {n: v for n, v in stored.items() if n.startswith(AT) and n not in copies}
    save_file(only, tmp_path / "model.safetensors")
    target = Target.from_config(CONFIG)
    target.path = tmp_path
    with pytest.raises(UserError, match="must have a scale per"):
        build(target, MtpConfig(init="native"))
