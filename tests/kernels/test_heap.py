"""Memory that steps give back is not given back to the system."""

import subprocess
import sys

import pytest

FAULTS = """
import resource
import torch
from batchmla.kernels.cpu.heap import keep_freed
if not keep_freed():
    raise SystemExit("not kept")
def step():
    blocks = [torch.ones(3_000_000) for _ in range(10)]
    del blocks
for _ in range(3):
    step()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(20):
    step()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="a setting of glibc")
def test_pages_are_not_cleared_anew_in_every_step() -> None:
    done = subprocess.run(
        [sys.executable, "-c", FAULTS], capture_output=True, text=True, timeout=120
    )
    if "not kept" in done.stderr:
        pytest.skip("this C library has no such setting")
    assert done.returncode == 0, done.stderr
    touched = 20 * 10 * 3_000_000 * 4 // 4096
    assert int(done.stdout) < touched / 100
