"""Linears, embeddings and gates, as formulas. Shapes: see `batchmla.kernels.ops`."""

import math

import torch

from batchmla.kernels.ops import Packed, PackKind
from batchmla.kernels.quant import Quantised, Scheme
from batchmla.kernels.reference.quant import expand


def pack(kind: PackKind, weight: torch.Tensor | Quantised) -> Packed:
    """Keeps the weight as it is."""
    if isinstance(weight, Quantised):
        return Packed(kind, weight.shape, quantised=weight)
    return Packed(kind, tuple(weight.shape), plain=weight)


def packed_bytes(kind: PackKind, shape: tuple[int, ...], dtype: torch.dtype | Scheme) -> int:
    """Nothing is laid out anew."""
    if isinstance(dtype, Scheme):
        return dtype.nbytes(shape)
    return math.prod(shape) * dtype.itemsize


def plain(weight: Packed) -> torch.Tensor:
    """The original weight."""
    if weight.quantised is not None:
        return expand(weight.quantised)
    assert weight.plain is not None, f"{weight.kind} of shape {weight.shape} has no plain copy"
    return weight.plain


def linear(x_TI: torch.Tensor, weight: Packed, bias_O: torch.Tensor | None) -> torch.Tensor:
    """x·Wᵀ + b, summed in float32."""
    y_TO = x_TI.float() @ plain(weight).float().T
    if bias_O is not None:
        y_TO = y_TO + bias_O.float()
    return y_TO if weight.kind is PackKind.LOGITS else y_TO.to(x_TI.dtype)


def act_mul(gate_up_TF: torch.Tensor) -> torch.Tensor:
    """silu(gate) · up with silu(z) = z / (1 + exp(-z))."""
    gate_TF, up_TF = gate_up_TF.float().chunk(2, dim=-1)
    return (gate_TF / (1 + torch.exp(-gate_TF)) * up_TF).to(gate_up_TF.dtype)
