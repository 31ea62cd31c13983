"""The engine's runtime: queues, pages that run out, pages that are shared, requests that end early or fail alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from head_variants import make_variant
from test_schemes import SCHEMES, requests
from toys import make_lively_target, make_tokenizer

from mtp_train.attention.packed import PackedContext
from mtp_train.engine.chain import ChainProposer
from mtp_train.engine.engine import Engine, EngineConfig
from mtp_train.engine.pages import PageAllocator
from mtp_train.engine.sampling import Sampling
from mtp_train.engine.sequences import Completion, Request
from mtp_train.engine.step import NOT_FINITE, Step
from mtp_train.models.target import Target
from mtp_train.text.stopping import StopStrings

SMALL = EngineConfig(max_batch=4, cache_rows=1024, page_size=4, prefill_rows=64)
SOME = ("mtp-3", "eagle-dynamic", "draft-model", "ngram")


def plain(target: Target, asked: list[Request], **changes: Any) -> list[Completion]:
    return Engine(target, None, replace(SMALL, **changes)).generate(asked)


@pytest.mark.parametrize("scheme", ["mtp-3", "mtp-dynamic"])
def test_a_thousand_queued_requests_of_mixed_lengths(toy_target: Target, scheme: str) -> None:
    """Prompts of 1 to 60 tokens, in chunks, by turns over too few pages; each is what it is alone."""
    generator = torch.Generator().manual_seed(5)
    sizes = torch.randint(1, 60, (1000, 2), generator=generator).tolist()
    asked = [
        Request(str(at), tuple(torch.randint(61, (n,), generator=generator).tolist()), 1 + new // 2)
        for at, (n, new) in enumerate(sizes)
    ]
    crowded = EngineConfig(max_batch=48, cache_rows=800, page_size=4, prefill_rows=100)
    engine = Engine(toy_target, SCHEMES[scheme](toy_target), crowded)
    done = engine.generate(asked)
    roomy = EngineConfig(max_batch=128, cache_rows=16384, share_prefixes=False)
    want = Engine(toy_target, None, roomy).generate(asked)
    assert [c.tokens for c in done] == [c.tokens for c in want]
    assert engine.stats.preempted > 0
    assert engine.parts.pages.available == engine.parts.pages.pages


# --- pages --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scheme", SCHEMES)
def test_sequences_that_begin_alike_share_pages(toy_target: Target, scheme: str) -> None:
    """Among them one that is a prefix of another, and one that differs in the first token after a page."""
    base = requests(1, longest=3)[0].prompt + tuple(range(3, 40))
    prompts = [base, base[:20], (*base[:16], 60, 1, 2), base, (*base, 5), (60, *base[1:])]
    asked = [Request(str(at), prompt, 9) for at, prompt in enumerate(prompts)]
    want = plain(toy_target, asked, share_prefixes=False)
    engine = Engine(toy_target, SCHEMES[scheme](toy_target), replace(SMALL, max_batch=2))
    for _ in range(2):  # the second time all is known
        assert [c.tokens for c in engine.generate(asked)] == [c.tokens for c in want]
    shares = engine.proposer.reach is not None
    assert (engine.stats.shared_rows > 4 * len(base)) == shares
    assert engine.parts.pages.available == engine.parts.pages.pages


def test_a_head_drafts_from_shared_pages_what_it_drafts_from_its_own(toy_target: Target) -> None:
    """A page whose last row read another token after it would give other drafts, and no test of outputs sees that."""
    prompt = tuple(range(1, 34))
    asked = [Request("a", (*prompt[:16], 50, 51, 52), 6), Request("b", prompt, 12)]
    head = make_variant(toy_target, "mtp")

    def drafts(share: bool) -> list[Any]:
        config = replace(SMALL, max_batch=1, share_prefixes=share)
        engine = Engine(toy_target, ChainProposer(toy_target, head, 3), config)
        done = engine.generate(asked)
        assert bool(engine.stats.shared_rows) == share
        return [c.steps for c in done]

    assert drafts(True) == drafts(False)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_drafts_do_not_depend_on_chunks_or_shared_pages(scheme: str) -> None:
    """A head's cached row that is missing or another text's changes no output; its drafts it does."""
    target, prompt = make_lively_target(), tuple(range(1, 34))
    beginnings = [(*prompt[:16], 50, 51, 52), prompt, (*prompt[:20], 7, 8)]
    asked = [Request(str(at), begin, 12) for at, begin in enumerate(beginnings)]

    def drafts(**changes: Any) -> tuple[list[Any], list[float]]:
        config = replace(SMALL, max_batch=1, alphas=True, **changes)
        engine = Engine(target, SCHEMES[scheme](target), config)
        steps = [step for c in engine.generate(asked) for step in c.steps]
        measured = [alpha for step in steps for alpha in step.alphas]
        return [(step.drafted, step.accepted) for step in steps], measured

    want = drafts(share_prefixes=False)
    for changes in ({}, {"prefill_rows": 5}):
        found = drafts(**changes)
        assert found[0] == want[0]
        assert found[1] == pytest.approx(want[1], abs=1e-4)


def test_later_modules_read_no_row_twice_once_its_tokens_are_known(
    toy_target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    read, propose = [], ChainProposer.propose

    def watched(self: ChainProposer, step: Any) -> Any:
        read.append(max(len(rows.token_W) for rows in step.carry.waiting))
        return propose(self, step)

    monkeypatch.setattr(ChainProposer, "propose", watched)
    engine = Engine(toy_target, SCHEMES["mtp-modules"](toy_target), SMALL)
    engine.generate(requests(1))
    assert len(read) > 10
    assert max(read[1:]) <= 2 + 4, "two that wait, and what one step verifies"


@pytest.mark.parametrize("scheme", SCHEMES)
def test_who_reads_ahead_says_so(toy_target: Target, scheme: str) -> None:
    """A page is named by all that its last row read, or not at all. What a block head caches reads the state alone."""
    proposer = SCHEMES[scheme](toy_target)
    read = 0 if scheme.startswith(("dflash", "dspark")) else proposer.ahead
    assert proposer.reach in (None, read if proposer.cache_layers else proposer.reach)


def test_pages_are_found_by_all_that_they_depend_on() -> None:
    pages = PageAllocator(4, 2, reach=1)
    table = pages.allocate(6)
    tokens = [1, 2, 3, 4, 5, 6]
    assert pages.name(table, tokens, 0, 6) == 2, "the last page's next token is not known"
    assert pages.share([1, 2, 3, 4, 5]) == table[:2]
    assert pages.share([1, 2, 3, 9, 9]) == table[:1], "the second page's own tokens differ"
    assert pages.share([1, 2, 9, 4, 5]) == [], "the token after the first page differs"
    for _ in range(2):
        pages.release(table[:1])
    pages.release(table[1:2])
    pages.release(table)
    assert pages.available == 4
    taken = pages.allocate(4)  # the nameless ones first
    assert not set(taken) & set(table[:2])
    assert pages.share([1, 2, 3, 4, 5]) == table[:2]
    pages.release(table[:2])
    pages.allocate(4)
    assert pages.share([1, 2, 3, 4, 5]) == [], "names go with their pages"


def test_an_interrupted_call_gives_its_pages_back(toy_target: Target) -> None:
    engine = Engine(toy_target, None, SMALL)

    def stop(_: Completion) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        engine.generate(requests(6), on_finish=stop)
    assert engine.parts.pages.available == engine.parts.pages.pages
    assert engine.generate(requests(6)) == plain(toy_target, requests(6))


# Without what drafts by the batch's size: that differs where others wait.
@pytest.mark.parametrize("scheme", [name for name in SCHEMES if name != "mtp-adaptive"])
@pytest.mark.parametrize(
    ("sampling", "order"), [(Sampling(), "plain"), (Sampling(1.0), "overlapped")]
)
def test_who_had_to_yield_goes_on_as_if_it_had_not(
    toy_target: Target, scheme: str, sampling: Sampling, order: str
) -> None:
    """The same drafts, and draws of the request's own generator, as where there are pages for all."""
    asked = [replace(r, seed=at) for at, r in enumerate(requests(12))]
    scarce = replace(SMALL, cache_rows=96, prefill_rows=9, order=order)
    engine = Engine(toy_target, SCHEMES[scheme](toy_target), scarce)
    done = engine.generate(asked, sampling)
    assert engine.stats.preempted > 0
    want = Engine(toy_target, SCHEMES[scheme](toy_target), SMALL).generate(asked, sampling)
    assert [(c.tokens, c.steps) for c in done] == [(c.tokens, c.steps) for c in want]


# --- how outputs end ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scheme", SOME)
def test_a_stop_string_ends_an_output_where_plain_decoding_ends_it(scheme: str) -> None:
    target, tokenizer = make_lively_target(vocab_size=49), make_tokenizer()
    asked = [replace(r, prompt=tuple(t % 49 for t in r.prompt)) for r in requests(8, 40)]
    texts = [tokenizer.decode(c.tokens) for c in plain(target, asked)]
    strings = [text[at : at + 3] for text, at in zip(texts, range(3, 30, 3), strict=False)]
    stopping = [
        replace(r, ends=StopStrings(tokenizer, [string]))
        for r, string in zip(asked, strings, strict=False)
    ]
    want = plain(target, stopping)
    done = Engine(target, SCHEMES[scheme](target), SMALL).generate(stopping)
    assert [(c.tokens, c.finish) for c in done] == [(c.tokens, c.finish) for c in want]
    assert sum(c.finish == "stop" and len(c.tokens) < 40 for c in done) >= 4


@pytest.mark.parametrize("scheme", [None, *SOME])
def test_a_request_that_fails_fails_alone(toy_target: Target, scheme: str | None) -> None:
    def broken(output: tuple[int, ...]) -> None:
        if len(output) > 3:
            raise ValueError("no such thing")

    asked = requests(5)
    asked[1] = replace(asked[1], ends=broken)
    asked[3] = replace(asked[3], prompt=(1, 61))
    proposer = SCHEMES[scheme](toy_target) if scheme else None
    done = Engine(toy_target, proposer, SMALL).generate(asked)
    assert done[1].finish == "failed: its stop rule raised ValueError: no such thing"
    assert done[3].finish.startswith("refused") and "vocabulary" in done[3].finish
    rest = [0, 2, 4]
    want = plain(toy_target, [asked[at] for at in rest])
    assert [done[at].tokens for at in rest] == [c.tokens for c in want]


@pytest.mark.parametrize("scheme", [None, "mtp-3"])
def test_logits_that_are_no_numbers_fail_their_request_alone(
    toy_target: Target, scheme: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    embed, poison = toy_target.base.get_input_embeddings().forward, 60

    def poisoned(token: torch.Tensor) -> torch.Tensor:
        return torch.where((token == poison).unsqueeze(-1), torch.nan, embed(token))

    asked = [replace(r, prompt=tuple(t % 59 for t in r.prompt)) for r in requests(5)]
    asked[2] = replace(asked[2], prompt=(1, 2, poison, 3))
    want = plain(toy_target, asked)
    monkeypatch.setattr(toy_target.base.get_input_embeddings(), "forward", poisoned)
    proposer = SCHEMES[scheme](toy_target) if scheme else None
    engine = Engine(toy_target, proposer, SMALL)
    done = engine.generate(asked)
    assert done[2].finish == NOT_FINITE
    assert engine.generate(asked) == done, "its pages poison nobody who gets them next"
    rest = [at for at in (0, 1, 3, 4) if poison not in want[at].tokens]
    assert rest and [done[at].tokens for at in rest] == [want[at].tokens for at in rest]


@pytest.mark.parametrize("scheme", ["mtp-3", "mtp-dynamic"])
def test_a_draft_whose_logits_are_no_numbers_is_never_the_last_word(
    toy_target: Target, scheme: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where only an accepted draft's row overflows, as a last layer's output may: no token is chosen from it."""
    asked = requests(16, 40)
    usual = Engine(toy_target, SCHEMES[scheme](toy_target), SMALL).generate(asked)
    accepted = Counter(t for c in usual for step in c.steps for t in step.drafted[: step.accepted])
    poison = accepted.most_common(1)[0][0]

    def overflow(engine: Engine) -> list[Completion]:
        head, token = engine.parts.target.base.norm.forward, {}

        def embedded(_: Any, inputs: tuple[torch.Tensor]) -> None:
            token["T"] = inputs[0]

        def normed(state_TD: torch.Tensor) -> torch.Tensor:
            bad_T1 = (token["T"] == poison).unsqueeze(-1)
            return torch.where(bad_T1, torch.nan, head(state_TD))

        embedding = toy_target.base.get_input_embeddings()
        hook = embedding.register_forward_pre_hook(embedded)
        with monkeypatch.context() as patch:
            patch.setattr(toy_target.base.norm, "forward", normed)
            done = engine.generate(asked)
        hook.remove()
        return done

    want = overflow(Engine(toy_target, None, SMALL))
    assert sum(c.finish == NOT_FINITE for c in want) >= 1
    done = overflow(Engine(toy_target, SCHEMES[scheme](toy_target), SMALL))
    assert [c.finish for c in done] == [c.finish for c in want]
    for one, other in zip(done, want, strict=True):
        assert one.tokens == other.tokens[: len(one.tokens)]


@pytest.mark.parametrize("order", ["overlapped", "plain"])
def test_a_head_that_gives_no_numbers_costs_speed_alone(toy_target: Target, order: str) -> None:
    """One that diverged: sampled output is what it is without it, and its expected acceptance a number."""
    head = make_variant(toy_target, "mtp")
    with torch.no_grad():
        next(head.parameters()).fill_(torch.nan)
    config = replace(SMALL, order=order, alphas=True)
    engine = Engine(toy_target, ChainProposer(toy_target, head, 2), config)
    done = engine.generate(requests(16), Sampling(1.0))
    steps = [step for c in done for step in c.steps]
    assert steps and all(step.alphas[0] == step.accepted == 0 for step in steps)
    said = [token for c in done for token in c.tokens]
    assert len(set(said)) > 40, "drawn from the target, not the first token over and over"


# --- what else is asked of an output ------------------------------------------------------------------------------


@pytest.mark.parametrize("scheme", [None, *SOME])
def test_logprobs_are_the_targets_own(toy_target: Target, scheme: str | None) -> None:
    asked = [replace(r, logprobs=2) for r in requests(4)]
    proposer = SCHEMES[scheme](toy_target) if scheme else None
    for done in Engine(toy_target, proposer, replace(SMALL, prefill_rows=9)).generate(asked):
        assert len(done.logprobs) == len(done.tokens)
        text = torch.tensor(done.prompt + done.tokens)
        with torch.no_grad():
            state = toy_target.forward(text, torch.arange(len(text)), PackedContext([0, len(text)]))
            exact = toy_target.logits(state).log_softmax(-1)[len(done.prompt) - 1 : -1]
        for row, token, kept in zip(exact, done.tokens, done.logprobs, strict=True):
            assert kept.token == token
            assert kept.logprob == pytest.approx(float(row[token]), abs=1e-4)
            best = row.topk(2)
            assert [at for at, _ in kept.top] == best.indices.tolist()


@pytest.mark.parametrize("scheme", SOME)
def test_requests_have_rules_of_their_own(toy_target: Target, scheme: str) -> None:
    """Greedy, penalised and sampled ones in one batch: the first two are those of plain decoding."""
    penalty = Sampling(repetition_penalty=1.7)
    asked = [
        replace(r, sampling=[None, penalty, Sampling(1.0, top_k=5)][at % 3])
        for at, r in enumerate(requests(9))
    ]
    want = plain(toy_target, asked)
    done = Engine(toy_target, SCHEMES[scheme](toy_target), SMALL).generate(asked)
    for at in (0, 1, 3, 4, 6, 7):
        assert done[at].tokens == want[at].tokens
    assert want[1].tokens != plain(toy_target, [requests(9)[1]])[0].tokens


def test_alphas_are_measured_where_drafts_were_reached(toy_target: Target) -> None:
    head = make_variant(toy_target, "mtp")
    config = replace(SMALL, alphas=True)
    for sampling in (Sampling(), Sampling(0.8)):
        engine = Engine(toy_target, ChainProposer(toy_target, head, 3), config)
        steps = [step for c in engine.generate(requests(6), sampling) for step in c.steps]
        assert all(len(step.alphas) == min(step.accepted + 1, 3) for step in steps)
        assert all(0 <= alpha <= 1 for step in steps for alpha in step.alphas)
    drawn = [step for step in steps if step.alphas]
    mean = sum(step.alphas[0] for step in drawn) / len(drawn)
    rate = sum(step.accepted > 0 for step in drawn) / len(drawn)
    assert abs(mean - rate) < 0.15, "alpha is the chance that the first draft is accepted"


# --- the overlapped order -----------------------------------------------------------------------------------------


@contextmanager
def no_host_reads(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Whatever brings a tensor's values to the host raises."""

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("the host reads a tensor")

    with monkeypatch.context() as patch:
        for name in ("tolist", "item", "cpu", "numpy", "__bool__", "__int__", "__index__"):
            patch.setattr(torch.Tensor, name, refuse)
        yield


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(1.0)], ids=["greedy", "sampled"])
def test_nothing_is_read_between_acceptance_and_the_next_draft(
    toy_target: Target, sampling: Sampling, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Single-token MTP: verdict, the head's rows and its next draft, all without the host knowing what was accepted."""
    observe, verify, guarded = Step._observe, Step._verify, []

    def watched(self: Step, *args: Any) -> None:
        with no_host_reads(monkeypatch):
            observe(self, *args)
        guarded.append(len(args[0].decoding))
        assert all(sequence.draft is not None for sequence in args[0].decoding)

    def judged(self: Step, *args: Any) -> Any:
        with no_host_reads(monkeypatch):
            return verify(self, *args)

    monkeypatch.setattr(Step, "_observe", watched)
    monkeypatch.setattr(Step, "_verify", judged)
    engine = Engine(toy_target, SCHEMES["mtp-1"](toy_target), SMALL)
    done = engine.generate(requests(5), sampling)
    assert sum(guarded) > 20 and sum(len(c.steps) for c in done) > 20


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("sampling", [Sampling(), Sampling(1.0)], ids=["greedy", "sampled"])
def test_the_order_of_things_changes_no_token(
    toy_target: Target, scheme: str, sampling: Sampling
) -> None:
    asked = [replace(r, seed=at) for at, r in enumerate(requests(6))]
    outputs = []
    for order in ("overlapped", "plain"):
        engine = Engine(toy_target, SCHEMES[scheme](toy_target), replace(SMALL, order=order))
        outputs.append([c.tokens for c in engine.generate(asked, sampling)])
    assert outputs[0] == outputs[1]
