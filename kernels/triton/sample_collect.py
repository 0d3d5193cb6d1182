"""What top-k and top-p may keep of a row: counted by distance from the largest logit, and copied
out of the row where it is little. Shapes: see `batchmla.kernels.triton.sample_filter`."""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from batchmla.kernels.triton.aot import AotCase
from batchmla.kernels.triton.sample_rows import (
    CHUNK,
    best_of_row,
    inverse_of,
    is_finite,
    logit_of,
    weight_of,
)

SHARES = 16
BLOCK = 256
WARPS = 8
COLLECT_BLOCK = 1024
COLLECT_WARPS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameters:
    """What `SampleOp` is given beside logits, each in one piece."""

    temperature_N: torch.Tensor
    top_k_N: torch.Tensor
    top_p_N: torch.Tensor
    min_p_N: torch.Tensor
    uniform_N: torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Surveyed:
    """Of each chunk: its largest key, the first id that has it, and room for a sum of weights."""

    key_NS: torch.Tensor
    id_NS: torch.Tensor
    totals_NS: torch.Tensor


@triton.jit
def is_ours(temperature, top_k, top_p, row, key):
    """Whether the row is drawn here."""
    is_filtered = (tl.load(top_k + row) > 0) | (tl.load(top_p + row) < 1)
    return (tl.load(temperature + row) > 0) & is_filtered & is_finite(key)


@triton.jit
def _distance(logits, most, inverse, SHARES: tl.constexpr):
    """Whole temperatures below the largest logit, at most the last share."""
    below = (most - logits.to(tl.float64)) * inverse
    return tl.minimum(below, SHARES - 1.0).to(tl.int32)


@triton.jit
def _survey_kernel(
    logits, best_key, best_id, totals, counts, sums, temperature, top_k, top_p, row_stride, vocab,
    num_chunks,
    CHUNK: tl.constexpr, CHUNKS: tl.constexpr, BLOCK: tl.constexpr, SHARES: tl.constexpr,
):  # fmt: skip
    """Of each chunk the whole weight, and count and weight (float32) by distance."""
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    key, _ = best_of_row(best_key, best_id, row, num_chunks, CHUNKS)
    if is_ours(temperature, top_k, top_p, row, key) == 0:
        return
    most, inverse = logit_of(key).to(tl.float64), inverse_of(tl.load(temperature + row))
    shares = tl.arange(0, SHARES)
    total = tl.zeros([BLOCK], tl.float64)
    share_counts = tl.zeros([SHARES, BLOCK], tl.int32)
    share_sums = tl.zeros([SHARES, BLOCK], tl.float32)
    for start in tl.range(0, CHUNK, BLOCK, num_stages=4):
        ids = chunk * CHUNK + start + tl.arange(0, BLOCK)
        inside = ids < vocab
        values = tl.load(logits + row * row_stride + ids, mask=inside, other=float("-inf"))
        weights = weight_of(values, most, inverse)
        total += weights
        distance = _distance(values, most, inverse, SHARES)
        is_here = inside[None, :] & (distance[None, :] == shares[:, None])
        share_counts += is_here.to(tl.int32)
        share_sums += tl.where(is_here, weights.to(tl.float32)[None, :], 0.0)
    at = row * num_chunks + chunk
    tl.store(totals + at, tl.sum(total, axis=0))
    tl.store(counts + at * SHARES + shares, tl.sum(share_counts, axis=1))
    tl.store(sums + at * SHARES + shares, tl.sum(share_sums, axis=1))


@triton.jit
def reach(
    counts, sums, totals, top_k, top_p, row, vocab, num_chunks,
    CHUNKS: tl.constexpr, SHARES: tl.constexpr,
):  # fmt: skip
    """(the last share with logits that may be kept, how many come that far, counts by chunk and
    share, the row's whole weight)."""
    chunks, shares = tl.arange(0, CHUNKS)[:, None], tl.arange(0, SHARES)
    inside = chunks < num_chunks
    at = (row * num_chunks + chunks) * SHARES + shares[None, :]
    all_counts = tl.load(counts + at, mask=inside, other=0)
    row_sums = tl.sum(tl.load(sums + at, mask=inside, other=0.0).to(tl.float64), axis=0)
    places = tl.arange(0, CHUNKS)
    chunk_totals = tl.load(totals + row * num_chunks + places, mask=places < num_chunks, other=0.0)
    total = tl.sum(chunk_totals, axis=0)
    count, share = tl.load(top_k + row), tl.load(top_p + row)
    enough = tl.where(share < 1, share * total * 1.0001, float("inf"))  # sums are float32
    has_count = (count > 0) & (count < vocab)
    num_down = tl.cumsum(tl.sum(all_counts, axis=0), axis=0)
    sum_down = tl.cumsum(row_sums, axis=0)
    is_enough = tl.where(has_count, num_down >= count, sum_down >= enough)
    last = tl.min(tl.where(is_enough, shares, SHARES - 1), axis=0)
    reached = tl.max(tl.where(shares <= last, num_down, 0), axis=0)
    return last, reached, all_counts, total


@triton.jit
def _collect_kernel(
    logits, best_key, best_id, totals, counts, sums, kept_logits, kept_ids, temperature, top_k,
    top_p, row_stride, vocab, num_chunks, capacity,
    CHUNK: tl.constexpr, CHUNKS: tl.constexpr, BLOCK: tl.constexpr, SHARES: tl.constexpr,
):  # fmt: skip
    """Copies what may be kept, if there is room for it."""
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    key, _ = best_of_row(best_key, best_id, row, num_chunks, CHUNKS)
    if is_ours(temperature, top_k, top_p, row, key) == 0:
        return
    last, reached, all_counts, _ = reach(
        counts, sums, totals, top_k, top_p, row, vocab, num_chunks, CHUNKS, SHARES
    )
    if (last == SHARES - 1) | (reached > capacity):
        return
    chunks, shares = tl.arange(0, CHUNKS)[:, None], tl.arange(0, SHARES)[None, :]
    is_kept = shares <= last
    before = tl.sum(tl.sum(tl.where(is_kept & (chunks < chunk), all_counts, 0), axis=1), axis=0)
    mine = tl.sum(tl.sum(tl.where(is_kept & (chunks == chunk), all_counts, 0), axis=1), axis=0)
    if mine == 0:
        return
    most, inverse = logit_of(key).to(tl.float64), inverse_of(tl.load(temperature + row))
    for start in range(0, CHUNK, BLOCK):
        ids = chunk * CHUNK + start + tl.arange(0, BLOCK)
        inside = ids < vocab
        values = tl.load(logits + row * row_stride + ids, mask=inside, other=float("-inf"))
        is_taken = inside & (_distance(values, most, inverse, SHARES) <= last)
        places = row * capacity + before + tl.cumsum(is_taken.to(tl.int32), axis=0) - 1
        tl.store(kept_logits + places, values, mask=is_taken)
        tl.store(kept_ids + places, ids, mask=is_taken)
        before += tl.sum(is_taken.to(tl.int32), axis=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Collected:
    """Counts and sums [N, S, F], copied logits and their ids [N, K]."""

    counts_NSF: torch.Tensor
    sums_NSF: torch.Tensor
    logits_NK: torch.Tensor
    ids_NK: torch.Tensor


def collect(
    logits_NV: torch.Tensor, surveyed: Surveyed, parameters: Parameters, chunk: int, capacity: int
) -> Collected:
    """Two passes over the rows with top-k or top-p whose largest logit is finite."""
    (num_rows, vocab), device = logits_NV.shape, logits_NV.device
    num_chunks = surveyed.key_NS.shape[1]
    counts_NSF = torch.empty(num_rows, num_chunks, SHARES, dtype=torch.int32, device=device)
    collected = Collected(
        counts_NSF=counts_NSF,
        sums_NSF=torch.empty(counts_NSF.shape, device=device),
        logits_NK=torch.empty(num_rows, min(capacity, vocab), device=device),
        ids_NK=torch.empty(num_rows, min(capacity, vocab), dtype=torch.int32, device=device),
    )
    found = (
        logits_NV, surveyed.key_NS, surveyed.id_NS, surveyed.totals_NS, counts_NSF,
        collected.sums_NSF,
    )  # fmt: skip
    filters = (parameters.temperature_N, parameters.top_k_N, parameters.top_p_N)
    sizes = (logits_NV.stride(0), vocab, num_chunks)
    padded = triton.next_power_of_2(num_chunks)
    _survey_kernel[(num_rows, num_chunks)](
        *found, *filters, *sizes,
        CHUNK=chunk, CHUNKS=padded, BLOCK=min(BLOCK, chunk), SHARES=SHARES, num_warps=WARPS,
    )  # fmt: skip
    _collect_kernel[(num_rows, num_chunks)](
        *found, collected.logits_NK, collected.ids_NK, *filters, *sizes, min(capacity, vocab),
        CHUNK=chunk, CHUNKS=padded, BLOCK=min(COLLECT_BLOCK, chunk), SHARES=SHARES,
        num_warps=COLLECT_WARPS,
    )  # fmt: skip
    return collected


TYPES = {
    "logits": "*fp32", "best_key": "*i32", "best_id": "*i32", "totals": "*fp64",
    "counts": "*i32", "sums": "*fp32", "temperature": "*fp64", "top_k": "*i64", "top_p": "*fp64",
    "row_stride": "i32", "vocab": "i32", "num_chunks": "i32",
}  # fmt: skip
KEPT_TYPES = {**TYPES, "kept_logits": "*fp32", "kept_ids": "*i32", "capacity": "i32"}


def _case(name: str, kernel: object, types: dict[str, str], block: int, warps: int) -> AotCase:
    pointers = tuple(name for name, kind in types.items() if kind.startswith("*"))
    return AotCase(
        name=name,
        kernel=kernel,
        types=types,
        constants={"CHUNK": CHUNK, "CHUNKS": 16, "SHARES": SHARES, "BLOCK": block},
        aligned=(*pointers, "row_stride"),
        num_warps=warps,
    )


AOT_CASES = (
    _case("survey logits", _survey_kernel, TYPES, BLOCK, WARPS),
    _case("collect logits", _collect_kernel, KEPT_TYPES, COLLECT_BLOCK, COLLECT_WARPS),
)
