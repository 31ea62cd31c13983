"""Training logits are the engine's logits, draft step by draft step."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from head_variants import VARIANTS, WINDOWED, make_variant
from toy_families import CONFIGS, toy

from mtp_train.attention.packed import PackedContext
from mtp_train.batches.pack import Pack
from mtp_train.engine.chain import ChainProposer
from mtp_train.engine.engine import Engine, EngineConfig
from mtp_train.engine.sequences import Request
from mtp_train.evaluate.lossless import first_difference
from mtp_train.evaluate.validation import engine_validation, names
from mtp_train.heads.base import DraftHead
from mtp_train.heads.eagle import EagleConfig
from mtp_train.heads.eagle3 import Eagle3Config
from mtp_train.heads.families import build_head
from mtp_train.heads.mtp import MtpConfig
from mtp_train.losses.terms import LossConfig
from mtp_train.models.target import Target
from mtp_train.text.sources import Answer
from mtp_train.train.metrics import ValidationSums
from mtp_train.train.step import RolloutModule

STEPS = 3
REJECTING = ("mtp", "mtp-2-modules", "mtp-3-modules", "draft_model", "peagle", "dflash", "dspark")


@pytest.fixture
def texts() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(61, (length,), generator=generator) for length in (40, 23, 31)]


@pytest.mark.parametrize("variant", VARIANTS | WINDOWED)
def test_training_logits_equal_the_engines_at_draft_steps_1_to_3(
    toy_target: Target, texts: list[torch.Tensor], variant: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    hold_engine_against_training(toy_target, make_variant(toy_target, variant), texts, monkeypatch)


@pytest.mark.parametrize("config", [MtpConfig, EagleConfig, Eagle3Config])
@pytest.mark.parametrize("block", ["target", "llama"])
def test_training_logits_equal_the_engines_for_a_target_with_q_and_k_norms(
    texts: list[torch.Tensor], config: Any, block: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = Target.from_config(CONFIGS["qwen3"], seed=1)
    head = build_head(target, config(block=block), 3, torch.arange(target.vocab_size))
    assert ("block.self_attn.q_norm.weight" in head.state_dict()) == (block == "target")
    hold_engine_against_training(target, head, texts, monkeypatch)


TRAITS = [name for name in CONFIGS if name not in ("llama", "mistral", "qwen2", "qwen3")]


@pytest.mark.parametrize(
    "config",
    [MtpConfig(), MtpConfig(modules=2), EagleConfig()],
    ids=["mtp", "mtp-2-modules", "eagle"],
)
@pytest.mark.parametrize("name", TRAITS)
def test_training_logits_equal_the_engines_for_every_target(
    texts: list[torch.Tensor], name: str, config: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Windows, caps, sinks, latent keys and values, experts: also where a draft's window leaves rows behind."""
    hold_engine_against_training(toy(name), build_head(toy(name), config, 3), texts, monkeypatch)


@pytest.mark.parametrize(
    "config", [MtpConfig(block="llama"), Eagle3Config(block="llama")], ids=["mtp", "eagle3"]
)
@pytest.mark.parametrize("name", ["gemma3", "deepseek_v2", "gpt_oss"])
def test_a_llama_block_beside_another_kind_of_layer(
    texts: list[torch.Tensor], name: str, config: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = replace(config, init="random")
    head = build_head(toy(name), config, 3, torch.arange(61))
    hold_engine_against_training(toy(name), head, texts, monkeypatch)


def hold_engine_against_training(
    toy_target: Target, head: DraftHead, texts: list[torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine follows scripted texts and drafts their very tokens, so that each chain's inputs are training's."""
    prompts = [5, 2, 9]
    recorded: list[torch.Tensor] = []
    served = Engine(
        toy_target,
        ChainProposer(toy_target, head, STEPS),
        EngineConfig(max_batch=3, cache_rows=1024, page_size=4),
    )
    starts = [p - head.ahead for p in prompts]  # row of each sequence whose output is carried
    visited: list[tuple[int, int, int]] = []

    def scripted(_: ChainProposer, logits: torch.Tensor, *__: object) -> tuple[torch.Tensor, None]:
        if len(logits) != len(texts):
            return logits.argmax(-1), None
        step = len(recorded) % STEPS
        recorded.append(logits)
        rows = [start + (len(recorded) - 1) // STEPS * (STEPS + 1) for start in starts]
        visited.extend((index, row, step) for index, row in enumerate(rows))
        return torch.stack(
            [
                text[min(row + 1 + head.ahead + step, len(text) - 1)]
                for text, row in zip(texts, rows, strict=True)
            ]
        ), None

    requests = [
        Request(str(i), tuple(t[:p].tolist()), 12, script=tuple(t[p:].tolist()))
        for i, (t, p) in enumerate(zip(texts, prompts, strict=True))
    ]
    monkeypatch.setattr(ChainProposer, "_choose", scripted)
    done = served.generate(requests)
    assert all(step.accepted == STEPS for completion in done for step in completion.steps), (
        "the drafts are the script"
    )

    offsets = [0, 40, 63, 94]
    tokens = torch.cat(texts)
    states = captured_states(toy_target, texts, head.states)
    outs = training_logits(toy_target, head, tokens, offsets, states, STEPS)
    compared = 0
    for call, logits in enumerate(recorded):
        for index in range(len(texts)):
            _, row, step = visited[call * len(texts) + index]
            torch.testing.assert_close(
                logits[index], outs[offsets[index] + row, step], atol=2e-5, rtol=1e-4
            )
            compared += 1
    assert compared >= 3 * STEPS * len(texts)


@pytest.mark.parametrize("drafts", [2, 3, 4])
@pytest.mark.parametrize("variant", REJECTING)
def test_training_logits_equal_the_engines_after_rejected_drafts(
    toy_target: Target, variant: str, drafts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows that a later module ran on rejected drafts must be run anew, also of prompts shorter than its lag.

    The engine follows one scripted text from prompts of 1 to 6 tokens, each with mistakes of its own; logits are held
    against training's up to the first mistake of each chain.
    """
    head = make_variant(toy_target, variant)
    drafts = min(drafts, head.steps or drafts)
    text = torch.randint(61, (40,), generator=torch.Generator().manual_seed(2))
    prompts = [1, 2, 3, 6]
    rows = [p - head.ahead for p in prompts]  # row of each sequence whose output is carried
    seen: list[tuple[int, int, torch.Tensor]] = []
    calls = [0]

    def scripted(_: ChainProposer, logits: torch.Tensor, *__: object) -> tuple[torch.Tensor, None]:
        if len(logits) != len(prompts):  # one has ended
            return logits.argmax(-1), None
        turn, step = divmod(calls[0], drafts)
        calls[0] += 1
        wrong = [(turn + index) % (drafts + 1) for index in range(len(prompts))]
        chosen = []
        for index, row in enumerate(rows):
            right = int(text[row + 1 + head.ahead + step])
            chosen.append((right + 1) % 61 if step >= wrong[index] else right)
            if step <= wrong[index]:
                seen.append((row, step, logits[index]))
        if step == drafts - 1:
            rows[:] = [row + 1 + bad for row, bad in zip(rows, wrong, strict=True)]
        return torch.tensor(chosen), None

    monkeypatch.setattr(ChainProposer, "_choose", scripted)
    served = Engine(
        toy_target,
        ChainProposer(toy_target, head, drafts),
        EngineConfig(max_batch=4, cache_rows=1024, page_size=4),
    )
    script = text.tolist()
    served.generate(
        Request(str(p), tuple(script[:p]), 24, script=tuple(script[p:])) for p in prompts
    )
    states = captured_states(toy_target, [text], head.states)
    outs = training_logits(toy_target, head, text, [0, 40], states, drafts)
    for row, step, logits in seen:
        torch.testing.assert_close(logits, outs[row, step], atol=2e-5, rtol=1e-4)
    assert len(seen) > 20


def training_logits(
    target: Target,
    head: DraftHead,
    tokens: torch.Tensor,
    offsets: list[int],
    states: dict[str, torch.Tensor],
    steps: int,
) -> dict[tuple[int, int], torch.Tensor]:
    """Logits of every chain that predicts something, by the row where it starts and the draft step."""
    aligned = head.align(tokens, torch.ones_like(tokens), offsets, steps)
    found: dict[tuple[int, int], torch.Tensor] = {}
    with torch.no_grad():
        unrolled = head.unroll(target, aligned, states)
        for step, read_NE in enumerate(unrolled.read_SNE):
            logits_NU = head.project(target, read_NE, step)
            if unrolled.bias is not None:
                logits_NU = logits_NU + unrolled.bias[0][step] @ unrolled.bias[1].T
            valid_N = aligned.valid_SN[step]
            rows = aligned.source_SN[step][valid_N].tolist()
            found |= {(row, step): one for row, one in zip(rows, logits_NU[valid_N], strict=True)}
    return found


def captured_states(
    target: Target, texts: list[torch.Tensor], names: tuple[str, ...]
) -> dict[str, torch.Tensor]:
    """Named states of packed texts, the post-norm ones with them."""
    offsets = [0, *torch.tensor([len(text) for text in texts]).cumsum(0).tolist()]
    positions = torch.cat([torch.arange(len(text)) for text in texts])
    with torch.no_grad():
        return target.capture(
            torch.cat(texts), positions, PackedContext(offsets), ("post_norm", *names)
        )


@pytest.mark.parametrize("variant", VARIANTS | WINDOWED)
def test_validation_through_the_engine_equals_the_trainers(
    toy_target: Target, texts: list[torch.Tensor], variant: str
) -> None:
    head = make_variant(toy_target, variant)
    answers = [
        Answer(str(i), "all", (), tuple(t[:7].tolist()), tuple(t[7:].tolist()), "stop")
        for i, t in enumerate(texts)
    ]
    trainers = trainers_validation(toy_target, head, texts, STEPS)
    ours = engine_validation(toy_target, head, answers, STEPS)
    assert set(ours) == set(trainers) == set(names(STEPS))
    for name, value in trainers.items():
        exact = name.startswith(("agree", "prefix", "tau"))
        assert ours[name] == pytest.approx(value, abs=1e-6 if exact else 1e-9, rel=1e-4), name


@pytest.mark.parametrize("name", TRAITS)
def test_validation_at_every_depth_for_every_target(
    texts: list[torch.Tensor], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Windows, sinks and latent keys, with chains cut into parts that draft at once."""
    from mtp_train.evaluate import validation

    head = build_head(toy(name), MtpConfig(modules=2), 3)
    answers = [
        Answer(str(i), "all", (), tuple(t[:7].tolist()), tuple(t[7:].tolist()), "stop")
        for i, t in enumerate(texts)
    ]
    whole = engine_validation(toy(name), head, answers, 4)
    monkeypatch.setattr(validation, "CHAINS", 5)
    assert engine_validation(toy(name), head, answers, 4) == pytest.approx(whole, rel=1e-5)
    again = trainers_validation(toy(name), head, texts, 4)
    assert whole == pytest.approx(again, rel=1e-3, abs=1e-4)


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_acceptance_over_a_part_of_the_targets_lm_head(
    texts: list[torch.Tensor], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By hand: the head's chances are over its tokens, capped as the target's, p is over the whole vocabulary."""
    target = toy(name)
    head = build_head(target, MtpConfig(draft_vocabulary=30), 3, torch.arange(61) % 7)
    text, vocabulary = texts[0], head.vocabulary
    assert vocabulary is not None and len(vocabulary) == 30
    hold_engine_against_training(target, head, texts, monkeypatch)
    states = captured_states(target, [text], head.states)
    logits = training_logits(target, head, text, [0, len(text)], states, 1)
    alphas, agreed = [], []
    for row in range(6, len(text) - 2):  # predicts tokens 8, 9, ...
        p = target.logits(states["post_norm"][row + 1]).softmax(-1)
        alphas.append(float(torch.minimum(p[vocabulary], logits[row, 0].softmax(-1)).sum()))
        agreed.append(float(p.argmax() == vocabulary[logits[row, 0].argmax()]))
    answer = Answer("0", "all", (), tuple(text[:8].tolist()), tuple(text[8:].tolist()), "stop")
    found = engine_validation(target, head, [answer], 1)
    assert found["alpha/1"] == pytest.approx(sum(alphas) / len(alphas), rel=1e-4)
    assert found["agree/1"] == pytest.approx(sum(agreed) / len(agreed))
    engines = engine_validation(target, head, answers_of(texts), STEPS)
    assert engines == pytest.approx(trainers_validation(target, head, texts, STEPS), rel=1e-3)


def answers_of(texts: list[torch.Tensor]) -> list[Answer]:
    """Their tokens from the eighth on are the answer's."""
    return [
        Answer(str(i), "all", (), tuple(t[:7].tolist()), tuple(t[7:].tolist()), "stop")
        for i, t in enumerate(texts)
    ]


def trainers_validation(
    target: Target, head: DraftHead, texts: list[torch.Tensor], steps: int
) -> dict[str, float]:
    """What `train` reports of these texts, whose tokens from the eighth on are the answer's."""
    mask = torch.cat([(torch.arange(len(t)) >= 7).long() for t in texts])
    states = captured_states(target, texts, head.states)
    pack = Pack(("0", "1", "2"), (0, 40, 63, 94), torch.cat(texts), mask, states)
    sums = ValidationSums(steps)
    with torch.no_grad():
        module = RolloutModule(head, target, loss=LossConfig({"kl": 1.0}))
        sums.add(module(pack, steps, measure=True))
    return sums.summary()


def test_the_first_difference_of_two_outputs() -> None:
    assert first_difference((1, 2, 3), (1, 5, 3)) == 1
    assert first_difference((1, 2), (1, 2, 3)) == 2
