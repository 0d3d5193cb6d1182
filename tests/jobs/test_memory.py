"""The pipeline's memory does not follow the number of rows."""

import json
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "pipeline_memory.py"


def test_peak_memory_grows_by_less_than_20_bytes_a_row_and_50_mb() -> None:
    command = [sys.executable, str(SCRIPT), "5000", "40000", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout)
    assert found["large"]["rows"] == 40_000
    assert found["grown_bytes"] < 20 * 35_000 + 50_000_000
