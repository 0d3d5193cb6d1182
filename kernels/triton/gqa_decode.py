"""Grouped-query attention of few queries over paged keys and values, split by keys.

A work item (see `spans`) is a block of rows (the query heads of one key head, query by query) over
one split of a sequence's keys; the grid's second axis is the key heads. Keys stand in the place of
rows: S' = K q', z' = V' P', in base 2. Records as in `prefill`.

D width of a head; constants of kernels: ROWS of a block, KEYS of a tile.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from batchmla.kernels.triton.aot import AotCase
from batchmla.kernels.triton.merge import merge
from batchmla.kernels.triton.mla_decode import LEAST, page_rows
from batchmla.kernels.triton.prefill import HeadRows, head_values
from batchmla.kernels.triton.spans import DeviceTables


@triton.jit
def _decode_kernel(
    q, key, value, key_factors, value_factors, key_box, value_box, sequences, items, pages, out,
    partial, lse, scale, q_stride, q_step, stride, step,
    GROUP: tl.constexpr, KEY_HEADS: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, PAGE: tl.constexpr, SPLIT: tl.constexpr,
    UNIT: tl.constexpr, IS_RECORD: tl.constexpr, IS_BOXED: tl.constexpr,
):  # fmt: skip
    stride *= UNIT
    item = items + tl.program_id(0) * 4
    sequence = tl.load(item)
    if sequence < 0:
        return
    head = tl.program_id(1)
    split, slot = tl.load(item + 1), tl.load(item + 3)
    entry = sequences + sequence * 8
    first_row, num_queries = tl.load(entry).to(tl.int64), tl.load(entry + 1)
    num_keys, table = tl.load(entry + 2), pages + tl.load(entry + 3)
    rows, columns = tl.load(item + 2) * ROWS + tl.arange(0, ROWS), tl.arange(0, BLOCK_D)
    query = rows // GROUP
    is_row, is_column = query < num_queries, columns < D
    token, q_head = first_row + query, head * GROUP + rows % GROUP
    here = q + token[:, None] * q_stride + q_head[:, None] * q_step + columns[None, :]
    q_part = tl.load(here, mask=is_row[:, None] & is_column[None, :], other=0.0)
    first = split * SPLIT
    stop = tl.minimum(num_keys, first + SPLIT)
    visible = tl.minimum(num_keys - (num_queries - 1 - query), stop)

    most = tl.full([ROWS], LEAST, tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    z = tl.zeros([BLOCK_D, ROWS], tl.float32)
    for start in tl.range(first, stop, KEYS):
        keys = start + tl.arange(0, KEYS)
        if IS_BOXED:
            row = tl.load(table + start // PAGE) * PAGE + start % PAGE
            k = key_box.load([row, head * step]).to(q_part.dtype)
            v = value_box.load([row, head * step]).to(q_part.dtype)
        else:
            seen = keys < stop
            at = page_rows(table, keys, seen, PAGE)
            k = head_values(
                key, key_factors, at, seen, head, stride, step, stride,
                D, BLOCK_D, IS_RECORD, True, q_part.dtype,
            )  # fmt: skip
            v = head_values(
                value, value_factors, at, seen, head, stride, step, stride,
                D, BLOCK_D, IS_RECORD, True, q_part.dtype,
            )  # fmt: skip
        scores = tl.dot(k, tl.trans(q_part), input_precision="ieee") * scale
        scores = tl.where(keys[:, None] < visible[None, :], scores, float("-inf"))
        more = tl.maximum(most, tl.max(scores, axis=0))
        weights = tl.exp2(scores - more[None, :])
        shrink = tl.exp2(most - more)
        total = total * shrink + tl.sum(weights, axis=0)
        z = tl.dot(tl.trans(v), weights.to(v.dtype), z * shrink[None, :], input_precision="ieee")
        most = more
    z = z / tl.where(total == 0, 1.0, total)[None, :]
    inside = is_row[None, :] & is_column[:, None]
    if slot < 0:
        place = token * (KEY_HEADS * GROUP) + q_head
        tl.store(
            out + place[None, :] * D + columns[:, None], z.to(out.dtype.element_ty), mask=inside
        )
    else:
        place = (slot.to(tl.int64) * KEY_HEADS + head) * ROWS + tl.arange(0, ROWS)
        tl.store(partial + place[None, :] * D + columns[:, None], z, mask=inside)
        tl.store(lse + place, tl.where(total == 0, float("-inf"), most + tl.log2(total)))


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeTiling:
    """How the kernel is launched."""

    rows: int
    keys: int
    split_tokens: int
    num_warps: int
    num_stages: int


SHORT_ROWS = 64  # rows of the queries of a short chunk that are split by keys


def decode_tiling(group: int, width: int, itemsize: int, *, is_single: bool) -> DecodeTiling:
    """For one query of `group` heads, or for the few of a short chunk."""
    rows = min(SHORT_ROWS, max(16, triton.next_power_of_2(group))) if is_single else SHORT_ROWS
    if itemsize > 2 or width > 256:
        return DecodeTiling(rows=rows, keys=32, split_tokens=1024, num_warps=4, num_stages=1)
    return DecodeTiling(rows=rows, keys=64, split_tokens=1024, num_warps=4, num_stages=3)


def gqa_decode(
    q_THD: torch.Tensor,
    key: HeadRows,
    value: HeadRows,
    tables: DeviceTables,
    out_THD: torch.Tensor,
    scale: float,
    tiling: DecodeTiling,
    *,
    key_heads: int,
    page_tokens: int,
    boxes: tuple[torch.Tensor, torch.Tensor] | None,
) -> None:
    """Writes the rows of the tables' sequences. `boxes`: the caches as rows [P*B, K*D], for devices
    with TMA; their pages hold whole tiles. `scale` multiplies scores of base 2."""
    if not tables.capacity.items:
        return
    num_heads, width = q_THD.shape[1:]
    group, num_slots, block = num_heads // key_heads, tables.capacity.slots, [tiling.keys, width]
    partial = out_THD.new_empty((num_slots, key_heads, tiling.rows, width), dtype=torch.float32)
    lse = out_THD.new_empty((num_slots, key_heads, tiling.rows), dtype=torch.float32)
    key_box, value_box = (
        (TensorDescriptor.from_tensor(rows, block) for rows in boxes) if boxes else (None, None)
    )
    _decode_kernel[(tables.capacity.items, key_heads)](
        q_THD, key.base, value.base, key.factors, value.factors, key_box, value_box,
        tables.sequences, tables.items, tables.pages, out_THD, partial, lse,
        scale, q_THD.stride(0), q_THD.stride(1), key.stride // key.unit, key.step,
        GROUP=group, KEY_HEADS=key_heads, D=width, BLOCK_D=max(16, triton.next_power_of_2(width)),
        ROWS=tiling.rows, KEYS=tiling.keys, PAGE=page_tokens, SPLIT=tiling.split_tokens,
        UNIT=key.unit, IS_RECORD=key.factors is not None, IS_BOXED=boxes is not None,
        num_warps=tiling.num_warps, num_stages=tiling.num_stages,
    )  # fmt: skip
    merge(partial, lse, tables, out_THD, key_heads=key_heads, block_rows=tiling.rows)


_TYPES = {
    "q": "*bf16", "key": "*bf16", "value": "*bf16", "sequences": "*i32", "items": "*i32",
    "pages": "*i32", "out": "*bf16", "partial": "*fp32", "lse": "*fp32", "scale": "fp32",
    "q_stride": "i32", "q_step": "i32", "stride": "i32", "step": "i32",
}  # fmt: skip


def _case(
    name: str, group: int, *, is_boxed: bool, is_single: bool = True, has_records: bool = False,
    targets: tuple[int, ...] = (90, 100),
) -> AotCase:  # fmt: skip
    chosen = decode_tiling(group, 128, 2, is_single=is_single)
    types, loose = dict(_TYPES), ["scale", "key_box", "value_box"]
    constants: dict[str, object] = {
        "GROUP": group, "KEY_HEADS": 8, "D": 128, "BLOCK_D": 128, "ROWS": chosen.rows,
        "KEYS": chosen.keys, "PAGE": 64, "SPLIT": chosen.split_tokens,
        "UNIT": 8 if has_records else 1, "IS_RECORD": has_records, "IS_BOXED": is_boxed,
    }  # fmt: skip
    if has_records:
        code = "*u8" if 80 in targets else "*fp8e4nv"
        types |= {"key": code, "value": code, "key_factors": "*u8", "value_factors": "*u8"}
        loose += ["stride", "key_factors", "value_factors"]
    else:
        constants |= {"key_factors": None, "value_factors": None}
    if is_boxed:
        box = f"tensordesc<bf16[{chosen.keys},128]>"
        types |= {"key_box": box, "value_box": box}
    else:
        constants |= {"key_box": None, "value_box": None}
    return AotCase(
        name=f"gqa decode {name}",
        kernel=_decode_kernel,
        types=types,
        constants=constants,
        aligned=tuple(each for each in types if each not in loose),
        num_warps=chosen.num_warps,
        num_stages=chosen.num_stages,
        requires=("HGMMA", "UTMALDG") if is_boxed else (),
        targets=targets,
    )


AOT_CASES = (
    _case("8 x 8 of 128 boxes", 8, is_boxed=True),
    _case("8 x 8 of 128 boxes, short chunk", 8, is_boxed=True, is_single=False),
    _case("8 x 8 of 128 pointers", 8, is_boxed=False, targets=(80,)),
    _case("fp8 8 x 8 of 128", 8, is_boxed=False, has_records=True),
    _case("fp8 8 x 8 of 128 bytes", 8, is_boxed=False, has_records=True, targets=(80,)),
)
