"""w · (x - mean) / sqrt(variance + eps) + b. T rows, M columns; one program a row, in float32."""

import torch
import triton
import triton.language as tl

from batchmla.kernels.triton.aot import AotCase
from batchmla.kernels.triton.norm import num_warps


@triton.jit
def _layer_norm_kernel(x, weight, bias, out, x_stride, width, eps, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < width
    values = tl.load(x + row * x_stride + columns, mask=inside, other=0.0).to(tl.float32)
    centred = tl.where(inside, values - tl.sum(values, axis=0) / width, 0.0)
    factor = tl.rsqrt(tl.sum(centred * centred, axis=0) / width + eps)
    scale = tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    shift = tl.load(bias + columns, mask=inside, other=0.0).to(tl.float32)
    result = centred * factor * scale + shift
    tl.store(out + row * width + columns, result.to(out.dtype.element_ty), mask=inside)


def layer_norm(
    x_TM: torch.Tensor, weight_M: torch.Tensor, bias_M: torch.Tensor, eps: float
) -> torch.Tensor:
    """See `LayerNormOp`."""
    width = x_TM.shape[-1]
    rows_TM = x_TM.reshape(-1, width)
    if rows_TM.stride(1) != 1:
        rows_TM = rows_TM.contiguous()
    out_TM = torch.empty(rows_TM.shape, dtype=x_TM.dtype, device=x_TM.device)
    if len(rows_TM):
        block = triton.next_power_of_2(width)
        _layer_norm_kernel[(len(rows_TM),)](
            rows_TM, weight_M, bias_M, out_TM, rows_TM.stride(0), width, eps,
            BLOCK=block, num_warps=num_warps(block),
        )  # fmt: skip
    return out_TM.view(x_TM.shape)


AOT_CASES = (
    AotCase(
        name="layer_norm 128",
        kernel=_layer_norm_kernel,
        types={
            "x": "*bf16", "weight": "*fp32", "bias": "*fp32", "out": "*bf16", "x_stride": "i32",
            "width": "i32", "eps": "fp32",
        },
        constants={"BLOCK": 128},
        aligned=("x", "weight", "bias", "out", "x_stride", "width"),
        num_warps=num_warps(128),
    ),
)  # fmt: skip
