"""One head of each family on the real target: it can be made, trained a step, and leaves the output alone."""

from __future__ import annotations

from itertools import accumulate, pairwise
from pathlib import Path

import pytest
import torch

from mtp_train.attention.packed import PackedContext
from mtp_train.batches.pack import Pack
from mtp_train.engine.chain import ChainProposer
from mtp_train.engine.engine import Engine, EngineConfig
from mtp_train.engine.propose import Proposer
from mtp_train.engine.schemes import SchemeConfig, make_proposer
from mtp_train.engine.sequences import Completion, Request
from mtp_train.heads.base import DraftHead
from mtp_train.heads.draft_model import DraftModelConfig
from mtp_train.heads.families import FAMILIES, build_head
from mtp_train.losses.terms import LossConfig
from mtp_train.models.target import Target, load_tokenizer
from mtp_train.train.step import RolloutModule

PROMPTS = (
    (1, 4093, 198, 1780, 536),
    (1, 9690, 198, 2683, 359, 253, 5356, 5646, 11173),
    (504, 3575),
)
SMALL = EngineConfig(max_batch=3, cache_rows=1024)
LAYERS = 6  # of the draft model's
REQUESTS = [Request(str(at), prompt, 20) for at, prompt in enumerate(PROMPTS)]


@pytest.fixture(scope="module")
def target(smollm2_path: Path) -> Target:
    return Target.load(smollm2_path, "float32")


@pytest.fixture(scope="module")
def plain(target: Target) -> list[Completion]:
    return Engine(target, None, SMALL).generate(REQUESTS)


@pytest.mark.parametrize("family", [name for name in FAMILIES if name != "draft_model"])
def test_a_head_trains_a_step_and_leaves_the_output_alone(
    target: Target, plain: list[Completion], family: str
) -> None:
    counts = torch.arange(target.vocab_size) % 997
    head = build_head(target, FAMILIES[family].config(), counts_V=counts)
    generator = torch.Generator().manual_seed(0)
    names = dict.fromkeys(("post_norm", *head.states))
    states = {name: torch.randn(24, target.hidden_size, generator=generator) for name in names}
    tokens = torch.randint(target.vocab_size, (24,), generator=generator)
    pack = Pack(("one",), (0, 24), tokens, torch.ones_like(tokens), states)
    sure = {} if head.temperatures is None else {"confidence": 1.0}
    loss = LossConfig({"kl": 1.0} | sure)
    RolloutModule(head, target, loss=loss)(pack, head.steps or 3).values.loss.backward()
    assert all(weight.grad is not None for weight in head.parameters())
    torch.optim.SGD(head.parameters(), lr=1e-4).step()
    done = Engine(target, ChainProposer(target, head, 3), SMALL).generate(REQUESTS)
    assert [c.tokens for c in done] == [c.tokens for c in plain]


@pytest.fixture(scope="module")
def truncated(smollm2_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The target's first layers as a model of their own."""
    folder = tmp_path_factory.mktemp("truncated")
    small = Target.load(smollm2_path, "bfloat16")
    small.base.layers = small.base.layers[:LAYERS]
    small.config.num_hidden_layers = LAYERS
    small.config.layer_types = None
    small.model.save_pretrained(folder)
    load_tokenizer(smollm2_path).save_pretrained(folder)
    return folder


def test_a_truncated_target_is_distilled_and_leaves_the_output_alone(
    target: Target, plain: list[Completion], truncated: Path
) -> None:
    head = build_head(target, DraftModelConfig(path=str(truncated), freeze_embedding=True))
    assert head.cache_layers == LAYERS
    tokens = torch.tensor([token for done in plain for token in (*done.prompt, *done.tokens)])
    offsets = (0, *accumulate(len(done.prompt) + len(done.tokens) for done in plain))
    position = torch.cat([torch.arange(b - a) for a, b in pairwise(offsets)])
    states = target.capture(tokens, position, PackedContext(offsets), ("post_norm",))
    pack = Pack(("0", "1", "2"), offsets, tokens, torch.ones_like(tokens), states)
    module = RolloutModule(head, target, loss=LossConfig({"kl": 1.0}))
    optimizer = torch.optim.AdamW([w for w in head.parameters() if w.requires_grad], lr=3e-4)
    losses = []
    for _ in range(10):
        values = module(pack, 1).values
        values.loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(values.terms["kl"].mean()))
    assert losses[-1] < 0.4 * losses[0]
    done = Engine(target, ChainProposer(target, head, 3), SMALL).generate(REQUESTS)
    assert [c.tokens for c in done] == [c.tokens for c in plain]
    assert sum(step.accepted for c in done for step in c.steps) > 0


def likely(target: Target, family: str) -> DraftHead:
    """A head whose drafts are sometimes right: its output is the state that it is given, nearly."""
    counts = torch.arange(target.vocab_size) % 997
    head = build_head(target, FAMILIES[family].config(), counts_V=counts)
    with torch.no_grad():
        for name, weight in head.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                weight.mul_(0.3)
    return head


def scheme(name: str, target: Target, truncated: Path) -> Proposer:
    family, kind = name.split(" ")
    if family == "none":
        return make_proposer(target, None, SchemeConfig(kind, 3))
    if family == "draft_model":
        head = build_head(target, DraftModelConfig(path=str(truncated)))
    else:
        head = likely(target, family)
    drafts = {"single": 1, "chain": 3}.get(kind, 8)
    kind = "chain" if kind == "single" else kind
    return make_proposer(target, head, SchemeConfig(kind, drafts, depth=3, top_k=4))


@pytest.fixture(scope="module")
def ragged() -> list[Request]:
    """Sixteen prompts of 1 to 40 tokens, some of which repeat themselves, with outputs of 3 to 9 tokens."""
    generator = torch.Generator().manual_seed(8)
    asked = []
    for at in range(16):
        prompt = torch.randint(200, 4000, (1 + at * 5 // 2,), generator=generator).tolist()
        asked.append(Request(str(at), (*prompt, *prompt[: at % 3]), 3 + at % 7))
    return asked


@pytest.fixture(scope="module")
def said(target: Target, ragged: list[Request]) -> list[Completion]:
    return Engine(target, None, EngineConfig(max_batch=16, cache_rows=2048)).generate(ragged)


@pytest.mark.parametrize(
    "name",
    [
        "mtp single",
        "mtp chain",
        "mtp dynamic",
        "eagle chain",
        "eagle fixed",
        "eagle dynamic",
        "eagle3 chain",
        "eagle3 dynamic",
        "medusa fixed",
        "draft_model chain",
        "none ngram",
    ],
)
def test_every_scheme_leaves_the_output_alone(
    target: Target, ragged: list[Request], said: list[Completion], truncated: Path, name: str
) -> None:
    """One at a time; three places for eight requests that join and leave, prompts in chunks; sixteen at once."""
    proposer = scheme(name, target, truncated)
    for batch, asked in ((1, ragged[12:13]), (3, ragged[::2]), (16, ragged)):
        config = EngineConfig(
            max_batch=batch, cache_rows=2048, prefill_rows=24 if batch == 3 else 2048
        )
        done = Engine(target, proposer, config).generate(asked)
        want = {c.key: c.tokens for c in said}
        different = [c for c in done if c.tokens != want[c.key]]
        assert not different, batch
    if name not in ("medusa fixed", "none ngram"):  # untrained, and without anything to look up
        assert sum(step.accepted for c in done for step in c.steps) > 0
