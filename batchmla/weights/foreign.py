"""Weights in formats that are not read, by the endings of their files; refused by name."""

import re
from pathlib import Path

from batchmla.errors import JobError

FORMATS = {
    ".bin": "pickles", ".pt": "pickles", ".pth": "pickles", ".ckpt": "pickles", ".pkl": "pickles",
    ".gguf": "GGUF", ".ggml": "GGML", ".h5": "HDF5", ".msgpack": "MessagePack", ".onnx": "ONNX",
    ".npz": "NumPy archives",
}  # fmt: skip
# what a training leaves beside the weights
BESIDE = re.compile(r"(training_args|optimizer|scheduler|rng_state|scaler)\b.*")


def foreign_files(folder: Path) -> list[Path]:
    """The files of such weights in a folder, by name."""
    return sorted(
        path for path in folder.iterdir() if path.suffix in FORMATS and not BESIDE.match(path.name)
    )


def refuse_foreign(folder: Path) -> None:
    """A `JobError` for a folder that has such weights; only to be asked where there are no
    safetensors."""
    if found := foreign_files(folder):
        raise JobError(f"the weights in {folder} are {told_of(found[0])}")


def told_of(path: Path) -> str:
    """What the file is, and the way out."""
    kind = FORMATS[path.suffix]
    if kind == "pickles":
        return f"pickles ({path.name}), which can run code; convert them to safetensors"
    return f"{kind} ({path.name}), which is not read; take the model's safetensors instead"
