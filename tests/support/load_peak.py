"""Loads a model in a process of its own and prints the bytes that its memory grew by at most.

Arguments: the model's folder, the back end.
"""

import sys
from pathlib import Path

import torch
from tiny import read_config

from batchmla import kernels
from batchmla.models.load import load_model
from batchmla.parallel import Par
from batchmla.placement import Placement


def resident_bytes(field: str) -> int:
    """VmRSS or VmHWM of this process."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise AssertionError(f"no {field}")


def main() -> None:
    torch.set_num_threads(1)
    folder, ops = Path(sys.argv[1]), kernels.load(sys.argv[2])
    raw = read_config(folder)
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
    before = resident_bytes("VmRSS")
    model = load_model(
        folder, raw, Placement(), Par.single(), ops, torch.bfloat16, torch.device("cpu"),
        keeps_quantised=True,
    )  # fmt: skip
    print(resident_bytes("VmHWM") - before, resident_bytes("VmRSS") - before)
    assert any(True for _ in model.named_weights())  # type: ignore[attr-defined]


if __name__ == "__main__":
    main()
