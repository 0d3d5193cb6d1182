"""The tensors behind a `KVLayout`."""

import math
import mmap
from contextlib import suppress

import torch

from batchmla.kv.layout import KVLayout, KVPart

LayerCache = dict[str, torch.Tensor]

HUGE_PAGE_BYTES = 2 << 20


def make_cache(
    layout: KVLayout, num_pages: int, device: torch.device, num_lanes: int = 0
) -> tuple[LayerCache, ...]:
    """One dict a layer: part name → [num_pages, page_tokens / stride, width], or [num_lanes,
    window, width] where it has a window, zero-filled.

    Zeros keep unused rows finite: a masked row of NaN would still poison the product P·V.
    """
    return tuple(
        {
            part.name: _zeros(part, _shape(part, num_pages, layout.page_tokens, num_lanes), device)
            for part in layer
            if part.window is None or num_lanes
        }
        for layer in layout.layers
    )


def _shape(part: KVPart, num_pages: int, page_tokens: int, num_lanes: int) -> tuple[int, int, int]:
    if part.window is not None:
        return num_lanes, part.window, part.width
    return num_pages, page_tokens // part.stride, part.width


def _zeros(part: KVPart, shape: tuple[int, int, int], device: torch.device) -> torch.Tensor:
    dtype = getattr(torch, part.dtype)
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    return _fresh_memory(math.prod(shape) * dtype.itemsize).view(dtype).view(shape)


def _fresh_memory(num_bytes: int) -> torch.Tensor:
    """Zeroed bytes on the host, which the system gives as they are touched: no slow start.

    In large pages where it has them: rows are written at random places, and each page of 4 KiB
    that is touched for the first time, or again after long, costs more than the row.
    """
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS  # what is shared gets large pages more rarely
    area = mmap.mmap(-1, num_bytes + HUGE_PAGE_BYTES, flags=flags)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a system without them
            area.madvise(mmap.MADV_HUGEPAGE)
    buffer = torch.frombuffer(area, dtype=torch.uint8)
    start = -buffer.data_ptr() % HUGE_PAGE_BYTES
    return buffer[start : start + num_bytes]
