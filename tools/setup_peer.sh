#!/usr/bin/env bash
# Sets up `.venv-peer`: speculators, the trainer that tools/bench_trainer.py measures ours against, in
# an environment of its own because it pins other versions. Run again, it returns at once unless the
# pins changed.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

readonly PINS="constraints-peer.txt"
readonly VENV=".venv-peer"
readonly STAMP="$VENV/.ready"
readonly PYTHON="${PYTHON:-python3}"
# Without what it asks for beyond its import: torchvision and torchaudio must match torch's build.
readonly PEER=(speculators hs-connectors)
readonly NEEDED=(torch transformers datasets aiohttp loguru openai protobuf psutil pydantic-settings pyyaml)

say() { printf 'peer: %s\n' "$*"; }
die() { printf 'error: %s\n' "$*" >&2; exit 1; }

wanted="$(cksum <"$PINS")"
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

say "installing what speculators imports"
"$VENV/bin/python" -m pip install -qq --constraint "$PINS" "${NEEDED[@]}" ||
    die "installing ${NEEDED[*]} failed, see above"
"$VENV/bin/python" -m pip install -qq --constraint "$PINS" --no-deps "${PEER[@]}" ||
    die "installing ${PEER[*]} failed, see above"
problem=$("$VENV/bin/python" -c 'import speculators.models.mtp' 2>&1) ||
    die "importing speculators failed: $(tail -n 1 <<<"$problem"); remove $VENV and try again"

printf '%s\n' "$wanted" >"$STAMP"
say "$VENV is ready"
