"""Linears of the GPU path: cuBLAS for plain weights, through torch. Shapes: see
`batchmla.kernels.ops`."""

import math

import torch
import torch.nn.functional as F

from batchmla.kernels.cpu.quant import KEPT, quantised_linear
from batchmla.kernels.ops import Packed, PackKind
from batchmla.kernels.quant import Quantised, Scheme

NARROW = (torch.bfloat16, torch.float16)


def pack(kind: PackKind, weight: torch.Tensor | Quantised) -> Packed:
    """Nothing is laid out anew: kernels read weights as they lie."""
    if isinstance(weight, torch.Tensor):
        return Packed(kind, tuple(weight.shape), plain=weight)
    if kind in KEPT:
        return Packed(kind, weight.shape, quantised=weight)
    return Packed(kind, weight.shape, plain=weight.expanded())


def packed_bytes(kind: PackKind, shape: tuple[int, ...], dtype: torch.dtype | Scheme) -> int:
    """What `pack` leaves."""
    if isinstance(dtype, Scheme):
        if kind in KEPT:
            return dtype.nbytes(shape)
        dtype = dtype.dtype
    return math.prod(shape) * dtype.itemsize


def linear(x_TI: torch.Tensor, weight: Packed, bias_O: torch.Tensor | None) -> torch.Tensor:
    """See `LinearOp`; sums of logits are never rounded to 16 bits."""
    if weight.kind is PackKind.LOGITS:
        return _logits(x_TI, weight, bias_O)
    if weight.quantised is not None:
        return quantised_linear(x_TI, weight.quantised, bias_O)
    return F.linear(x_TI, _plain(weight), bias_O)


def _logits(x_TM: torch.Tensor, weight: Packed, bias_V: torch.Tensor | None) -> torch.Tensor:
    """float32."""
    if weight.quantised is not None:
        return quantised_linear(x_TM.float(), weight.quantised, bias_V)
    plain_VM = _plain(weight)
    if x_TM.is_cuda and x_TM.dtype == plain_VM.dtype and x_TM.dtype in NARROW:
        logits_TV = torch.mm(x_TM, plain_VM.t(), out_dtype=torch.float32)
        return logits_TV if bias_V is None else logits_TV.add_(bias_V)
    return F.linear(x_TM.float(), plain_VM.float(), None if bias_V is None else bias_V.float())


def _plain(weight: Packed) -> torch.Tensor:
    assert weight.plain is not None, f"{weight.kind} {weight.shape} is in no form that is read here"
    return weight.plain
