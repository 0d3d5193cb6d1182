"""DeepSeek-V4's attention: rows of a window and chosen or all entries of a cache, by two lists of
places, with a sink for every head that takes part in the sum only.

Programs and products as in `sparse_mla`; a row, key and value in one, is read in one piece. N rows,
H heads, D width of a row, W places of a window, K slots of entries.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from batchmla.kernels.hybrid_ops import HybridRows
from batchmla.kernels.sparse_ops import Record
from batchmla.kernels.triton.aot import AotCase
from batchmla.kernels.triton.index_scores import coded, dot_block
from batchmla.kernels.triton.sparse_mla import (
    LOG2_E,
    attend_tile,
    row_starts,
    scaled,
    within,
)


@triton.jit
def _places(
    places, slots, step, near_steps, num_near, num_far, HAS_ENTRIES: tl.constexpr,
    KEYS: tl.constexpr,
):  # fmt: skip
    """What a step reads, first of the window and then of the entries; -1 beyond the counts."""
    near = step * KEYS + tl.arange(0, KEYS)
    found = tl.load(places + near, mask=near < num_near, other=-1).to(tl.int64)
    if HAS_ENTRIES:
        far = near - near_steps * KEYS
        is_far = (far >= 0) & (far < num_far)
        found = tl.maximum(found, tl.load(slots + far, mask=is_far, other=-1).to(tl.int64))
    return found


@triton.jit
def _entry_rows(
    entries, scales, tails, slot, seen, page_stride, row_stride,
    WIDTH: tl.constexpr, BLOCK_WIDTH: tl.constexpr, PAGE: tl.constexpr, VALUES: tl.constexpr,
    TILE: tl.constexpr, SCALE_BASE: tl.constexpr, SCALE_BYTES: tl.constexpr, dtype: tl.constexpr,
):  # fmt: skip
    """[keys, width] of flat cache rows, plain or from records with their scales behind the page."""
    columns = tl.arange(0, BLOCK_WIDTH)
    at = row_starts(slot, page_stride, row_stride, PAGE)
    if TILE > 0:
        codes = tl.load(
            entries + at[:, None] + columns[None, :],
            mask=seen[:, None] & (columns < VALUES)[None, :], other=0.0,
        )  # fmt: skip
        tiles = tl.arange(0, BLOCK_WIDTH // TILE)
        scale_at = (slot // PAGE) * page_stride + SCALE_BASE + (slot % PAGE) * SCALE_BYTES
        exponents = tl.load(
            scales + scale_at[:, None] + tiles[None, :],
            mask=seen[:, None] & (tiles * TILE < VALUES)[None, :], other=127,
        )  # fmt: skip
        factors = (exponents.to(tl.int32) << 23).to(tl.float32, bitcast=True)
        tail = tl.load(
            tails + ((at + VALUES) // 2)[:, None] + (columns - VALUES)[None, :],
            mask=seen[:, None] & ((columns >= VALUES) & (columns < WIDTH))[None, :], other=0.0,
        )  # fmt: skip
        rows = scaled(codes, factors, dtype, TILE)
        rows = tl.where((columns < VALUES)[None, :], rows, tail.to(dtype))
    else:
        rows = tl.load(
            entries + at[:, None] + columns[None, :],
            mask=within(seen, columns, WIDTH), other=0.0,
        ).to(dtype)  # fmt: skip
    return rows


@triton.jit
def _hybrid_kernel(
    q, window, places, window_counts, entries, scales, tails, slots, entry_counts, sinks, out,
    num_heads, scale, q_stride, q_head_stride, window_stride, places_stride, slots_stride,
    page_stride, row_stride,
    WIDTH: tl.constexpr, BLOCK_WIDTH: tl.constexpr, PAGE: tl.constexpr, VALUES: tl.constexpr,
    TILE: tl.constexpr, SCALE_BASE: tl.constexpr, SCALE_BYTES: tl.constexpr,
    HAS_ENTRIES: tl.constexpr, IS_MIXED: tl.constexpr, HEADS: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    num_blocks = tl.cdiv(num_heads, HEADS)
    row = (tl.program_id(0) // num_blocks).to(tl.int64)
    heads = (tl.program_id(0) % num_blocks) * HEADS + tl.arange(0, HEADS)
    columns = tl.arange(0, BLOCK_WIDTH)
    is_q = within(heads < num_heads, columns, WIDTH)
    dtype: tl.constexpr = q.dtype.element_ty
    q_tile = tl.load(
        q + row * q_stride + heads[:, None] * q_head_stride + columns[None, :], mask=is_q, other=0.0
    )
    sink = tl.load(sinks + heads, mask=heads < num_heads, other=float("-inf"))
    most = sink * 1.4426950408889634
    total = tl.where(most == float("-inf"), 0.0, 1.0)
    acc = tl.zeros([BLOCK_WIDTH, HEADS], tl.float32)
    num_near = tl.load(window_counts + row).to(tl.int32)
    num_far = num_near * 0
    if HAS_ENTRIES:
        num_far = tl.load(entry_counts + row).to(tl.int32)
    places += row * places_stride
    if HAS_ENTRIES:
        slots += row * slots_stride
    near_steps = tl.cdiv(num_near, KEYS)
    num_steps = near_steps + tl.cdiv(num_far, KEYS)
    place = _places(places, slots, 0, near_steps, num_near, num_far, HAS_ENTRIES, KEYS)
    for step in range(0, num_steps):
        is_near = step < near_steps
        seen = place >= 0
        near = window + place * window_stride
        if IS_MIXED:
            near_rows = tl.load(
                near[:, None] + columns[None, :],
                mask=within(seen & is_near, columns, WIDTH), other=0.0,
            ).to(dtype)  # fmt: skip
            far_rows = _entry_rows(
                entries, scales, tails, place, seen & (step >= near_steps), page_stride, row_stride,
                WIDTH, BLOCK_WIDTH, PAGE, VALUES, TILE, SCALE_BASE, SCALE_BYTES, dtype,
            )  # fmt: skip
            rows = tl.where(is_near, near_rows, far_rows)
        else:
            if HAS_ENTRIES:
                far = entries + row_starts(place, page_stride, row_stride, PAGE)
                near = tl.where(is_near, near, far)
            rows = tl.load(
                near[:, None] + columns[None, :],
                mask=within(seen, columns, WIDTH), other=0.0,
            ).to(dtype)  # fmt: skip
        place = _places(places, slots, step + 1, near_steps, num_near, num_far, HAS_ENTRIES, KEYS)
        scores = tl.dot(rows, tl.trans(q_tile), input_precision="ieee") * scale
        most, total, acc = attend_tile(scores, rows, seen, most, total, acc, True)
    total = tl.where(total == 0.0, 1.0, total)
    out_at = (row * num_heads + heads) * WIDTH
    acc = (acc / total[None, :]).to(dtype)
    tl.store(out + out_at[None, :] + columns[:, None], acc, mask=tl.trans(is_q))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Entries:
    """The cache of entries, or views of the parts of its records; strides of those in bytes."""

    values: torch.Tensor
    row_stride: int
    scales: torch.Tensor | None = None
    tails: torch.Tensor | None = None
    num_values: int = 0
    tile: int = 0
    scale_base: int = 0
    scale_bytes: int = 0

    @staticmethod
    def of(entries_PBX: torch.Tensor, record: Record | None) -> "_Entries":
        assert entries_PBX.stride(2) == 1, f"entries of strides {entries_PBX.stride()}"
        if record is None:
            return _Entries(values=entries_PBX, row_stride=entries_PBX.stride(1))
        page_tokens, row_bytes = entries_PBX.shape[1:]
        assert entries_PBX.stride(1) == row_bytes, f"records of strides {entries_PBX.stride()}"
        is_behind = record.scales_last and record.has_e8m0
        assert is_behind and not record.tile & (record.tile - 1), f"no record of entries: {record}"
        data_bytes = record.values + record.tail_bytes
        return _Entries(
            values=coded(entries_PBX), row_stride=data_bytes, scales=entries_PBX,
            tails=entries_PBX.view(torch.bfloat16), num_values=record.values,
            tile=min(record.tile, dot_block(record.width)), scale_base=page_tokens * data_bytes,
            scale_bytes=record.scale_bytes,
        )  # fmt: skip


def attend(
    q_NHD: torch.Tensor,
    window_XD: torch.Tensor,
    entries_PBD: torch.Tensor | None,
    rows: HybridRows,
    sink_H: torch.Tensor,
    scale: float,
    record: Record | None,
) -> torch.Tensor:
    """See `HybridAttendOp`."""
    num_rows, num_heads, width = q_NHD.shape
    out_NHD = torch.empty(q_NHD.shape, dtype=q_NHD.dtype, device=q_NHD.device)
    assert q_NHD.stride(2) == 1 and window_XD.stride(1) == 1 and rows.window_NW.stride(1) == 1
    slots_NK, counts_N, read = rows.slots_NK, rows.entry_count_N, None
    if slots_NK is not None and slots_NK.shape[1]:
        assert entries_PBD is not None and counts_N is not None, "slots of no entries"
        assert slots_NK.stride(1) == 1 and counts_N.is_contiguous()
        read = _Entries.of(entries_PBD, record)
    is_mixed = read is not None and read.values.dtype != window_XD.dtype
    heads, keys = _tile(num_heads, is_mixed, q_NHD)
    _hybrid_kernel[(num_rows * triton.cdiv(num_heads, heads),)](
        q_NHD, window_XD, rows.window_NW, rows.window_count_N.contiguous(),
        None if read is None else read.values, None if read is None else read.scales,
        None if read is None else read.tails, None if read is None else slots_NK,
        None if read is None else counts_N, sink_H.contiguous(), out_NHD,
        num_heads, scale * LOG2_E, q_NHD.stride(0), q_NHD.stride(1), window_XD.stride(0),
        rows.window_NW.stride(0), 0 if read is None or slots_NK is None else slots_NK.stride(0),
        0 if read is None else read.values.stride(0), 0 if read is None else read.row_stride,
        WIDTH=width, BLOCK_WIDTH=dot_block(width), PAGE=1 if read is None else read.values.shape[1],
        VALUES=0 if read is None else read.num_values, TILE=0 if read is None else read.tile,
        SCALE_BASE=0 if read is None else read.scale_base,
        SCALE_BYTES=0 if read is None else read.scale_bytes,
        HAS_ENTRIES=read is not None, IS_MIXED=is_mixed, HEADS=heads, KEYS=keys,
        num_warps=8, num_stages=2,
    )  # fmt: skip
    return out_NHD


def _tile(num_heads: int, is_mixed: bool, like: torch.Tensor) -> tuple[int, int]:
    """Heads and keys of a tile: what registers and shared memory hold of rows of 512 elements."""
    if like.dtype == torch.float32:
        return 16, 16
    if num_heads > 16:
        return 32, 32
    is_hopper = like.device.type != "cuda" or torch.cuda.get_device_capability(like.device)[0] == 9
    return 16, 32 if is_mixed or not is_hopper else 64


_STRIDES = ("q_stride", "q_head_stride", "window_stride", "places_stride", "slots_stride",
            "page_stride", "row_stride")  # fmt: skip


def _case(
    name: str, heads: int, keys: int, targets: tuple[int, ...], codes: str | None = None
) -> AotCase:
    """Rows of 512 elements, pages of 64 entries."""
    types = dict.fromkeys(("q", "window", "out"), "*bf16") | {
        "places": "*i64", "window_counts": "*i64", "entries": codes or "*bf16", "slots": "*i64",
        "entry_counts": "*i64", "sinks": "*fp32", "num_heads": "i32", "scale": "fp32",
        **dict.fromkeys(_STRIDES, "i32"),
    }  # fmt: skip
    constants: dict[str, int | None] = {
        "WIDTH": 512, "BLOCK_WIDTH": 512, "PAGE": 64, "HAS_ENTRIES": True,
        "IS_MIXED": codes is not None, "HEADS": heads, "KEYS": keys, "VALUES": 0, "TILE": 0,
        "SCALE_BASE": 0, "SCALE_BYTES": 0,
    }  # fmt: skip
    if codes:
        types |= {"scales": "*u8", "tails": "*bf16"}
        constants |= {"VALUES": 448, "TILE": 64, "SCALE_BASE": 64 * 576, "SCALE_BYTES": 8}
    else:
        constants |= dict.fromkeys(("scales", "tails"))
    return AotCase(
        name=f"hybrid {name}", kernel=_hybrid_kernel, types=types, constants=constants,
        aligned=tuple(name for name in types if name not in ("scale", "num_heads")),
        num_warps=8, num_stages=2, targets=targets, requires=("HGMMA", "LDGSTS"),
    )  # fmt: skip


AOT_CASES = (
    _case("bf16 16 heads", 16, 64, (90,)),
    _case("bf16 32 heads", 32, 32, (80, 90, 100)),
    _case("e4m3 16 heads", 16, 32, (90,), "*fp8e4nv"),
    _case("e4m3 32 heads", 32, 32, (90, 100), "*fp8e4nv"),
    _case("bytes 16 heads", 16, 32, (80,), "*u8"),
)
