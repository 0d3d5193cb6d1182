"""Two rates of a machine: matrix flops and memory bytes a second, at best."""

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

GEMM_SIDE = 1024
READ_BYTES = 256 << 20
REPEATS = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """What the machine does a second, at best."""

    flops_per_s: float
    bytes_per_s: float

    def best(self, other: "Rates") -> "Rates":
        """The greater of two measurements, each rate by itself."""
        return Rates(
            flops_per_s=max(self.flops_per_s, other.flops_per_s),
            bytes_per_s=max(self.bytes_per_s, other.bytes_per_s),
        )


def _best_s(action: Callable[[], object], repeats: int = REPEATS) -> float:
    """Seconds of the fastest of `repeats` calls, the first one for warm-up."""
    action()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        action()
        times.append(time.perf_counter() - start)
    return min(times)


def measure_cpu_rates(dtype_name: str) -> Rates:
    """Times one square GEMM in a dtype and one read of a large array, in a third of a second."""
    a_NN = torch.ones(GEMM_SIDE, GEMM_SIDE, dtype=getattr(torch, dtype_name))
    gemm_s = _best_s(lambda: a_NN @ a_NN)
    data = torch.ones(READ_BYTES // 4, dtype=torch.float32)
    read_s = _best_s(data.sum, repeats=3)
    return Rates(flops_per_s=2 * GEMM_SIDE**3 / gemm_s, bytes_per_s=READ_BYTES / read_s)
