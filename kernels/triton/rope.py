"""Rotary embedding in place: a pair (a, b) becomes (a cos - b sin, b cos + a sin).

One program rotates some heads of one token. A head is read and written as it lies in memory, so
neighbouring pairs take the same wide loads as halves do. T tokens, H heads, R rotated width.
"""

import torch
import triton
import triton.language as tl

from batchmla.kernels.ops import RopeLayout
from batchmla.kernels.triton.aot import AotCase

TILE_VALUES = 2048


@triton.jit
def rotate_pairs(values, cos, sin, HEADS: tl.constexpr, HALF: tl.constexpr):
    """float32 [HEADS, 2 * HALF] whose neighbours are pairs; `cos` and `sin` are [1, HALF]."""
    first, second = tl.split(tl.reshape(values, [HEADS, HALF, 2]))
    both = tl.join(first * cos - second * sin, second * cos + first * sin)
    return tl.reshape(both, [HEADS, 2 * HALF])


@triton.jit
def _rope_kernel(
    x, cos, sin, token_stride, head_stride, value_stride, angle_stride, num_heads, half,
    INTERLEAVED: tl.constexpr, HEADS: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    heads = tl.program_id(1).to(tl.int64) * HEADS + tl.arange(0, HEADS)
    pairs = tl.arange(0, HALF)
    angles = token * angle_stride + pairs
    turn_cos = tl.load(cos + angles, mask=pairs < half, other=0.0)[None, :]
    turn_sin = tl.load(sin + angles, mask=pairs < half, other=0.0)[None, :]
    rows = x + token * token_stride + heads[:, None] * head_stride
    if INTERLEAVED:
        columns = tl.arange(0, 2 * HALF)[None, :]
        inside = (heads[:, None] < num_heads) & (columns < 2 * half)
        values = tl.load(rows + columns * value_stride, mask=inside, other=0.0).to(tl.float32)
        turned = rotate_pairs(values, turn_cos, turn_sin, HEADS, HALF)
        tl.store(rows + columns * value_stride, turned.to(x.dtype.element_ty), mask=inside)
    else:
        inside = (heads[:, None] < num_heads) & (pairs[None, :] < half)
        at = pairs[None, :] * value_stride
        behind = at + half * value_stride
        first = tl.load(rows + at, mask=inside, other=0.0).to(tl.float32)
        second = tl.load(rows + behind, mask=inside, other=0.0).to(tl.float32)
        turned_first = first * turn_cos - second * turn_sin
        turned_second = second * turn_cos + first * turn_sin
        tl.store(rows + at, turned_first.to(x.dtype.element_ty), mask=inside)
        tl.store(rows + behind, turned_second.to(x.dtype.element_ty), mask=inside)


def rope(
    x_THR: torch.Tensor, cos_TR: torch.Tensor, sin_TR: torch.Tensor, layout: RopeLayout
) -> None:
    """See `RopeOp`."""
    num_tokens, num_heads, width = x_THR.shape
    half = width // 2
    assert cos_TR.shape == sin_TR.shape == (num_tokens, half), (x_THR.shape, cos_TR.shape)
    if x_THR.numel() == 0:
        return
    cos_TR, sin_TR = cos_TR.contiguous(), sin_TR.contiguous()
    heads, padded, warps = _tile(num_heads, half)
    _rope_kernel[(num_tokens, triton.cdiv(num_heads, heads))](
        x_THR, cos_TR, sin_TR, *x_THR.stride(), half, num_heads, half,
        INTERLEAVED=layout is RopeLayout.INTERLEAVED, HEADS=heads, HALF=padded, num_warps=warps,
    )  # fmt: skip


def _tile(num_heads: int, half: int) -> tuple[int, int, int]:
    """(heads, pairs, warps) of a program."""
    padded = triton.next_power_of_2(half)
    heads = min(triton.next_power_of_2(num_heads), max(1, TILE_VALUES // (2 * padded)))
    return heads, padded, 4 if heads * padded >= 512 else 1


def _case(name: str, num_heads: int, half: int, layout: RopeLayout, x: str = "*bf16") -> AotCase:
    heads, padded, warps = _tile(num_heads, half)
    return AotCase(
        name=name,
        kernel=_rope_kernel,
        types={
            "x": x, "cos": "*fp32", "sin": "*fp32", "token_stride": "i32", "head_stride": "i32",
            "angle_stride": "i32", "num_heads": "i32", "half": "i32",
        },
        constants={
            "value_stride": 1, "INTERLEAVED": layout is RopeLayout.INTERLEAVED, "HEADS": heads,
            "HALF": padded,
        },
        aligned=("x", "cos", "sin", "token_stride", "head_stride", "angle_stride", "half"),
        num_warps=warps,
    )  # fmt: skip


AOT_CASES = (
    _case("rope 128 heads of 64, pairs", 128, 32, RopeLayout.INTERLEAVED),
    _case("rope 40 heads of 128, halves", 40, 64, RopeLayout.HALVES),
    _case("rope 1 head of 64, pairs", 1, 32, RopeLayout.INTERLEAVED),
)
