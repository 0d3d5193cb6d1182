"""The pipeline's memory does not follow the number of rows."""

import json
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "pipeline_memory.py"
SMALL_ROWS, LARGE_ROWS = 60_000, 200_000  # buffers and windows are full at the smaller one
NOISE_BYTES = 15_000_000  # far below what keeping each row's text and objects would take


def test_peak_memory_does_not_grow_with_the_rows() -> None:
    command = [sys.executable, str(SCRIPT), str(SMALL_ROWS), str(LARGE_ROWS), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout)
    assert found["large"]["rows"] == LARGE_ROWS
    assert found["grown_bytes"] < 20 * (LARGE_ROWS - SMALL_ROWS) + NOISE_BYTES, found
