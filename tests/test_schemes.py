"""Every drafting scheme, greedy: it says what plain decoding says, token for token, in every kind of batch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from head_variants import make_variant
from toy_families import toy

from mtp_train.core.errors import UserError
from mtp_train.engine.adaptive import AdaptiveProposer, StepCosts, paying
from mtp_train.engine.branch import TreeConfig, TreeProposer
from mtp_train.engine.chain import ChainProposer
from mtp_train.engine.engine import Engine, EngineConfig
from mtp_train.engine.ngram import NgramProposer
from mtp_train.engine.propose import Draft, Proposer, Proposing
from mtp_train.engine.sampling import Sampling
from mtp_train.engine.sequences import Completion, Request
from mtp_train.models.target import Target

ROOMY = EngineConfig(max_batch=4, cache_rows=1024, page_size=4, prefill_rows=64)
# A prompt takes several forwards; a running sequence is in most of them.
CHUNKED = replace(ROOMY, prefill_rows=7)
# Sequences take pages from each other.
SCARCE = replace(ROOMY, cache_rows=96)
CONFIGS = {
    "roomy": ROOMY,
    "chunked": CHUNKED,
    "scarce": SCARCE,
    "both": replace(SCARCE, prefill_rows=7),
    "normal-when-mixed": replace(CHUNKED, mixed_drafts=False),
    "plain-order": replace(CHUNKED, order="plain"),
    "no-sharing": replace(SCARCE, share_prefixes=False),
}
DYNAMIC = TreeConfig("dynamic", drafts=7, depth=3, top_k=3)
FIXED = TreeConfig("fixed", drafts=7, depth=3, top_k=3)
COSTS = (1.0, 1.3, 1.55, 2.0)  # seconds of a step with 0 to 3 drafts: some pay, some don't
Scheme = Callable[[Target], Proposer]
SCHEMES: dict[str, Scheme] = {
    "mtp-1": lambda target: ChainProposer(target, make_variant(target, "mtp"), 1),
    "mtp-3": lambda target: ChainProposer(target, make_variant(target, "mtp"), 3),
    "mtp-modules": lambda target: ChainProposer(target, make_variant(target, "mtp-3-modules"), 3),
    "mtp-window": lambda target: ChainProposer(
        target, make_variant(target, "mtp-2-modules-window"), 3
    ),
    "mtp-part": lambda target: ChainProposer(target, make_variant(target, "mtp-part"), 3),
    "mtp-layers": lambda target: ChainProposer(
        target, make_variant(target, "mtp-2-layers", seed=3), 3
    ),
    "mtp-dynamic": lambda target: TreeProposer(target, make_variant(target, "mtp"), DYNAMIC),
    "eagle-chain": lambda target: ChainProposer(target, make_variant(target, "eagle"), 3),
    "eagle-fixed": lambda target: TreeProposer(
        target, make_variant(target, "eagle-2-layers"), FIXED
    ),
    "eagle-dynamic": lambda target: TreeProposer(target, make_variant(target, "eagle"), DYNAMIC),
    "eagle-window": lambda target: TreeProposer(
        target, make_variant(target, "eagle-window"), DYNAMIC
    ),
    "eagle-part": lambda target: TreeProposer(target, make_variant(target, "eagle-part"), DYNAMIC),
    "eagle3-chain": lambda target: ChainProposer(target, make_variant(target, "eagle3"), 3),
    "eagle3-dynamic": lambda target: TreeProposer(
        target, make_variant(target, "eagle3-2-layers"), DYNAMIC
    ),
    "medusa-chain": lambda target: ChainProposer(target, make_variant(target, "medusa"), 3),
    "medusa-fixed": lambda target: TreeProposer(target, make_variant(target, "medusa"), FIXED),
    "medusa-dynamic": lambda target: TreeProposer(target, make_variant(target, "medusa"), DYNAMIC),
    "draft-model": lambda target: ChainProposer(target, make_variant(target, "draft_model"), 3),
    "draft-model-tree": lambda target: TreeProposer(
        target, make_variant(target, "draft_model"), DYNAMIC
    ),
    "peagle": lambda target: ChainProposer(target, make_variant(target, "peagle"), 3),
    "peagle-llama": lambda target: ChainProposer(target, make_variant(target, "peagle-llama"), 2),
    "dflash": lambda target: ChainProposer(target, make_variant(target, "dflash"), 3),
    "dflash-window": lambda target: ChainProposer(target, make_variant(target, "dflash-window"), 2),
    "dspark": lambda target: ChainProposer(target, make_variant(target, "dspark"), 3),
    "dspark-adaptive": lambda target: AdaptiveProposer(
        target, make_variant(target, "dspark"), 3, StepCosts({1: COSTS, 4: COSTS})
    ),
    "mtp-adaptive": lambda target: AdaptiveProposer(
        target, make_variant(target, "mtp"), 3, table={1: 3, 2: 0, 3: 1, 4: 2}
    ),
    "ngram": lambda _target: NgramProposer(3, longest=2, shortest=1),
}


def requests(count: int, tokens: int = 20, longest: int = 30) -> list[Request]:
    generator = torch.Generator().manual_seed(11)
    lengths = torch.randint(1, longest, (count,), generator=generator).tolist()
    return [
        Request(str(i), tuple(torch.randint(61, (n,), generator=generator).tolist()), tokens)
        for i, n in enumerate(lengths)
    ]


@pytest.fixture(scope="module")
def plain(toy_target: Target) -> list[Completion]:
    return Engine(toy_target, None, ROOMY).generate(requests(16))


@pytest.mark.parametrize("count", [1, 3, 16])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_greedy_output_is_plain_decodings(
    toy_target: Target, plain: list[Completion], scheme: str, count: int
) -> None:
    config = replace(ROOMY, max_batch=max(count, 4))
    done = Engine(toy_target, SCHEMES[scheme](toy_target), config).generate(requests(16)[:count])
    assert [c.tokens for c in done] == [c.tokens for c in plain[:count]]
    assert sum(len(c.steps) for c in done) > 0


@pytest.mark.parametrize("name", [name for name in CONFIGS if name != "roomy"])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_joining_leaving_and_yielding_change_nothing(
    toy_target: Target, plain: list[Completion], scheme: str, name: str
) -> None:
    engine = Engine(toy_target, SCHEMES[scheme](toy_target), CONFIGS[name])
    done = engine.generate(requests(16))
    assert [c.tokens for c in done] == [c.tokens for c in plain]
    assert engine.parts.pages.available == engine.parts.pages.pages
    if CONFIGS[name].cache_rows == SCARCE.cache_rows:
        assert engine.stats.preempted > 0


@pytest.mark.parametrize("name", ["both", "no-sharing"])
@pytest.mark.parametrize(
    "variant",
    [
        "mtp-2-modules-window",
        "mtp-2-modules-2-layers",
        "mtp-part",
        "eagle-window",
        "eagle3-window",
        "peagle-window",
        "dflash-window",
    ],
)
def test_drafts_do_not_depend_on_chunks_yielding_or_shared_pages(
    toy_target: Target, variant: str, name: str
) -> None:
    """Outputs are the target's whatever a head drafts: here its own cached rows are held, windows' edges with them."""
    common = torch.randint(61, (13,), generator=torch.Generator().manual_seed(3)).tolist()
    shown = [replace(r, prompt=(*common, *r.prompt)) for r in requests(8)]
    found = []
    for config in (replace(ROOMY, max_batch=1, share_prefixes=False), CONFIGS[name]):
        engine = Engine(
            toy_target, ChainProposer(toy_target, make_variant(toy_target, variant), 3), config
        )
        found.append([drafts_by_place(one) for one in engine.generate(shown)])
    assert engine.stats.preempted > 0
    shared = [
        (a[place], b[place]) for a, b in zip(*found, strict=True) for place in a if place in b
    ]
    assert len(shared) > 0.8 * sum(map(len, found[0]))
    assert all(one == other for one, other in shared)


def drafts_by_place(done: Completion) -> dict[int, tuple[int, ...]]:
    """What was drafted, by how many tokens were there."""
    place, found = 1, {}
    for step in done.steps:
        found[place] = tuple(step.drafted)
        place += 1 + step.accepted
    return found


LIKELY = [name for name in SCHEMES if not name.startswith(("medusa", "dflash", "dspark"))]


@pytest.mark.parametrize("scheme", LIKELY)
def test_some_drafts_of_a_likely_head_are_accepted(toy_target: Target, scheme: str) -> None:
    """A tree's accepted paths leave the root's best child, and cached rows move: else little of it is tested."""
    engine = Engine(toy_target, SCHEMES[scheme](toy_target), ROOMY)
    steps = [step for c in engine.generate(requests(16, 40)) for step in c.steps]
    assert sum(step.accepted for step in steps) > 0
    assert all(
        step.nodes == engine.proposer.drafts
        for step in steps
        if scheme not in ("ngram", "mtp-adaptive")
    )


@pytest.mark.parametrize("order", ["overlapped", "plain"])
@pytest.mark.parametrize("scheme", [name for name in SCHEMES if "adaptive" not in name])
def test_seeded_draws_do_not_depend_on_batch_or_order(
    toy_target: Target, scheme: str, order: str
) -> None:
    asked = [replace(r, seed=at) for at, r in enumerate(requests(6, 12))]

    def drawn(config: EngineConfig, shown: list[Request]) -> dict[str, tuple[int, ...]]:
        engine = Engine(toy_target, SCHEMES[scheme](toy_target), config)
        return {c.key: c.tokens for c in engine.generate(shown, Sampling(1.0, top_k=20))}

    alone = drawn(replace(ROOMY, max_batch=1), asked)
    assert drawn(replace(CHUNKED, order=order), asked[::-1]) == alone


@pytest.mark.parametrize("name", ["gemma3", "deepseek_v2", "gpt_oss", "mistral"])
@pytest.mark.parametrize("kind", [DYNAMIC, FIXED], ids=["dynamic", "fixed"])
def test_trees_over_windows_caps_sinks_and_latent_keys(name: str, kind: TreeConfig) -> None:
    target = toy(name)
    want = Engine(target, None, ROOMY).generate(requests(6))
    proposer = TreeProposer(target, make_variant(target, "mtp"), kind)
    done = Engine(target, proposer, CHUNKED).generate(requests(6))
    assert [c.tokens for c in done] == [c.tokens for c in want]


def test_a_tree_accepts_what_a_chain_misses(toy_target: Target) -> None:
    """Breadth pays: of the same head more drafts are accepted per step."""

    def accepted(proposer: Proposer) -> float:
        done = Engine(toy_target, proposer, ROOMY).generate(requests(16, 60))
        steps = [step for c in done for step in c.steps]
        return sum(step.accepted for step in steps) / len(steps)

    head = make_variant(toy_target, "mtp")
    chain = accepted(ChainProposer(toy_target, head, 3))
    tree = accepted(TreeProposer(toy_target, head, TreeConfig("dynamic", 24, 3, 8)))
    assert tree > chain


def test_trees_that_cannot_be_are_refused(toy_target: Target) -> None:
    with pytest.raises(UserError, match="kind"):
        TreeConfig("wide")
    with pytest.raises(UserError, match="2 to 6 drafts"):
        TreeConfig("dynamic", drafts=7, depth=2, top_k=2)
    with pytest.raises(UserError, match="one module"):
        TreeProposer(toy_target, make_variant(toy_target, "mtp-2-modules"), DYNAMIC)
    with pytest.raises(UserError, match="3 tokens at most"):
        TreeProposer(toy_target, make_variant(toy_target, "medusa"), TreeConfig("fixed", 8, 4, 3))


def test_prompt_lookup_drafts_what_followed() -> None:
    proposer = NgramProposer(3, longest=3, shortest=2)
    assert proposer.lookup([1, 2, 3, 9, 8, 7, 1, 2, 3]) == [9, 8, 7]
    assert proposer.lookup([5, 1, 2, 6, 1, 2, 7, 1, 2]) == [7, 1, 2], "the latest"
    assert proposer.lookup([4, 2, 3, 9, 1, 2, 3]) == [9, 1, 2]
    assert proposer.lookup([1, 2, 3]) == [] and proposer.lookup([1]) == []
    assert proposer.lookup([7, 7, 7]) == [7]
    with pytest.raises(UserError, match="shortest"):
        NgramProposer(3, longest=1, shortest=2)


@pytest.mark.parametrize("kind", ["dynamic", "fixed"])
@pytest.mark.parametrize("family", ["mtp", "eagle", "eagle3", "draft_model"])
def test_a_trees_best_branch_is_the_chain(
    toy_target: Target, family: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The best child of the best child is what the chain drafts: a draft's row sees its ancestors, in their places."""
    head = make_variant(toy_target, family)
    with torch.no_grad():
        for name, weight in head.named_parameters():
            if name.endswith(("v_proj.weight", "o_proj.weight")):
                weight.mul_(6)  # what it attends to decides
    asked = requests(12, tokens=2)
    config = replace(ROOMY, max_batch=1)
    chain = Engine(toy_target, ChainProposer(toy_target, head, 4), config).generate(asked)
    tree = TreeConfig(kind, drafts=30, depth=4, top_k=3)
    seen: list[Draft] = []
    long = 0
    propose = TreeProposer.propose

    def kept(self: TreeProposer, step: Proposing) -> Draft:
        seen.append(propose(self, step))
        return seen[-1]

    monkeypatch.setattr(TreeProposer, "propose", kept)
    for request, done in zip(asked, chain, strict=True):
        seen.clear()
        Engine(toy_target, TreeProposer(toy_target, head, tree), config).generate([request])
        first, branch, at = seen[0], [], 0
        assert first.parent_BN is not None
        parents = first.parent_BN[0].tolist()
        while at in parents:
            at = parents.index(at) + 1
            branch.append(int(first.token_BN[0, at - 1]))
        drafted = done.steps[0].drafted[: len(branch)]
        assert tuple(branch) == drafted
        long += len(branch) >= 3
    assert long > len(asked) // 2, (
        "a dynamic tree reads the best branch on as long as it is among the best"
    )


def test_drafts_are_verified_as_long_as_they_pay() -> None:
    """Tokens a second with 0 to 3 drafts: 1, 1.8 / 1.2 = 1.5, 2.3 / 1.4 = 1.64, 2.5 / 1.6 = 1.56."""
    assert paying([0.8, 0.5, 0.2], [1.0, 1.2, 1.4, 1.6]) == 2
    assert paying([0.1, 0.1, 0.1], [1.0, 1.2, 1.4, 1.6]) == 0
    assert paying([1.0, 1.0, 1.0], [1.0, 1.2, 1.4, 1.6]) == 3


def test_an_adaptive_chain_has_steps_of_several_lengths(toy_target: Target) -> None:
    proposer = SCHEMES["dspark-adaptive"](toy_target)
    torch.nn.init.normal_(proposer.head.confidence_head.proj.weight)  # type: ignore[attr-defined]
    done = Engine(toy_target, proposer, ROOMY).generate(requests(16))
    lengths = {len(step.drafted) for completion in done for step in completion.steps}
    assert len(lengths) > 1 and sum(completion.undrafted for completion in done) > 0


def test_an_adaptive_scheme_says_what_it_needs(toy_target: Target) -> None:
    for variant, missing in (("dspark", "measured costs"), ("mtp", "table of drafts")):
        with pytest.raises(UserError, match=missing):
            AdaptiveProposer(toy_target, make_variant(toy_target, variant), 3)
