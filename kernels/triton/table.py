"""The GPU back end as one value: Triton's kernels over torch's calls (cuBLAS for plain products)."""

from dataclasses import replace

from batchmla.kernels.cpu.table import make_ops as make_torch
from batchmla.kernels.ops import Ops
from batchmla.kernels.triton.norm import add_norm, norm


def make_ops() -> Ops:
    """Every op; those without a kernel here are torch's, which run where their tensors are."""
    plain = make_torch("torch")
    return replace(plain, name="triton", norm=norm, add_norm=add_norm)
