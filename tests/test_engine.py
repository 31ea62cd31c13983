"""The engine: lossless for good heads and bad ones, ragged batches, limits, and requests that fail alone."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from mtp_train.core.errors import UserError
from mtp_train.engine.chain import ChainProposer
from mtp_train.engine.engine import Engine, EngineConfig
from mtp_train.engine.pages import PageAllocator
from mtp_train.engine.propose import Draft, NoProposer, Proposing
from mtp_train.engine.sampling import Sampling
from mtp_train.engine.sequences import Completion, Request
from mtp_train.evaluate.lossless import compare
from mtp_train.heads.mtp import MtpConfig, build
from mtp_train.models.target import Target

SMALL = EngineConfig(max_batch=4, cache_rows=512, page_size=4, prefill_rows=64)


def requests(count: int, tokens: int = 24, **extra: object) -> list[Request]:
    generator = torch.Generator().manual_seed(6)
    lengths = torch.randint(1, 40, (count,), generator=generator).tolist()
    prompts = [tuple(torch.randint(61, (n,), generator=generator).tolist()) for n in lengths]
    return [Request(str(i), p, tokens, **extra) for i, p in enumerate(prompts)]  # type: ignore[arg-type]


class ScriptedProposer(NoProposer):
    """Drafts known tokens with chosen mistakes: never, always or sometimes accepted."""

    def __init__(
        self, drafts: int, outputs: dict[tuple[int, ...], tuple[int, ...]], wrong: set[int]
    ) -> None:
        self.drafts = self.depth = self.room = drafts
        self.texts, self.wrong = [(*prompt, *output) for prompt, output in outputs.items()], wrong

    def propose(self, step: Proposing) -> Draft:  # type: ignore[override]
        return Draft(torch.tensor([self.known(tuple(tokens)) for tokens in step.tokens]))

    def known(self, tokens: tuple[int, ...]) -> list[int]:
        at = len(tokens)
        text = next(text for text in self.texts if text[:at] == tokens)
        right = (list(text[at : at + self.drafts]) + [0] * self.drafts)[: self.drafts]
        return [(token + 1) % 61 if i in self.wrong else token for i, token in enumerate(right)]


@pytest.mark.parametrize("drafts", [1, 2, 5])
@pytest.mark.parametrize("count", [1, 3, 16])
def test_greedy_speculation_equals_plain_decoding(
    toy_target: Target, count: int, drafts: int
) -> None:
    asked = requests(count)
    plain = Engine(toy_target, None, SMALL).generate(asked)
    head = build(toy_target, MtpConfig(init="random"), seed=3)
    speculative = Engine(toy_target, ChainProposer(toy_target, head, drafts), SMALL).generate(asked)
    assert [c.tokens for c in speculative] == [c.tokens for c in plain]
    assert compare(toy_target, plain, speculative)["equal"] == count
    assert sum(len(c.steps) for c in speculative) > 0


def test_plain_decoding_equals_transformers_generate(toy_target: Target) -> None:
    from transformers import AutoModelForCausalLM, LlamaConfig

    reference = AutoModelForCausalLM.from_config(
        LlamaConfig(**toy_target.config.to_diff_dict()), attn_implementation="eager"
    ).eval()
    reference.load_state_dict(toy_target.model.state_dict())
    for done in Engine(toy_target, None, SMALL).generate(requests(5)):
        prompt = torch.tensor([done.prompt])
        theirs = reference.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            do_sample=False,
            max_new_tokens=24,
            eos_token_id=None,
            pad_token_id=0,
        )
        assert tuple(theirs[0, prompt.shape[1] :].tolist()) == done.tokens


@pytest.mark.parametrize(("wrong", "accepted"), [({0}, {0}), (set(), {3}), ({1}, {1}), ({2}, {2})])
def test_scripted_drafts_are_accepted_as_far_as_they_are_right(
    toy_target: Target, wrong: set[int], accepted: set[int]
) -> None:
    asked = requests(3)
    plain = {c.prompt: c.tokens for c in Engine(toy_target, None, SMALL).generate(asked)}
    proposer = ScriptedProposer(3, plain, wrong)
    done = Engine(toy_target, proposer, SMALL).generate(asked)
    assert [c.tokens for c in done] == [plain[c.prompt] for c in done]
    inner = [
        s.accepted for c in done for s in c.steps[:-1]
    ]  # the last step's drafts reach past the output
    assert set(inner) == accepted


def test_an_output_ends_inside_an_accepted_run(toy_target: Target) -> None:
    """A stop token and the length limit cut a run short exactly where plain decoding ends."""
    asked = requests(6)
    plain = Engine(toy_target, None, SMALL).generate(asked)
    stop = frozenset({plain[0].tokens[5], plain[2].tokens[9]})
    stopped = [Request(r.key, r.prompt, 7 if i % 2 else 24, stop) for i, r in enumerate(asked)]
    head = build(toy_target, MtpConfig(init="random"), seed=3)
    want = Engine(toy_target, None, SMALL).generate(stopped)
    got = Engine(toy_target, ChainProposer(toy_target, head, 4), SMALL).generate(stopped)
    assert [(c.tokens, c.finish) for c in got] == [(c.tokens, c.finish) for c in want]
    assert {c.finish for c in got} == {"stop", "length"}
    assert all(c.tokens[-1] in stop for c in got if c.finish == "stop")


def test_requests_that_cannot_run_fail_alone(toy_target: Target) -> None:
    limit = toy_target.max_positions
    bad = [
        Request("empty", (), 4),
        Request("long", (1,) * limit, 4),
        Request("vocabulary", (1, 99), 4),
        Request("zero", (1,), 0),
    ]
    config = EngineConfig(max_batch=2, cache_rows=2048, page_size=4)
    done = Engine(toy_target, None, config).generate([*bad[:2], *requests(2), *bad[2:]])
    assert [c.finish.split(":")[0] for c in done] == [
        "refused",
        "refused",
        "length",
        "length",
        "refused",
        "refused",
    ]
    assert "vocabulary of 61" in done[4].finish


@pytest.mark.parametrize("drafts", [0, 3])
def test_a_prompt_one_short_of_the_limit_gets_one_token(toy_target: Target, drafts: int) -> None:
    prompt = tuple(range(1, 61)) * 5
    request = Request("edge", prompt[: toy_target.max_positions - 1], 10)
    head = build(toy_target, MtpConfig(init="random"))
    proposer = ChainProposer(toy_target, head, drafts) if drafts else None
    (done,) = Engine(toy_target, proposer, EngineConfig(max_batch=1, cache_rows=1024)).generate(
        [request]
    )
    assert (len(done.tokens), done.finish) == (1, "length")


def test_pages_come_back(toy_target: Target) -> None:
    engine = Engine(toy_target, None, SMALL)
    first = engine.generate(requests(9))
    assert engine.parts.pages.fits(SMALL.cache_rows)
    assert engine.generate(requests(9)) == first


def test_a_page_allocator_refuses_more_than_it_has() -> None:
    pages = PageAllocator(4, 8)
    taken = pages.allocate(17)
    assert len(taken) == 3 and not pages.fits(9)
    with pytest.raises(UserError, match="free pages"):
        pages.allocate(9)
    pages.release(taken)
    assert sorted(pages.allocate(32)) == [0, 1, 2, 3]


def test_keys_must_be_unique_and_temperatures_not_negative(toy_target: Target) -> None:
    with pytest.raises(UserError, match="unique"):
        Engine(toy_target, None, SMALL).generate([Request("a", (1,), 2), Request("a", (2,), 2)])
    with pytest.raises(UserError, match="temperature"):
        Sampling(-1.0)


def test_a_script_stands_for_the_targets_choices(toy_target: Target) -> None:
    script = (7, 3, 50, 21, 8)
    (done,) = Engine(toy_target, None, SMALL).generate([Request("s", (1, 2, 3), 5, script=script)])
    assert done.tokens == script
    (refused,) = Engine(toy_target, None, SMALL).generate(
        [Request("s", (1, 2, 3), 5, script=script)], Sampling(1.0)
    )
    assert refused.finish.startswith("refused")


@pytest.mark.parametrize("drafts", [0, 2])
def test_a_source_is_served_while_it_grows(toy_target: Target, drafts: int) -> None:
    """Each completion brings its continuation; nothing is asked for that there is no room for."""
    head = build(toy_target, MtpConfig(init="random"), seed=3)
    proposer = ChainProposer(toy_target, head, drafts) if drafts else None
    waiting, done, open_now = requests(7, tokens=5), [], 0

    def source() -> Request | None:
        nonlocal open_now
        if not waiting:
            return None
        open_now += 1
        assert open_now <= SMALL.max_batch + 1, "one may stand in line beside those that run"
        return waiting.pop(0)

    def finish(completion: Completion) -> None:
        nonlocal open_now
        open_now -= 1
        done.append(completion)
        if "+" not in completion.key:
            longer = completion.prompt + completion.tokens
            waiting.append(Request(f"{completion.key}+", longer, 4))

    engine = Engine(toy_target, proposer, SMALL)
    engine.serve(source, finish)
    assert len(done) == 14 and engine.stats.tokens == 7 * 9
    whole = {c.key: c.tokens for c in Engine(toy_target, None, SMALL).generate(requests(7, 9))}
    by_key = {completion.key: completion for completion in done}
    assert {key: by_key[key].tokens + by_key[f"{key}+"].tokens for key in whole} == whole
    assert engine.parts.pages.fits(SMALL.cache_rows)


@pytest.mark.parametrize("drafts", [0, 3])
def test_the_draws_of_a_seeded_request_are_its_own(toy_target: Target, drafts: int) -> None:
    """Whoever it runs with, in whatever order; the others share the run's generator as ever."""
    head = build(toy_target, MtpConfig(init="random"), seed=3)

    def sampled(asked: list[Request], batch: int, seed: int = 0) -> dict[str, tuple[int, ...]]:
        proposer = ChainProposer(toy_target, head, drafts) if drafts else None
        config = EngineConfig(max_batch=batch, cache_rows=512, page_size=4, prefill_rows=64)
        done = Engine(toy_target, proposer, config).generate(asked, Sampling(1.0, seed))
        return {completion.key: completion.tokens for completion in done}

    plain = requests(6, tokens=12)
    seeded = [replace(request, seed=at) for at, request in enumerate(plain)]
    alone = sampled(seeded, batch=1)
    assert sampled(seeded[::-1], batch=4, seed=1) == alone
    mixed = sampled([*plain[:3], *seeded[3:]], batch=6)
    assert all(mixed[request.key] == alone[request.key] for request in seeded[3:])
    other = sampled([replace(request, seed=100) for request in plain], batch=6)
    assert all(other[key] != alone[key] for key in alone)
    assert sampled(plain, batch=6) != sampled(plain, batch=6, seed=1)
