"""Parameters and bytes of a built model, from shapes alone: nothing is allocated."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from batchmla.kernels.ops import Ops
from batchmla.kernels.quant import Scheme
from batchmla.layers.block import Block, Weight


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightCount:
    """`total` and `active` count a tied weight once; `weights_bytes` is what packing leaves in
    memory."""

    total: int
    active: int
    weights_bytes: int


def count_weights(
    model: Block, ops: Ops, dtype: torch.dtype, schemes: Mapping[str, Scheme] | None = None
) -> WeightCount:
    """Of this rank; with one rank, of the whole model. `schemes` are those of the weights that stay
    quantised."""
    total, active, weights_bytes = 0, 0.0, 0
    for name, weight in model.named_weights():
        held, scheme = weight.dtype(dtype), None if schemes is None else schemes.get(name)
        packed_bytes = ops.packed_bytes(weight.kind, weight.shape, scheme or held)
        if weight.tied is None:
            total += weight.numel
            active += weight.numel * weight.active_share
        elif _is_kept(weight, ops, held):
            continue  # the same tensor serves both
        weights_bytes += packed_bytes
    return WeightCount(total=total, active=round(active), weights_bytes=weights_bytes)


def _is_kept(weight: Weight, ops: Ops, dtype: torch.dtype) -> bool:
    """Whether packing hands back the tensor that it is given, tried on one row of it."""
    row_1I = torch.zeros(1, *weight.shape[1:], dtype=dtype)
    return ops.pack(weight.kind, row_1I).plain is row_1I
