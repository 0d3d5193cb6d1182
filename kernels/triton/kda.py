"""Kimi Delta Attention's elementwise ops and its table. Shapes: see `batchmla.kernels.kda_ops`."""

import torch
import triton
import triton.language as tl

from batchmla.kernels.kda_ops import KdaOps
from batchmla.kernels.triton.aot import AotCase
from batchmla.kernels.triton.kda_delta import delta

COLUMNS = 1024
TILE_VALUES = 2048
WARPS = 4


@triton.jit(do_not_specialize=["num_rows", "num_tokens"])
def _convolve_kernel(
    x, weight, places, out, x_stride, num_rows, num_tokens, width,
    TAPS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """silu of some channels of one token; a place outside of x counts as zeros."""
    token = tl.program_id(0).to(tl.int64)
    channels = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = channels < width
    total = tl.zeros([COLUMNS], tl.float32)
    for tap in tl.static_range(TAPS):
        place = tl.load(places + tap * num_tokens + token).to(tl.int64)
        is_there = inside & (place >= 0) & (place < num_rows)
        values = tl.load(x + place * x_stride + channels, mask=is_there, other=0.0)
        factor = tl.load(weight + channels * TAPS + tap, mask=inside, other=0.0)
        total += values.to(tl.float32) * factor.to(tl.float32)
    result = total / (1.0 + tl.exp(0.0 - total))
    tl.store(out + token * width + channels, result.to(out.dtype.element_ty), mask=inside)


@triton.jit
def softplus(x):
    """max(x, 0) + log(1 + e) of e = exp(-|x|), by 2 artanh(e / (2 + e)): exact to float32."""
    raised = tl.exp(0.0 - tl.abs(x))
    ratio = raised / (2.0 + raised)
    square = ratio * ratio
    series = 1.0 / 13.0 + square * (1.0 / 15.0)
    series = 1.0 / 9.0 + square * (1.0 / 11.0 + square * series)
    series = 1.0 / 5.0 + square * (1.0 / 7.0 + square * series)
    series = 1.0 + square * (1.0 / 3.0 + square * series)
    return tl.maximum(x, 0.0) + 2.0 * ratio * series


@triton.jit
def _gates_kernel(
    forget, write, log_rate, bias, decay, beta, forget_stride, write_row, write_head, num_heads,
    head_width, COLUMNS: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    width = num_heads * head_width
    inside = columns < width
    values = tl.load(forget + token * forget_stride + columns, mask=inside, other=0.0)
    values = values.to(tl.float32) + tl.load(bias + columns, mask=inside, other=0.0).to(tl.float32)
    rate = tl.load(log_rate + columns // head_width, mask=inside, other=0.0).to(tl.float32)
    decays = 0.0 - tl.exp(rate) * softplus(values)
    tl.store(decay + token * width + columns, decays, mask=inside)
    if tl.program_id(1) == 0:
        heads = tl.arange(0, HEADS)
        is_head = heads < num_heads
        strength = tl.load(write + token * write_row + heads * write_head, mask=is_head, other=0.0)
        strength = 1.0 / (1.0 + tl.exp(0.0 - strength.to(tl.float32)))
        tl.store(beta + token * num_heads + heads, strength, mask=is_head)


@triton.jit(do_not_specialize=["num_rows"])
def _gated_norm_kernel(
    x, gate, weight, out, num_rows, width, eps, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, COLUMNS)
    inside = (rows < num_rows)[:, None] & (columns < width)[None, :]
    at = rows[:, None] * width + columns[None, :]
    values = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    opened = tl.load(gate + at, mask=inside, other=0.0).to(tl.float32)
    scale = tl.load(weight + columns, mask=columns < width, other=0.0).to(tl.float32)
    factor = tl.rsqrt(tl.sum(values * values, axis=1) / width + eps)
    result = values * factor[:, None] * scale[None, :] / (1.0 + tl.exp(0.0 - opened))
    tl.store(out + at, result.to(out.dtype.element_ty), mask=inside)


def convolve(x_XC: torch.Tensor, weight_C1W: torch.Tensor, places_WT: torch.Tensor) -> torch.Tensor:
    """See `ConvolveOp`."""
    num_taps, num_tokens = places_WT.shape
    num_rows, width = x_XC.shape
    assert weight_C1W.shape == (width, 1, num_taps), (weight_C1W.shape, x_XC.shape)
    out_TC = torch.empty(num_tokens, width, dtype=x_XC.dtype, device=x_XC.device)
    if num_tokens:
        if x_XC.stride(1) != 1:
            x_XC = x_XC.contiguous()
        _convolve_kernel[(num_tokens, triton.cdiv(width, COLUMNS))](
            x_XC, weight_C1W.contiguous(), places_WT.contiguous(), out_TC, x_XC.stride(0),
            num_rows, num_tokens, width, TAPS=num_taps, COLUMNS=COLUMNS, num_warps=WARPS,
        )  # fmt: skip
    return out_TC


def gates(
    forget_TX: torch.Tensor,
    write_TH: torch.Tensor,
    log_rate_H: torch.Tensor,
    bias_X: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `GatesOp`."""
    (num_tokens, num_heads), width = write_TH.shape, forget_TX.shape[1]
    head_width = width // num_heads
    assert width == num_heads * head_width == len(bias_X), (forget_TX.shape, write_TH.shape)
    device = forget_TX.device
    decay_THD = torch.empty(num_tokens, num_heads, head_width, device=device)
    beta_TH = torch.empty(num_tokens, num_heads, device=device)
    if num_tokens:
        if forget_TX.stride(1) != 1:
            forget_TX = forget_TX.contiguous()
        _gates_kernel[(num_tokens, triton.cdiv(width, COLUMNS))](
            forget_TX, write_TH, log_rate_H.contiguous(), bias_X.contiguous(), decay_THD, beta_TH,
            forget_TX.stride(0), *write_TH.stride(), num_heads, head_width,
            COLUMNS=COLUMNS, HEADS=triton.next_power_of_2(num_heads), num_warps=WARPS,
        )  # fmt: skip
    return decay_THD, beta_TH


def gated_norm(
    x_THD: torch.Tensor, gate_THD: torch.Tensor, weight_D: torch.Tensor, eps: float
) -> torch.Tensor:
    """See `GatedNormOp`."""
    width = x_THD.shape[2]
    out_THD = torch.empty(x_THD.shape, dtype=gate_THD.dtype, device=x_THD.device)
    num_rows = out_THD.shape[0] * out_THD.shape[1]
    if num_rows:
        columns = triton.next_power_of_2(width)
        rows = max(1, TILE_VALUES // columns)
        _gated_norm_kernel[(triton.cdiv(num_rows, rows),)](
            x_THD.contiguous(), gate_THD.contiguous(), weight_D, out_THD, num_rows, width, eps,
            ROWS=rows, COLUMNS=columns, num_warps=WARPS,
        )  # fmt: skip
    return out_THD


def make_kda() -> KdaOps:
    """These ops as one value."""
    return KdaOps(convolve=convolve, gates=gates, delta=delta, gated_norm=gated_norm)


AOT_CASES = (
    AotCase(
        name="convolve 4 taps",
        kernel=_convolve_kernel,
        types={
            "x": "*bf16", "weight": "*bf16", "places": "*i64", "out": "*bf16", "x_stride": "i32",
            "num_rows": "i32", "num_tokens": "i32", "width": "i32",
        },
        constants={"TAPS": 4, "COLUMNS": COLUMNS},
        aligned=("x", "weight", "places", "out", "x_stride", "width"),
        num_warps=WARPS,
    ),
    AotCase(
        name="gates of 32 heads",
        kernel=_gates_kernel,
        types={
            "forget": "*bf16", "write": "*bf16", "log_rate": "*fp32", "bias": "*fp32",
            "decay": "*fp32", "beta": "*fp32", "forget_stride": "i32", "write_row": "i32",
            "num_heads": "i32", "head_width": "i32",
        },
        constants={"write_head": 1, "COLUMNS": COLUMNS, "HEADS": 32},
        aligned=("forget", "write", "log_rate", "bias", "decay", "beta", "forget_stride"),
        num_warps=WARPS,
    ),
    AotCase(
        name="gated norm 128",
        kernel=_gated_norm_kernel,
        types={
            "x": "*fp32", "gate": "*bf16", "weight": "*bf16", "out": "*bf16", "num_rows": "i32",
            "width": "i32", "eps": "fp32",
        },
        constants={"ROWS": 16, "COLUMNS": 128},
        aligned=("x", "gate", "weight", "out", "width"),
        num_warps=WARPS,
    ),
)  # fmt: skip
