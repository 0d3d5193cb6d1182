"""Joins the results of a sequence's splits: softmaxes over parts of the keys, with results x and
base-2 log-sum-exps l, make the one over all of them: the mean of x weighted by 2^l (Milakov and
Gimelshein, arXiv:1805.02867). The splits are taken in their order."""

import torch
import triton
import triton.language as tl

from batchmla.kernels.triton.aot import AotCase
from batchmla.kernels.triton.spans import DeviceTables


@triton.jit
def _merge_kernel(
    partial, lse, sequences, merges, out,
    GROUP: tl.constexpr, KEY_HEADS: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    merge = merges + tl.program_id(0) * 2
    sequence, query = tl.load(merge), tl.load(merge + 1)
    if sequence < 0:
        return
    head = tl.program_id(1)
    entry = sequences + sequence * 8
    first_row, num_queries = tl.load(entry).to(tl.int64), tl.load(entry + 1)
    num_splits = tl.load(entry + 5)
    row = query * GROUP + head % GROUP
    num_blocks = (num_queries * GROUP + ROWS - 1) // ROWS
    slot = (tl.load(entry + 4) + row // ROWS).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < WIDTH
    most = float("-inf")
    total = 0.0
    x = tl.zeros([BLOCK], tl.float32)
    for _ in range(num_splits):
        place = (slot * KEY_HEADS + head // GROUP) * ROWS + row % ROWS
        part_lse = tl.load(lse + place)
        part = tl.load(partial + place * WIDTH + columns, mask=inside, other=0.0)
        more = tl.maximum(most, part_lse)
        finite = tl.where(more == float("-inf"), 0.0, more)
        shrink, share = tl.exp2(most - finite), tl.exp2(part_lse - finite)
        x = x * shrink + part * share
        total = total * shrink + share
        most = more
        slot += num_blocks
    x = x / tl.where(total == 0, 1.0, total)
    here = out + ((first_row + query) * (KEY_HEADS * GROUP) + head) * WIDTH + columns
    tl.store(here, x.to(out.dtype.element_ty), mask=inside)


def merge(
    partial: torch.Tensor,
    lse: torch.Tensor,
    tables: DeviceTables,
    out_NHW: torch.Tensor,
    *,
    key_heads: int,
    block_rows: int,
) -> None:
    """Writes the rows of `tables.merges`; parts are float32 [slots, key heads, rows, W] and
    [slots, key heads, rows]."""
    num_heads, width = out_NHW.shape[1:]
    if not tables.capacity.merges:
        return
    _merge_kernel[(tables.capacity.merges, num_heads)](
        partial, lse, tables.sequences, tables.merges, out_NHW,
        GROUP=num_heads // key_heads, KEY_HEADS=key_heads, WIDTH=width,
        BLOCK=triton.next_power_of_2(width), ROWS=block_rows, num_warps=1 if width <= 128 else 4,
    )  # fmt: skip


_TYPES = {
    "partial": "*fp32", "lse": "*fp32", "sequences": "*i32", "merges": "*i32", "out": "*bf16",
}  # fmt: skip
AOT_CASES = tuple(
    AotCase(
        name=f"merge {width} of {key_heads} x {group}",
        kernel=_merge_kernel,
        types=_TYPES,
        constants={
            "GROUP": group, "KEY_HEADS": key_heads, "WIDTH": width, "BLOCK": width, "ROWS": rows,
        },
        aligned=("partial", "lse", "sequences", "merges", "out"),
        num_warps=num_warps,
    )
    for width, key_heads, group, rows, num_warps in ((512, 1, 16, 16, 4), (128, 8, 8, 16, 1))
)  # fmt: skip
