"""Causal attention of blocks of queries over keys and values on pages, in parts of any width.

A key is `key` ‖ `tail` (the tail, where there is one, is the same for all heads), a value `value`;
each has its own row width and its own step from head to head. Records (see `Record`) have codes
e4m3 and a byte for each head, the exponent of its factor. GROUP query heads share a key head: the
rows of an item (see `spans`) are a block of those, query by query.

A call covers the keys from `first_key` up to `stop_key` of every sequence, whose pages alone are in
the table. What keys before made of a row, in float32 with its log-sum-exp, is where the softmax
begins; what a later call goes on with is left there.

D key width, R tail width, W value width; constants of kernels: ROWS of a block, KEYS of a tile.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from batchmla.kernels.triton.aot import AotCase
from batchmla.kernels.triton.mla_decode import LEAST, page_rows, wide_codes
from batchmla.kernels.triton.spans import DeviceTables


@triton.jit
def head_values(
    base, factors, rows, seen, head, stride, step, factor_stride,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, IS_RECORD: tl.constexpr, IS_MASKED: tl.constexpr,
    dtype: tl.constexpr,
):  # fmt: skip
    """What one head has in `rows`: [rows, BLOCK]; zeros where a row is not seen."""
    columns = tl.arange(0, BLOCK)
    here = base + rows[:, None] * stride + head * step + columns[None, :]
    if IS_MASKED:
        values = tl.load(here, mask=seen[:, None] & (columns < WIDTH)[None, :], other=0.0)
    elif WIDTH == BLOCK:
        values = tl.load(here)
    else:
        values = tl.load(here, mask=(columns < WIDTH)[None, :], other=0.0)
    if IS_RECORD:
        exponent = tl.load(factors + rows * factor_stride + head, mask=seen, other=0)
        factor = (exponent.to(tl.int32) << 23).to(tl.float32, bitcast=True)
        values = wide_codes(values) * factor[:, None]
    return values.to(dtype)


@triton.jit
def _tile(
    q, q_tail, key, tail, value, key_factors, value_factors, table, start, first_key, stop, visible,
    most, total, z, head, scale, key_stride, key_step, tail_stride, value_stride, value_step,
    factor_stride,
    D: tl.constexpr, R: tl.constexpr, W: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_W: tl.constexpr, KEYS: tl.constexpr, PAGE: tl.constexpr,
    IS_RECORD: tl.constexpr, IS_MASKED: tl.constexpr,
):  # fmt: skip
    """The softmax after KEYS more keys."""
    keys = start + tl.arange(0, KEYS)
    seen = keys < stop
    rows = page_rows(table, keys - first_key, seen, PAGE)
    k = head_values(
        key, key_factors, rows, seen, head, key_stride, key_step, factor_stride,
        D, BLOCK_D, IS_RECORD, IS_MASKED, q.dtype,
    )  # fmt: skip
    scores = tl.dot(q, tl.trans(k), input_precision="ieee")
    if R > 0:
        k_tail = head_values(
            tail, tail, rows, seen, 0, tail_stride, 0, 0, R, BLOCK_R, False, IS_MASKED, q.dtype
        )
        scores = tl.dot(q_tail, tl.trans(k_tail), scores, input_precision="ieee")
    scores *= scale
    if IS_MASKED:
        scores = tl.where(keys[None, :] < visible[:, None], scores, float("-inf"))
    more = tl.maximum(most, tl.max(scores, axis=1))
    weights = tl.exp2(scores - more[:, None])
    shrink = tl.exp2(most - more)
    v = head_values(
        value, value_factors, rows, seen, head, value_stride, value_step, factor_stride,
        W, BLOCK_W, IS_RECORD, IS_MASKED, q.dtype,
    )  # fmt: skip
    z = tl.dot(weights.to(v.dtype), v, z * shrink[:, None], input_precision="ieee")
    return more, total * shrink + tl.sum(weights, axis=1), z


@triton.jit
def _prefill_kernel(
    q, key, tail, value, key_factors, value_factors, sequences, items, pages, out, state, lse,
    scale, first_key, stop_key, q_stride, q_step, key_stride, key_step, tail_stride, value_stride,
    value_step, factor_stride,
    GROUP: tl.constexpr, KEY_HEADS: tl.constexpr, D: tl.constexpr, R: tl.constexpr,
    W: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_W: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, PAGE: tl.constexpr, IS_RECORD: tl.constexpr,
    IS_LATER: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    key_stride *= UNIT
    value_stride *= UNIT
    factor_stride *= UNIT
    item = items + tl.program_id(0) * 4
    sequence = tl.load(item)
    if sequence < 0:
        return
    head = tl.program_id(1)
    entry = sequences + sequence * 8
    first_row, num_queries = tl.load(entry).to(tl.int64), tl.load(entry + 1)
    num_keys, table = tl.load(entry + 2), pages + tl.load(entry + 3)
    first_query = tl.load(item + 2) * ROWS // GROUP
    rows = tl.load(item + 2) * ROWS + tl.arange(0, ROWS)
    query = rows // GROUP
    is_row = query < num_queries
    q_head = head * GROUP + rows % GROUP
    token = first_row + query
    here = q + token[:, None] * q_stride + q_head[:, None] * q_step
    columns, tail_columns = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_R)
    q_part = tl.load(
        here + columns[None, :], mask=is_row[:, None] & (columns < D)[None, :], other=0.0
    )
    q_tail = q_part
    if R > 0:
        q_tail = tl.load(
            here + D + tail_columns[None, :], mask=is_row[:, None] & (tail_columns < R)[None, :],
            other=0.0,
        )  # fmt: skip
    before = num_keys - num_queries
    stop = tl.minimum(stop_key, before + tl.minimum((rows_end(item, ROWS, GROUP)), num_queries))
    whole = tl.minimum(stop, before + first_query + 1)
    whole = first_key + tl.maximum(whole - first_key, 0) // KEYS * KEYS
    visible = tl.minimum(before + query + 1, stop)

    value_columns = tl.arange(0, BLOCK_W)
    inside = is_row[:, None] & (value_columns < W)[None, :]
    place = token * (KEY_HEADS * GROUP) + q_head
    most = tl.full([ROWS], LEAST, tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    z = tl.zeros([ROWS, BLOCK_W], tl.float32)
    if IS_LATER:
        most = tl.load(lse + place, mask=is_row, other=LEAST)
        total = tl.where(is_row, 1.0, 0.0)
        z = tl.load(state + place[:, None] * W + value_columns[None, :], mask=inside, other=0.0)
    for start in tl.range(first_key, whole, KEYS):
        most, total, z = _tile(
            q_part, q_tail, key, tail, value, key_factors, value_factors, table, start, first_key,
            stop, visible, most, total, z, head, scale, key_stride, key_step, tail_stride,
            value_stride, value_step, factor_stride,
            D, R, W, BLOCK_D, BLOCK_R, BLOCK_W, KEYS, PAGE, IS_RECORD, False,
        )  # fmt: skip
    for start in tl.range(whole, stop, KEYS):
        most, total, z = _tile(
            q_part, q_tail, key, tail, value, key_factors, value_factors, table, start, first_key,
            stop, visible, most, total, z, head, scale, key_stride, key_step, tail_stride,
            value_stride, value_step, factor_stride,
            D, R, W, BLOCK_D, BLOCK_R, BLOCK_W, KEYS, PAGE, IS_RECORD, True,
        )  # fmt: skip
    z = z / tl.where(total == 0, 1.0, total)[:, None]
    there = place[:, None] * W + value_columns[None, :]
    if num_keys <= stop_key:
        tl.store(out + there, z.to(out.dtype.element_ty), mask=inside)
    else:
        tl.store(state + there, z, mask=inside)
        tl.store(lse + place, tl.where(total == 0, LEAST, most + tl.log2(total)), mask=is_row)


@triton.jit
def rows_end(item, ROWS: tl.constexpr, GROUP: tl.constexpr):
    """The query behind the last of a block."""
    return ((tl.load(item + 2) + 1) * ROWS + GROUP - 1) // GROUP


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadRows:
    """Where heads lie in flat rows: `base` begins with the first head of the first row, the next
    row `stride` elements behind, the next head `step`. `factors` has the exponents of records."""

    base: torch.Tensor
    stride: int
    step: int
    width: int
    factors: torch.Tensor | None = None

    @property
    def unit(self) -> int:
        """Bytes that the rows of records are multiples of: kernels load so many at once, as those
        of other rows, whose strides show it by themselves, 16."""
        return 1 if self.factors is None else min(16, self.stride & -self.stride)


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillTiling:
    """How the kernel is launched."""

    rows: int
    keys: int
    num_warps: int
    num_stages: int


def prefill_tiling(width: int, itemsize: int, *, has_tma: bool) -> PrefillTiling:
    """For keys of `width` elements of `itemsize` bytes, tail included; devices with TMA have more
    shared memory too."""
    if itemsize > 2 or width > 256:
        return PrefillTiling(rows=32, keys=32, num_warps=4, num_stages=1)
    if not has_tma:
        return PrefillTiling(rows=64, keys=64, num_warps=4, num_stages=2)
    if width > 192:
        return PrefillTiling(rows=128, keys=32, num_warps=8, num_stages=2)
    return PrefillTiling(rows=128, keys=64, num_warps=8, num_stages=3)


def prefill(
    q_THD: torch.Tensor,
    key: HeadRows,
    value: HeadRows,
    tables: DeviceTables,
    out_THW: torch.Tensor,
    scale: float,
    tiling: PrefillTiling,
    *,
    key_heads: int,
    page_tokens: int,
    tail: HeadRows | None = None,
    keys: tuple[int, int],
    state: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> None:
    """Writes the rows of the tables' items; the keys are those from `keys[0]` up to `keys[1]`.

    `scale` multiplies scores of base 2. `state` (float32 [T, H, W] and [T, H]) is needed where
    sequences have keys before or after these.
    """
    if not tables.capacity.items:
        return
    num_heads = q_THD.shape[1]
    block_of = triton.next_power_of_2
    first_key, stop_key = keys
    values, lse = state or (out_THW, out_THW)
    tail_width = tail.width if tail else 0
    _prefill_kernel[(tables.capacity.items, key_heads)](
        q_THD, key.base, tail.base if tail else key.base, value.base, key.factors, value.factors,
        tables.sequences, tables.items, tables.pages, out_THW, values, lse,
        scale, first_key, stop_key, q_THD.stride(0), q_THD.stride(1),
        key.stride // key.unit, key.step, tail.stride if tail else 0,
        value.stride // key.unit, value.step, key.stride // key.unit,
        GROUP=num_heads // key_heads, KEY_HEADS=key_heads, D=key.width, R=tail_width, W=value.width,
        BLOCK_D=max(16, block_of(key.width)), BLOCK_R=max(16, block_of(tail_width or 1)),
        BLOCK_W=max(16, block_of(value.width)), ROWS=tiling.rows, KEYS=tiling.keys,
        PAGE=page_tokens, IS_RECORD=key.factors is not None, IS_LATER=first_key > 0,
        UNIT=key.unit,
        num_warps=tiling.num_warps, num_stages=tiling.num_stages,
    )  # fmt: skip


_TYPES = {
    "q": "*bf16", "key": "*bf16", "tail": "*bf16", "value": "*bf16", "sequences": "*i32",
    "items": "*i32", "pages": "*i32", "out": "*bf16", "state": "*fp32", "lse": "*fp32",
    "scale": "fp32", "first_key": "i32", "stop_key": "i32", "q_stride": "i32", "q_step": "i32",
    "key_stride": "i32", "key_step": "i32", "tail_stride": "i32", "value_stride": "i32",
    "value_step": "i32", "factor_stride": "i32",
}  # fmt: skip


def _case(
    name: str, *, group: int, key_heads: int, tail: int, has_tma: bool, is_later: bool = False,
    has_records: bool = False,
) -> AotCase:  # fmt: skip
    chosen = prefill_tiling(128 + tail, 2, has_tma=has_tma)
    types = dict(_TYPES)
    loose = ["scale", "factor_stride"]
    constants: dict[str, object] = {
        "GROUP": group, "KEY_HEADS": key_heads, "D": 128, "R": tail, "W": 128, "BLOCK_D": 128,
        "BLOCK_R": tail or 16, "BLOCK_W": 128, "ROWS": chosen.rows, "KEYS": chosen.keys,
        "PAGE": 64, "IS_RECORD": has_records, "IS_LATER": is_later,
        "UNIT": 8 if has_records else 1,
    }  # fmt: skip
    if has_records:
        code = "*fp8e4nv" if has_tma else "*u8"
        types |= {"key": code, "value": code, "key_factors": "*u8", "value_factors": "*u8"}
        loose += ["key_stride", "value_stride", "key_factors", "value_factors"]
    else:
        constants |= {"key_factors": None, "value_factors": None}
    return AotCase(
        name=f"prefill {name}{'' if has_tma else ' small'}",
        kernel=_prefill_kernel,
        types=types,
        constants=constants,
        aligned=tuple(each for each in types if each not in loose),
        num_warps=chosen.num_warps,
        num_stages=chosen.num_stages,
        requires=("HGMMA",) if has_tma else (),
        targets=(80,) if not has_tma else (90,) if is_later else (90, 100),
    )


AOT_CASES = (
    _case("mla 192/128", group=1, key_heads=16, tail=64, has_tma=True),
    _case("mla 192/128 later keys", group=1, key_heads=16, tail=64, has_tma=True, is_later=True),
    _case("mla 192/128", group=1, key_heads=16, tail=64, has_tma=False),
    _case("gqa 8 x 8 of 128", group=8, key_heads=8, tail=0, has_tma=True),
    _case("gqa 8 x 8 of 128", group=8, key_heads=8, tail=0, has_tma=False),
    _case("gqa fp8 8 x 8 of 128", group=8, key_heads=8, tail=0, has_tma=True, has_records=True),
    _case("gqa fp8 8 x 8 of 128", group=8, key_heads=8, tail=0, has_tma=False, has_records=True),
)
