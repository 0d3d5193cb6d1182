"""Activations and cached values as e4m3 bytes.

Bytes are made and read by arithmetic on bits, nearest even, so that every GPU gives the same ones
whether it has instructions for them or not. T rows, M columns, G groups of columns.

    scale = max(largest magnitude of a group, 1e-4) / 448
    code  = e4m3(x / scale)
"""

import torch
import triton
import triton.language as tl

from batchmla.kernels.triton.aot import AotCase
from batchmla.kernels.triton.norm import num_warps

GROUP = 128  # columns that share a scale


@triton.jit
def encode_e4m3(values):
    """The bytes, uint8, of float32 values within 448; what is beyond becomes 448, NaN stays NaN."""
    whole = values.to(tl.int32, bitcast=True)
    bits = whole & 0x7FFFFFFF
    magnitude = tl.minimum(bits.to(tl.float32, bitcast=True), 448.0)
    bits = tl.where(bits > 0x7F800000, bits, magnitude.to(tl.int32, bitcast=True))
    # below 2**-6 codes are 2**-9 apart, as floats from 2**14 to 2**15 are
    shifted = (magnitude + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
    rounded = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - 960  # biases 127 and 7 apart
    code = tl.where(magnitude < 0.015625, shifted, rounded)
    code = tl.where(bits > 0x7F800000, 0x7F, code)
    return (code | ((whole >> 24) & 0x80)).to(tl.uint8)


@triton.jit
def decode_e4m3(codes):
    """float32 values of uint8 bytes, exact; what is below e4m3's normal numbers included."""
    code = codes.to(tl.int32)
    # the exponent bits lie in float32's lowest ones: 2**120 too small
    small = ((code & 0x7F) << 20).to(tl.float32, bitcast=True)
    bits = (small * 1.329227995784916e36).to(tl.int32, bitcast=True)
    bits = tl.where((code & 0x7F) == 0x7F, 0x7FC00000, bits) | ((code & 0x80) << 24)
    return bits.to(tl.float32, bitcast=True)


@triton.jit(do_not_specialize=["scale_group_stride"])
def _quantise_kernel(
    x, codes, scales, x_stride, width, scale_row_stride, scale_group_stride,
    GROUPS: tl.constexpr, GROUP_SIZE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    groups = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
    columns = groups[:, None] * GROUP_SIZE + tl.arange(0, GROUP_SIZE)[None, :]
    inside = columns < width
    values = tl.load(x + row * x_stride + columns, mask=inside, other=0.0).to(tl.float32)
    _store_codes(
        values, codes + row * width + columns, inside,
        scales + row * scale_row_stride + groups.to(tl.int64) * scale_group_stride,
        groups * GROUP_SIZE < width,
    )  # fmt: skip


@triton.jit
def _store_codes(values, codes, inside, scales, has_group):
    most = tl.maximum(tl.max(tl.abs(values), axis=1), 1e-4)
    scale = most / 448.0
    tl.store(codes, encode_e4m3(values / scale[:, None]), mask=inside)
    tl.store(scales, scale, mask=has_group)


@triton.jit(do_not_specialize=["scale_group_stride"])
def _norm_quantise_kernel(
    x, residual, weight, total, codes, scales, x_stride, width, eps,
    scale_row_stride, scale_group_stride,
    HAS_RESIDUAL: tl.constexpr, GROUPS: tl.constexpr, GROUP_SIZE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    groups = tl.arange(0, GROUPS)
    columns = groups[:, None] * GROUP_SIZE + tl.arange(0, GROUP_SIZE)[None, :]
    inside = columns < width
    form = x.dtype.element_ty
    values = tl.load(x + row * x_stride + columns, mask=inside, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        values += tl.load(residual + row * width + columns, mask=inside, other=0.0).to(tl.float32)
        rounded = values.to(form)
        tl.store(total + row * width + columns, rounded, mask=inside)
        values = rounded.to(tl.float32)
    squares = tl.sum(tl.sum(values * values, axis=1), axis=0)
    scale = tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    normed = (values * tl.rsqrt(squares / width + eps) * scale).to(form).to(tl.float32)
    _store_codes(
        normed, codes + row * width + columns, inside,
        scales + row * scale_row_stride + groups.to(tl.int64) * scale_group_stride,
        groups * GROUP_SIZE < width,
    )  # fmt: skip


def quantise(x_TM: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(e4m3 codes [T, M], float32 scales [T, G]); value = code · scale of its 128 columns.

    The scales of a group of columns follow each other in memory, as block-scaled products want.
    """
    if x_TM.stride(1) != 1:
        x_TM = x_TM.contiguous()
    num_rows, width = x_TM.shape
    codes_TM, scales_TG = _outputs(x_TM)
    if x_TM.numel():
        groups = min(16, triton.next_power_of_2(triton.cdiv(width, GROUP)))
        _quantise_kernel[(num_rows, triton.cdiv(width, groups * GROUP))](
            x_TM, codes_TM.view(torch.uint8), scales_TG, x_TM.stride(0), width,
            *scales_TG.stride(),
            GROUPS=groups, GROUP_SIZE=GROUP, num_warps=num_warps(groups * GROUP),
        )  # fmt: skip
    return codes_TM, scales_TG


def norm_quantise(
    x_TM: torch.Tensor, weight_M: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """`quantise` of `NormOp`'s result, which is rounded to x's dtype first, in one pass."""
    codes_TM, scales_TG = _outputs(x_TM)
    _norm_quantise(x_TM, None, weight_M, None, codes_TM, scales_TG, eps)
    return codes_TM, scales_TG


def add_norm_quantise(
    x_TM: torch.Tensor, residual_TM: torch.Tensor, weight_M: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(codes, scales, x + residual): `quantise` of `AddNormOp`'s first result, in one pass."""
    codes_TM, scales_TG = _outputs(x_TM)
    total_TM = torch.empty(x_TM.shape, dtype=x_TM.dtype, device=x_TM.device)
    residual_TM = residual_TM.contiguous()
    _norm_quantise(x_TM, residual_TM, weight_M, total_TM, codes_TM, scales_TG, eps)
    return codes_TM, scales_TG, total_TM


def _outputs(x_TM: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    num_rows, width = x_TM.shape
    codes_TM = torch.empty(num_rows, width, dtype=torch.float8_e4m3fn, device=x_TM.device)
    scales_GT = torch.empty(triton.cdiv(width, GROUP), num_rows, device=x_TM.device)
    return codes_TM, scales_GT.t()


def _norm_quantise(
    x_TM: torch.Tensor,
    residual_TM: torch.Tensor | None,
    weight_M: torch.Tensor,
    total_TM: torch.Tensor | None,
    codes_TM: torch.Tensor,
    scales_TG: torch.Tensor,
    eps: float,
) -> None:
    if x_TM.stride(1) != 1:
        x_TM = x_TM.contiguous()
    num_rows, width = x_TM.shape
    if not num_rows:
        return
    groups = triton.next_power_of_2(triton.cdiv(width, GROUP))
    _norm_quantise_kernel[(num_rows,)](
        x_TM, residual_TM, weight_M, total_TM, codes_TM.view(torch.uint8), scales_TG,
        x_TM.stride(0), width, eps, *scales_TG.stride(),
        HAS_RESIDUAL=residual_TM is not None, GROUPS=groups, GROUP_SIZE=GROUP,
        num_warps=num_warps(groups * GROUP),
    )  # fmt: skip


_TYPES = {
    "x": "*bf16", "codes": "*u8", "scales": "*fp32", "x_stride": "i32", "width": "i32",
    "scale_group_stride": "i32",
}  # fmt: skip
_ALIGNED = ("x", "codes", "scales", "x_stride", "width")
AOT_CASES = (
    AotCase(
        name="quantise 7168",
        kernel=_quantise_kernel,
        types=_TYPES,
        constants={"scale_row_stride": 1, "GROUPS": 16, "GROUP_SIZE": GROUP},
        aligned=_ALIGNED,
        num_warps=num_warps(16 * GROUP),
    ),
    AotCase(
        name="add_norm_quantise 7168",
        kernel=_norm_quantise_kernel,
        types={
            **_TYPES, "residual": "*bf16", "weight": "*bf16", "total": "*bf16", "eps": "fp32",
        },
        constants={
            "scale_row_stride": 1, "HAS_RESIDUAL": True, "GROUPS": 64, "GROUP_SIZE": GROUP,
        },
        aligned=(*_ALIGNED, "residual", "weight", "total"),
        num_warps=num_warps(64 * GROUP),
    ),
)  # fmt: skip
