"""The tensors behind a `KVLayout`."""

import math

import numpy as np
import torch

from batchmla.kv.layout import KVLayout

LayerCache = dict[str, torch.Tensor]


def make_cache(layout: KVLayout, num_pages: int, device: torch.device) -> tuple[LayerCache, ...]:
    """One dict a layer: part name → [num_pages, page_tokens / stride, width], zero-filled.

    Zeros keep unused rows finite: a masked row of NaN would still poison the product P·V.
    """
    return tuple(
        {
            part.name: _zeros(
                (num_pages, layout.page_tokens // part.stride, part.width),
                getattr(torch, part.dtype),
                device,
            )
            for part in layer
            if part.window is None
        }
        for layer in layout.layers
    )


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Zeros; on a CPU the system gives the memory page by page as it is first written.

    torch.zeros writes all of it at once: seconds, and resident memory, for a pool that a short job
    never fills. The start is aligned to 64 bytes, as torch's own allocations are.
    """
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    num_bytes = math.prod(shape) * dtype.itemsize
    room = np.zeros(num_bytes + 64, np.uint8)
    start = -room.ctypes.data % 64
    return torch.from_numpy(room[start : start + num_bytes]).view(dtype).view(shape)
