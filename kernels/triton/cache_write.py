"""Rows into the flat rows of a paged cache, plainly or as latents that are normed and rotated on
the way. T tokens, P pages, B tokens per page, W width of a row, C latent and R rope width.

A slot outside the cache is skipped, so that rows which only pad a batch need no page.
"""

import torch
import triton
import triton.language as tl

from batchmla.kernels.triton.aot import AotCase
from batchmla.kernels.triton.norm import num_warps
from batchmla.kernels.triton.rope import rotate_pairs

BLOCK_COLUMNS = 2048


@triton.jit
def _write_kernel(
    cache, slots, rows, slot_stride, cache_stride, row_stride, column_stride, num_slots, width,
    BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row * slot_stride).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = (columns < width) & (slot >= 0) & (slot < num_slots)
    at = columns.to(tl.int64) * column_stride
    values = tl.load(rows + row * row_stride + at, mask=inside, other=0.0)
    if values.dtype != cache.dtype.element_ty:
        values = values.to(tl.float32).to(cache.dtype.element_ty)
    tl.store(cache + slot * cache_stride + columns, values, mask=inside)


@triton.jit
def _write_latent_kernel(
    cache, slots, latent, weight, cos, sin, slot_stride, cache_stride, latent_stride, angle_stride,
    num_slots, width, half, eps,
    BLOCK: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row * slot_stride).to(tl.int64)
    if (slot < 0) | (slot >= num_slots):
        return
    source = latent + row * latent_stride
    target = cache + slot * cache_stride
    form = latent.dtype.element_ty
    columns = tl.arange(0, BLOCK)
    inside = columns < width
    values = tl.load(source + columns, mask=inside, other=0.0).to(tl.float32)
    factor = tl.rsqrt(tl.sum(values * values, axis=0) / width + eps)
    scale = tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    normed = (values * factor * scale).to(form).to(tl.float32)
    tl.store(target + columns, normed.to(cache.dtype.element_ty), mask=inside)
    pairs = tl.arange(0, HALF)
    angles = row * angle_stride + pairs
    turn_cos = tl.load(cos + angles, mask=pairs < half, other=0.0)[None, :]
    turn_sin = tl.load(sin + angles, mask=pairs < half, other=0.0)[None, :]
    places = tl.arange(0, 2 * HALF)[None, :]
    is_rope = places < 2 * half
    pe = tl.load(source + width + places, mask=is_rope, other=0.0).to(tl.float32)
    turned = rotate_pairs(pe, turn_cos, turn_sin, 1, HALF).to(form).to(tl.float32)
    tl.store(target + width + places, turned.to(cache.dtype.element_ty), mask=is_rope)


def write(cache_PBW: torch.Tensor, slots_T: torch.Tensor, rows_TW: torch.Tensor) -> None:
    """See `WriteOp`."""
    num_rows, width = rows_TW.shape
    num_slots, cache_stride = flat_rows(cache_PBW)
    assert width == cache_PBW.shape[2], (rows_TW.shape, cache_PBW.shape)
    if rows_TW.numel() == 0:
        return
    block = min(triton.next_power_of_2(width), BLOCK_COLUMNS)
    _write_kernel[(num_rows, triton.cdiv(width, block))](
        cache_PBW, slots_T, rows_TW, slots_T.stride(0), cache_stride, *rows_TW.stride(),
        num_slots, width, BLOCK=block, num_warps=num_warps(block),
    )  # fmt: skip


def write_latent(
    cache_PBW: torch.Tensor,
    slots_T: torch.Tensor,
    latent_TX: torch.Tensor,
    weight_C: torch.Tensor,
    eps: float,
    cos_TR: torch.Tensor,
    sin_TR: torch.Tensor,
) -> None:
    """See `WriteLatentOp`."""
    num_rows, total = latent_TX.shape
    width = weight_C.shape[0]
    half = (total - width) // 2
    num_slots, cache_stride = flat_rows(cache_PBW)
    assert total == cache_PBW.shape[2] == width + 2 * half, (latent_TX.shape, cache_PBW.shape)
    assert cos_TR.shape == sin_TR.shape == (num_rows, half), (cos_TR.shape, latent_TX.shape)
    if not num_rows:
        return
    if latent_TX.stride(1) != 1:
        latent_TX = latent_TX.contiguous()
    cos_TR, sin_TR = cos_TR.contiguous(), sin_TR.contiguous()
    block = triton.next_power_of_2(width)
    _write_latent_kernel[(num_rows,)](
        cache_PBW, slots_T, latent_TX, weight_C, cos_TR, sin_TR, slots_T.stride(0), cache_stride,
        latent_TX.stride(0), half, num_slots, width, half, eps,
        BLOCK=block, HALF=triton.next_power_of_2(half), num_warps=num_warps(block),
    )  # fmt: skip


def flat_rows(cache_PBW: torch.Tensor) -> tuple[int, int]:
    """(rows, elements from one to the next) of a cache whose pages follow each other."""
    num_pages, page_tokens, _ = cache_PBW.shape
    page_stride, row_stride, value_stride = cache_PBW.stride()
    is_flat = num_pages == 1 or page_stride == page_tokens * row_stride
    assert is_flat and value_stride == 1, (cache_PBW.shape, cache_PBW.stride())
    return num_pages * page_tokens, row_stride


_WRITE_TYPES = {
    "cache": "*bf16", "slots": "*i64", "rows": "*bf16", "cache_stride": "i32", "row_stride": "i32",
    "num_slots": "i32", "width": "i32",
}  # fmt: skip
AOT_CASES = (
    *(
        AotCase(
            name=f"cache write {width}",
            kernel=_write_kernel,
            types=_WRITE_TYPES,
            constants={"slot_stride": 1, "column_stride": 1, "BLOCK": width},
            aligned=("cache", "slots", "rows", "cache_stride", "row_stride", "width"),
            num_warps=num_warps(width),
        )
        for width in (128, 1024)
    ),
    AotCase(
        name="latent write 512+64",
        kernel=_write_latent_kernel,
        types={
            "cache": "*bf16", "slots": "*i64", "latent": "*bf16", "weight": "*bf16",
            "cos": "*fp32", "sin": "*fp32", "cache_stride": "i32", "latent_stride": "i32",
            "angle_stride": "i32", "num_slots": "i32", "width": "i32", "half": "i32",
            "eps": "fp32",
        },
        constants={"slot_stride": 1, "BLOCK": 512, "HALF": 32},
        aligned=(
            "cache", "slots", "latent", "weight", "cos", "sin", "cache_stride", "latent_stride",
            "angle_stride", "width", "half",
        ),
        num_warps=num_warps(512),
    ),
)  # fmt: skip
