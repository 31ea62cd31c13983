"""Behaviour on the real target: SmolLM2-135M-Instruct, as `make setup` unpacks it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from accelerate import Accelerator

from mtp_train.core.dist import Ranks
from mtp_train.core.records import Accounting
from mtp_train.engine.chain import ChainProposer
from mtp_train.engine.engine import Engine, EngineConfig
from mtp_train.engine.sequences import Completion, Request
from mtp_train.evaluate.runs import Bench
from mtp_train.evaluate.sets import PromptSet
from mtp_train.evaluate.stage import EvaluateConfig, measure_lossless
from mtp_train.export.stage import ExportConfig, export_head, import_head
from mtp_train.heads.mtp import MtpConfig, MtpHead, build
from mtp_train.models.target import Target, load_tokenizer
from mtp_train.precompute.sources import EngineStates
from mtp_train.precompute.stage import PrecomputeConfig, precompute
from mtp_train.store.shards import FeatureStore
from mtp_train.text.joined import join_turns
from mtp_train.text.sources import Answer
from mtp_train.text.template import ChatTemplate
from mtp_train.train.config import TrainConfig
from mtp_train.train.loop import train

QUESTIONS = (
    "How do I keep basil alive on a windowsill?",
    "A box holds 12 pens. How many pens are in 7 boxes, and how many are left after giving away 30?",
    "Name three uses of vinegar.",
)


@pytest.fixture(scope="module")
def target(smollm2_path: Path) -> Target:
    return Target.load(smollm2_path, "float32")


@pytest.fixture(scope="module")
def requests(smollm2_path: Path) -> list[Request]:
    template = ChatTemplate(load_tokenizer(smollm2_path))
    prompts = [template.prompt([{"role": "user", "content": question}]) for question in QUESTIONS]
    return [Request(str(i), tuple(prompt), 32, frozenset({2})) for i, prompt in enumerate(prompts)]


@pytest.fixture(scope="module")
def answer(target: Target, requests: list[Request]) -> Answer:
    (done,) = Engine(target, None, EngineConfig(max_batch=1, cache_rows=512)).generate(requests[:1])
    return Answer("one", "all", (), done.prompt, done.tokens, done.finish)


@pytest.fixture(scope="module")
def overfitted(target: Target, answer: Answer, tmp_path_factory: pytest.TempPathFactory) -> MtpHead:
    """A head trained on one answer until it knows it."""
    folder = tmp_path_factory.mktemp("overfit")
    (sequence, _), *_ = join_turns([answer])
    accounting = Accounting(used=1).as_dict()
    source = EngineStates(target)
    precompute(source, [sequence], PrecomputeConfig(), folder / "features", accounting, Ranks())
    store = FeatureStore(folder / "features")
    assert store.manifest.gate["rows"] > 0, "the gate compared rows"
    head = build(target, MtpConfig())
    settings = TrainConfig(
        epochs=60, learning_rate=2e-3, decay=1.0, loss_vocabulary=4096, validations=1, checkpoints=1
    )
    train(
        target,
        head,
        store,
        store,
        settings,
        Accelerator(cpu=True, mixed_precision="bf16"),
        folder / "train",
    )
    return head


def run(target: Target, head: MtpHead, requests: list[Request]) -> list[Completion]:
    return Engine(
        target, ChainProposer(target, head, 3), EngineConfig(max_batch=3, cache_rows=2048)
    ).generate(requests)


def test_speculation_is_lossless_and_plain_decoding_is_transformers(
    target: Target, requests: list[Request], tmp_path: Path
) -> None:
    prompts = PromptSet("real", tuple(requests), {r.key: "all" for r in requests})
    result = measure_lossless(
        target,
        build(target, MtpConfig()),
        [prompts],
        EvaluateConfig(reference_prompts=3),
        EngineConfig(max_batch=2, cache_rows=2048),
        Bench(tmp_path),
    )
    assert result["different"] == [] and result["equal"] + len(result["ties"]) == 3
    assert result["transformers"]["different"] == [] and result["transformers"]["prompts"] == 3


def test_a_head_overfitted_on_one_sample_accepts_nearly_everything(
    target: Target, overfitted: MtpHead, requests: list[Request], answer: Answer
) -> None:
    (done,) = run(target, overfitted, requests[:1])
    assert done.tokens == answer.output_ids
    whole = [step for step in done.steps[:-1]]  # the last step drafts past what was trained
    assert sum(step.accepted for step in whole) / sum(len(step.drafted) for step in whole) >= 0.95


def test_the_same_head_is_lossless_on_other_prompts(
    target: Target, overfitted: MtpHead, requests: list[Request]
) -> None:
    plain = Engine(target, None, EngineConfig(max_batch=3, cache_rows=2048)).generate(requests)
    assert [c.tokens for c in run(target, overfitted, requests)] == [c.tokens for c in plain]


def test_an_exported_head_comes_back_and_drafts_the_same(
    target: Target, overfitted: MtpHead, requests: list[Request], tmp_path: Path
) -> None:
    check = export_head(overfitted, target, ExportConfig(), tmp_path / "head", {})
    assert len(check) == 6 and max(check.values()) == 0
    _, again = import_head(tmp_path / "head", target)
    assert [c.steps for c in run(target, again, requests)] == [
        c.steps for c in run(target, overfitted, requests)
    ]


def test_unpacked_weights_are_bfloat16_with_tied_embeddings(smollm2_path: Path) -> None:
    target = Target.load(smollm2_path, "bfloat16")
    assert target.dtype == torch.bfloat16
    assert target.lm_head.weight.data_ptr() == target.base.embed_tokens.weight.data_ptr()
    assert (target.layers, target.hidden_size, target.vocab_size) == (30, 576, 49152)
