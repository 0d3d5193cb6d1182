"""Products with quantised weights: some outputs at a time are expanded, multiplied and dropped.
Shapes: see `batchmla.kernels.ops`."""

import torch
import torch.nn.functional as F

from batchmla.kernels.ops import PackKind
from batchmla.kernels.quant import Coding, Quantised, Scheme

OUTPUTS_AT_ONCE = 256  # a few MiB of values in a wide model
KEPT = (PackKind.LINEAR, PackKind.LOGITS, PackKind.EXPERTS_UP, PackKind.EXPERTS_DOWN)
"""What stays quantised. Latent weights are read as they are and by head, in every step: expanded
they take half a percent of a model's bytes and save as much work again."""


def quantised_linear(
    x_TI: torch.Tensor, weight: Quantised, bias_O: torch.Tensor | None = None
) -> torch.Tensor:
    """x·Wᵀ + b in x's dtype."""
    outputs = weight.shape[0]
    y_TO = x_TI.new_empty(len(x_TI), outputs)
    for start in range(0, outputs, OUTPUTS_AT_ONCE):
        some = slice(start, min(start + OUTPUTS_AT_ONCE, outputs))
        w_OI = weight.outputs(some.start, some.stop).expanded(x_TI.dtype)
        y_TO[:, some] = F.linear(x_TI, w_OI, None if bias_O is None else bias_O[some])
    return y_TO


def with_values(weight_OI: torch.Tensor) -> Quantised:
    """A matrix of nearly these values, for trials of products: equal ones stay equal, and so do
    their magnitudes."""
    inputs = weight_OI.shape[1]
    scheme = Scheme(
        coding=Coding.E4M3,
        block=inputs,
        scale_rows=1,
        scale_dtype=torch.float32,
        dtype=weight_OI.dtype,
    )
    return Quantised(
        scheme=scheme,
        codes=weight_OI.to(torch.float8_e4m3fn).view(torch.uint8),
        scales=torch.ones(1, 1),
        scale_row_O=torch.zeros(len(weight_OI), dtype=torch.int32),
    )
