"""The tensors behind a `KVLayout`."""

import torch

from batchmla.kv.layout import KVLayout

LayerCache = dict[str, torch.Tensor]


def make_cache(layout: KVLayout, num_pages: int, device: torch.device) -> tuple[LayerCache, ...]:
    """One dict a layer: part name → [num_pages, page_tokens / stride, width], zero-filled.

    Zeros keep unused rows finite: a masked row of NaN would still poison the product P·V.
    """
    return tuple(
        {
            part.name: torch.zeros(
                num_pages,
                layout.page_tokens // part.stride,
                part.width,
                dtype=getattr(torch, part.dtype),
                device=device,
            )
            for part in layer
            if part.window is None
        }
        for layer in layout.layers
    )
