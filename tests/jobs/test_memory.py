"""The pipeline's memory does not follow the number of rows."""

import json
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "pipeline_memory.py"
SMALL_ROWS, LARGE_ROWS = 60_000, 200_000  # buffers and windows are full at the smaller one


def test_peak_memory_grows_by_less_than_the_promise() -> None:
    """20 bytes a row plus 50 MB, which the script compares; keeping rows takes 350 and up."""
    command = [sys.executable, str(SCRIPT), str(SMALL_ROWS), str(LARGE_ROWS), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout)
    assert found["large"]["rows"] == LARGE_ROWS
    assert found["grown_bytes"] < found["allowed_bytes"]
