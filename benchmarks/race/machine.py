"""The machine under the race: what it is, what it does a second, what else it is doing."""

import json
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

from batchmla.engine.roofline import Rates

HERE = Path(__file__).resolve().parents[1]
_RATES = """
import json, sys, time, torch
torch.set_num_threads(int(sys.argv[1]))
def best(action):
    action()
    times = []
    for _ in range(10):
        start = time.perf_counter()
        action()
        times.append(time.perf_counter() - start)
    return min(times)
x, w = torch.randn(4096, 768).bfloat16(), torch.randn(768, 768).bfloat16()
flops = 2 * 4096 * 768 * 768 / best(lambda: torch.nn.functional.linear(x, w))
data = torch.ones(2**27)
print(json.dumps([flops, data.numel() * 4 / best(data.sum)]))
"""


def environment(**more: str) -> dict[str, str]:
    """This process' variables without thread settings, with benchmarks/ importable."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("OMP_")}
    given = filter(None, kept.get("PYTHONPATH", "").split(os.pathsep))
    paths = [str(HERE), *map(os.path.abspath, given)]
    return kept | {"PYTHONPATH": os.pathsep.join(paths)} | more


def measure_rates(threads: int) -> Rates:
    """A bfloat16 product of 4096x768x768 and one read of 512 MB, the best of ten."""
    run = subprocess.run(
        [sys.executable, "-P", "-c", _RATES, str(threads)],
        env=environment(OMP_NUM_THREADS=str(threads)), capture_output=True, text=True, check=True,
    )  # fmt: skip
    flops_per_s, bytes_per_s = json.loads(run.stdout)
    return Rates(flops_per_s=flops_per_s, bytes_per_s=bytes_per_s)


def describe_machine() -> dict[str, Any]:
    """Processor, cores, memory and system."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "processor": _processor(),
        "cores": os.cpu_count(),
        "memory_gib": round(memory / 2**30, 1),
        "os": platform.platform(),
    }


def load_average() -> float:
    """Of the last minute, as the system tells it."""
    return round(os.getloadavg()[0], 2)


def commit() -> str:
    """The checked-out commit, "unknown" without git."""
    run = subprocess.run(
        ["git", "-C", str(HERE), "describe", "--always", "--dirty"], capture_output=True, text=True
    )
    return run.stdout.strip() or "unknown"


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor()
