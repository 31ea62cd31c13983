"""The family of docs/adding_a_head.md, taken from the page: it trains, drafts as it trains, and stays lossless."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from test_parity import hold_engine_against_training, trainers_validation
from toys import make_lively_target
from yaml import safe_load

from mtp_train.engine.engine import Engine, EngineConfig
from mtp_train.engine.schemes import SchemeConfig, make_proposer
from mtp_train.engine.sequences import Request
from mtp_train.evaluate.validation import engine_validation
from mtp_train.heads import families
from mtp_train.heads.families import FAMILIES, Family, build_head, make_head
from mtp_train.models.target import Target
from mtp_train.text.sources import Answer
from mtp_train.train.cost import kept_for_backward

PAGE = (Path(__file__).parents[1] / "docs" / "adding_a_head.md").read_text(encoding="utf-8")


@pytest.fixture
def hydra(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The page's module, entered as the page says."""
    source, entry = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    module = ModuleType("hydra")
    monkeypatch.setitem(sys.modules, "hydra", module)
    exec(compile(source, "adding_a_head.md", "exec"), module.__dict__)
    with monkeypatch.context():
        monkeypatch.setattr(families, "FAMILIES", dict(FAMILIES))
        exec(entry, {"FAMILIES": families.FAMILIES, "Family": Family, "hydra": module})
        yield module


@pytest.fixture
def texts() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(61, (length,), generator=generator) for length in (40, 23, 31)]


def shaken(target: Target, module: Any) -> Any:
    head = build_head(target, module.HydraConfig())
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.normal_(std=0.1, generator=torch.Generator().manual_seed(1))
    return head


def test_its_training_logits_are_the_engines(
    hydra: Any, toy_target: Target, texts: list[torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    hold_engine_against_training(toy_target, shaken(toy_target, hydra), texts, monkeypatch)


def test_its_validation_is_the_engines(
    hydra: Any, toy_target: Target, texts: list[torch.Tensor]
) -> None:
    head = shaken(toy_target, hydra)
    answers = [
        Answer(str(i), "all", (), tuple(t[:7].tolist()), tuple(t[7:].tolist()), "stop")
        for i, t in enumerate(texts)
    ]
    ours = engine_validation(toy_target, head, answers, 3)
    assert ours == pytest.approx(trainers_validation(toy_target, head, texts, 3), rel=1e-4)


@pytest.mark.parametrize("kind", ["chain", "dynamic", "fixed"])
def test_its_greedy_output_is_plain_decoding(hydra: Any, kind: str) -> None:
    target = make_lively_target()
    requests = [Request(str(n), (5, 7, n), 20) for n in range(4)]
    small = EngineConfig(max_batch=3, cache_rows=1024, page_size=4)
    scheme = SchemeConfig(kind, 3, depth=2, top_k=2)
    drafted, plain = (
        Engine(target, make_proposer(target, shaken(target, hydra), one), small).generate(requests)
        for one in (scheme, SchemeConfig("none"))
    )
    assert [done.tokens for done in drafted] == [done.tokens for done in plain]
    assert any(step.drafted for done in drafted for step in done.steps)


def test_it_can_be_made_again_and_counted(hydra: Any, toy_target: Target) -> None:
    head = shaken(toy_target, hydra)
    again = make_head(toy_target, {"family": "hydra", "steps": 3})
    again.load_state_dict(head.state_dict())
    assert kept_for_backward(head, toy_target, 3, autocast=False)[1] > 0


def test_the_page_shows_every_option_at_its_default(hydra: Any) -> None:
    (shown,) = re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)
    assert hydra.HydraConfig(**safe_load(shown)["head"]) == hydra.HydraConfig()
    assert set(safe_load(shown)["head"]) == set(hydra.HydraConfig.__dataclass_fields__)
