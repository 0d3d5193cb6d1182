"""RMS norm, alone and after a sum. T rows, M columns; one program a row, float32 inside."""

import torch
import triton
import triton.language as tl

from batchmla.kernels.triton.aot import AotCase


@triton.jit
def _norm_kernel(
    x, residual, weight, out, total, x_stride, width, eps,
    HAS_RESIDUAL: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < width
    values = tl.load(x + row * x_stride + columns, mask=inside, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        values += tl.load(residual + row * width + columns, mask=inside, other=0.0).to(tl.float32)
        rounded = values.to(total.dtype.element_ty)
        tl.store(total + row * width + columns, rounded, mask=inside)
        values = rounded.to(tl.float32)
    factor = tl.rsqrt(tl.sum(values * values, axis=0) / width + eps)
    scale = tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    result = values * factor * scale
    tl.store(out + row * width + columns, result.to(out.dtype.element_ty), mask=inside)


def norm(x_TM: torch.Tensor, weight_M: torch.Tensor, eps: float) -> torch.Tensor:
    """See `NormOp`."""
    *_, width = x_TM.shape
    rows_TM = x_TM.reshape(-1, width)
    out_TM = torch.empty(rows_TM.shape, dtype=x_TM.dtype, device=x_TM.device)
    _launch(rows_TM, None, weight_M, out_TM, None, eps)
    return out_TM.view(x_TM.shape)


def add_norm(
    x_TM: torch.Tensor, residual_TM: torch.Tensor, weight_M: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `AddNormOp`."""
    out_TM = torch.empty(x_TM.shape, dtype=x_TM.dtype, device=x_TM.device)
    total_TM = torch.empty_like(out_TM)
    _launch(x_TM, residual_TM.contiguous(), weight_M, out_TM, total_TM, eps)
    return out_TM, total_TM


def _launch(
    x_TM: torch.Tensor,
    residual_TM: torch.Tensor | None,
    weight_M: torch.Tensor,
    out_TM: torch.Tensor,
    total_TM: torch.Tensor | None,
    eps: float,
) -> None:
    if not len(x_TM):
        return
    if x_TM.stride(-1) != 1:
        x_TM = x_TM.contiguous()
    num_rows, width = x_TM.shape
    block = triton.next_power_of_2(width)
    _norm_kernel[(num_rows,)](
        x_TM, residual_TM, weight_M, out_TM, total_TM, x_TM.stride(0), width, eps,
        HAS_RESIDUAL=residual_TM is not None, BLOCK=block, num_warps=num_warps(block),
    )  # fmt: skip


def num_warps(block: int) -> int:
    """For a row of so many elements."""
    return 1 if block <= 512 else 4 if block <= 2048 else 8


_TYPES = {
    "x": "*bf16", "residual": "*bf16", "weight": "*bf16", "out": "*bf16", "total": "*bf16",
    "x_stride": "i32", "width": "i32", "eps": "fp32",
}  # fmt: skip
AOT_CASES = tuple(
    AotCase(
        name=f"add_norm {width}" if has_residual else f"norm {width}",
        kernel=_norm_kernel,
        types=_TYPES,
        constants={"HAS_RESIDUAL": has_residual, "BLOCK": triton.next_power_of_2(width)},
        aligned=("x", "residual", "weight", "out", "total", "x_stride", "width"),
        num_warps=num_warps(triton.next_power_of_2(width)),
    )
    for width, has_residual in ((2048, True), (7168, True), (512, False))
)
