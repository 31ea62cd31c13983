"""One head of each family on the real target: it can be made, trained a step, and leaves the output alone."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from mtp_train.batches.pack import Pack
from mtp_train.engine.engine import Engine, EngineConfig
from mtp_train.engine.propose import ChainProposer
from mtp_train.engine.sequences import Completion, Request
from mtp_train.heads.families import FAMILIES, build_head
from mtp_train.losses.terms import LossConfig
from mtp_train.models.target import Target
from mtp_train.train.step import RolloutModule

PROMPTS = (
    (1, 4093, 198, 1780, 536),
    (1, 9690, 198, 2683, 359, 253, 5356, 5646, 11173),
    (504, 3575),
)
SMALL = EngineConfig(max_batch=3, cache_rows=1024)
REQUESTS = [Request(str(at), prompt, 20) for at, prompt in enumerate(PROMPTS)]


@pytest.fixture(scope="module")
def target(smollm2_path: Path) -> Target:
    return Target.load(smollm2_path, "float32")


@pytest.fixture(scope="module")
def plain(target: Target) -> list[Completion]:
    return Engine(target, None, SMALL).generate(REQUESTS)


@pytest.mark.parametrize("family", FAMILIES)
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
