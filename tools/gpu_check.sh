#!/usr/bin/env bash
# Every GPU test and benchmark, in one call of under 10 minutes: each part has a time limit of its own, and one that
# fails or runs out of time does not keep the others from running.
#
#     tools/gpu_check.sh [FOLDER]
#
# Writes results.json (per part: exit status, seconds, log), the parts' logs and their figures to FOLDER, or $OUT, or
# runs/gpu_check. Needs the environment of `make setup` with a torch build for the GPU, on a machine with one; with
# `pip install 'mtp_train[gpu]'` FlashInfer is checked too. FlashInfer compiles each kernel at its first use (nvcc and
# ninja; the package flashinfer-jit-cache brings them compiled): a second call takes much less time than the first.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python="${PYTHON:-.venv/bin/python}"
out="${1:-${OUT:-runs/gpu_check}}"
mkdir -p "$out"
records=()
failed=0

part() { # NAME LIMIT COMMAND...
  local name="$1" limit="$2" begin="$SECONDS" status=0
  shift 2
  timeout --kill-after=5 "$limit" "$@" >"$out/$name.log" 2>&1 || status=$?
  [ "$status" -eq 0 ] || failed=1
  records+=("{\"part\": \"$name\", \"status\": $status, \"timed_out\": $([ "$status" -eq 124 ] || [ "$status" -eq 137 ] && echo true || echo false), \"seconds\": $((SECONDS - begin)), \"limit\": $limit, \"log\": \"$name.log\"}")
  (IFS=,; printf '[%s]\n' "${records[*]}") >"$out/results.json"
  echo "$name: status $status after $((SECONDS - begin)) of $limit seconds"
  tail -n 3 "$out/$name.log"
}

"$python" -c 'import sys, torch; sys.exit(0 if torch.cuda.is_available() else "error: no CUDA device")' || exit 1

part machine 30 "$python" -c 'import torch, sys
from importlib.metadata import distributions
print(sys.version, torch.version.cuda, torch.cuda.get_device_name(0), torch.cuda.get_device_capability(0))
print(sorted(f"{d.name}=={d.version}" for d in distributions() if d.name in
             ("torch", "transformers", "triton", "flashinfer-python", "flashinfer-jit-cache", "deepspeed")))'
tests=("$python" -m pytest -m gpu -v -p no:cacheprovider tests)
part tests 110 "${tests[@]}" -k "not flashinfer" --junitxml "$out/tests.xml"
part tests_flashinfer 230 "${tests[@]}" -k flashinfer --junitxml "$out/tests_flashinfer.xml"
part bench_attention 60 "$python" tools/bench_attention.py --out "$out/bench_attention.json"
part demo 120 "$python" -m mtp_train.cli.main run recipe=smollm2_mtp_cpu run="$out/demo" target.device=cuda \
  'regenerate.limits={train: 300, heldout: 24, ood: 8}' train.epochs=2 evaluate.speed_prompts=2
[ ! -f "$out/demo/report/report.md" ] || cat "$out/demo/report/report.md"
exit "$failed"
