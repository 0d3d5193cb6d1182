"""Gated activations, alone and for the experts' products. T rows, F columns of a half; float32
inside.

    silu      g · sigmoid(g) · u
    clamped   the same with g = min(g, limit), u within ±limit
    oai       g · sigmoid(alpha · g) · (u + 1), clamped
"""

from dataclasses import dataclass
from enum import IntEnum

import torch
import triton
import triton.language as tl

from batchmla.kernels.block_sparse_ops import OaiGate
from batchmla.kernels.triton.aot import AotCase

BLOCK_F = 1024
NUM_WARPS = 4


class Act(IntEnum):
    """Which function; a constant of the kernels."""

    NONE = 0
    SILU = 1
    CLAMPED = 2
    OAI = 3


@dataclass(frozen=True, slots=True)
class Activation:
    """A function with its numbers; `limit` and `alpha` count where the function has them."""

    act: Act
    limit: float = 0.0
    alpha: float = 1.0


@triton.jit
def activate(gate, up, limit, alpha, ACT: tl.constexpr):
    """Of float32 values; what is no number stays none."""
    if ACT >= 2:
        gate = tl.where(gate > limit, limit, gate)
        up = tl.where(up > limit, limit, tl.where(up < -limit, -limit, up))
    if ACT == 3:
        result = gate / (1.0 + tl.exp(-alpha * gate)) * (up + 1.0)
    else:
        result = gate / (1.0 + tl.exp(-gate)) * up
    return result


@triton.jit
def _act_mul_kernel(
    gate_up, out, stride, width, limit, alpha, ACT: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    pair = gate_up + row * stride + columns
    gate = tl.load(pair, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(pair + width, mask=inside, other=0.0).to(tl.float32)
    result = activate(gate, up, limit, alpha, ACT)
    tl.store(out + row * width + columns, result.to(out.dtype.element_ty), mask=inside)


def act_mul(gate_up_TF: torch.Tensor) -> torch.Tensor:
    """See `ActMulOp`."""
    return _launch(gate_up_TF, Activation(Act.SILU))


def clamped_act_mul(gate_up_TF: torch.Tensor, limit: float) -> torch.Tensor:
    """See `ClampedActMulOp`."""
    return _launch(gate_up_TF, Activation(Act.CLAMPED, limit))


def oai_act_mul(gate_up_TF: torch.Tensor, gate: OaiGate) -> torch.Tensor:
    """See `OaiActMulOp`."""
    return _launch(gate_up_TF, Activation(Act.OAI, gate.limit, gate.alpha))


def _launch(gate_up_TF: torch.Tensor, activation: Activation) -> torch.Tensor:
    *leading, both = gate_up_TF.shape
    rows_TF, width = gate_up_TF.reshape(-1, both), both // 2
    assert both == 2 * width, f"{both} columns are not two halves"
    if rows_TF.stride(-1) != 1:
        rows_TF = rows_TF.contiguous()
    out_TF = rows_TF.new_empty(len(rows_TF), width)
    if out_TF.numel():
        _act_mul_kernel[(len(rows_TF), triton.cdiv(width, BLOCK_F))](
            rows_TF, out_TF, rows_TF.stride(0), width, float(activation.limit),
            float(activation.alpha), ACT=int(activation.act), BLOCK=BLOCK_F, num_warps=NUM_WARPS,
        )  # fmt: skip
    return out_TF.view(*leading, width)


AOT_CASES = tuple(
    AotCase(
        name=f"act_mul {act.name.lower()}",
        kernel=_act_mul_kernel,
        types={
            "gate_up": "*bf16", "out": "*bf16", "stride": "i32", "width": "i32", "limit": "fp32",
            "alpha": "fp32",
        },
        constants={"ACT": int(act), "BLOCK": BLOCK_F},
        aligned=("gate_up", "out", "stride", "width"),
        num_warps=NUM_WARPS,
    )
    for act in (Act.SILU, Act.CLAMPED, Act.OAI)
)  # fmt: skip
