"""MiniMax-M3's attention: blocks of keys by their best index score, and attention over those.

Scoring, a program has one block of keys on the first axis of the product, and on the second the
index heads of one row, or of several rows that read the same pages. Attending, it has a row and a
kv head whose query heads stand on the second axis, and goes through the row's blocks. Both are the
same for a row alone. N rows, H query heads, K kv and index heads, D width of a head, U blocks.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from batchmla.kernels.block_sparse_ops import BlockDims
from batchmla.kernels.sparse_ops import IndexGroup
from batchmla.kernels.triton.aot import AotCase
from batchmla.kernels.triton.index_scores import dot_block
from batchmla.kernels.triton.sparse import blocks_of_rows, group_pages, make_scores
from batchmla.kernels.triton.sparse_mla import LOG2_E, fold, within
from batchmla.kernels.triton.topk import choose

SHARED_COLUMNS = 64  # rows times heads of a program whose rows read the same pages
TILE_KEYS = 64  # of a program that attends
_GREATEST = tl.constexpr(3.4028234663852886e38)


@triton.jit
def _block_scores_kernel(
    q, keys, pages, visible, out,
    num_columns, num_heads, columns_per_program, forced, page_stride, key_stride, pages_stride,
    out_stride,
    WIDTH: tl.constexpr, BLOCK_WIDTH: tl.constexpr, PAGE: tl.constexpr, COLUMNS: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0)
    first = tl.program_id(1).to(tl.int64) * columns_per_program
    lanes = tl.arange(0, COLUMNS)
    column = first + lanes
    is_column = (lanes < columns_per_program) & (column < num_columns)
    seen_by = tl.load(visible + column // num_heads, mask=is_column, other=0)
    limit = tl.max(seen_by, axis=0)
    if block * BLOCK_TOKENS >= limit:
        return
    offsets, wide = tl.arange(0, KEYS), tl.arange(0, BLOCK_WIDTH)
    at = block * BLOCK_TOKENS + offsets
    is_key = (offsets < BLOCK_TOKENS) & (at < limit)
    row = first // num_heads
    page = tl.load(pages + row * pages_stride + at // PAGE, mask=is_key, other=0).to(tl.int64)
    key_at = page * page_stride + (at % PAGE) * key_stride
    k = tl.load(keys + key_at[:, None] + wide[None, :], mask=within(is_key, wide, WIDTH), other=0.0)
    q_tile = tl.load(
        q + column[:, None] * WIDTH + wide[None, :], mask=within(is_column, wide, WIDTH), other=0.0
    )
    dots = tl.dot(k.to(q_tile.dtype), tl.trans(q_tile), input_precision="ieee")
    is_seen = is_key[:, None] & (at[:, None] < seen_by[None, :])
    is_bad = tl.max(tl.where(is_seen & (dots != dots), 1, 0), axis=0)
    best = tl.max(tl.where(is_seen & (dots == dots), dots, float("-inf")), axis=0)
    best = tl.where(is_bad > 0, float("-inf"), tl.minimum(best, _GREATEST))
    end = (seen_by + BLOCK_TOKENS - 1) // BLOCK_TOKENS
    best = tl.where(block >= end - forced, float("inf"), best)
    tl.store(out + column * out_stride + block, best, mask=is_column & (block < end))


def select(
    q_NKD: torch.Tensor, key_PBD: torch.Tensor, groups: Sequence[IndexGroup], dims: BlockDims
) -> torch.Tensor:
    """See `SelectBlocksOp`."""
    num_rows, num_heads, width = q_NKD.shape
    q_NKD = q_NKD.contiguous()
    assert key_PBD.stride(2) == 1, f"index keys of strides {key_PBD.stride()}"
    blocks_NKU = torch.empty(
        num_rows, num_heads, dims.count, dtype=torch.int64, device=q_NKD.device
    )
    for group in groups:
        num_blocks = -(-group.num_keys // dims.block_tokens)
        for inside, rows in blocks_of_rows(group, num_heads * num_blocks):
            visible_R, pages_GP = group.visible_N[inside].contiguous(), group_pages(group, inside)
            columns = (inside.stop - inside.start) * num_heads
            scores_XB = make_scores(columns, num_blocks, q_NKD.device)
            is_shared = len(pages_GP) == 1
            step = SHARED_COLUMNS if is_shared and columns > num_heads else num_heads
            _block_scores_kernel[(num_blocks, triton.cdiv(columns, step))](
                q_NKD[rows], key_PBD, pages_GP, visible_R, scores_XB,
                columns, num_heads, step, dims.forced, key_PBD.stride(0), key_PBD.stride(1),
                0 if is_shared else pages_GP.stride(0), scores_XB.stride(0),
                WIDTH=width, BLOCK_WIDTH=dot_block(width), PAGE=key_PBD.shape[1],
                COLUMNS=dot_block(step), BLOCK_TOKENS=dims.block_tokens,
                KEYS=dot_block(dims.block_tokens), num_warps=4, num_stages=1,
            )  # fmt: skip
            chosen_XU = blocks_NKU[rows].flatten(0, 1)
            choose(scores_XB, visible_R, chosen_XU, unit=dims.block_tokens)
    return blocks_NKU


@triton.jit
def _places(
    step, num_steps, blocks, pages, seen_by, PAGE: tl.constexpr, BLOCK_TOKENS: tl.constexpr,
    PARTS: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """Pages and places of a tile's keys, and which of them are read."""
    block = tl.load(blocks + step // PARTS, mask=step < num_steps, other=0).to(tl.int32)
    offsets = (step % PARTS) * KEYS + tl.arange(0, KEYS)
    at = block * BLOCK_TOKENS + offsets
    seen = (offsets < BLOCK_TOKENS) & (at < seen_by) & (step < num_steps)
    return tl.load(pages + at // PAGE, mask=seen, other=0).to(tl.int64), at % PAGE, seen


@triton.jit
def _attend_blocks_kernel(
    q, keys, values, pages, visible, blocks, out,
    kv_heads, count, scale, q_stride, key_page_stride, key_stride, value_page_stride, value_stride,
    pages_stride,
    SHARE: tl.constexpr, HEADS: tl.constexpr, WIDTH: tl.constexpr, BLOCK_WIDTH: tl.constexpr,
    PAGE: tl.constexpr, BLOCK_TOKENS: tl.constexpr, PARTS: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    row, head = (tl.program_id(0) // kv_heads).to(tl.int64), tl.program_id(0) % kv_heads
    heads, wide = tl.arange(0, HEADS), tl.arange(0, BLOCK_WIDTH)
    is_q = within(heads < SHARE, wide, WIDTH)
    q_at = (head * SHARE + heads)[:, None] * WIDTH + wide[None, :]
    q_tile = tl.load(q + row * q_stride + q_at, mask=is_q, other=0.0)
    dtype: tl.constexpr = q.dtype.element_ty
    seen_by = tl.load(visible + row).to(tl.int32)
    blocks += (row * kv_heads + head) * count
    pages += row * pages_stride
    columns = head * WIDTH + wide
    most = tl.full([HEADS], float("-inf"), tl.float32)
    total = tl.zeros([HEADS], tl.float32)
    acc = tl.zeros([BLOCK_WIDTH, HEADS], tl.float32)
    num_steps = count * PARTS
    page, place, seen = _places(
        0, num_steps, blocks, pages, seen_by, PAGE, BLOCK_TOKENS, PARTS, KEYS
    )
    for step in range(0, num_steps):
        mask = within(seen, wide, WIDTH)
        key_at = page * key_page_stride + place * key_stride
        k = tl.load(keys + key_at[:, None] + columns[None, :], mask=mask, other=0.0).to(dtype)
        value_at = page * value_page_stride + place * value_stride
        v = tl.load(values + value_at[:, None] + columns[None, :], mask=mask, other=0.0).to(dtype)
        scores = tl.dot(k, tl.trans(q_tile), input_precision="ieee") * scale
        scores = tl.where(seen[:, None], scores, float("-inf"))
        weights, factor, most, total = fold(scores, most, total, 0)
        acc = tl.dot(tl.trans(v), weights.to(dtype), acc * factor[None, :], input_precision="ieee")
        page, place, seen = _places(
            step + 1, num_steps, blocks, pages, seen_by, PAGE, BLOCK_TOKENS, PARTS, KEYS
        )
    acc = (acc / tl.where(total == 0.0, 1.0, total)[None, :]).to(dtype)
    out_at = (row * kv_heads + head) * (SHARE * WIDTH) + heads[None, :] * WIDTH + wide[:, None]
    tl.store(out + out_at, acc, mask=tl.trans(is_q))


def attend(
    q_NHD: torch.Tensor,
    key_PBW: torch.Tensor,
    value_PBW: torch.Tensor,
    groups: Sequence[IndexGroup],
    blocks_NKU: torch.Tensor,
    dims: BlockDims,
    scale: float,
) -> torch.Tensor:
    """See `AttendBlocksOp`."""
    num_rows, num_heads, width = q_NHD.shape
    kv_heads, page_tokens = blocks_NKU.shape[1], key_PBW.shape[1]
    q_NHD, blocks_NKU = q_NHD.contiguous(), blocks_NKU.contiguous()
    assert key_PBW.stride(2) == 1 and value_PBW.stride(2) == 1, "cached rows are not contiguous"
    out_NX = torch.empty(num_rows, num_heads * width, dtype=q_NHD.dtype, device=q_NHD.device)
    share, keys = num_heads // kv_heads, min(TILE_KEYS, dot_block(dims.block_tokens))
    for group in groups:
        rows = slice(group.first_row, group.first_row + group.num_rows)
        pages_GP = group.pages_GP
        _attend_blocks_kernel[(group.num_rows * kv_heads,)](
            q_NHD[rows], key_PBW, value_PBW, pages_GP, group.visible_N.contiguous(),
            blocks_NKU[rows], out_NX[rows],
            kv_heads, dims.count, scale * LOG2_E, q_NHD.stride(0), key_PBW.stride(0),
            key_PBW.stride(1), value_PBW.stride(0), value_PBW.stride(1),
            0 if len(pages_GP) == 1 else pages_GP.stride(0),
            SHARE=share, HEADS=dot_block(share), WIDTH=width, BLOCK_WIDTH=dot_block(width),
            PAGE=page_tokens, BLOCK_TOKENS=dims.block_tokens,
            PARTS=triton.cdiv(dims.block_tokens, keys), KEYS=keys, num_warps=4, num_stages=2,
        )  # fmt: skip
    return out_NX


_SCORE_NUMBERS = ("num_columns", "num_heads", "columns_per_program", "forced", "page_stride",
                  "key_stride", "pages_stride", "out_stride")  # fmt: skip
_ATTEND_NUMBERS = ("kv_heads", "count", "q_stride", "key_page_stride", "key_stride",
                   "value_page_stride", "value_stride", "pages_stride")  # fmt: skip


def _score_case(name: str, columns: int, targets: tuple[int, ...]) -> AotCase:
    """Blocks of 128 keys of 128 elements, 4 index heads, pages of 64."""
    return AotCase(
        name=f"block scores {name}", kernel=_block_scores_kernel,
        types={"q": "*bf16", "keys": "*bf16", "pages": "*i64", "visible": "*i64", "out": "*fp32",
               **dict.fromkeys(_SCORE_NUMBERS, "i32")},
        constants={"WIDTH": 128, "BLOCK_WIDTH": 128, "PAGE": 64, "COLUMNS": columns,
                   "BLOCK_TOKENS": 128, "KEYS": 128},
        aligned=("q", "keys", "pages", "visible", "out", "page_stride", "key_stride", "out_stride"),
        num_warps=4, num_stages=1, targets=targets, requires=("HGMMA",),
    )  # fmt: skip


_ATTEND_CASE = AotCase(
    name="attend blocks of 128", kernel=_attend_blocks_kernel,
    types={"q": "*bf16", "keys": "*bf16", "values": "*bf16", "pages": "*i64", "visible": "*i64",
           "blocks": "*i64", "out": "*bf16", "scale": "fp32",
           **dict.fromkeys(_ATTEND_NUMBERS, "i32")},
    constants={"SHARE": 16, "HEADS": 16, "WIDTH": 128, "BLOCK_WIDTH": 128, "PAGE": 64,
               "BLOCK_TOKENS": 128, "PARTS": 2, "KEYS": 64},
    aligned=("q", "keys", "values", "pages", "visible", "blocks", "out", "count", "q_stride",
             "key_page_stride", "key_stride", "value_page_stride", "value_stride"),
    num_warps=4, num_stages=2, requires=("HGMMA", "LDGSTS"),
)  # fmt: skip
AOT_CASES = (
    _score_case("of single rows", 16, (90,)),
    _score_case("of rows on shared pages", SHARED_COLUMNS, (80, 90, 100)),
    _ATTEND_CASE,
)
