#!/bin/sh
# One short check of a machine with a GPU: what the device can do, and that the engine generates there what it
# generates on the CPU. Needs python with torch, triton, transformers, safetensors and numpy; the rest of the
# package's dependencies are not imported. Writes a JSON file to benchmarks/results/.
#
# This script has not yet run on a GPU; only `--device cpu` has been exercised.
#
#   benchmarks/gpu_check.sh                 # on a GPU machine
#   benchmarks/gpu_check.sh --device cpu    # the same steps without one
set -eu
root=$(cd "$(dirname "$0")/.." && pwd)
links=$(mktemp -d)
trap 'rm -rf "$links"' EXIT
# The folders kernels/ and jobs/ are installed as batchmla.kernels and batchmla.jobs: build the same view by links,
# so that nothing has to be installed.
mkdir "$links/batchmla"
ln -s "$root"/batchmla/* "$root/kernels" "$root/jobs" "$links/batchmla/"
PYTHONPATH="$links${PYTHONPATH:+:$PYTHONPATH}" "${PYTHON:-python3}" -P "$root/benchmarks/gpu_check.py" "$@"
