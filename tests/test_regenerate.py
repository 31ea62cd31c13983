"""Prompts in, answers out: what happens to each row, and to a run that is killed between sets."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mtp_train.core.records import Accounting
from mtp_train.engine.engine import Engine, EngineConfig
from mtp_train.models.target import Target, load_tokenizer
from mtp_train.regenerate.stage import RegenerateConfig, regenerate
from mtp_train.text.sources import read_conversations

USER = {"role": "user", "content": "Two words for rain?"}
REPLY = {"role": "assistant", "content": "Drizzle, shower."}


@pytest.fixture(scope="module")
def engine(smollm2_path: Path) -> Engine:
    return Engine(Target.load(smollm2_path), None, EngineConfig(max_batch=4, cache_rows=1024))


def write(path: Path, rows: list[object]) -> str:
    lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return str(path)


def test_every_row_is_used_repaired_or_refused(
    engine: Engine, smollm2_path: Path, tmp_path: Path
) -> None:
    prompts = write(
        tmp_path / "prompts.jsonl",
        [
            {"id": "plain", "messages": [USER]},
            {"id": "answered", "messages": [USER, REPLY]},
            {"id": "backwards", "messages": [REPLY]},
            {"id": "beyond", "messages": [USER]},
            "{broken",
        ],
    )
    config = RegenerateConfig({"train": prompts}, {"train": 2}, max_new_tokens=4)
    out = tmp_path / "train.jsonl"
    accounting = regenerate(engine, load_tokenizer(smollm2_path), config, "train", out)
    assert (accounting.used, sum(accounting.repaired.values())) == (1, 1)
    assert sum(accounting.refused.values()) == 3 and accounting.total == 5
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert [row["id"] for row in rows] == ["plain", "answered"]
    assert rows[0]["prompt_ids"] == rows[1]["prompt_ids"], (
        "the given reply is no part of the prompt"
    )
    assert rows[1]["messages"] == [USER]


def test_a_finished_set_is_not_answered_again(
    engine: Engine, smollm2_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = write(tmp_path / "prompts.jsonl", [{"id": "plain", "messages": [USER]}])
    config = RegenerateConfig({"train": prompts}, {}, max_new_tokens=4)
    tokenizer, out = load_tokenizer(smollm2_path), tmp_path / "train.jsonl"
    regenerate(engine, tokenizer, config, "train", out)
    before = out.read_bytes()
    asked: list[int] = []
    monkeypatch.setattr(engine, "generate", lambda requests, *_, **__: asked.append(len(requests)))
    regenerate(engine, tokenizer, config, "train", out)
    assert asked == [0] and out.read_bytes() == before


def test_lines_beyond_python_are_refused_not_raised(tmp_path: Path) -> None:
    path = write(
        tmp_path / "odd.jsonl",
        [
            {"messages": [USER]},
            '{"messages": ' + "9" * 5000 + "}",
            "[" * 100_000,
            {"messages": [{"role": "user", "content": "half \ud800"}]},
            {"messages": [USER], "tools": [{"type": "function"}]},
            {"id": None, "messages": [USER]},
        ],
    )
    accounting = Accounting()
    found = read_conversations(path, accounting)
    assert [conversation.key for conversation in found] == ["odd.jsonl:1", "odd.jsonl:6"]
    assert accounting.used == 2 and accounting.total == 6
