"""The tensors behind a `KVLayout`."""

import numpy as np
import torch

from batchmla.kv.layout import KVLayout, KVPart

LayerCache = dict[str, torch.Tensor]

ALIGNMENT_BYTES = 64


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
    # numpy takes zeroed memory from the system page by page as it is touched: no slow start.
    num_bytes = shape[0] * shape[1] * part.row_bytes
    buffer = np.zeros(num_bytes + ALIGNMENT_BYTES, np.uint8)
    start = -buffer.ctypes.data % ALIGNMENT_BYTES
    return torch.from_numpy(buffer[start : start + num_bytes]).view(dtype).view(shape)
