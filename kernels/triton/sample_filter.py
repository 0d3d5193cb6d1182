"""Drawing from rows with top-k or top-p. N rows, V vocabulary, S chunks of a row, F shares.

The logits from the largest down are a list in which equals stand by id; top-k, top-p and min-p each
keep a beginning of it, and the draw is a place in it. Nothing is sorted:
    1. logits are counted and weighed by their distance from the largest, a share for each
       temperature, which says how far down the list the kept ones may reach;
    2. if those are few, they are copied out of the row, in the order of their ids;
    3. a place of the list is found by cutting the range of logits into F shares again and again,
       going on with the one in which the count or the sum that is wanted is reached; of equal
       logits the place follows from their number.
Sums are float64. A row that keeps more than its copies have room for is searched where it lies.
"""

import torch
import triton
import triton.language as tl

from batchmla.kernels.triton.aot import AotCase
from batchmla.kernels.triton.sample_collect import (
    KEPT_TYPES,
    SHARES,
    Parameters,
    Surveyed,
    collect,
    is_ours,
    reach,
)
from batchmla.kernels.triton.sample_rows import (
    best_of_row,
    inverse_of,
    logit_of,
    order_key,
    weight_of,
)

BLOCK = 256  # most rows keep few logits: a block of each pass is one turn of its loop
WARPS = 4


@triton.jit
def _bounds(source, length, most, inverse, least, BLOCK: tl.constexpr):
    """(smallest key, how many weigh at least `least` and more than 0, what they weigh)."""
    low = tl.full([BLOCK], 0x7FFFFFFF, tl.int32)
    count = tl.zeros([BLOCK], tl.int64)
    total = tl.zeros([BLOCK], tl.float64)
    for start in tl.range(0, length, BLOCK):
        at = start + tl.arange(0, BLOCK)
        inside = at < length
        values = tl.load(source + at, mask=inside, other=float("-inf"))
        weights = weight_of(values, most, inverse)
        is_kept = inside & (weights >= least) & (weights > 0)
        low = tl.minimum(low, tl.where(inside, order_key(values), 0x7FFFFFFF))
        count += is_kept.to(tl.int64)
        total += tl.where(is_kept, weights, 0.0)
    return tl.min(low, axis=0).to(tl.int64), tl.sum(count, axis=0), tl.sum(total, axis=0)


@triton.jit
def _share_out(
    source, length, most, inverse, low, high, shift, BLOCK: tl.constexpr, SHARES: tl.constexpr
):
    """Counts and weights [SHARES] of the keys from `low` to before `high`, from the top down."""
    shares = tl.arange(0, SHARES)
    counts = tl.zeros([SHARES, BLOCK], tl.int32)
    sums = tl.zeros([SHARES, BLOCK], tl.float64)
    for start in tl.range(0, length, BLOCK):
        at = start + tl.arange(0, BLOCK)
        inside = at < length
        values = tl.load(source + at, mask=inside, other=float("-inf"))
        keys = order_key(values).to(tl.int64)
        inside = inside & (keys >= low) & (keys < high)
        share = (high - 1 - keys) >> shift
        is_here = inside[None, :] & (share[None, :] == shares[:, None])
        counts += is_here.to(tl.int32)
        sums += tl.where(is_here, weight_of(values, most, inverse)[None, :], 0.0)
    return tl.sum(counts, axis=1).to(tl.int64), tl.sum(sums, axis=1)


@triton.jit
def _is_reached(sums, wanted, is_strict):
    return tl.where(is_strict, sums > wanted, sums >= wanted)


@triton.jit
def _find(
    source, length, most, inverse, low, high, num_wanted, sum_wanted, is_strict,
    BLOCK: tl.constexpr, SHARES: tl.constexpr,
):  # fmt: skip
    """The first place down the list with which `num_wanted` or `sum_wanted` is reached, else the
    last: (its key, which of the equals it is from 1, places and weight up to and with it)."""
    shares = tl.arange(0, SHARES)
    num_above = low * 0
    sum_above = most * 0.0
    equals = low * 0 - 1
    while (high - low > 1) | (equals < 0):
        shift = low * 0
        while (high - low) > (SHARES << shift):
            shift += 1
        counts, sums = _share_out(source, length, most, inverse, low, high, shift, BLOCK, SHARES)
        is_enough = num_above + tl.cumsum(counts, axis=0) >= num_wanted
        is_enough |= _is_reached(sum_above + tl.cumsum(sums, axis=0), sum_wanted, is_strict)
        last = (high - low - 1) >> shift
        share = tl.minimum(tl.min(tl.where(is_enough, shares, SHARES), axis=0), last)
        num_above += tl.sum(tl.where(shares < share, counts, 0), axis=0)
        sum_above += tl.sum(tl.where(shares < share, sums, 0.0), axis=0)
        equals = tl.sum(tl.where(shares == share, counts, 0), axis=0)
        high = high - (share << shift)
        low = tl.maximum(low, high - (low * 0 + 1 << shift))
    weight = weight_of(logit_of(low.to(tl.int32)), most, inverse)
    # by division to within one, then as the sums say
    guess = (sum_wanted - sum_above) / tl.maximum(weight, 1e-300)
    place = tl.maximum(tl.minimum(guess, 1e9).to(tl.int64) - 1, 1)
    place += tl.where(_is_reached(sum_above + place * weight, sum_wanted, is_strict), 0, 1)
    place += tl.where(_is_reached(sum_above + place * weight, sum_wanted, is_strict), 0, 1)
    place = tl.maximum(tl.minimum(tl.minimum(place, num_wanted - num_above), equals), 1)
    return low, place, num_above + place, sum_above + place * weight


@triton.jit
def _position(source, length, key, place, BLOCK: tl.constexpr):
    """Where in the source the key stands for the `place`-th time."""
    found = tl.full([BLOCK], 0x7FFFFFFF, tl.int32)
    before = place * 0
    for start in tl.range(0, length, BLOCK):
        at = start + tl.arange(0, BLOCK)
        values = tl.load(source + at, mask=at < length, other=float("-inf"))
        is_equal = (at < length) & (order_key(values).to(tl.int64) == key)
        rank = before + tl.cumsum(is_equal.to(tl.int32), axis=0)
        found = tl.minimum(found, tl.where(is_equal & (rank == place), at, 0x7FFFFFFF))
        before += tl.sum(is_equal.to(tl.int32), axis=0)
    return tl.min(found, axis=0)


@triton.jit
def _draw_filtered_kernel(
    logits, best_key, best_id, totals, counts, sums, kept_logits, kept_ids, temperature, top_k,
    top_p, min_p, uniform, out, row_stride, vocab, num_chunks, capacity,
    CHUNKS: tl.constexpr, BLOCK: tl.constexpr, SHARES: tl.constexpr,
):  # fmt: skip
    """One program a row: the ends of top-k, of top-p and of min-p, then the draw."""
    row = tl.program_id(0).to(tl.int64)
    key, _ = best_of_row(best_key, best_id, row, num_chunks, CHUNKS)
    if is_ours(temperature, top_k, top_p, row, key) == 0:
        return
    last, reached, _, total = reach(
        counts, sums, totals, top_k, top_p, row, vocab, num_chunks, CHUNKS, SHARES
    )
    is_copied = (last < SHARES - 1) & (reached <= capacity)
    if is_copied:
        source, length = kept_logits + row * capacity, reached
    else:
        source, length = logits + row * row_stride, vocab
    most, inverse = logit_of(key).to(tl.float64), inverse_of(tl.load(temperature + row))
    high = key.to(tl.int64) + 1
    low, num_heavy, sum_heavy = _bounds(source, length, most, inverse, tl.load(min_p + row), BLOCK)
    count, share = tl.load(top_k + row), tl.load(top_p + row)
    num_kept, sum_kept = vocab.to(tl.int64), total
    place = num_kept * 0
    for stage in range(3):  # top-k, top-p, the draw
        is_draw = stage == 2
        is_light = is_draw & (num_kept > num_heavy)
        num_kept = tl.maximum(tl.where(is_light, num_heavy, num_kept), 1)
        sum_kept = tl.where(is_light, sum_heavy, sum_kept)
        num_wanted = tl.where(stage == 0, count, num_kept)
        part = tl.where(is_draw, tl.load(uniform + row), share)
        sum_wanted = tl.where(stage == 0, float("inf"), part * sum_kept)
        is_top_k = (stage == 0) & (count > 0) & (count < vocab)
        if is_draw | is_top_k | ((stage == 1) & (share < 1)):
            low, place, num_kept, sum_kept = _find(
                source, length, most, inverse, low, high, num_wanted, sum_wanted, is_draw,
                BLOCK, SHARES,
            )  # fmt: skip
    position = _position(source, length, low, place, BLOCK)
    chosen = position
    if is_copied:
        chosen = tl.load(kept_ids + row * capacity + position)
    tl.store(out + row, chosen.to(tl.int64))


def draw_filtered(
    logits_NV: torch.Tensor,
    surveyed: Surveyed,
    parameters: Parameters,
    out_N: torch.Tensor,
    chunk: int,
    capacity: int,
) -> None:
    """Writes the ids of the rows with top-k or top-p whose largest logit is finite."""
    num_rows, vocab = logits_NV.shape
    num_chunks = surveyed.key_NS.shape[1]
    collected = collect(logits_NV, surveyed, parameters, chunk, capacity)
    _draw_filtered_kernel[(num_rows,)](
        logits_NV, surveyed.key_NS, surveyed.id_NS, surveyed.totals_NS, collected.counts_NSF,
        collected.sums_NSF, collected.logits_NK, collected.ids_NK, parameters.temperature_N,
        parameters.top_k_N, parameters.top_p_N, parameters.min_p_N, parameters.uniform_N, out_N,
        logits_NV.stride(0), vocab, num_chunks, collected.ids_NK.shape[1],
        CHUNKS=triton.next_power_of_2(num_chunks), BLOCK=BLOCK, SHARES=SHARES, num_warps=WARPS,
    )  # fmt: skip


_TYPES = {**KEPT_TYPES, "min_p": "*fp64", "uniform": "*fp64", "out": "*i64"}
AOT_CASES = (
    AotCase(
        name="draw filtered",
        kernel=_draw_filtered_kernel,
        types=_TYPES,
        constants={"CHUNKS": 16, "SHARES": SHARES, "BLOCK": BLOCK},
        aligned=(*(name for name, kind in _TYPES.items() if kind[0] == "*"), "row_stride"),
        num_warps=WARPS,
    ),
)
