"""Cached rows as records of bytes. Layout: see `batchmla.kernels.sparse_ops.Record`.

One program writes or reads one row: its tiles as [tiles, tile], then its tail. T and N rows, P
pages, B tokens per page, Y bytes of a record, X width of a row.

A slot outside the cache is skipped when written, and zeros when read.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from batchmla.kernels.sparse_ops import Record
from batchmla.kernels.triton.aot import AotCase
from batchmla.kernels.triton.norm import num_warps
from batchmla.kernels.triton.quant import decode_e4m3, encode_e4m3


@triton.jit
def _write_record_kernel(
    cache, slots, rows, slot_stride, page_stride, row_stride, page_tokens, num_slots,
    data_stride, scale_base, scale_stride, tail_base,
    VALUES: tl.constexpr, TILE: tl.constexpr, TAIL: tl.constexpr, SCALE_BYTES: tl.constexpr,
    HAS_E8M0: tl.constexpr, PADDED_TILES: tl.constexpr, PADDED_TILE: tl.constexpr,
    PADDED_TAIL: tl.constexpr, PADDED_SCALES: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row * slot_stride).to(tl.int64)
    if (slot < 0) | (slot >= num_slots):
        return
    page = cache + slot // page_tokens * page_stride
    place = slot % page_tokens
    source = rows + row * row_stride
    tiles, inner = tl.arange(0, PADDED_TILES), tl.arange(0, PADDED_TILE)[None, :]
    columns = tiles[:, None] * TILE + inner
    inside = (inner < TILE) & (columns < VALUES)
    values = tl.load(source + columns, mask=inside, other=0.0).to(tl.float32)
    most = tl.maximum(tl.max(tl.abs(values), axis=1), 1e-4).to(tl.int32, bitcast=True)
    # the least power of two by which most is within 448 = 1.75 * 2**8
    exponents = (most >> 23) - 8 + tl.where((most & 0x7FFFFF) > 0x600000, 1, 0)
    inverse = ((254 - exponents) << 23).to(tl.float32, bitcast=True)
    codes = encode_e4m3(values * inverse[:, None])
    tl.store(page + place * data_stride + columns, codes, mask=inside)
    scales = page + scale_base + place * scale_stride
    num_tiles: tl.constexpr = (VALUES + TILE - 1) // TILE
    scale_width: tl.constexpr = 1 if HAS_E8M0 else 4
    if HAS_E8M0:
        tl.store(scales + tiles, exponents.to(tl.uint8), mask=tiles < num_tiles)
    else:
        at = tl.arange(0, 4)[None, :]
        parts = ((exponents << 23)[:, None] >> (8 * at)) & 255
        is_tile = (tiles < num_tiles)[:, None]
        tl.store(scales + 4 * tiles[:, None] + at, parts.to(tl.uint8), mask=is_tile)
    if scale_width * num_tiles < SCALE_BYTES:
        at = tl.arange(0, PADDED_SCALES)
        is_pad = (at >= scale_width * num_tiles) & (at < SCALE_BYTES)
        tl.store(scales + at, tl.zeros([PADDED_SCALES], tl.uint8), mask=is_pad)
    if TAIL > 0:
        ends = tl.arange(0, PADDED_TAIL)
        tail = tl.load(source + VALUES + ends, mask=ends < TAIL, other=0.0).to(tl.float32)
        words = tail.to(tl.bfloat16).to(tl.int16, bitcast=True).to(tl.int32)
        parts = tl.reshape(tl.join(words & 255, (words >> 8) & 255), [2 * PADDED_TAIL])
        at = tl.arange(0, 2 * PADDED_TAIL)
        target = page + tail_base + place * data_stride + at
        tl.store(target, parts.to(tl.uint8), mask=at < 2 * TAIL)


@triton.jit
def _read_record_kernel(
    cache, slots, out, slot_stride, page_stride, page_tokens, num_slots,
    data_stride, scale_base, scale_stride, tail_base,
    VALUES: tl.constexpr, TILE: tl.constexpr, TAIL: tl.constexpr, HAS_E8M0: tl.constexpr,
    PADDED_TILES: tl.constexpr, PADDED_TILE: tl.constexpr, PADDED_TAIL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row * slot_stride).to(tl.int64)
    is_there = (slot >= 0) & (slot < num_slots)
    slot = tl.where(is_there, slot, 0)
    page = cache + slot // page_tokens * page_stride
    place = slot % page_tokens
    target = out + row * (VALUES + TAIL)
    tiles, inner = tl.arange(0, PADDED_TILES), tl.arange(0, PADDED_TILE)[None, :]
    columns = tiles[:, None] * TILE + inner
    inside = (inner < TILE) & (columns < VALUES)
    codes = tl.load(page + place * data_stride + columns, mask=inside & is_there, other=0)
    scales = page + scale_base + place * scale_stride
    num_tiles: tl.constexpr = (VALUES + TILE - 1) // TILE
    is_tile = (tiles < num_tiles) & is_there
    if HAS_E8M0:
        exponents = tl.load(scales + tiles, mask=is_tile, other=0).to(tl.int32)
        bits = exponents << 23
    else:
        at = tl.arange(0, 4)[None, :]
        parts = tl.load(scales + 4 * tiles[:, None] + at, mask=is_tile[:, None], other=0)
        bits = tl.sum(parts.to(tl.int32) << (8 * at), axis=1)
    factors = bits.to(tl.float32, bitcast=True)
    values = decode_e4m3(codes) * factors[:, None]
    tl.store(target + columns, values.to(out.dtype.element_ty), mask=inside)
    if TAIL > 0:
        ends = tl.arange(0, PADDED_TAIL)
        source = page + tail_base + place * data_stride + 2 * ends
        is_end = (ends < TAIL) & is_there
        low = tl.load(source, mask=is_end, other=0).to(tl.int32)
        high = tl.load(source + 1, mask=is_end, other=0).to(tl.int32)
        tail = ((low << 16) | (high << 24)).to(tl.float32, bitcast=True)
        tl.store(target + VALUES + ends, tail.to(out.dtype.element_ty), mask=ends < TAIL)


def write_record(
    cache_PBY: torch.Tensor, slots_T: torch.Tensor, rows_TX: torch.Tensor, record: Record
) -> None:
    """See `WriteRecordOp`; the same bytes as the reference's."""
    num_rows, width = rows_TX.shape
    assert width == record.width, (rows_TX.shape, record)
    if not num_rows:
        return
    if rows_TX.stride(1) != 1:
        rows_TX = rows_TX.contiguous()
    num_pages, page_tokens, _ = cache_PBY.shape
    _write_record_kernel[(num_rows,)](
        cache_PBY, slots_T, rows_TX, slots_T.stride(0), _page_stride(cache_PBY, record),
        rows_TX.stride(0), page_tokens, num_pages * page_tokens, *_places(page_tokens, record),
        **_sizes(record), SCALE_BYTES=record.scale_bytes,
        PADDED_SCALES=triton.next_power_of_2(record.scale_bytes), num_warps=_warps(record),
    )  # fmt: skip


def read_record(
    cache_PBY: torch.Tensor, slots_N: torch.Tensor, record: Record, dtype: torch.dtype
) -> torch.Tensor:
    """See `ReadRecordOp`; the same values as the reference's."""
    out_NX = torch.empty(len(slots_N), record.width, dtype=dtype, device=cache_PBY.device)
    if len(slots_N):
        num_pages, page_tokens, _ = cache_PBY.shape
        _read_record_kernel[(len(slots_N),)](
            cache_PBY, slots_N, out_NX, slots_N.stride(0), _page_stride(cache_PBY, record),
            page_tokens, num_pages * page_tokens, *_places(page_tokens, record),
            **_sizes(record), num_warps=_warps(record),
        )  # fmt: skip
    return out_NX


def _page_stride(cache_PBY: torch.Tensor, record: Record) -> int:
    """Bytes from page to page; a page lies in one piece."""
    page_stride, row_stride, byte_stride = cache_PBY.stride()
    assert cache_PBY.shape[2] == row_stride == record.num_bytes, (cache_PBY.shape, record)
    assert byte_stride == 1, cache_PBY.stride()
    return page_stride


def _places(page_tokens: int, record: Record) -> tuple[int, int, int, int]:
    """Bytes: from values to values of the next row, to a page's first scales, from scales to
    scales, to a page's first tail."""
    data_bytes = record.values + record.tail_bytes
    if record.scales_last:
        return data_bytes, page_tokens * data_bytes, record.scale_bytes, record.values
    row_bytes = record.num_bytes
    return row_bytes, record.values, row_bytes, record.values + record.scale_bytes


def _sizes(record: Record) -> dict[str, Any]:
    """The constants of a record."""
    return {
        "VALUES": record.values,
        "TILE": record.tile,
        "TAIL": record.tail,
        "HAS_E8M0": record.has_e8m0,
        "PADDED_TILES": triton.next_power_of_2(record.num_tiles),
        "PADDED_TILE": triton.next_power_of_2(record.tile),
        "PADDED_TAIL": triton.next_power_of_2(max(1, record.tail)),
    }


def _warps(record: Record) -> int:
    return num_warps(triton.next_power_of_2(record.values))


_TYPES = {
    "cache": "*u8", "slots": "*i64", "page_stride": "i32", "page_tokens": "i32",
    "num_slots": "i32", "data_stride": "i32", "scale_base": "i32", "scale_stride": "i32",
    "tail_base": "i32",
}  # fmt: skip
_ALIGNED = ("cache", "slots", "page_stride", "page_tokens")


def _write_case(name: str, record: Record) -> AotCase:
    padded = triton.next_power_of_2(record.scale_bytes)
    scales = {"SCALE_BYTES": record.scale_bytes, "PADDED_SCALES": padded}
    return AotCase(
        name=name,
        kernel=_write_record_kernel,
        types={**_TYPES, "rows": "*bf16", "row_stride": "i32"},
        constants={**_sizes(record), **scales, "slot_stride": 1},
        aligned=(*_ALIGNED, "rows", "row_stride"),
        num_warps=_warps(record),
    )


def _read_case(name: str, record: Record) -> AotCase:
    return AotCase(
        name=name,
        kernel=_read_record_kernel,
        types={**_TYPES, "out": "*bf16"},
        constants={**_sizes(record), "slot_stride": 1},
        aligned=(*_ALIGNED, "out"),
        num_warps=_warps(record),
    )


_LATENT = Record(values=512, tile=128, tail=64)
_V4_ROW = Record(values=448, tile=64, tail=64, scales_last=True, has_e8m0=True, pad=1)
AOT_CASES = (
    _write_case("write 656-byte record", _LATENT),
    _write_case("write 584-byte record", _V4_ROW),
    _read_case("read 656-byte record", _LATENT),
    _read_case("read 584-byte record", _V4_ROW),
)
