#!/usr/bin/env bash
# From scratch on one GPU: scripts/reproduce.sh [--preset h200|24gb|cpu] [--text DIR] [--family llama|qwen2|both] [--ablation NAME …]
# Makes the environment first if none is active; see docs/reproduce.md.
set -euo pipefail
cd "$(dirname "$0")/.."
if [ -z "${VIRTUAL_ENV:-}" ] && [ -z "${CONDA_PREFIX:-}" ]; then
    make env
    source "${VENV:-.venv}/bin/activate"
fi
exec python -m scripts.reproduce "$@"
