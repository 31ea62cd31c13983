#!/usr/bin/env bash
# The demo, stage by stage. `mtp-train run recipe=smollm2_mtp_cpu` does the same in one process.
# Further arguments are overrides for every stage, for instance: run.sh train.epochs=2
set -euo pipefail

for stage in regenerate precompute; do
  mtp-train "$stage" recipe=smollm2_mtp_cpu "$@"
done
accelerate launch --cpu --num_processes 1 --num_machines 1 --mixed_precision bf16 --dynamo_backend no \
  -m mtp_train.cli.train recipe=smollm2_mtp_cpu "$@"
for stage in evaluate report export; do
  mtp-train "$stage" recipe=smollm2_mtp_cpu "$@"
done
