"""The engine's benchmark drives both sides on the same prompts, and its ratios are those of what they answer.

vLLM is a stand-in that speaks the protocol: its own environment is not needed here.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from toys import make_target

from mtp_train.checkpoint.heads import HeadCard, save_checkpoint
from mtp_train.heads.mtp import MtpConfig, build
from mtp_train.models.target import Target

TOOLS = Path(__file__).parents[1] / "tools"
STAND_IN = """
import json, sys
spec = json.load(open(sys.argv[2]))
print("a line of some library")
print(json.dumps({"ready": True}), flush=True)
for line in sys.stdin:
    scheme, batch, number = line.split()
    assert scheme == "plain"
    outputs = [[0] * spec["max_new_tokens"]] * int(batch)
    print(json.dumps({"seconds": 50.0, "cpu_seconds": 25.0, "tokens": 500, "outputs": outputs}), flush=True)
print(json.dumps({"peak_mb": 1e5, "held_mb": 4e4, "vllm": "0"}), flush=True)
"""


@pytest.fixture
def serving(tmp_path: Path) -> Path:
    folder = tmp_path / "serving" / "bin"
    folder.mkdir(parents=True)
    (folder / "stand_in.py").write_text(STAND_IN)
    script = folder / "python"
    script.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{folder}/stand_in.py" "$@"\n')
    script.chmod(0o755)
    return folder.parent


def save_head(folder: Path, target: Target) -> None:
    head = build(target, MtpConfig())
    card = HeadCard("mtp", target.hash, "post_norm", target.hidden_size, target.vocab_size, 0)
    save_checkpoint(folder, head, card)


def test_engines_take_turns_and_schemes_are_compared_with_plain(
    tmp_path: Path, serving: Path
) -> None:
    folder = tmp_path / "target"
    make_target().model.save_pretrained(folder)  # type: ignore[operator]
    save_head(tmp_path / "head", Target.load(folder))
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(f'{{"prompt_ids": [1, {2 + i}, 5]}}\n' for i in range(4)))
    out = tmp_path / "out.json"
    options = (
        "--plain-batches 1 3 --batches 2 --rounds 2 --max-new-tokens 5 --threads 1 "
        "--schemes chain_2 --cost-batches 2 --cost-repeats 1"
    )
    done = subprocess.run(
        [
            *(sys.executable, str(TOOLS / "bench_engine.py"), "--target", str(folder)),
            *("--head", str(tmp_path / "head"), "--prompts", str(prompts), "--out", str(out)),
            *("--serving", str(serving), *options.split()),
        ],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(out.read_text())
    one, three = found["plain"]
    assert (one["batch"], three["batch"]) == (1, 3)
    assert one["tokens_per_s"]["vllm"] == 10.0
    for row in (one, three):
        assert len(row["ratios"]) == 2, "the first round is not counted"
        assert row["ratio"] == pytest.approx(row["tokens_per_s"]["ours"] / 10, rel=1e-2)
        assert row["cpu_ratio"] > 0
    (part,) = found["speculative"]
    assert set(part["schemes"]) == {"plain", "chain_2"}
    assert part["schemes"]["plain"]["ratios"] == [1.0, 1.0]
    chain = part["schemes"]["chain_2"]
    assert chain["tau"] >= 1 and sum(chain["shares"].values()) == pytest.approx(1)
    assert {"target", "cpu"} < set(chain["shares"])
    assert len(found["costs"]["batches"][0]["verified_row"]) == 8
    assert found["vllm"]["peak_mb"] == 1e5 and found["ours"]["peak_mb"] > 0
    assert "| 3 |" in done.stdout and "chain_2" in done.stdout
