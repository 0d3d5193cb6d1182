"""Predicted time of a job from two rates of the machine: matrix flops and memory bytes a second.

A lower bound by construction: attention flops, host work and kernel launches are left out.
"""

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """A job in the numbers that the roofline needs; tokens are totals over its rows."""

    prompt_tokens: int
    output_tokens: int
    num_rows: int
    concurrency: int  # sequences a decode step holds
    active_params: int
    weight_bytes: int
    kv_token_bytes: float


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


def predict_seconds(work: Workload, rates: Rates) -> float:
    """Prefill bound by flops; every decode step by the slower of its flops and its bytes.

    A decode step of S sequences reads the weights once and S contexts of the cache; a context is
    taken at its mean, the prompt plus half the output.
    """
    prefill_s = 2 * work.active_params * work.prompt_tokens / rates.flops_per_s
    if work.output_tokens == 0 or work.num_rows == 0:
        return prefill_s
    together = max(1, min(work.concurrency, work.num_rows))
    steps = work.output_tokens / together
    context = (work.prompt_tokens + work.output_tokens / 2) / work.num_rows
    step_bytes = work.weight_bytes + together * context * work.kv_token_bytes
    step_flops = 2 * work.active_params * together
    return prefill_s + steps * max(step_bytes / rates.bytes_per_s, step_flops / rates.flops_per_s)
