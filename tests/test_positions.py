"""The longest sequence that a target or a head has positions for: no door lets a longer one through in silence."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from accelerate import Accelerator
from head_variants import SMALL_MODEL
from toys import conversations, make_store, make_target, make_tokenizer

from mtp_train.cli.corpora import corpora, text_inputs
from mtp_train.cli.job import Job
from mtp_train.cli.main import dispatch, guarded
from mtp_train.core.errors import UserError
from mtp_train.engine.chain import ChainProposer
from mtp_train.engine.engine import Engine, EngineConfig
from mtp_train.engine.sequences import Request
from mtp_train.evaluate.sets import prompt_set, within
from mtp_train.export.llama import dimensions, read_layer
from mtp_train.heads.draft_model import DraftModelConfig
from mtp_train.heads.eagle import EagleConfig
from mtp_train.heads.families import build_head
from mtp_train.models.target import Target, config_of
from mtp_train.store.corpus import Corpus
from mtp_train.text.lengths import Bound, LengthPolicy
from mtp_train.text.sources import Answer
from mtp_train.train.config import TrainConfig
from mtp_train.train.loop import train

POSITIONS = 256  # of the toy target
TRAINED = 300  # letters of a long reply


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target, a draft model with half its positions, and chats of which one is longer than both."""
    folder = tmp_path_factory.mktemp("positions")
    small = Target.from_config(config_of(SMALL_MODEL | {"max_position_embeddings": POSITIONS // 2}))
    for name, model in (("target", make_target()), ("small", small)):
        model.model.save_pretrained(folder / name)
        make_tokenizer().save_pretrained(folder / name)
    for name, letters in (("train", (TRAINED, 5)), ("heldout", (6,))):
        said = [("a" * 20 + str(number), "b" * number) for number in letters]
        rows = [{"prompt": asked, "completion": answer} for asked, answer in said]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def lines(folder: Path, run: Path, *more: str) -> list[str]:
    sets = [f"data.sets.{name}={folder / name}.jsonl" for name in ("train", "heldout")]
    return [f"target.path={folder / 'target'}", "target.dtype=float32", f"run={run}", *sets, *more]


BOUNDS: dict[str, tuple[int, str, tuple[str, ...]]] = {
    "target": (POSITIONS, "the target's positions", ()),
    "draft model": (
        POSITIONS // 2,
        "the head's positions",
        ("head=draft_model", "head.path=SMALL"),
    ),
    "imported head": (
        POSITIONS // 4,
        "the head's positions",
        ("head=eagle", "head.block=llama", "head.layer={max_position_embeddings: 64}"),
    ),
}


@pytest.mark.parametrize("rule", ["refuse", "truncate", "split"])
@pytest.mark.parametrize("of", BOUNDS)
def test_a_chat_longer_than_the_positions_takes_the_configured_way(
    folder: Path, tmp_path: Path, of: str, rule: str
) -> None:
    limit, whose, head = BOUNDS[of]
    more = [item.replace("SMALL", str(folder / "small")) for item in head]
    job = Job(lines(folder, tmp_path, f"data.length={rule}", "data.context=8", *more))
    corpus = corpora(job)["train"]
    accounting = corpus.note.accounting
    assert corpus.lengths.max() <= limit
    if rule == "refuse":
        assert accounting["refused"] == {f"longer than {limit} tokens, {whose}": 1}
        assert len(corpus) == 1
    elif rule == "truncate":
        assert accounting["repaired"] == {f"cut to {limit} tokens, {whose}": 1}
        assert corpus.lengths.max() == limit
    else:
        assert accounting["notes"]["sequences split into windows"] == 1
        assert corpus.note.loss_tokens == TRAINED + 5 + 2, "every trained token, and the ends"


def test_a_source_of_its_own_lengths_is_bounded_too(folder: Path, tmp_path: Path) -> None:
    train = f"data.sets.train={{path: {folder / 'train.jsonl'}, length: truncate, max_tokens: 900}}"
    found = corpora(Job([*lines(folder, tmp_path), train]))["train"]
    assert found.lengths.max() == POSITIONS


def test_what_bounds_nothing_changes_no_features(folder: Path, tmp_path: Path) -> None:
    short = "data.max_tokens=64"
    inputs = [text_inputs(Job(lines(folder, tmp_path, *more))) for more in (
        (short,), (short, "head=draft_model", f"head.path={folder / 'small'}"), (),
    )]  # fmt: skip
    assert inputs[0] == inputs[1] != inputs[2]


def test_live_features_are_bounded_before_the_target_is_loaded(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    folder: Path,
    tmp_path: Path,
) -> None:
    def stop(*_: Any, **__: Any) -> Any:
        raise UserError("the target", "is loaded", "here")

    monkeypatch.setattr(Target, "load", stop)
    arguments = lines(folder, tmp_path, "precompute.live=true")
    assert guarded(lambda: dispatch("precompute", arguments)) == 2
    assert f"longer than {POSITIONS} tokens, the target's positions" in capsys.readouterr().err
    assert len(Corpus(tmp_path / "precompute" / "train.text")) == 1


def test_a_window_must_leave_room_beside_its_context() -> None:
    policy = LengthPolicy("split", 4096, 512)
    with pytest.raises(UserError, match="less than the 256 tokens, the target's positions"):
        policy.within(Bound(256, "the target's positions"))
    assert policy.within(Bound(8192, "the target's positions")) == policy.within(None) == policy


def eagle(target: Target, positions: int) -> Any:
    layer = {"max_position_embeddings": positions}
    return build_head(target, EagleConfig(block="llama", layer=layer))


def draft_model(target: Target, positions: int) -> Any:
    model = SMALL_MODEL | {"max_position_embeddings": positions}
    return build_head(target, DraftModelConfig(model=model))


@pytest.mark.parametrize("make", [eagle, draft_model])
def test_features_longer_than_a_head_has_positions_are_not_trained(
    tmp_path: Path, make: Any
) -> None:
    target = make_target()
    chats = conversations(8)
    longest = max(len(chat.tokens) for chat in chats)
    features = make_store(tmp_path / "features", target, chats)
    config = TrainConfig(epochs=1, rows=64, warmup_steps=0, rollout_steps=1)
    with pytest.raises(UserError, match=f"fit into the {longest - 1} positions of the head"):
        head = make(target, longest - 1)
        train(target, head, features, features, config, Accelerator(cpu=True), tmp_path)


@pytest.mark.parametrize("make", [eagle, draft_model])
def test_the_engine_drafts_no_further_than_a_heads_positions(make: Any) -> None:
    target = make_target()
    proposer = ChainProposer(target, make(target, 16), 2)
    engine = Engine(target, proposer, EngineConfig(cache_rows=256, page_size=4))
    requests = [Request(str(size), tuple(range(3, 3 + size)), 64) for size in (10, 16, 20)]
    fits, *others = engine.generate(requests)
    assert len(fits.tokens) == 6
    assert {done.finish for done in others} == {"refused: the prompt leaves no room below 16 positions"}  # fmt: skip


def test_prompts_that_a_head_has_no_positions_for_are_counted() -> None:
    answers = [
        Answer(key, "c", (), tuple(range(size)), tuple(range(said)), "length")
        for key, size, said in (("a", 4, 4), ("b", 4, 9), ("c", 9, 2))
    ]
    prompts = prompt_set("heldout", answers, frozenset(), 8)
    found = within(prompts, 12)
    assert [request.key for request in found.requests] == ["a", "b"]
    assert [answer.key for answer in found.answers] == ["a"]
    assert found.accounting.refused == {"longer with its answer than the head's 12 positions": 1}
    assert within(prompts, 0) is prompts


def test_an_imported_heads_positions_are_part_of_its_layer() -> None:
    target = make_target()
    config = dimensions(target)
    assert not read_layer(config, target)
    assert read_layer(config | {"max_position_embeddings": 128}, target) == {
        "max_position_embeddings": 128
    }
    assert not read_layer(config | {"max_position_embeddings": 9999}, target)
    del config["max_position_embeddings"]
    assert not read_layer(config, target), "not said: the target's"
