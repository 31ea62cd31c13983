"""The store's benchmark runs and its figures add up; rates are not asserted."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from stores import write_store

TOOL = Path(__file__).parents[1] / "tools" / "bench_store.py"


def test_the_benchmark_measures_a_store(tmp_path: Path) -> None:
    write_store(tmp_path / "features")
    done = subprocess.run(
        [sys.executable, str(TOOL), "--store", str(tmp_path / "features"), "--many", "40"],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    result = json.loads(done.stdout)
    assert (result["rows"], result["sequences"], result["hidden_size"]) == (22, 5, 6)
    codecs = result["codecs"]
    assert [name for name, row in codecs.items() if row["exact"]] == ["raw", "lossless"]
    assert codecs["raw"]["bytes_to_raw"] == 1.0
    assert codecs["fp8"]["bytes_to_raw"] == round((6 + 4) / 12, 4)
    assert 0 < codecs["fp8"]["relative_error"] < 0.1
    assert all(row["random_packs_over_consumed"] > 0 for row in codecs.values())
    assert [(row["sequences"], row["shards"]) for row in result["opening"]] == [(10, 1), (40, 3)]
