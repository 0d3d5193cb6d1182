"""The tensors behind a `KVLayout`."""

import math

import torch

from batchmla.kernels.cpu.large_pages import large_pages
from batchmla.kv.layout import KVLayout, KVPart

LayerCache = dict[str, torch.Tensor]


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
    return large_pages(math.prod(shape) * dtype.itemsize).view(dtype).view(shape)
