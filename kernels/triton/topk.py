"""The `count` largest of a row of float32 scores, in the order of their positions; of equals those
at the lowest positions.

A score becomes a 32-bit key in whose unsigned order floats rise; NaN counts as -inf, -0 as 0. Four
passes over the row, each a histogram of eight bits of the keys that agree with what is known, find
the key of the last one chosen and how many of its equals are; a fifth writes what is chosen. The
choice is exact, so it is the same however a row is cut: long rows of few are cut into chunks whose
chosen keys are chosen from again. R rows, N of them with own counts, L scores, K chosen, C chunks.
"""

import torch
import triton
import triton.language as tl

from batchmla.kernels.triton.aot import AotCase

CHUNK_SCORES = 16384
MANY_ROWS = 128  # that keep a device busy without being cut
BLOCK = 4096
_SIGN = tl.constexpr(-(2**31))
_LOW = tl.constexpr(2**16 - 1)


@triton.jit
def _rising(scores):
    """Keys of scores."""
    scores = tl.where(scores != scores, float("-inf"), scores)
    scores = tl.where(scores == 0.0, 0.0, scores)
    bits = scores.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) | _SIGN)


@triton.jit
def _keys(scores, at, inside, HAS_KEYS: tl.constexpr):
    if HAS_KEYS:
        return tl.load(scores + at, mask=inside, other=0)
    return _rising(tl.load(scores + at, mask=inside, other=0.0))


@triton.jit
def _topk_kernel(
    scores, places, visible, pages, out, out_keys,
    length, num_chunks, chunk_scores, count, row_heads, unit, row_stride, pages_stride,
    PAGE: tl.constexpr, BLOCK: tl.constexpr, IS_FIRST: tl.constexpr, IS_LAST: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) // num_chunks
    start = (tl.program_id(0) % num_chunks) * chunk_scores
    wide = row.to(tl.int64)
    if IS_FIRST:
        seen = tl.load(visible + row // row_heads).to(tl.int32)
        num = tl.minimum((seen + unit - 1) // unit - start, chunk_scores)
    else:
        num = length
    scores += wide * row_stride + start
    lanes, digits = tl.arange(0, BLOCK), tl.arange(0, 256)
    threshold = tl.full([], 0, tl.int32)
    wanted = tl.full([], 0, tl.int32)
    if num > count:
        wanted += count
        for digit in tl.static_range(4):
            counts = tl.zeros([256], tl.int32)
            for first in range(0, num, BLOCK):
                at = first + lanes
                key = _keys(scores, at, at < num, not IS_FIRST)
                agrees = at < num
                if digit > 0:
                    agrees &= ((key ^ threshold) >> (32 - 8 * digit)) == 0
                counts += tl.histogram((key >> (24 - 8 * digit)) & 255, 256, mask=agrees)
            above = tl.sum(counts, axis=0) - tl.cumsum(counts, axis=0)
            is_last = (above < wanted) & (above + counts >= wanted)
            threshold |= tl.sum(tl.where(is_last, digits, 0), axis=0) << (24 - 8 * digit)
            wanted -= tl.sum(tl.where(is_last, above, 0), axis=0)
    out_at = (wide * num_chunks + tl.program_id(0) % num_chunks) * count
    num_above = tl.full([], 0, tl.int32)
    num_equal = tl.full([], 0, tl.int32)
    for first in range(0, num, BLOCK):
        at = first + lanes
        key = _keys(scores, at, at < num, not IS_FIRST)
        is_above = (at < num) & ((key ^ _SIGN) > (threshold ^ _SIGN))
        is_equal = (at < num) & (key == threshold)
        both = is_above.to(tl.int32) | (is_equal.to(tl.int32) << 16)
        before = tl.cumsum(both, axis=0) - both
        equals = num_equal + (before >> 16)
        is_chosen = is_above | (is_equal & (equals < wanted))
        rank = num_above + (before & _LOW) + tl.minimum(equals, wanted)
        total = tl.sum(both, axis=0)
        num_above += total & _LOW
        num_equal += total >> 16
        if IS_FIRST:
            place = start + at
        else:
            place = tl.load(places + wide * length + at, mask=is_chosen, other=0)
        if IS_LAST:
            chosen = place.to(tl.int64)
            if PAGE > 0:
                page = tl.load(
                    pages + wide * pages_stride + place // PAGE, mask=is_chosen, other=0
                ).to(tl.int64)
                chosen = page * PAGE + place % PAGE
            tl.store(out + out_at + rank, chosen, mask=is_chosen)
        else:
            tl.store(out + out_at + rank, place, mask=is_chosen)
            tl.store(out_keys + out_at + rank, key, mask=is_chosen)
    if not IS_LAST:
        for first in range(tl.maximum(num, 0), count, BLOCK):
            at = first + lanes
            tl.store(out_keys + out_at + at, tl.zeros([BLOCK], tl.int32), mask=at < count)


def choose(
    scores_RL: torch.Tensor,
    visible_N: torch.Tensor,
    out_RK: torch.Tensor,
    *,
    unit: int = 1,
    pages_GP: torch.Tensor | None = None,
    page_tokens: int = 0,
) -> None:
    """Writes positions, rising, as int64.

    Of row r, one of R/N for each of N, the first `visible / unit`, rounded up, count; they must be
    at least K. With pages, one row of them for each of R or one for all, a position becomes a flat
    cache row.
    """
    num_rows, length = scores_RL.shape
    count = out_RK.shape[1]
    if not num_rows:
        return
    assert out_RK.is_contiguous() and scores_RL.stride(1) == 1 and visible_N.is_contiguous()
    row_heads = num_rows // len(visible_N)
    chunk = max(CHUNK_SCORES, triton.next_power_of_2(4 * count))
    paging = (0 if pages_GP is None or len(pages_GP) == 1 else pages_GP.stride(0),)
    page = 0 if pages_GP is None else page_tokens
    if num_rows >= MANY_ROWS or length <= 2 * chunk:
        _topk_kernel[(num_rows,)](
            scores_RL, None, visible_N, pages_GP, out_RK, None,
            length, 1, length, count, row_heads, unit, scores_RL.stride(0), *paging,
            PAGE=page, IS_FIRST=True, IS_LAST=True, **_launch(length),
        )  # fmt: skip
        return
    num_chunks = triton.cdiv(length, chunk)
    found = num_chunks * count
    keys_RX = torch.empty(num_rows, found, dtype=torch.int32, device=scores_RL.device)
    places_RX = torch.empty_like(keys_RX)
    _topk_kernel[(num_rows * num_chunks,)](
        scores_RL, None, visible_N, None, places_RX, keys_RX,
        length, num_chunks, chunk, count, row_heads, unit, scores_RL.stride(0), 0,
        PAGE=0, IS_FIRST=True, IS_LAST=False, **_launch(chunk),
    )  # fmt: skip
    _topk_kernel[(num_rows,)](
        keys_RX, places_RX, None, pages_GP, out_RK, None,
        found, 1, found, count, 1, 1, found, *paging,
        PAGE=page, IS_FIRST=False, IS_LAST=True, **_launch(found),
    )  # fmt: skip


def _launch(length: int) -> dict[str, int]:
    """Options for rows of so many scores."""
    block = min(BLOCK, max(256, triton.next_power_of_2(length)))
    return {"BLOCK": block, "num_warps": num_warps(block), "num_stages": 1}


def num_warps(block: int) -> int:
    """For so many scores at a time."""
    return 16 if block >= 4096 else 8 if block >= 2048 else 4


_NUMBERS = ("length", "num_chunks", "chunk_scores", "count", "row_heads", "unit", "row_stride",
            "pages_stride")  # fmt: skip


def _case(name: str, *, is_first: bool, is_last: bool, page: int, ones: tuple[str, ...]) -> AotCase:
    """`ones` are the numbers that are 1, for which Triton compiles a form of its own."""
    pointers = {
        "scores": "*fp32" if is_first else "*i32",
        "places": None if is_first else "*i32",
        "visible": "*i64" if is_first else None,
        "pages": "*i64" if page else None,
        "out": "*i64" if is_last else "*i32",
        "out_keys": None if is_last else "*i32",
    }
    given = {key: kind for key, kind in pointers.items() if kind is not None}
    absent = {key: None for key, kind in pointers.items() if kind is None}
    numbers = {key: "i32" for key in _NUMBERS if key not in ones}
    return AotCase(
        name=f"top-k {name}", kernel=_topk_kernel, types=given | numbers,
        constants=absent | dict.fromkeys(ones, 1)
        | {"PAGE": page, "BLOCK": BLOCK, "IS_FIRST": is_first, "IS_LAST": is_last},
        aligned=(*given, "chunk_scores", "row_stride", "count"),
        num_warps=num_warps(BLOCK), num_stages=1,
        targets=(80, 90, 100) if is_first and is_last and page else (90,),
    )  # fmt: skip


AOT_CASES = (
    _case("of whole rows", is_first=True, is_last=True, page=64,
          ones=("num_chunks", "row_heads", "unit")),
    _case("of chunks", is_first=True, is_last=False, page=0, ones=("row_heads", "unit")),
    _case("of what chunks chose", is_first=False, is_last=True, page=64,
          ones=("num_chunks", "row_heads", "unit")),
    _case("of blocks of keys", is_first=True, is_last=True, page=0, ones=("num_chunks",)),
)  # fmt: skip
