"""A small model that drafts for a large one: where it comes from, what it reads, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from accelerate import Accelerator
from head_variants import SMALL_MODEL, make_variant
from torch import Tensor
from toys import conversations, make_lively_target, make_store, make_target, make_tokenizer

from mtp_train.attention.packed import PackedContext
from mtp_train.checkpoint.heads import HeadCard, load_head, save_checkpoint, warm_start
from mtp_train.core.errors import UserError
from mtp_train.engine.chain import ChainProposer
from mtp_train.engine.engine import Engine, EngineConfig
from mtp_train.engine.sampling import Sampling
from mtp_train.engine.sequences import Request
from mtp_train.heads.draft_model import DraftModelConfig, DraftModelHead
from mtp_train.heads.families import build_head
from mtp_train.models.target import Target, config_of, config_values, target_hash
from mtp_train.train.config import TrainConfig
from mtp_train.train.loop import train

PROMPTS = ((5, 9, 2, 33), (7,), tuple(range(1, 20)), (50, 3, 3, 8, 21, 40), (11, 12))
REQUESTS = [Request(str(at), prompt, 24) for at, prompt in enumerate(PROMPTS)]


def save_model(folder: Path, model: Target) -> Path:
    model.model.save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    folder = tmp_path_factory.mktemp("large")
    return Target.load(save_model(folder, make_target()), "float32")


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("small")
    return save_model(folder, Target.from_config(config_of(SMALL_MODEL), seed=3))


def engine(target: Target, head: DraftModelHead, drafts: int, batch: int = 4) -> Engine:
    config = EngineConfig(max_batch=batch, cache_rows=1024, page_size=4, prefill_rows=64)
    return Engine(target, ChainProposer(target, head, drafts), config)


def from_folder(target: Target, path: Path, **options: object) -> DraftModelHead:
    head = build_head(target, DraftModelConfig(path=str(path), **options))  # type: ignore[arg-type]
    assert isinstance(head, DraftModelHead)
    return head


# --- where it comes from --------------------------------------------------------------------------------------


@pytest.mark.parametrize("tied", [False, True])
def test_it_begins_as_the_model_in_the_folder(target: Target, tmp_path: Path, tied: bool) -> None:
    small = Target.from_config(config_of(SMALL_MODEL | {"tie_word_embeddings": tied}), seed=3)
    head = from_folder(target, save_model(tmp_path, small))
    assert head.config.source == target_hash(tmp_path)
    assert config_of(head.config.model).to_diff_dict() == small.config.to_diff_dict() | {
        "dtype": "float32",
        "architectures": ["LlamaForCausalLM"],
    }
    assert (head.cache_layers, head.states, head.vocabulary) == (3, (), None)
    text, position, context = torch.arange(1, 30), torch.arange(29), PackedContext([0, 29])
    with torch.no_grad():
        out = head(head.embed(target, text), head.fuse({}), position, context)
    expected = small.logits(small.forward(text, position, context))
    torch.testing.assert_close(head.logits(target, out, 0), expected)
    assert ("lm_head.weight" in head.state_dict()) != tied


def test_a_config_is_made_again_from_its_values() -> None:
    config = make_target(rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": 5e5})
    values = config_values(config.config)
    assert config_of(values).to_diff_dict() == config.config.to_diff_dict()
    assert config_values(config_of(values)) == values


def test_other_weights_than_those_named_are_refused(target: Target, small: Path) -> None:
    assert from_folder(target, small, source=target_hash(small)).config.source
    with pytest.raises(UserError, match=r"head\.source 0123"):
        from_folder(target, small, source="0123")


def test_a_draft_model_must_be_named(target: Target) -> None:
    with pytest.raises(UserError, match=r"head\.path"):
        build_head(target, DraftModelConfig())


def test_a_model_of_other_tokens_is_refused(target: Target, small: Path, tmp_path: Path) -> None:
    Target.load(small, "float32").model.save_pretrained(tmp_path)
    tokenizer = make_tokenizer()
    tokenizer.add_tokens(["<think>"])
    tokenizer.save_pretrained(tmp_path)
    with pytest.raises(UserError, match=r"'<think>' 49 for None.*target's family"):
        from_folder(target, tmp_path)


def test_a_frozen_embedding_stays_and_the_layers_learn(target: Target, tmp_path: Path) -> None:
    store = make_store(tmp_path / "store", target, conversations(6))
    config = TrainConfig(epochs=2, rollout_steps=1, loss={"kl": 1.0}, warmup_steps=0)
    head = build_head(target, DraftModelConfig(model=SMALL_MODEL, freeze_embedding=True))
    before = {name: value.clone() for name, value in head.state_dict().items()}
    train(target, head, store, store, config, Accelerator(cpu=True), tmp_path / "train")
    learnt, card = load_head(tmp_path / "train" / "head", target)
    after = learnt.state_dict()
    still = {name for name in before if torch.equal(before[name], after[name])}
    assert still == {"base.embed_tokens.weight", "lm_head.weight"}
    assert card.head["freeze_embedding"]


def test_a_rollout_of_several_steps_is_refused(target: Target) -> None:
    head = make_variant(target, "draft_model")
    head.require_rollout(1)
    with pytest.raises(UserError, match=r"rollout_steps must be 1.*received 3"):
        head.require_rollout(3)


def test_a_warm_start_takes_the_trained_model(target: Target, small: Path, tmp_path: Path) -> None:
    head = make_variant(target, "draft_model")
    sizes = (target.hidden_size, target.vocab_size)
    card = HeadCard(head.family, target.hash, target.state, *sizes, step=3)
    save_checkpoint(tmp_path / "head", head, card)
    again = warm_start(tmp_path / "head", target, DraftModelConfig(path=str(small)))
    state = head.state_dict()
    assert all(torch.equal(value, state[name]) for name, value in again.state_dict().items())
    with pytest.raises(UserError, match="freeze_embedding False for True"):
        warm_start(tmp_path / "head", target, DraftModelConfig(freeze_embedding=True))


# --- the engine -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("drafts", [1, 2, 5])
def test_greedy_output_is_the_targets(target: Target, small: Path, batch: int, drafts: int) -> None:
    plain = Engine(target).generate(REQUESTS)
    done = engine(target, from_folder(target, small), drafts, batch).generate(REQUESTS)
    assert [c.tokens for c in done] == [c.tokens for c in plain]


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(0.8, seed=2)])
@pytest.mark.parametrize("batch", [1, 3])
def test_the_target_as_its_own_draft_is_always_right(
    tmp_path: Path, sampling: Sampling, batch: int
) -> None:
    """Whatever it has read, the draft knows what the target knows: no token is missing, none stands elsewhere."""
    folder = save_model(tmp_path, make_lively_target())
    target = Target.load(folder, "float32")
    done = engine(target, from_folder(target, folder), 3, batch).generate(REQUESTS, sampling)
    assert all(step.accepted == 3 for c in done for step in c.steps)
    assert sum(len(c.steps) for c in done) >= 30


def test_a_step_reads_what_is_new_to_it_and_its_own_drafts(
    target: Target, small: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    head = from_folder(target, small)
    read: list[list[int]] = []
    embed = head.embed

    def noted(of: Target, token_T: Tensor) -> Tensor:
        read.append(token_T.tolist())
        return embed(of, token_T)

    monkeypatch.setattr(head, "embed", noted)
    (done,) = engine(target, head, 3).generate(REQUESTS[:1])
    text, length = [*done.prompt, *done.tokens], len(done.prompt) + 1
    expected = [text[:length]]
    for step in done.steps[:-1]:  # the last may reach beyond the output
        length += step.accepted + 1
        new = 2 if step.accepted == 3 else 1  # its last draft it has not read
        expected += [[step.drafted[0]], [step.drafted[1]], text[length - new : length]]
    assert read[: len(expected)] == expected


def test_vocabularies_may_be_padded_differently(target: Target) -> None:
    """More rows than the target's are never drafted; fewer draft what they have."""
    longer, shorter = (
        make_variant(target, name) for name in ("draft_model-tied", "draft_model-fewer")
    )
    assert longer.vocabulary is None
    assert shorter.vocabulary is not None
    assert len(shorter.vocabulary) == 50
    out = torch.randn(4, 24)
    assert longer.logits(target, out, 0).shape == (4, 61)
    assert shorter.logits(target, out, 0).shape == (4, 50)


def test_a_cast_draft_model_keeps_its_rope_frequencies(target: Target) -> None:
    head = make_variant(target, "draft_model").to(torch.bfloat16)
    assert isinstance(head, DraftModelHead)
    assert head.base.norm.weight.dtype == torch.bfloat16
    assert head.base.rotary_emb.inner.inv_freq.dtype == torch.float32
