#!/usr/bin/env bash
# The stages in order; further arguments are overrides for every stage. A vLLM server of the target must answer at
# regenerate.server for the first one; stop it before the second, which needs the GPUs.
set -euo pipefail

mtp-train regenerate recipe=deepseek_v2_lite_mtp_8gpu "$@"
torchrun --nproc-per-node 8 -m mtp_train.cli.precompute recipe=deepseek_v2_lite_mtp_8gpu "$@"
torchrun --nproc-per-node 8 -m mtp_train.cli.train recipe=deepseek_v2_lite_mtp_8gpu "$@"
mtp-train evaluate recipe=deepseek_v2_lite_mtp_8gpu "$@"
mtp-train report recipe=deepseek_v2_lite_mtp_8gpu "$@"
