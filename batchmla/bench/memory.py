"""The most memory in use over a stretch of time."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

import psutil
import torch

_PAUSE_S = 0.02


@dataclass(slots=True)
class Peak:
    """Bytes: on a GPU those that torch has allocated, else the memory of this process and of those
    it started, without what files back where the system tells.
    """

    num_bytes: int = 0


def used_bytes(device: str) -> int:
    """Now, counted as in `Peak`."""
    if device == "cuda":
        return torch.cuda.memory_allocated()
    return _own_bytes(psutil.Process())


@contextmanager
def watched_memory(device: str) -> Iterator[Peak]:
    """Looks every few milliseconds as long as the block lasts."""
    peak = Peak()
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        yield peak
        peak.num_bytes = torch.cuda.max_memory_allocated()
        return
    is_over = threading.Event()
    watch = threading.Thread(target=_watch, args=(peak, is_over), daemon=True)
    watch.start()
    try:
        yield peak
    finally:
        is_over.set()
        watch.join()


def _watch(peak: Peak, is_over: threading.Event) -> None:
    process = psutil.Process()
    processes = [process, *process.children(recursive=True)]
    while True:
        peak.num_bytes = max(peak.num_bytes, sum(map(_own_bytes, processes)))
        if is_over.wait(_PAUSE_S):
            return


def _own_bytes(process: psutil.Process) -> int:
    with suppress(psutil.NoSuchProcess):
        info = process.memory_info()
        return int(info.rss - getattr(info, "shared", 0))
    return 0
