#!/usr/bin/env bash
# Every GPU test and a short run of the demo on the GPU, in one call of under 10 minutes.
# Needs the environment of `make setup`, with a torch build for the GPU, on a machine with one.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python="${PYTHON:-.venv/bin/python}"
out="${OUT:-runs/gpu_check}"

"$python" -c 'import sys, torch; sys.exit(0 if torch.cuda.is_available() else "error: no CUDA device")'
"$python" -m pytest -m gpu -q
"$python" -m mtp_train.cli.main run recipe=smollm2_mtp_cpu run="$out" target.device=cuda \
  'regenerate.limits={train: 300, heldout: 24, ood: 8}' train.epochs=2 evaluate.speed_prompts=2
cat "$out/report/report.md"
