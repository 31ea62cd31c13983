"""A toy head measured on toy prompts: what the evaluation's tests, and their other processes, all start from."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from toys import make_lively_target, make_tokenizer

from mtp_train.core.dist import Ranks
from mtp_train.engine.engine import Engine, EngineConfig
from mtp_train.engine.sequences import Request
from mtp_train.evaluate.grid import Acceptance
from mtp_train.evaluate.runs import Bench
from mtp_train.evaluate.sets import PromptSet, chat_set, prompt_set
from mtp_train.evaluate.stage import EvaluateConfig, measure_acceptance
from mtp_train.heads.mtp import MtpConfig, MtpHead, build
from mtp_train.models.target import Target
from mtp_train.text.sources import Answer
from mtp_train.text.template import ChatTemplate

SIZES = EngineConfig(max_batch=3, cache_rows=2048, page_size=4)
CONFIG = EvaluateConfig(
    drafts=2,
    max_new_tokens=12,
    sampled_prompts=4,
    temperatures=[0.0, 0.7],
    ks=[1, 2],
    grid_prompts=3,
)
STOP = frozenset({2})
FIRST = ["why?", "name a bird.", "say hello", "count to 3", "is it late?", "what is 2 + 2?"]
SECOND = ["and then?", "shorter."]
PLACEHOLDER = "FULL BENCHMARK DATA SHOULD BE FETCHED FROM THE SOURCE USING SPECDEC_BENCH"


def write_questions(folder: Path, more: Sequence[dict[str, Any]] = ()) -> Path:
    """Questions of one turn and of two, in a benchmark's form."""
    rows: list[dict[str, Any]] = [
        {
            "question_id": 80 + number,
            "category": "one" if number % 2 else "two",
            "turns": [text] if number % 2 else [text, SECOND[number % 4 // 2]],
        }
        for number, text in enumerate(FIRST)
    ]
    path = folder / "question.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in [*rows, *more]))
    return path


def toy_sets(folder: Path, target: Target) -> list[PromptSet]:
    """Answers of the target's own, and conversations."""
    folder.mkdir(parents=True, exist_ok=True)
    prompts = [tuple(range(3 + at, 9 + 2 * at)) for at in range(5)]
    requests = [Request(f"a{at}", prompt, 12, STOP) for at, prompt in enumerate(prompts)]
    answers = [
        Answer(done.key, "all", (), done.prompt, done.tokens, done.finish)
        for done in Engine(target, None, SIZES).generate(requests)
    ]
    template = ChatTemplate(make_tokenizer())
    return [
        prompt_set("heldout", answers, STOP, 12),
        chat_set("talks", str(write_questions(folder)), template, STOP, 12),
    ]


def toy_head(target: Target, size: float = 0.0) -> MtpHead:
    """A head that starts as the target's last layer; `size` of noise makes it worse."""
    head = build(target, MtpConfig(embedding_noise=0.3), seed=1)
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for weight in head.parameters():
            weight.add_(torch.randn(weight.shape, generator=generator) * size)
    return head


def measure(
    folder: Path, ranks: Ranks | None = None, config: EvaluateConfig = CONFIG, size: float = 0.0
) -> Acceptance:
    """The toy head's acceptance, its completions in `folder`."""
    target = make_lively_target()
    own = folder / f"questions-{(ranks or Ranks()).rank}"
    bench = Bench(folder / "completions", ranks or Ranks(), seed=config.seed)
    sets = toy_sets(own, target)
    return measure_acceptance(target, toy_head(target, size), sets, config, SIZES, bench)
