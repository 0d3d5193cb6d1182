"""A run that was told to stop ends in time, while its store hangs."""

import subprocess
import sys
import time

SCRIPT = """
import sys, time
from pathlib import Path
from batchmla.jobs.deadline import Deadline
from batchmla.jobs.remote_store import store_at
from batchmla.jobs.remote import place_of

began_s = time.monotonic()
with Deadline(store_at(Path("/tmp/local")), lambda: True, limit_s=0.2):
    time.sleep(0.8)
with Deadline(store_at(place_of("memory://bucket/out")), lambda: False, limit_s=0.2):
    time.sleep(0.8)
with Deadline(store_at(place_of("memory://bucket/out")), lambda: True, limit_s=5.0):
    time.sleep(0.6)
time.sleep(0.6)
print("waits", flush=True)
is_stopping = lambda: time.monotonic() > began_s + 3.5
with Deadline(store_at(place_of("memory://bucket/out")), is_stopping, limit_s=0.4):
    time.sleep(60)
"""


def test_only_a_store_that_hangs_after_a_signal_ends_the_process() -> None:
    began_s = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-P", "-c", SCRIPT], capture_output=True, text=True, timeout=50
    )
    assert done.returncode == 4 and done.stdout == "waits\n"
    assert done.stderr.startswith("memory://bucket/out: the store does not answer; ended without")
    assert time.monotonic() - began_s < 40
