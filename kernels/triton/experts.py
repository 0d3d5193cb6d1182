"""Routed experts as one op: sort, product, activation, product, weighted sum. T tokens, A choices
of each, M width.

Nothing waits for the device. A token's result depends on its own row, choices and weights, and on
the rows that a tile has: with `is_exact` that is one number, otherwise it follows the step's size.
A choice whose id is no expert here adds nothing.
"""

import torch
import triton
import triton.language as tl

from batchmla.kernels.block_sparse_ops import OaiGate
from batchmla.kernels.ops import Packed
from batchmla.kernels.triton import moe_gemm, moe_gemm_codes, moe_gemm_fp4, moe_gemm_fp8
from batchmla.kernels.triton.act_mul import Act, Activation
from batchmla.kernels.triton.aot import AotCase
from batchmla.kernels.triton.expert_tiles import pick_tokens
from batchmla.kernels.triton.sort_experts import Tiles, sort_experts

BLOCK_M = 1024
NUM_WARPS = 4


@triton.jit
def _combine_kernel(rows, weights, ids, out, num_experts, active, width, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    total = tl.zeros([BLOCK], tl.float32)
    for index in range(active):
        choice = token * active + index
        expert = tl.load(ids + choice)
        is_here = (expert >= 0) & (expert < num_experts)
        weight = tl.load(weights + choice).to(tl.float32)
        row = tl.load(rows + choice * width + columns, mask=inside & is_here, other=0.0)
        total += tl.where(is_here, weight * row.to(tl.float32), 0.0)
    tl.store(out + token * width + columns, total.to(out.dtype.element_ty), mask=inside)


def combine(
    rows_XM: torch.Tensor, weights_TA: torch.Tensor, ids_TA: torch.Tensor, num_experts: int
) -> torch.Tensor:
    """Σ_a weight_a · row of choice (t, a), in the order of the choices, float32 inside → [T, M]."""
    num_tokens, active = ids_TA.shape
    width = rows_XM.shape[1]
    out_TM = rows_XM.new_empty(num_tokens, width)
    _combine_kernel[(num_tokens, triton.cdiv(width, BLOCK_M))](
        rows_XM, weights_TA.contiguous(), ids_TA.contiguous(), out_TM, num_experts, active, width,
        BLOCK=BLOCK_M, num_warps=NUM_WARPS,
    )  # fmt: skip
    return out_TM


class Experts:
    """The three ops, which differ in their activation."""

    def __init__(self, *, is_exact: bool = False) -> None:
        """`is_exact`: a token's result does not depend on how many others there are."""
        self._is_exact = is_exact

    def experts(
        self,
        x_TM: torch.Tensor,
        weights_TA: torch.Tensor,
        ids_TA: torch.Tensor,
        up: Packed,
        down: Packed,
    ) -> torch.Tensor:
        """See `ExpertsOp`."""
        return self._run(x_TM, weights_TA, ids_TA, up, down, Activation(Act.SILU))

    def clamped_experts(
        self,
        x_TM: torch.Tensor,
        weights_TA: torch.Tensor,
        ids_TA: torch.Tensor,
        up: Packed,
        down: Packed,
        limit: float,
    ) -> torch.Tensor:
        """See `ClampedExpertsOp`."""
        return self._run(x_TM, weights_TA, ids_TA, up, down, Activation(Act.CLAMPED, limit))

    def oai_experts(
        self,
        x_TM: torch.Tensor,
        weights_TA: torch.Tensor,
        ids_TA: torch.Tensor,
        up: Packed,
        down: Packed,
        gate: OaiGate,
    ) -> torch.Tensor:
        """See `OaiExpertsOp`."""
        activation = Activation(Act.OAI, gate.limit, gate.alpha)
        return self._run(x_TM, weights_TA, ids_TA, up, down, activation)

    def _run(
        self,
        x_TM: torch.Tensor,
        weights_TA: torch.Tensor,
        ids_TA: torch.Tensor,
        up: Packed,
        down: Packed,
        activation: Activation,
    ) -> torch.Tensor:
        if not ids_TA.numel():
            return torch.zeros_like(x_TM)
        num_experts, active = up.shape[0], ids_TA.shape[1]
        rows_per_expert = ids_TA.numel() / num_experts
        tokens = pick_tokens(rows_per_expert, x_TM.dtype, is_exact=self._is_exact)
        tiles = sort_experts(ids_TA, num_experts, tokens)
        hidden_XF = _up(x_TM, up, tiles, active, activation, tokens)
        rows_XM = _down(hidden_XF, down, tiles, tokens)
        return combine(rows_XM, weights_TA, ids_TA, num_experts)


def _up(
    x_TM: torch.Tensor, up: Packed, tiles: Tiles, active: int, activation: Activation, tokens: int
) -> torch.Tensor:
    """The gated product that serves the form of the weight."""
    dtype, quantised = x_TM.dtype, up.quantised
    if quantised is None:
        plain, shape = _plain(up), moe_gemm.up_shape(tokens, dtype)
        return moe_gemm.up_product(x_TM, plain, tiles, active, activation, shape)
    if moe_gemm_fp8.reads(quantised):
        product, shape = moe_gemm_fp8.up_product, moe_gemm_fp8.up_shape(tokens)
    elif moe_gemm_fp4.reads(quantised, dtype):
        product, shape = moe_gemm_fp4.up_product, moe_gemm_fp4.up_shape(tokens)
    else:
        product, shape = moe_gemm_codes.up_product, moe_gemm_codes.up_shape(tokens, dtype)
    return product(x_TM, quantised, tiles, active, activation, shape)


def _down(hidden_XF: torch.Tensor, down: Packed, tiles: Tiles, tokens: int) -> torch.Tensor:
    """As `_up`."""
    dtype, quantised = hidden_XF.dtype, down.quantised
    if quantised is None:
        shape = moe_gemm.down_shape(tokens, dtype)
        return moe_gemm.down_product(hidden_XF, _plain(down), tiles, shape)
    if moe_gemm_fp8.reads(quantised):
        product, shape = moe_gemm_fp8.down_product, moe_gemm_fp8.down_shape(tokens)
    elif moe_gemm_fp4.reads(quantised, dtype):
        product, shape = moe_gemm_fp4.down_product, moe_gemm_fp4.down_shape(tokens)
    else:
        product, shape = moe_gemm_codes.down_product, moe_gemm_codes.down_shape(tokens, dtype)
    return product(hidden_XF, quantised, tiles, shape)


def _plain(weight: Packed) -> torch.Tensor:
    assert weight.plain is not None, f"{weight.kind} {weight.shape} is in no form that is read here"
    return weight.plain


AOT_CASES = (
    AotCase(
        name="combine experts",
        kernel=_combine_kernel,
        types={
            "rows": "*bf16", "weights": "*fp32", "ids": "*i64", "out": "*bf16",
            "num_experts": "i32", "active": "i32", "width": "i32",
        },
        constants={"BLOCK": BLOCK_M},
        aligned=("rows", "weights", "ids", "out", "width"),
        num_warps=NUM_WARPS,
    ),
)  # fmt: skip
