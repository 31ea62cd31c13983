"""What every head must do, whatever its family and norms: learn, be saved, and draft without changing the output."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from head_variants import NORMS, ONE_NORM_OUT, VARIANTS, make_variant
from toy_families import toy
from toys import conversation, make_lively_target, make_store, make_target

from mtp_train.attention.packed import PackedContext
from mtp_train.batches.pack import load_pack
from mtp_train.checkpoint.heads import HeadCard, load_head, read_card, save_checkpoint, warm_start
from mtp_train.core.errors import UserError
from mtp_train.core.provenance import SEAL
from mtp_train.engine.chain import ChainProposer
from mtp_train.engine.engine import Engine, EngineConfig
from mtp_train.engine.sequences import Completion, Request
from mtp_train.export.stage import ExportConfig, export_head
from mtp_train.heads.base import DraftHead
from mtp_train.heads.eagle import EagleConfig
from mtp_train.heads.eagle3 import Eagle3Config
from mtp_train.heads.families import FAMILIES, build_head, family_of
from mtp_train.heads.medusa import MedusaConfig
from mtp_train.heads.mtp import MtpConfig, MtpHead, build
from mtp_train.heads.vocabulary import choose_vocabulary
from mtp_train.losses.part import part_acceptance
from mtp_train.losses.terms import LossConfig
from mtp_train.models.target import Target
from mtp_train.store.shards import FeatureStore
from mtp_train.train.config import TrainConfig
from mtp_train.train.loop import train
from mtp_train.train.step import RolloutModule

LIKE_ANOTHER = (
    "draft_model-fewer",
    "eagle-2-layers",
    "mtp-2-modules-2-layers",
)  # that need not be overfitted as well
SMALL = EngineConfig(max_batch=4, cache_rows=1024, page_size=4, prefill_rows=64)
PROMPTS = ((5, 9, 2, 33), (7,), tuple(range(1, 20)), (50, 3, 3, 8, 21, 40), (11, 12))
CPU = torch.device("cpu")


def requests(tokens: int) -> list[Request]:
    return [Request(str(at), prompt, tokens) for at, prompt in enumerate(PROMPTS)]


def answers(target: Target, tokens: int) -> list[Completion]:
    return Engine(target, None, SMALL).generate(requests(tokens))


def all_states(head: DraftHead) -> tuple[str, ...]:
    return tuple(dict.fromkeys(("post_norm", *head.states)))


def features(target: Target, head: DraftHead, folder: Path, tokens: int = 16) -> FeatureStore:
    """The target's own answers to the prompts, with the states that the head needs."""
    chats = [conversation(c.key, c.prompt, c.tokens) for c in answers(target, tokens)]
    return make_store(folder, target, chats, states=all_states(head))


def loss_of(head: DraftHead) -> dict[str, float]:
    """Terms on states are for heads that share the target's lm_head, others for those that say how sure they are."""
    found = {"kl": 1.0, "smooth_l1": 0.1} if head.own_output() is None else {"kl": 1.0}
    return found if head.temperatures is None else found | {"confidence": 1.0}


def card(target: Target, head: DraftHead) -> HeadCard:
    sizes = (target.hidden_size, target.vocab_size)
    return HeadCard(head.family, target.hash, target.state, *sizes, step=3)


def test_every_family_is_tried() -> None:
    assert {config.family for config in VARIANTS.values()} == set(FAMILIES)


def test_an_unknown_family_lists_those_known() -> None:
    with pytest.raises(UserError, match=r"mtp.*received eagle9"):
        family_of("eagle9")


# --- the engine -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("variant", VARIANTS)
def test_greedy_speculation_equals_plain_decoding(toy_target: Target, variant: str) -> None:
    head = make_variant(toy_target, variant)
    plain = answers(toy_target, 20)
    done = Engine(toy_target, ChainProposer(toy_target, head, 3), SMALL).generate(requests(20))
    assert [c.tokens for c in done] == [c.tokens for c in plain]
    assert all(c.steps for c in done)


# --- on disk --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_head_comes_back_from_its_checkpoint(
    toy_target: Target, variant: str, tmp_path: Path
) -> None:
    head = make_variant(toy_target, variant)
    save_checkpoint(tmp_path / "head", head, card(toy_target, head))
    again, found = load_head(tmp_path / "head", toy_target)
    assert (again.config, again.states, again.steps) == (head.config, head.states, head.steps)
    expected = head.state_dict()
    assert again.state_dict().keys() == expected.keys()
    assert all(torch.equal(value, expected[name]) for name, value in again.state_dict().items())
    drafts = [
        [
            c.steps
            for c in Engine(toy_target, ChainProposer(toy_target, one, 3)).generate(requests(9))
        ]
        for one in (head, again)
    ]
    assert drafts[0] == drafts[1]
    assert found.head["family"] == found.family == head.family


def test_a_checkpoint_with_settings_of_no_family_is_refused(
    toy_target: Target, tmp_path: Path
) -> None:
    head = make_variant(toy_target, "mtp")
    save_checkpoint(tmp_path / "head", head, card(toy_target, head))
    path = tmp_path / "head" / "head.json"
    value = json.loads(path.read_text())
    value["head"]["hnorms"] = value["head"].pop("hnorm")
    del value[SEAL]
    path.write_text(json.dumps(value))
    with pytest.raises(UserError, match="received hnorms"):
        load_head(tmp_path / "head", toy_target)


def test_a_card_without_settings_is_an_mtp_head_with_all_norms(
    toy_target: Target, tmp_path: Path
) -> None:
    head = make_variant(toy_target, "mtp")
    save_checkpoint(tmp_path / "head", head, card(toy_target, head))
    path = tmp_path / "head" / "head.json"
    value = json.loads(path.read_text()) | {"head": {}}
    del value[SEAL]  # as cards were before they had one
    path.write_text(json.dumps(value))
    assert read_card(tmp_path / "head").head == {}
    assert load_head(tmp_path / "head", toy_target)[0].config == MtpConfig()


# --- training -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("variant", ["mtp", "dflash", "dspark", "peagle"])
def test_a_pack_without_a_trained_token_weighs_nothing(
    toy_target: Target, variant: str, tmp_path: Path
) -> None:
    head = make_variant(toy_target, variant)
    pack = load_pack(features(toy_target, head, tmp_path), range(2), CPU)
    pack = replace(pack, loss_mask_T=torch.zeros_like(pack.loss_mask_T))
    module = RolloutModule(head, toy_target, loss=LossConfig(loss_of(head)))
    loss = module(pack, 3, seed=1).values.loss
    loss.backward()
    assert float(loss.detach()) == 0.0
    assert not any(
        bool(one.grad.any()) or bool(one.grad.isnan().any())
        for one in head.parameters()
        if one.grad is not None
    )


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_parameter_gets_a_gradient(toy_target: Target, variant: str, tmp_path: Path) -> None:
    head = make_variant(toy_target, variant)
    store = features(toy_target, head, tmp_path)
    module = RolloutModule(head, toy_target, loss=LossConfig(loss_of(head)))
    module(load_pack(store, range(len(store)), CPU), 3).values.loss.backward()
    still = [
        name
        for name, weight in head.named_parameters()
        if weight.grad is None or not weight.grad.any()
    ]
    assert still == []
    assert all(parameter.grad is None for parameter in toy_target.model.parameters())


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_float32_head_takes_bfloat16_features_without_autocast(
    toy_target: Target, variant: str, tmp_path: Path
) -> None:
    head = make_variant(toy_target, variant)
    pack = load_pack(features(toy_target, head, tmp_path), [0, 1], CPU)
    coarse = replace(pack, states={name: state.bfloat16() for name, state in pack.states.items()})
    module = RolloutModule(head, toy_target, loss=LossConfig(loss_of(head)))
    with torch.no_grad():
        losses = [float(module(one, 3, measure=True).values.loss) for one in (pack, coarse)]
    assert losses[1] == pytest.approx(losses[0], rel=0.05)


@pytest.mark.parametrize(
    "variant",
    [name for name in VARIANTS if name not in {*ONE_NORM_OUT, *LIKE_ANOTHER}],
)
def test_a_head_overfitted_on_the_prompts_accepts_nearly_everything(
    variant: str, tmp_path: Path
) -> None:
    """DEFECTS 25, through the production loop and the engine."""
    target = make_lively_target()
    counts = torch.zeros(target.vocab_size)
    tokens = [token for done in answers(target, 16) for token in done.tokens]
    counts.index_add_(0, torch.tensor(tokens), torch.ones(len(tokens)))
    head = build_head(target, VARIANTS[variant], 0, counts)
    store = features(target, head, tmp_path / "features")
    config = TrainConfig(
        epochs=80,
        rollout_steps=3 if head.ahead else 1,
        learning_rate=1e-2,
        decay=1.0,
        loss={"hard_ce": 1.0},
        validations=1,
        checkpoints=1,
    )
    train(target, head, store, store, config, Accelerator(cpu=True), tmp_path / "train")
    learnt, _ = load_head(tmp_path / "train" / "head", target)
    done = Engine(target, ChainProposer(target, learnt, 3), SMALL).generate(requests(16))
    steps = [step for c in done for step in c.steps[:-1]]  # the last drafts past what was trained
    assert sum(step.accepted for step in steps) / (3 * len(steps)) >= 0.95


def test_features_without_the_heads_states_are_refused(toy_target: Target, tmp_path: Path) -> None:
    head = make_variant(toy_target, "mtp")
    head.states = ("layer_1",)
    store = features(toy_target, make_variant(toy_target, "mtp"), tmp_path / "features")
    with pytest.raises(UserError, match=r"states post_norm, layer_1; .*precompute\.states"):
        train(
            toy_target, head, store, store, TrainConfig(), Accelerator(cpu=True), tmp_path / "out"
        )


# --- mtp and its norms ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("init", "sums", "column"),
    [
        ("last_layer", (0.6478, 46.1921), [0.85015, -1.49564, -0.89638, -0.65958, 0.08738]),
        ("random", (32.0, 32.5633), [0.30371, -0.33135, 1.5096, -0.00663, -0.84808]),
    ],
)
def test_an_mtp_head_with_all_norms_is_what_it_was(
    toy_target: Target, init: str, sums: tuple[float, float], column: list[float]
) -> None:
    """Tensors and outputs of heads made before norms could be left out, written down then."""
    head = build(toy_target, MtpConfig(init=init), seed=3)
    layer = toy_target.base.layers[0].state_dict()
    norms = ("enorm.weight", "hnorm.weight", "final_norm.weight")
    assert set(head.state_dict()) == {
        *norms,
        "eh_proj.weight",
        *(f"block.{name}" for name in layer),
    }
    found = [float(part.weight.detach().abs().sum()) for part in (head.hnorm, head.eh_proj)]
    assert found == pytest.approx(sums, rel=1e-4)
    embedding, state = torch.randn(2, 5, 32, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        out = head(embedding, state, torch.arange(5), PackedContext([0, 5]))
    assert out[:, 0].tolist() == pytest.approx(column, abs=1e-4)


@pytest.mark.parametrize("norm", [*NORMS[1:], "all"])
def test_a_head_without_a_norm_begins_near_the_head_that_has_it(norm: str) -> None:
    """Otherwise a comparison of norms would compare starts. With weights far from 1, as trained targets have them."""
    target = make_target(seed=2, initializer_range=0.1, num_hidden_layers=3)
    generator = torch.Generator().manual_seed(3)
    for name, weight in target.model.named_parameters():
        if "norm" in name:
            weight.copy_(torch.rand(weight.shape, generator=generator) * 3 + 0.2)
    whole = MtpConfig(embedding_noise=0.0)
    left_out = dict.fromkeys(NORMS, False) if norm == "all" else {norm: False}
    text = torch.arange(1, 41)
    context, position = PackedContext([0, 40]), torch.arange(40)
    state = target.forward(text, position, context)
    logits = []
    for config in (whole, replace(whole, **left_out)):
        head = build(target, config)
        with torch.no_grad():
            out = head(target.embed(text), state, position, context)
        logits.append(head.logits(target, out, 0).log_softmax(-1))
    kl = (logits[0].exp() * (logits[0] - logits[1])).sum(-1).mean()
    spread = (logits[0].exp() * logits[0]).sum(-1).mean() + torch.log(torch.tensor(61.0))
    assert 0 < kl < 0.05 * spread


@pytest.mark.parametrize("norm", NORMS)
def test_a_head_without_a_norm_is_not_exported(
    toy_target: Target, norm: str, tmp_path: Path
) -> None:
    head = build(toy_target, MtpConfig(**{norm: False}))
    with pytest.raises(UserError, match=rf"mimo_mtp holds; received head\.{norm}=false"):
        export_head(head, toy_target, ExportConfig(), tmp_path / "out", {})
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("variant", [name for name in VARIANTS if not name.startswith("mtp")])
def test_another_family_does_not_go_to_the_mimo_layout(
    toy_target: Target, variant: str, tmp_path: Path
) -> None:
    head = make_variant(toy_target, variant)
    with pytest.raises(UserError, match=rf"mimo_mtp holds; received head\.family={head.family};"):
        export_head(head, toy_target, ExportConfig("mimo_mtp"), tmp_path / "out", {})
    assert not list(tmp_path.iterdir())


# --- eagle ----------------------------------------------------------------------------------------------------


def test_an_eagle_head_is_the_published_one(toy_target: Target) -> None:
    """Written out with plain matrices: no norm before fc or attention, none at the end, no zero at position 0."""
    head = make_variant(toy_target, "eagle")
    assert sorted(name.removeprefix("block.") for name in head.state_dict()) == [
        "fc.weight",
        *(f"mlp.{name}_proj.weight" for name in ("down", "gate", "up")),
        "post_attention_layernorm.weight",
        *(f"self_attn.{name}_proj.weight" for name in "koqv"),
    ]
    embedding, state = torch.randn(2, 1, 32, generator=torch.Generator().manual_seed(1))
    weight = head.state_dict()
    x = torch.cat([embedding, state], -1) @ weight["fc.weight"].T
    with torch.no_grad():
        out = head(embedding, state, torch.tensor([0]), PackedContext([0, 1]))
    torch.testing.assert_close(out, plain_block(weight, x, x), atol=1e-5, rtol=1e-4)


def plain_block(
    weight: dict[str, torch.Tensor], rows: torch.Tensor, residual: torch.Tensor
) -> torch.Tensor:
    """A Llama block's attention over `rows` and its mlp, for one row, with plain matrices."""

    def times(rows: torch.Tensor, name: str) -> torch.Tensor:
        return rows @ weight[f"block.{name}_proj.weight"].T

    # One row attends to itself alone: attention is its value; two query heads share each of two value heads.
    value = times(rows, "self_attn.v").view(2, 8).repeat_interleave(2, 0).view(1, 32)
    x = residual + times(value, "self_attn.o")
    normed = plain_norm(x, weight["block.post_attention_layernorm.weight"])
    gated = torch.nn.functional.silu(times(normed, "mlp.gate")) * times(normed, "mlp.up")
    return x + times(gated, "mlp.down")


def plain_norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x / (x.square().mean() + 1e-6).sqrt() * weight


@pytest.mark.parametrize(
    ("name", "config"),
    [
        ("llama", EagleConfig(embedding_noise=0.0)),
        ("gemma2", EagleConfig(embedding_noise=0.0)),
        ("gpt_oss", EagleConfig(embedding_noise=0.0)),
        ("qwen3", EagleConfig(embedding_noise=0.0, block="llama")),
        ("llama", Eagle3Config(embedding_noise=0.0, draft_vocabulary=0)),
        ("llama", MtpConfig(embedding_noise=0.0)),
        ("gemma2", MtpConfig(embedding_noise=0.0, final_norm=False)),
    ],
    ids=lambda value: value if isinstance(value, str) else f"{value.family}-{value.block}",
)
def test_a_head_of_several_layers_begins_as_one_of_a_single_layer(name: str, config: Any) -> None:
    """Later layers begin as the identity; each has keys and values of its own."""
    one, three = (build_head(toy(name), replace(config, layers=layers)) for layers in (1, 3))
    assert (one.cache_layers, three.cache_layers) == (1, 3)
    assert len(three.decoder_blocks()) == 3 and set(one.state_dict()) < set(three.state_dict())
    embedding, state = torch.randn(2, 5, 32, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        first, deep = (
            head(embedding, state, torch.arange(5), PackedContext([0, 5])) for head in (one, three)
        )
    assert first.abs().max() > 0
    torch.testing.assert_close(deep, first, atol=1e-6, rtol=1e-5)


# --- eagle3 ---------------------------------------------------------------------------------------------------


def test_an_eagle3_head_begins_as_the_targets_last_layer() -> None:
    """With that layer's own input as its third state, it says at once what the target says of the same row."""
    target = make_target(seed=2, initializer_range=0.2, num_hidden_layers=3)
    generator = torch.Generator().manual_seed(3)
    for name, weight in target.model.named_parameters():
        if "norm" in name:
            weight.copy_(torch.rand(weight.shape, generator=generator) * 3 + 0.2)
    text, position, context = torch.arange(1, 41), torch.arange(40), PackedContext([0, 40])
    names = ["layer_0", "layer_1", "layer_2"]
    states = target.capture(text, position, context, (*names, "post_norm"))
    for options in ({}, {"norm_before_residual": True}, {"fc_norm": True}):
        config = Eagle3Config(states=names, embedding_noise=0.0, draft_vocabulary=40, **options)
        head = build_head(target, config, counts_V=torch.arange(61))
        assert head.vocabulary is not None and head.vocabulary.tolist() == list(range(21, 61))
        with torch.no_grad():
            out = head(target.embed(text), head.fuse(states), position, context)
            found = head.logits(target, out, 0).log_softmax(-1)
        expected = target.logits(states["post_norm"])[:, head.vocabulary].log_softmax(-1)
        if not options:  # the others give the state its usual length, not each row's own
            torch.testing.assert_close(found, expected, atol=1e-3, rtol=1e-3)
        assert (found.argmax(-1) == expected.argmax(-1)).float().mean() > 0.8, options


@pytest.mark.parametrize("variant", ["eagle3", "eagle3-whole", "eagle3.1"])
def test_an_eagle3_head_is_the_published_one(toy_target: Target, variant: str) -> None:
    """Written out with plain matrices, with norm_before_residual and with 3.1's norms."""
    head = make_variant(toy_target, variant)
    weight = head.state_dict()
    embedding, *aux = torch.randn(4, 1, 32, generator=torch.Generator().manual_seed(1))
    normed = variant == "eagle3.1"
    if normed:
        aux = [plain_norm(g, weight[f"fc_norm.{at}.weight"]) for at, g in enumerate(aux)]
    hidden = torch.cat(aux, -1) @ weight["fc.weight"].T
    h = plain_norm(hidden, weight["hidden_norm.weight"])
    e = plain_norm(embedding, weight["block.input_layernorm.weight"])
    residual = h if variant == "eagle3-whole" else hidden
    x = plain_block(weight, torch.cat([e, h], -1), residual)
    read = plain_norm(x, weight["norm.weight"])
    given = dict(
        zip(
            head.states,
            torch.randn(4, 1, 32, generator=torch.Generator().manual_seed(1))[1:],
            strict=True,
        )
    )
    with torch.no_grad():
        out = head(embedding, head.fuse(given), torch.tensor([0]), PackedContext([0, 1]))
        logits = head.logits(toy_target, out, 0)
    torch.testing.assert_close(out, read if normed else x, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(logits, read @ weight["lm_head.weight"].T, atol=1e-5, rtol=1e-4)
    assert head.states == ("layer_0", "layer_1", "layer_2"), "of a target of two layers"


def test_what_eagle3_feeds_back(toy_target: Target) -> None:
    """DEFECTS 27: the pre-norm state, or the normed one with norm_output; the lm_head reads the normed one."""
    embedding, state = torch.randn(2, 4, 32, generator=torch.Generator().manual_seed(1))
    outs = []
    for variant in ("eagle3", "eagle3.1"):
        head = make_variant(toy_target, variant)
        head.load_state_dict(make_variant(toy_target, "eagle3").state_dict(), strict=False)
        with torch.no_grad():
            out = head(embedding, state, torch.arange(4), PackedContext([0, 4]))
            outs.append((out, head.readout(out, 0)))
            normed = head.get_submodule("norm")(outs[0][0])
    torch.testing.assert_close(outs[0][1], normed)
    torch.testing.assert_close(outs[1][0], normed)
    assert torch.equal(outs[1][1], outs[1][0])
    assert not torch.allclose(outs[0][0], normed, atol=0.1)


def test_a_draft_vocabulary_holds_the_most_trained_tokens(
    capsys: pytest.CaptureFixture[str],
) -> None:
    counts = torch.tensor([0, 5, 1, 9, 0, 5, 2, 0])
    assert choose_vocabulary(counts, 3).tolist() == [1, 3, 5]
    assert "3 draft tokens cover 86.36% of the trained text" in capsys.readouterr().err


def test_a_draft_vocabulary_larger_than_the_data_is_all_that_is_trained(
    toy_target: Target, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """DEFECTS 13: ten chats, size 32k; tokens of the prompts alone do not count."""
    chats = [conversation(str(at), [at, 50, 51], [20 + at, 30, 30]) for at in range(10)]
    store = make_store(tmp_path, toy_target, chats)
    counts = store.token_counts(trained=True)
    head = build_head(toy_target, Eagle3Config(), counts_V=counts)
    assert head.vocabulary is not None
    assert head.vocabulary.tolist() == [*range(20, 30), 30]
    assert head.config.draft_vocabulary == 11 == len(head.own_output())
    said = capsys.readouterr().err
    assert "11 draft tokens, all that are trained (32000 were asked for) cover 100.00%" in said


def test_a_draft_vocabulary_needs_trained_tokens(toy_target: Target) -> None:
    for counts in (None, torch.zeros(61)):
        with pytest.raises(UserError, match="no trained tokens"):
            build_head(toy_target, Eagle3Config(), counts_V=counts)


@pytest.mark.parametrize("wrong", [[3, 2], [0, 61], [-1, 4]])
def test_a_draft_vocabulary_of_another_target_is_refused(
    toy_target: Target, wrong: list[int], tmp_path: Path
) -> None:
    head = build_head(toy_target, Eagle3Config(draft_vocabulary=2), counts_V=torch.arange(61))
    head.vocabulary = torch.tensor(wrong)
    save_checkpoint(tmp_path / "head", head, card(toy_target, head))
    with pytest.raises(UserError, match="rising token ids below 61"):
        load_head(tmp_path / "head", toy_target)


def test_acceptance_of_a_draft_vocabulary_is_over_the_whole_vocabulary() -> None:
    generator = torch.Generator().manual_seed(0)
    student, teacher = (
        torch.randn(2, 7, 4, generator=generator),
        torch.randn(7, 6, generator=generator),
    )
    whole, own = torch.randn(5, 6, generator=generator), torch.randn(3, 4, generator=generator)
    part = torch.tensor([0, 2, 4])
    alpha, agree = part_acceptance(student, teacher, whole, own, part, chunk=3)
    p = (teacher @ whole.T).softmax(-1)
    for step in range(2):
        for goal in range(7):
            q = torch.zeros(5)
            q[part] = (own @ student[step, goal]).softmax(-1)
            assert float(alpha[step, goal]) == pytest.approx(float(torch.minimum(p[goal], q).sum()))
            assert bool(agree[step, goal]) == bool(p[goal].argmax() == q.argmax())
    assert agree.any() and not agree.all()
    assert part_acceptance(student[:, :0], teacher[:0], whole, own, part)[0].shape == (2, 0)
    goals = torch.stack([teacher, teacher.flip(0)])  # each step's own
    mine, chosen = part_acceptance(student, goals, whole, own, part, chunk=3)
    assert torch.equal(mine[0], alpha[0]) and torch.equal(chosen[0], agree[0])
    flipped, _ = part_acceptance(student.flip(1), teacher, whole, own, part, chunk=3)
    torch.testing.assert_close(mine[1], flipped[1].flip(0))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"loss": {"kl": 1.0, "smooth_l1": 0.1}}, r"smooth_l1: states .* shares.*train\.loss"),
        ({"loss": {"kl": 1.0}, "loss_vocabulary": 9}, r"draft vocabulary of their own"),
    ],
)
def test_a_configuration_that_does_not_fit_the_head_is_refused(
    toy_target: Target, tmp_path: Path, changes: dict, message: str
) -> None:
    head = make_variant(toy_target, "eagle3")
    store = features(toy_target, head, tmp_path / "features")
    config = TrainConfig(**changes)
    with pytest.raises(UserError, match=message):
        train(toy_target, head, store, store, config, Accelerator(cpu=True), tmp_path / "out")


# --- medusa ---------------------------------------------------------------------------------------------------


def test_a_medusa_head_learns_each_token_from_the_state_before_the_known_one(
    toy_target: Target, tmp_path: Path
) -> None:
    """Row p, whose next token x[p+1] is known, drafts x[p+2], x[p+3], x[p+4] from H[p]: by hand, with own lm_heads."""
    head = make_variant(toy_target, "medusa")
    store = features(toy_target, head, tmp_path)
    pack = load_pack(store, [0], CPU)
    module = RolloutModule(head, toy_target, loss=LossConfig({"hard_ce": 1.0}, decay=1.0))
    with torch.no_grad():
        found = float(module(pack, 3).values.loss)
    weight, state = head.state_dict(), pack.states["post_norm"]
    expected = 0.0
    for row in range(len(state)):
        for step in range(3):
            label = row + 2 + step
            if label < len(state) and pack.loss_mask_T[label]:
                layer = weight[f"blocks.{step}.0.weight"]
                x = state[row] + torch.nn.functional.silu(layer @ state[row])
                log_q = (weight["lm_heads"][step] @ x).log_softmax(-1)
                expected -= float(log_q[pack.token_T[label]])
    assert found == pytest.approx(expected / 3, rel=1e-5), "three steps of equal weight"


def test_a_fresh_medusa_head_is_the_targets_lm_head(toy_target: Target) -> None:
    head = build_head(toy_target, MedusaConfig())
    state = torch.randn(4, 32, generator=torch.Generator().manual_seed(1))
    for step in range(3):
        assert torch.equal(head.logits(toy_target, state, step), toy_target.logits(state))


def test_a_medusa_head_drafts_and_trains_as_many_tokens_as_it_has_steps(
    toy_target: Target, tmp_path: Path
) -> None:
    head = make_variant(toy_target, "medusa")
    ChainProposer(toy_target, head, 2)
    with pytest.raises(UserError, match=r"medusa head drafts 3 tokens at most.*received 4"):
        ChainProposer(toy_target, head, 4)
    store = features(toy_target, head, tmp_path / "features")
    config = TrainConfig(rollout_steps=2, loss={"kl": 1.0})
    with pytest.raises(UserError, match=r"rollout_steps must be 3.*received 2"):
        train(toy_target, head, store, store, config, Accelerator(cpu=True), tmp_path / "out")


# --- warm start -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_warm_start_goes_on_from_a_checkpoint_of_another_target(
    toy_target: Target, variant: str, tmp_path: Path
) -> None:
    head = make_variant(toy_target, variant)
    save_checkpoint(tmp_path / "head", head, replace(card(toy_target, head), target_hash="another"))
    with pytest.raises(UserError, match="own target"):
        load_head(tmp_path / "head", toy_target)
    again = warm_start(tmp_path / "head", toy_target, VARIANTS[variant])
    expected = head.state_dict()
    assert all(torch.equal(value, expected[name]) for name, value in again.state_dict().items())
    assert all(parameter.requires_grad for parameter in again.parameters())


def test_a_warm_start_on_other_data_keeps_the_draft_vocabulary(
    toy_target: Target, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """DEFECTS 14: the rows of the lm_head go on meaning the same tokens, whatever the new counts would choose."""
    first, other = torch.zeros(61), torch.zeros(61)
    first[:10], other[5:25] = 1.0, 1.0
    config = Eagle3Config(draft_vocabulary=8)
    head = build_head(toy_target, config, counts_V=first)
    save_checkpoint(tmp_path / "head", head, card(toy_target, head))
    capsys.readouterr()
    again = warm_start(tmp_path / "head", toy_target, config, other)
    assert head.vocabulary is not None and again.vocabulary is not None
    assert again.vocabulary.tolist() == head.vocabulary.tolist() == list(range(8))
    assert "its 8 draft tokens cover 15.00% of the trained text" in capsys.readouterr().err


@pytest.mark.parametrize("config", [MtpConfig(), EagleConfig(), MedusaConfig(own_lm_heads=False)])
def test_a_draft_vocabulary_is_rows_of_the_targets_lm_head(toy_target: Target, config: Any) -> None:
    """Nothing is added that is trained, and the rest of the head begins with the same bits."""
    counts = torch.arange(61) % 9
    whole = build_head(toy_target, config, 3)
    part = build_head(toy_target, replace(config, draft_vocabulary=40), 3, counts)
    assert part.vocabulary is not None
    assert part.vocabulary.tolist() == choose_vocabulary(counts, 40).tolist()
    assert set(part.state_dict()) - set(whole.state_dict()) == {"vocabulary"}
    for name, value in whole.state_dict().items():
        assert torch.equal(value, part.state_dict()[name])
    read = torch.randn(5, 32, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(
        part.project(toy_target, read, 0), toy_target.logits(read)[:, part.vocabulary]
    )
    part.vocabulary.copy_(part.vocabulary.flip(0))  # read from a checkpoint, for example
    torch.testing.assert_close(
        part.project(toy_target, read, 0), toy_target.logits(read)[:, part.vocabulary]
    )
    other = make_target(seed=9)
    torch.testing.assert_close(part.project(other, read, 0), other.logits(read)[:, part.vocabulary])


def test_a_draft_vocabulary_of_no_tokens_or_of_lm_heads_is_refused() -> None:
    for made in (MtpConfig, EagleConfig, Eagle3Config):
        with pytest.raises(UserError, match=r"draft_vocabulary must be 0 or more; received -1"):
            made(draft_vocabulary=-1)
    with pytest.raises(UserError, match=r"needs head\.own_lm_heads=false; received 9"):
        MedusaConfig(draft_vocabulary=9)


@pytest.mark.parametrize("config", [MtpConfig(), EagleConfig(), MedusaConfig(own_lm_heads=False)])
def test_a_warm_start_chooses_rows_of_the_targets_lm_head_anew(
    toy_target: Target, tmp_path: Path, config: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of another size alone: nothing that is trained knows the tokens."""
    first, other = torch.zeros(61), torch.zeros(61)
    first[:10], other[5:25] = 1.0, 1.0
    head = build_head(toy_target, replace(config, draft_vocabulary=8), counts_V=first)
    save_checkpoint(tmp_path / "head", head, card(toy_target, head))
    found = {}
    for size in (8, 12, 0):
        again = warm_start(
            tmp_path / "head", toy_target, replace(config, draft_vocabulary=size), other
        )
        found[size] = None if again.vocabulary is None else again.vocabulary.tolist()
        assert again.config == replace(config, draft_vocabulary=size)
        assert all(torch.equal(v, again.state_dict()[n]) for n, v in head.named_parameters())
    assert found == {8: list(range(8)), 12: list(range(5, 17)), 0: None}
    assert "12 draft tokens cover 60.00% of the trained text" in capsys.readouterr().err
    whole = build_head(toy_target, config)
    save_checkpoint(tmp_path / "whole", whole, card(toy_target, whole))
    part = warm_start(tmp_path / "whole", toy_target, replace(config, draft_vocabulary=8), other)
    assert part.vocabulary is not None and part.vocabulary.tolist() == list(range(5, 13))
    save_checkpoint(tmp_path / "part", part, card(toy_target, part))
    assert load_head(tmp_path / "part", toy_target)[0].vocabulary.tolist() == list(range(5, 13))


def test_a_head_of_several_modules_begins_as_a_head_of_one(
    toy_target: Target, tmp_path: Path
) -> None:
    head = make_variant(toy_target, "mtp")
    save_checkpoint(tmp_path / "head", head, card(toy_target, head))
    again = warm_start(tmp_path / "head", toy_target, MtpConfig(modules=3))
    assert isinstance(again, MtpHead)
    assert again.config == MtpConfig(modules=3)
    assert [again.at(step) for step in (0, 1, 2, 3)] == [again, *again.later, again.later[-1]]
    assert [module.block.self_attn.layer_idx for module in again.in_order()] == [2, 3, 4]
    for module in again.in_order():
        mine = module.state_dict()
        assert all(torch.equal(value, mine[name]) for name, value in head.state_dict().items())
    weights = {parameter.data_ptr() for parameter in again.parameters()}
    assert len(weights) == 3 * len(head.state_dict()), "copies, not one tensor for all"
    save_checkpoint(tmp_path / "several", again, card(toy_target, again))
    with pytest.raises(UserError, match="modules 3 for 1"):
        warm_start(tmp_path / "several", toy_target, MtpConfig())


def test_modules_of_several_layers_begin_as_a_module_of_as_many(
    toy_target: Target, tmp_path: Path
) -> None:
    head = make_variant(toy_target, "mtp-2-layers")
    save_checkpoint(tmp_path / "head", head, card(toy_target, head))
    again = warm_start(tmp_path / "head", toy_target, MtpConfig(modules=2, layers=2))
    assert isinstance(again, MtpHead) and again.cache_layers == 4
    numbers = [[b.self_attn.layer_idx for b in m.own_blocks()] for m in again.in_order()]
    assert numbers == [[2, 3], [4, 5]], "each layer has keys and values of its own"
    assert len(again.decoder_blocks()) == 4
    for module in again.in_order():
        mine = module.state_dict()
        assert all(torch.equal(value, mine[name]) for name, value in head.state_dict().items())
    with pytest.raises(UserError, match="layers 2 for 1"):
        warm_start(tmp_path / "head", toy_target, MtpConfig())


def test_a_rollout_must_train_every_module(toy_target: Target) -> None:
    head = make_variant(toy_target, "mtp-3-modules")
    head.require_rollout(3)
    head.require_rollout(5)
    with pytest.raises(UserError, match=r"rollout_steps must be 3 or more.*received 2"):
        head.require_rollout(2)
    with pytest.raises(UserError, match=r"rollout_steps must be 3.*received 4"):
        make_variant(toy_target, "medusa").require_rollout(4)


def test_a_head_of_several_modules_is_not_exported(toy_target: Target, tmp_path: Path) -> None:
    head = make_variant(toy_target, "mtp-2-modules")
    with pytest.raises(UserError, match=r"mimo_mtp holds; received head\.modules=2"):
        export_head(head, toy_target, ExportConfig(), tmp_path / "out", {})
    with pytest.raises(UserError, match=r"head\.modules must be 1 or more"):
        MtpConfig(modules=0)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (EagleConfig(), "family mtp for eagle"),
        (MtpConfig(hnorm=False), "received hnorm True for False"),
    ],
)
def test_a_warm_start_from_a_head_of_other_options_is_refused(
    toy_target: Target, tmp_path: Path, config: object, message: str
) -> None:
    head = make_variant(toy_target, "mtp")
    save_checkpoint(tmp_path / "head", head, card(toy_target, head))
    with pytest.raises(UserError, match=message):
        warm_start(tmp_path / "head", toy_target, config)
