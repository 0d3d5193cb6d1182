"""Parameters and bytes of a built model, from shapes alone: nothing is allocated."""

from dataclasses import dataclass

import torch

from batchmla.kernels.ops import Ops
from batchmla.layers.block import Block


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightCount:
    """`total` and `active` count a tied weight once; `weights_bytes` is what packing leaves in
    memory."""

    total: int
    active: int
    weights_bytes: int


def count_weights(model: Block, ops: Ops, dtype: torch.dtype) -> WeightCount:
    """Of this rank; with one rank, of the whole model."""
    total, active, weights_bytes = 0, 0.0, 0
    for _, weight in model.named_weights():
        held = weight.dtype(dtype)
        packed_bytes = ops.packed_bytes(weight.kind, weight.shape, held)
        if weight.tied is None:
            total += weight.numel
            active += weight.numel * weight.active_share
        elif packed_bytes == weight.numel * held.itemsize:
            continue  # kept as it is: the same tensor serves both
        weights_bytes += packed_bytes
    return WeightCount(total=total, active=round(active), weights_bytes=weights_bytes)
