"""Where a piece runs: a GPU, or with --dry the CPU with small shapes and interpreted kernels."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

WARM_UP, REPEATS = 3, 10
FLUSH_BYTES = 256 << 20  # several times a GPU's second-level cache


@dataclass(frozen=True, slots=True)
class Place:
    """A device; `is_dry`: no time means anything."""

    device: torch.device
    is_dry: bool

    def size(self, real: int, dry: int) -> int:
        """What a shape is, and what it is in a dry run."""
        return dry if self.is_dry else real

    def put(self, value: Any) -> Any:
        """A tensor there; anything else as it is."""
        return value.to(self.device) if isinstance(value, torch.Tensor) else value

    def wait(self) -> None:
        """Until everything is computed."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def seconds(self, run: Callable[[], object]) -> float:
        """The median of some calls with a cold second-level cache, launched from a recording where
        that is possible."""
        if self.is_dry:
            start_s = time.perf_counter()
            run()
            return time.perf_counter() - start_s
        for _ in range(WARM_UP):
            run()
        self.wait()
        launch = _recorded(run)
        flushed = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device=self.device)
        times = []
        for _ in range(REPEATS):
            flushed.zero_()
            start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            launch()
            stop.record()
            stop.synchronize()
            times.append(start.elapsed_time(stop) / 1e3)
        return sorted(times)[len(times) // 2]


def _recorded(run: Callable[[], object]) -> Callable[[], object]:
    """As a graph; itself where it cannot be recorded."""
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            run()
    except RuntimeError:
        torch.cuda.synchronize()
        return run
    return graph.replay
