"""Attention over latent rows, absorbed form: one row is key and value of all heads.

A work item (see `spans`) is a block of rows (a query's heads, query by query) over one split of a
sequence's keys. `_narrow_kernel` serves one query of up to 32 heads with keys in the place of rows:
S' = K q', z' = C' P'. `_wide_kernel` has blocks of rows: S = q K', z = P C. Both read a tile of
latents once for scores and values, and work in base 2.

| cache   | latent                                      | tail     |
| plain   | C values                                    | R values |
| records | C codes e4m3, a float32 factor for each 128 | R values |

Codes come as bytes where the device has no such type.

C latent, R rope, X = C + R; constants of kernels: ROWS of a block, KEYS of a tile.
"""

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from batchmla.kernels.triton.aot import AotCase
from batchmla.kernels.triton.latent_rows import TILE, LatentRows
from batchmla.kernels.triton.merge import merge
from batchmla.kernels.triton.spans import DeviceTables

NARROW_HEADS = 32
WIDE_ROWS = 64
LEAST = tl.constexpr(-1e30)  # below every score, and a number: a row may see no key of a tile


@triton.jit
def wide_codes(codes):
    """Values of e4m3 in float32; where they come as bytes, by way of float16, whose exponents have
    one bit more and a bias that is larger by 8."""
    if codes.dtype == tl.uint8:
        wide = codes.to(tl.uint16)
        bits = ((wide & 0x7F) << 7) | ((wide & 0x80) << 8)
        values = bits.to(tl.float16, bitcast=True).to(tl.float32) * 256.0
    else:
        values = codes.to(tl.float32)
    return values


@triton.jit
def page_rows(table, keys, seen, PAGE: tl.constexpr):
    """The flat cache rows of `keys`, which count from the table's first page.

    The compiler takes the sum of a multiple of PAGE and consecutive numbers for multiples of PAGE
    (triton 3.6), and would load rows of any width as if they were aligned: it is told otherwise."""
    first = tl.load(table + keys // PAGE, mask=seen, other=0).to(tl.int64) * PAGE
    return tl.multiple_of(first + keys % PAGE, [1])


@triton.jit
def _latents(
    latent, tail, factors, latent_box, tail_box, table, start, stop,
    latent_stride, tail_stride, factor_stride,
    LATENT: tl.constexpr, ROPE: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_R: tl.constexpr,
    KEYS: tl.constexpr, PAGE: tl.constexpr, TILES: tl.constexpr, IS_BOXED: tl.constexpr,
    dtype: tl.constexpr,
):  # fmt: skip
    """A tile of keys from `start` on: latents [KEYS, BLOCK_C] and tails [KEYS, BLOCK_R]."""
    keys = start + tl.arange(0, KEYS)
    seen = keys < stop
    columns, tail_columns = tl.arange(0, BLOCK_C), tl.arange(0, BLOCK_R)
    if IS_BOXED:
        first = tl.load(table + start // PAGE) * PAGE + start % PAGE
        rows = first.to(tl.int64) + tl.arange(0, KEYS)
        values = latent_box.load([first, 0])
        tails = tail_box.load([first, 0])
    else:
        rows = page_rows(table, keys, seen, PAGE)
        here = latent + rows[:, None] * latent_stride + columns[None, :]
        values = tl.load(here, mask=seen[:, None] & (columns < LATENT)[None, :], other=0.0)
        here = tail + rows[:, None] * tail_stride + tail_columns[None, :]
        tails = tl.load(here, mask=seen[:, None] & (tail_columns < ROPE)[None, :], other=0.0)
    if TILES > 0:
        tiles = tl.arange(0, TILES)
        here = factors + rows[:, None] * factor_stride + tiles[None, :]
        if IS_BOXED:
            factor = tl.load(here)
        else:
            factor = tl.load(here, mask=seen[:, None] & (tiles * 128 < LATENT)[None, :], other=0.0)
        wide = wide_codes(values).reshape(KEYS, TILES, BLOCK_C // TILES)
        values = (wide * factor[:, :, None]).reshape(KEYS, BLOCK_C)
    return values.to(dtype), tails.to(dtype)


@triton.jit
def _narrow_kernel(
    q, latent, tail, factors, latent_box, tail_box, sequences, items, pages, out, partial, lse,
    scale, latent_stride, tail_stride, factor_stride,
    HEADS: tl.constexpr, LATENT: tl.constexpr, ROPE: tl.constexpr, BLOCK_C: tl.constexpr,
    BLOCK_R: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, PAGE: tl.constexpr,
    SPLIT: tl.constexpr, TILES: tl.constexpr, IS_BOXED: tl.constexpr,
):  # fmt: skip
    item = items + tl.program_id(0) * 4
    sequence = tl.load(item)
    if sequence < 0:
        return
    split, slot = tl.load(item + 1), tl.load(item + 3)
    entry = sequences + sequence * 8
    first_row, num_keys = tl.load(entry).to(tl.int64), tl.load(entry + 2)
    table = pages + tl.load(entry + 3)
    heads = tl.load(item + 2) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, BLOCK_C)
    tail_columns = tl.arange(0, BLOCK_R)
    is_head, is_column = heads < HEADS, columns < LATENT
    here = q + (first_row * HEADS + heads[:, None]) * (LATENT + ROPE)
    q_latent = tl.load(
        here + columns[None, :], mask=is_head[:, None] & is_column[None, :], other=0.0
    )
    q_tail = tl.load(
        here + LATENT + tail_columns[None, :],
        mask=is_head[:, None] & (tail_columns < ROPE)[None, :], other=0.0,
    )  # fmt: skip

    most = tl.full([ROWS], LEAST, tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    z = tl.zeros([BLOCK_C, ROWS], tl.float32)
    first = split * SPLIT
    stop = tl.minimum(num_keys, first + SPLIT)
    for start in tl.range(first, stop, KEYS):
        values, tails = _latents(
            latent, tail, factors, latent_box, tail_box, table, start, stop,
            latent_stride, tail_stride, factor_stride,
            LATENT, ROPE, BLOCK_C, BLOCK_R, KEYS, PAGE, TILES, IS_BOXED, q.dtype.element_ty,
        )  # fmt: skip
        scores = tl.dot(values, tl.trans(q_latent), input_precision="ieee")
        scores = tl.dot(tails, tl.trans(q_tail), scores, input_precision="ieee") * scale
        seen = start + tl.arange(0, KEYS) < stop
        scores = tl.where(seen[:, None], scores, float("-inf"))
        more = tl.maximum(most, tl.max(scores, axis=0))
        weights = tl.exp2(scores - more[None, :])
        shrink = tl.exp2(most - more)
        total = total * shrink + tl.sum(weights, axis=0)
        z = tl.dot(
            tl.trans(values), weights.to(values.dtype), z * shrink[None, :], input_precision="ieee"
        )
        most = more
    z = z / tl.where(total == 0, 1.0, total)[None, :]
    inside = is_head[None, :] & is_column[:, None]
    if slot < 0:
        there = out + (first_row * HEADS + heads[None, :]) * LATENT + columns[:, None]
        tl.store(there, z.to(out.dtype.element_ty), mask=inside)
    else:
        places = slot.to(tl.int64) * ROWS + tl.arange(0, ROWS)
        tl.store(partial + places[None, :] * LATENT + columns[:, None], z, mask=inside)
        tl.store(lse + places, tl.where(total == 0, float("-inf"), most + tl.log2(total)))


@triton.jit
def _wide_kernel(
    q, latent, tail, factors, latent_box, tail_box, sequences, items, pages, out, partial, lse,
    scale, latent_stride, tail_stride, factor_stride,
    HEADS: tl.constexpr, LATENT: tl.constexpr, ROPE: tl.constexpr, BLOCK_C: tl.constexpr,
    BLOCK_R: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, PAGE: tl.constexpr,
    SPLIT: tl.constexpr, TILES: tl.constexpr, IS_BOXED: tl.constexpr,
):  # fmt: skip
    item = items + tl.program_id(0) * 4
    sequence = tl.load(item)
    if sequence < 0:
        return
    split = tl.load(item + 1)
    entry = sequences + sequence * 8
    first_row, num_queries = tl.load(entry).to(tl.int64), tl.load(entry + 1)
    num_keys, table = tl.load(entry + 2), pages + tl.load(entry + 3)
    rows = tl.load(item + 2) * ROWS + tl.arange(0, ROWS)
    columns, tail_columns = tl.arange(0, BLOCK_C), tl.arange(0, BLOCK_R)
    is_row, is_column = rows < num_queries * HEADS, columns < LATENT
    here = q + (first_row * HEADS + rows[:, None]) * (LATENT + ROPE)
    q_latent = tl.load(
        here + columns[None, :], mask=is_row[:, None] & is_column[None, :], other=0.0
    )
    q_tail = tl.load(
        here + LATENT + tail_columns[None, :],
        mask=is_row[:, None] & (tail_columns < ROPE)[None, :], other=0.0,
    )  # fmt: skip
    first = split * SPLIT
    stop = tl.minimum(num_keys, first + SPLIT)
    visible = tl.minimum(num_keys - (num_queries - 1 - rows // HEADS), stop)

    most = tl.full([ROWS], LEAST, tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    z = tl.zeros([ROWS, BLOCK_C], tl.float32)
    for start in tl.range(first, stop, KEYS):
        values, tails = _latents(
            latent, tail, factors, latent_box, tail_box, table, start, stop,
            latent_stride, tail_stride, factor_stride,
            LATENT, ROPE, BLOCK_C, BLOCK_R, KEYS, PAGE, TILES, IS_BOXED, q.dtype.element_ty,
        )  # fmt: skip
        scores = tl.dot(q_latent, tl.trans(values), input_precision="ieee")
        scores = tl.dot(q_tail, tl.trans(tails), scores, input_precision="ieee") * scale
        seen = start + tl.arange(0, KEYS)[None, :] < visible[:, None]
        scores = tl.where(seen, scores, float("-inf"))
        more = tl.maximum(most, tl.max(scores, axis=1))
        weights = tl.exp2(scores - more[:, None])
        shrink = tl.exp2(most - more)
        total = total * shrink + tl.sum(weights, axis=1)
        z = tl.dot(weights.to(values.dtype), values, z * shrink[:, None], input_precision="ieee")
        most = more
    z = z / tl.where(total == 0, 1.0, total)[:, None]
    # read again: numbers kept over the loop cost registers, and the loop has none to spare
    slot = tl.load(item + 3, volatile=True)
    first_row = tl.load(entry, volatile=True).to(tl.int64)
    rows = tl.load(item + 2, volatile=True) * ROWS + tl.arange(0, ROWS)
    is_row = rows < tl.load(entry + 1, volatile=True) * HEADS
    inside = is_row[:, None] & is_column[None, :]
    if slot < 0:
        there = out + (first_row * HEADS + rows[:, None]) * LATENT + columns[None, :]
        tl.store(there, z.to(out.dtype.element_ty), mask=inside)
    else:
        places = slot.to(tl.int64) * ROWS + tl.arange(0, ROWS)
        tl.store(partial + places[:, None] * LATENT + columns[None, :], z, mask=inside)
        tl.store(lse + places, tl.where(total == 0, float("-inf"), most + tl.log2(total)))


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentTiling:
    """How a kernel is launched."""

    rows: int
    keys: int
    split_tokens: int
    num_warps: int
    num_stages: int


def narrow_tiling(
    heads: int, itemsize: int, *, has_records: bool, has_tensor_memory: bool = False
) -> LatentTiling:
    """For one query of up to NARROW_HEADS heads; `itemsize` is that of the queries. Operands of
    products into tensor memory (from sm_100 on) take more of the shared memory."""
    rows = max(16, triton.next_power_of_2(heads))
    if itemsize > 2:
        return LatentTiling(rows=16, keys=16, split_tokens=1024, num_warps=4, num_stages=1)
    if has_records:
        return LatentTiling(rows=16, keys=32, split_tokens=1024, num_warps=8, num_stages=3)
    return LatentTiling(
        rows=rows, keys=64, split_tokens=1024,
        num_warps=4 if rows == 16 else 8, num_stages=1 if has_tensor_memory else 2,
    )  # fmt: skip


def wide_tiling(
    heads: int, itemsize: int, *, has_records: bool, has_tensor_memory: bool = False
) -> LatentTiling:
    """For blocks of rows."""
    if itemsize > 2:
        return LatentTiling(rows=32, keys=16, split_tokens=2048, num_warps=8, num_stages=1)
    keys = 32 if has_records or has_tensor_memory else 64
    return LatentTiling(rows=WIDE_ROWS, keys=keys, split_tokens=2048, num_warps=8, num_stages=2)


def mla_decode(
    q_NHX: torch.Tensor,
    rows: LatentRows,
    tables: DeviceTables,
    out_NHC: torch.Tensor,
    scale: float,
    tiling: LatentTiling,
    *,
    is_narrow: bool,
    has_tma: bool,
) -> None:
    """Writes the rows of the tables' sequences. `scale` multiplies scores of base 2; q is
    contiguous."""
    if not tables.capacity.items:
        return
    heads, latent = out_NHC.shape[1:]
    rope, num_slots = q_NHX.shape[2] - latent, tables.capacity.slots
    partial = out_NHC.new_empty((num_slots, tiling.rows, latent), dtype=torch.float32)
    lse = out_NHC.new_empty((num_slots, tiling.rows), dtype=torch.float32)
    boxes = rows.boxes(tiling.keys) if has_tma else None
    block_c = max(16, triton.next_power_of_2(latent))
    kernel = _narrow_kernel if is_narrow else _wide_kernel
    kernel[(tables.capacity.items,)](
        q_NHX, rows.latent, rows.tail, rows.factors, *(boxes or (None, None)),
        tables.sequences, tables.items, tables.pages, out_NHC, partial, lse,
        scale, rows.latent.stride(0), rows.tail.stride(0),
        0 if rows.factors is None else rows.factors.stride(0),
        HEADS=heads, LATENT=latent, ROPE=rope, BLOCK_C=block_c,
        BLOCK_R=max(16, triton.next_power_of_2(rope)), ROWS=tiling.rows, KEYS=tiling.keys,
        PAGE=rows.page_tokens, SPLIT=tiling.split_tokens,
        TILES=0 if rows.factors is None else max(1, block_c // TILE), IS_BOXED=boxes is not None,
        num_warps=tiling.num_warps, num_stages=tiling.num_stages,
    )  # fmt: skip
    merge(partial, lse, tables, out_NHC, key_heads=1, block_rows=tiling.rows)


_SHAPES = {
    "q": "*bf16", "latent": "*bf16", "tail": "*bf16", "sequences": "*i32", "items": "*i32",
    "pages": "*i32", "out": "*bf16", "partial": "*fp32", "lse": "*fp32", "scale": "fp32",
    "latent_stride": "i32", "tail_stride": "i32", "factor_stride": "i32",
}  # fmt: skip


def _case(heads: int, *, has_records: bool, target: int) -> AotCase:
    is_narrow, is_boxed = heads <= NARROW_HEADS, target >= 90
    choose = narrow_tiling if is_narrow else wide_tiling
    chosen = choose(heads, 2, has_records=has_records, has_tensor_memory=target >= 100)
    types = dict(_SHAPES)
    constants: dict[str, Any] = {
        "HEADS": heads, "LATENT": 512, "ROPE": 64, "BLOCK_C": 512, "BLOCK_R": 64,
        "ROWS": chosen.rows, "KEYS": chosen.keys, "PAGE": 64, "SPLIT": chosen.split_tokens,
        "TILES": 4 if has_records else 0, "IS_BOXED": is_boxed,
    }  # fmt: skip
    if has_records:
        types |= {"latent": "*fp8e4nv" if is_boxed else "*u8", "factors": "*fp32"}
    else:
        constants |= {"factors": None}
    if is_boxed:
        form = "fp8e4nv" if has_records else "bf16"
        types |= {
            "latent_box": f"tensordesc<{form}[{chosen.keys},512]>",
            "tail_box": f"tensordesc<bf16[{chosen.keys},64]>",
        }
    else:
        constants |= {"latent_box": None, "tail_box": None}
    cache, loose = "bf16", ["scale", "factor_stride", "latent_box", "tail_box"]
    if has_records:
        cache, loose = "fp8", [*loose, "tail_stride"]
    return AotCase(
        name=f"mla decode {cache} {heads} heads for sm_{target}",
        kernel=_narrow_kernel if is_narrow else _wide_kernel,
        types=types,
        constants=constants,
        aligned=tuple(name for name in types if name not in loose),
        num_warps=chosen.num_warps,
        num_stages=chosen.num_stages,
        requires=("HGMMA", "UTMALDG") if is_boxed else (),
        targets=(target,),
    )  # fmt: skip


AOT_CASES = tuple(
    _case(heads, has_records=has_records, target=target)
    for has_records in (False, True)
    for heads in (16, 32, 128)
    for target in (80, 90, 100)
)
