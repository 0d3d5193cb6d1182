#!/bin/sh
# One short check of a machine with a GPU: what the device can do, that every kernel is right and how fast it is, that
# the engine generates there what it generates on the CPU, and how many tokens a second. Needs python with torch,
# triton, transformers, safetensors and numpy; the rest of the package's dependencies are not imported. Writes a JSON
# file to benchmarks/results/.
#
# This script has not yet run on a GPU; only `--dry` has been exercised.
#
#   benchmarks/gpu_check.sh                          # on a GPU machine, at most 9 minutes
#   benchmarks/gpu_check.sh --pieces checks,speed    # parts of it
#   benchmarks/gpu_check.sh --dry                    # the same without one: small, interpreted
set -eu
root=$(cd "$(dirname "$0")/.." && pwd)
links=$(mktemp -d)
trap 'rm -rf "$links"' EXIT
# The folders kernels/ and jobs/ are installed as batchmla.kernels and batchmla.jobs: build the same view by links,
# so that nothing has to be installed.
mkdir "$links/batchmla"
ln -s "$root"/batchmla/* "$root/kernels" "$root/jobs" "$links/batchmla/"
for argument in "$@"; do
    if [ "$argument" = --dry ]; then export TRITON_INTERPRET=1; fi  # Triton reads it on import
done
PYTHONPATH="$links${PYTHONPATH:+:$PYTHONPATH}" "${PYTHON:-python3}" -P "$root/benchmarks/gpu_check.py" "$@"
