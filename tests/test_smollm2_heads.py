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
from mtp_train.engine.sequences import Completion, Request
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
    RolloutModule(head, target, loss=LossConfig({"kl": 1.0}))(pack, 3).values.loss.backward()
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
