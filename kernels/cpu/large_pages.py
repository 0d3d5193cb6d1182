"""Memory in large pages, where the system has them.

Products read all weights in every step, and rows of a cache are written and read at random places:
with pages of 4 KiB both wait for the places of those as often as for the values.
"""

import mmap
from contextlib import suppress

import torch

LARGE_PAGE_BYTES = 2 << 20
CHUNK_BYTES = 64 << 20
LINE_BYTES = 64


def large_pages(num_bytes: int) -> torch.Tensor:
    """Zeroed bytes, which the system gives as they are touched; freed with the last tensor that
    views them. Raises `MemoryError` where there are not so many."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS  # what is shared gets large pages more rarely
    try:
        area = mmap.mmap(-1, num_bytes + LARGE_PAGE_BYTES, flags=flags)
    except OSError as error:
        raise MemoryError(f"{num_bytes} bytes could not be allocated") from error
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a system without them
            area.madvise(mmap.MADV_HUGEPAGE)
    buffer = torch.frombuffer(area, dtype=torch.uint8)
    start = -buffer.data_ptr() % LARGE_PAGE_BYTES
    return buffer[start : start + num_bytes]


class WeightMemory:
    """Weights one behind the other, so that small ones share large pages."""

    def __init__(self) -> None:
        self._left = torch.empty(0, dtype=torch.uint8)

    def keep(self, weight: torch.Tensor) -> torch.Tensor:
        """A copy in memory of this kind."""
        num_bytes = weight.numel() * weight.element_size()
        if num_bytes > len(self._left):
            self._left = large_pages(max(num_bytes, CHUNK_BYTES))
        kept = self._left[:num_bytes].view(weight.dtype).view(weight.shape)
        self._left = self._left[-(-num_bytes // LINE_BYTES) * LINE_BYTES :]
        return kept.copy_(weight)
