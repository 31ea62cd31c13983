"""The GPU check and the attention benchmark do their bookkeeping on any machine; no figure is asserted."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

TOOLS = Path(__file__).parents[1] / "tools"
# Stands in for Python: there is a GPU; the benchmark fails, all else works.
PYTHON = """#!/usr/bin/env bash
case "$*" in
  *bench*) echo "no kernel"; exit 3 ;;
esac
"""


def run(*command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
        env=os.environ | environment,
    )


def test_a_part_that_fails_is_in_the_results_and_the_others_run(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text(PYTHON)
    python.chmod(0o755)
    done = run("bash", str(TOOLS / "gpu_check.sh"), str(tmp_path / "out"), PYTHON=str(python))
    parts = json.loads((tmp_path / "out" / "results.json").read_text())
    assert {part["part"]: part["status"] for part in parts} == {
        "machine": 0,
        "tests": 0,
        "tests_flashinfer": 0,
        "bench_attention": 3,
        "demo": 0,
    }
    assert done.returncode == 1 and "bench_attention: status 3" in done.stdout
    assert (tmp_path / "out" / "bench_attention.log").read_text() == "no kernel\n"
    assert not any(part["timed_out"] for part in parts)


def test_all_parts_together_take_less_than_ten_minutes() -> None:
    limits = re.findall(r"^part \w+ (\d+) ", (TOOLS / "gpu_check.sh").read_text(), re.MULTILINE)
    assert len(limits) == 5 and sum(int(limit) + 5 for limit in limits) < 600


def test_the_attention_benchmark_measures_every_shape_of_batch(tmp_path: Path) -> None:
    out = tmp_path / "bench.json"
    options = {"device": "cpu", "heads": "smollm2", "sizes": 2, "cached": 40, "repeats": 1}
    flags = [f"--{name}={value}" for name, value in options.items()]
    done = run(sys.executable, str(TOOLS / "bench_attention.py"), *flags, f"--out={out}")
    assert done.returncode == 0, done.stderr[-3000:]
    result = json.loads(out.read_text())
    names = [batch["batch"] for batch in result["batches"]]
    assert names == ["1 row x 2", "4 rows x 2", "tree of 16 x 2", "prompt of 1024 x 1"]
    assert all(batch["torch"]["layer_ms"] > 0 for batch in result["batches"])
    assert result["refused"] == []
