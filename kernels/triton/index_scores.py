"""Scores of index keys, Σ_i w_i relu(q_i · k), for rows that choose among the keys of their pages.

A program holds one block of keys and goes through a tile of rows that share them: one row where
every row has its own pages. Keys stand on the first axis of the product and heads on the second;
relu, weights and the sum over heads stay in registers. The product has the same shape for any tile,
so a score does not depend on the rows beside it. N rows, I index heads, D width, L keys.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from batchmla.kernels.sparse_ops import Record
from batchmla.kernels.triton.aot import AotCase
from batchmla.kernels.triton.quant import decode_e4m3

KEYS = 128  # of a program
SHARED_ROWS = 64  # of a program whose rows read the same pages
E4M3_CAPABILITY = (8, 9)
LEAST_DOT = 16  # on every axis of a product


@triton.jit
def plain_e4m3(codes, dtype: tl.constexpr):
    """e4m3 in a wider dtype, exact; bytes where the device has no such type."""
    if codes.dtype == tl.uint8:
        codes = decode_e4m3(codes)
    return codes.to(dtype)


@triton.jit
def _index_scores_kernel(
    q, weights, keys, scales, pages, visible, out,
    num_rows, page_stride, key_stride, scale_stride, pages_stride, out_stride,
    HEADS: tl.constexpr, WIDTH: tl.constexpr, BLOCK_HEADS: tl.constexpr, BLOCK_WIDTH: tl.constexpr,
    PAGE: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, HAS_SCALES: tl.constexpr,
):  # fmt: skip
    first = tl.program_id(1) * ROWS
    tile = first + tl.arange(0, ROWS)
    limit = tl.max(tl.load(visible + tile, mask=tile < num_rows, other=0), axis=0)
    at = tl.program_id(0) * KEYS + tl.arange(0, KEYS)
    if tl.program_id(0) * KEYS >= limit:
        return
    heads, columns = tl.arange(0, BLOCK_HEADS), tl.arange(0, BLOCK_WIDTH)
    seen = at < limit
    page = tl.load(pages + first.to(tl.int64) * pages_stride + at // PAGE, mask=seen, other=0)
    page = page.to(tl.int64)
    place = at % PAGE
    key_at = page * page_stride + place * key_stride
    k = tl.load(
        keys + key_at[:, None] + columns[None, :],
        mask=seen[:, None] & (columns < WIDTH)[None, :], other=0.0,
    )  # fmt: skip
    if HAS_SCALES:
        k = plain_e4m3(k, q.dtype.element_ty)
        factor = tl.load(scales + page * scale_stride + place, mask=seen, other=0.0)
    else:
        k = k.to(q.dtype.element_ty)
    is_query = (heads < HEADS)[:, None] & (columns < WIDTH)[None, :]
    for step in range(0, tl.minimum(num_rows - first, ROWS)):
        wide = first.to(tl.int64) + step
        q_at = wide * (HEADS * WIDTH) + heads[:, None] * WIDTH + columns[None, :]
        q_row = tl.load(q + q_at, mask=is_query, other=0.0)
        weight = tl.load(weights + wide * HEADS + heads, mask=heads < HEADS, other=0.0)
        dots = tl.dot(k, tl.trans(q_row), input_precision="ieee")
        dots = tl.maximum(dots, 0.0, propagate_nan=tl.PropagateNan.ALL)
        score = tl.sum(dots * weight[None, :], axis=1)
        if HAS_SCALES:
            score = score * factor
        seen_by_row = tl.load(visible + wide)
        tl.store(out + wide * out_stride + at, score, mask=at < seen_by_row)


@dataclass(frozen=True, slots=True)
class IndexKeys:
    """Cached keys [P, B, D] and, where they are e4m3, a float32 factor for each [P, B].

    Rows of a page follow each other; pages may lie further apart.
    """

    values_PBD: torch.Tensor
    scales_PB: torch.Tensor | None

    @staticmethod
    def of(cache_PBX: torch.Tensor, record: Record | None) -> "IndexKeys":
        """Plain rows, or views of the parts of records."""
        assert cache_PBX.stride(2) == 1, f"index keys of strides {cache_PBX.stride()}"
        if record is None:
            return IndexKeys(cache_PBX, None)
        is_key = record.scales_last and record.num_tiles == 1 and not record.tail + record.pad
        assert is_key and not record.has_e8m0, f"no record of an index key: {record}"
        num_pages, page_tokens, row_bytes = cache_PBX.shape
        assert cache_PBX.stride(1) == row_bytes, f"records of strides {cache_PBX.stride()}"
        page_bytes, border = cache_PBX.stride(0), page_tokens * record.values
        flat_PX = cache_PBX.as_strided((num_pages, page_tokens * row_bytes), (page_bytes, 1))
        values = flat_PX[:, :border]
        shape = (num_pages, page_tokens, record.values)
        return IndexKeys(
            coded(values.as_strided(shape, (page_bytes, record.values, 1))),
            flat_PX[:, border:].view(torch.float32),
        )


def coded(bytes_X: torch.Tensor) -> torch.Tensor:
    """Bytes as e4m3 where the device converts that."""
    device = bytes_X.device
    is_old = device.type == "cuda" and torch.cuda.get_device_capability(device) < E4M3_CAPABILITY
    return bytes_X if is_old else bytes_X.view(torch.float8_e4m3fn)


def index_scores(
    q_NID: torch.Tensor,
    weights_NI: torch.Tensor,
    keys: IndexKeys,
    pages_GP: torch.Tensor,
    visible_N: torch.Tensor,
    out_NL: torch.Tensor,
) -> None:
    """Writes the float32 scores of the keys that a row sees; what lies beyond them stays as it is.

    `pages_GP` has one row of pages for each of N, or one for all of them.
    """
    num_rows, num_heads, width = q_NID.shape
    assert weights_NI.is_contiguous() and q_NID.is_contiguous() and visible_N.is_contiguous()
    values, scales = keys.values_PBD, keys.scales_PB
    rows = SHARED_ROWS if len(pages_GP) == 1 and num_rows > 1 else 1
    grid = (triton.cdiv(out_NL.shape[1], KEYS), triton.cdiv(num_rows, rows))
    _index_scores_kernel[grid](
        q_NID, weights_NI, values, scales, pages_GP, visible_N, out_NL,
        num_rows, values.stride(0), values.stride(1), 0 if scales is None else scales.stride(0),
        0 if len(pages_GP) == 1 else pages_GP.stride(0), out_NL.stride(0),
        HEADS=num_heads, WIDTH=width, BLOCK_HEADS=dot_block(num_heads),
        BLOCK_WIDTH=dot_block(width), PAGE=values.shape[1], ROWS=rows, KEYS=KEYS,
        HAS_SCALES=scales is not None, num_warps=4, num_stages=2,
    )  # fmt: skip


def dot_block(length: int) -> int:
    """The axis of a product that `length` elements go on."""
    return max(LEAST_DOT, 1 << (length - 1).bit_length())


TARGETS = {None: (80, 90, 100), "*fp8e4nv": (90, 100), "*u8": (80,)}


def _case(name: str, rows: int, codes: str | None = None) -> AotCase:
    """64 heads of 128 elements, as DeepSeek-V3.2 and V4 have them, and pages of 64 keys."""
    types = {
        "q": "*bf16", "weights": "*fp32", "keys": codes or "*bf16",
        "pages": "*i64", "visible": "*i64", "out": "*fp32", "num_rows": "i32", "page_stride": "i32",
        "key_stride": "i32", "scale_stride": "i32", "pages_stride": "i32", "out_stride": "i32",
    }  # fmt: skip
    constants: dict[str, int | None] = {
        "HEADS": 64, "WIDTH": 128, "BLOCK_HEADS": 64, "BLOCK_WIDTH": 128, "PAGE": 64, "ROWS": rows,
        "KEYS": KEYS, "HAS_SCALES": codes is not None,
    }  # fmt: skip
    if codes is not None:
        types["scales"] = "*fp32"
    else:
        constants["scales"] = None
    aligned = ("q", "weights", "keys", "pages", "visible", "out", "page_stride", "key_stride",
               "out_stride", *(("scales", "scale_stride") if codes else ()))  # fmt: skip
    return AotCase(
        name=f"index scores {name}", kernel=_index_scores_kernel, types=types, constants=constants,
        aligned=aligned, num_warps=4, num_stages=2, requires=("HGMMA",),
        targets=TARGETS[codes],
    )  # fmt: skip


AOT_CASES = (
    _case("bf16 decode", 1),
    _case("bf16 shared pages", SHARED_ROWS),
    _case("e4m3 decode", 1, "*fp8e4nv"),
    _case("e4m3 shared pages", SHARED_ROWS, "*fp8e4nv"),
    _case("bytes shared pages", SHARED_ROWS, "*u8"),
)
