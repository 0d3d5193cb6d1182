"""A router's logits: bfloat16 rows times float32 weights, as exact as float32 sums are. T rows, E
experts, M columns, S parts of them.

A weight is the sum of three bfloat16 numbers, so three products on 16-bit tensor cores lose nothing
but what a float32 sum does. Columns go in parts of fixed length, which keep a GPU busy in small
steps too; who reads the parts adds them in order.
"""

import torch
import triton
import triton.language as tl

from batchmla.kernels.triton.aot import AotCase

PART = 2048  # columns
BLOCK_E, BLOCK_K = 64, 64
FEW, MANY = 32, 128  # rows of a tile
FEW_ROWS = 512  # up to which tiles are small
NUM_WARPS, NUM_STAGES = 4, 3


@triton.jit
def _logits_kernel(
    x, weight, out, num_rows, x_stride, width, num_experts, part_stride,
    PART_COLUMNS: tl.constexpr, IS_EVEN: tl.constexpr, BLOCK_T: tl.constexpr,
    BLOCK_EXPERTS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    expert = tl.program_id(1) * BLOCK_EXPERTS + tl.arange(0, BLOCK_EXPERTS)
    part = tl.program_id(2)
    column = tl.arange(0, BLOCK_COLUMNS)
    read = tl.minimum(row, num_rows - 1).to(tl.int64)
    x_rows = x + read[:, None] * x_stride + column[None, :]
    kept = tl.minimum(expert, num_experts - 1)
    weight_rows = weight + kept[:, None] * width + column[None, :]
    total = tl.zeros([BLOCK_EXPERTS, BLOCK_T], tl.float32)
    first = part * PART_COLUMNS
    for start in range(first, tl.minimum(first + PART_COLUMNS, width), BLOCK_COLUMNS):
        if IS_EVEN:
            rows = tl.load(x_rows + start)
            values = tl.load(weight_rows + start)
        else:
            inside = (start + column < width)[None, :]
            rows = tl.load(x_rows + start, mask=inside, other=0.0)
            values = tl.load(weight_rows + start, mask=inside, other=0.0)
        turned = tl.trans(rows)
        high = values.to(tl.bfloat16)
        values -= high.to(tl.float32)
        middle = values.to(tl.bfloat16)
        low = (values - middle.to(tl.float32)).to(tl.bfloat16)
        total = tl.dot(high, turned, total)
        total = tl.dot(middle, turned, total)
        total = tl.dot(low, turned, total)
    places = out + part.to(tl.int64) * part_stride + row[:, None].to(tl.int64) * num_experts
    mask = (row < num_rows)[:, None] & (expert < num_experts)[None, :]
    tl.store(places + expert[None, :], tl.trans(total), mask=mask)


def router_logits(
    x_TM: torch.Tensor, weight_EM: torch.Tensor, *, is_exact: bool = False, part: int = PART
) -> torch.Tensor:
    """Parts [S, T, E], float32, of bfloat16 rows; their sum is x Wᵀ.

    `is_exact`: a row's result does not depend on how many others there are."""
    assert x_TM.dtype == torch.bfloat16 and weight_EM.dtype == torch.float32
    (num_rows, width), num_experts = x_TM.shape, len(weight_EM)
    num_parts = triton.cdiv(width, part)
    out_STE = torch.empty(num_parts, num_rows, num_experts, dtype=torch.float32, device=x_TM.device)
    if not num_rows:
        return out_STE
    if x_TM.stride(1) != 1:
        x_TM = x_TM.contiguous()
    block_t = FEW if is_exact or num_rows <= FEW_ROWS else MANY
    _logits_kernel[(triton.cdiv(num_rows, block_t), triton.cdiv(num_experts, BLOCK_E), num_parts)](
        x_TM, weight_EM.contiguous(), out_STE, num_rows, x_TM.stride(0), width, num_experts,
        out_STE.stride(0),
        PART_COLUMNS=part, IS_EVEN=width % BLOCK_K == 0, BLOCK_T=block_t, BLOCK_EXPERTS=BLOCK_E,
        BLOCK_COLUMNS=BLOCK_K, num_warps=NUM_WARPS, num_stages=NUM_STAGES,
    )  # fmt: skip
    return out_STE


AOT_CASES = tuple(
    AotCase(
        name=f"router logits, {block_t} rows",
        kernel=_logits_kernel,
        types={
            "x": "*bf16", "weight": "*fp32", "out": "*fp32", "num_rows": "i32", "x_stride": "i32",
            "width": "i32", "num_experts": "i32", "part_stride": "i32",
        },
        constants={
            "PART_COLUMNS": PART, "IS_EVEN": True, "BLOCK_T": block_t, "BLOCK_EXPERTS": BLOCK_E,
            "BLOCK_COLUMNS": BLOCK_K,
        },
        aligned=("x", "weight", "out", "x_stride", "width", "num_experts"),
        num_warps=NUM_WARPS,
        num_stages=NUM_STAGES,
        requires=("HGMMA", "LDGSTS"),
        targets=targets,
    )
    for block_t, targets in ((FEW, (80, 90, 100)), (MANY, (90,)))
)  # fmt: skip
