"""Drawing tokens: `kernels/reference/sample.py` says what is drawn. N rows, V vocabulary.

Every row is read once for its largest logit, which is the token of a greedy row. A row without
top-k and top-p is read again for sums of its weights chunk by chunk, and the chunk that holds the
token once more. Rows with them go on in `sample_filter`. Weights and sums are float64, added in an
order that depends on V alone; nothing is sorted, and the host waits for nothing.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from batchmla.kernels.triton.aot import AotCase
from batchmla.kernels.triton.sample_collect import Parameters, Surveyed
from batchmla.kernels.triton.sample_filter import draw_filtered
from batchmla.kernels.triton.sample_rows import (
    CHUNK,
    LARGEST_WARPS,
    best_of_row,
    inverse_of,
    is_finite,
    largest_kernel,
    logit_of,
    weight_of,
)

BLOCK = 1024
WARPS = 4
CAPACITY = 8192  # of the logits that top-k and top-p choose among, apart from the row


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """How a row is cut."""

    chunk: int = CHUNK
    capacity: int = CAPACITY


@triton.jit
def _weigh_kernel(
    logits, best_key, best_id, totals, temperature, top_k, top_p, min_p, row_stride, vocab,
    num_chunks,
    CHUNK: tl.constexpr, CHUNKS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The kept weight of each chunk."""
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    heat = tl.load(temperature + row)
    if (heat <= 0) | (tl.load(top_k + row) > 0) | (tl.load(top_p + row) < 1):
        return
    key, _ = best_of_row(best_key, best_id, row, num_chunks, CHUNKS)
    most, inverse = logit_of(key).to(tl.float64), inverse_of(heat)
    least = tl.load(min_p + row)
    total = tl.zeros([BLOCK], tl.float64)
    for start in tl.range(0, CHUNK, BLOCK, num_stages=3):
        ids = chunk * CHUNK + start + tl.arange(0, BLOCK)
        values = tl.load(logits + row * row_stride + ids, mask=ids < vocab, other=float("-inf"))
        weights = weight_of(values, most, inverse)
        total += tl.where(weights >= least, weights, 0.0)
    tl.store(totals + row * num_chunks + chunk, tl.sum(total, axis=0))


@triton.jit
def _draw_by_id(
    row_logits, row_totals, most, inverse, least, uniform, vocab, num_chunks,
    CHUNK: tl.constexpr, CHUNKS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The first id at which the running sum exceeds its share of the total, else the last kept."""
    chunks = tl.arange(0, CHUNKS)
    sums = tl.load(row_totals + chunks, mask=chunks < num_chunks, other=0.0)
    running = tl.cumsum(sums, axis=0)
    target = uniform * tl.max(running, axis=0)
    last_chunk = tl.max(tl.where(sums > 0, chunks, 0), axis=0)
    has_token = (running > target) & (sums > 0)
    chunk = tl.min(tl.where(has_token, chunks, last_chunk), axis=0)
    before = tl.max(tl.where(chunks < chunk, running, 0.0), axis=0)
    found = tl.full([BLOCK], 0x7FFFFFFF, tl.int32)
    last = tl.zeros([BLOCK], tl.int32)
    for start in range(0, CHUNK, BLOCK):
        ids = chunk * CHUNK + start + tl.arange(0, BLOCK)
        values = tl.load(row_logits + ids, mask=ids < vocab, other=float("-inf"))
        weights = weight_of(values, most, inverse)
        weights = tl.where(weights >= least, weights, 0.0)
        is_beyond = (before + tl.cumsum(weights, axis=0) > target) & (weights > 0)
        found = tl.minimum(found, tl.where(is_beyond, ids, 0x7FFFFFFF))
        last = tl.maximum(last, tl.where(weights > 0, ids, 0))
        before += tl.sum(weights, axis=0)
    first = tl.min(found, axis=0)
    return tl.where(first < 0x7FFFFFFF, first, tl.max(last, axis=0))


@triton.jit
def _draw_kernel(
    logits, best_key, best_id, totals, temperature, top_k, top_p, min_p, uniform, out, row_stride,
    vocab, num_chunks,
    CHUNK: tl.constexpr, CHUNKS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program a row; of rows with top-k or top-p the largest logit for now."""
    row = tl.program_id(0).to(tl.int64)
    key, chosen = best_of_row(best_key, best_id, row, num_chunks, CHUNKS)
    heat = tl.load(temperature + row)
    is_filtered = (tl.load(top_k + row) > 0) | (tl.load(top_p + row) < 1)
    if (heat > 0) & (is_filtered == 0):
        if is_finite(key):
            chosen = _draw_by_id(
                logits + row * row_stride, totals + row * num_chunks, logit_of(key).to(tl.float64),
                inverse_of(heat), tl.load(min_p + row), tl.load(uniform + row), vocab, num_chunks,
                CHUNK, CHUNKS, BLOCK,
            )  # fmt: skip
        else:
            chosen = chosen * 0
    tl.store(out + row, chosen.to(tl.int64))


def sample(
    logits_NV: torch.Tensor,
    *,
    temperature_N: torch.Tensor,
    top_k_N: torch.Tensor,
    top_p_N: torch.Tensor,
    min_p_N: torch.Tensor,
    uniform_N: torch.Tensor,
) -> torch.Tensor:
    """See `SampleOp`; the reference's ids."""
    parameters = Parameters(
        temperature_N=temperature_N.contiguous(),
        top_k_N=top_k_N.contiguous(),
        top_p_N=top_p_N.contiguous(),
        min_p_N=min_p_N.contiguous(),
        uniform_N=uniform_N.contiguous(),
    )
    return draw(logits_NV, parameters, Sizes())


def draw(logits_NV: torch.Tensor, parameters: Parameters, sizes: Sizes) -> torch.Tensor:
    """`sample` with rows cut as `sizes` says."""
    num_rows, vocab = logits_NV.shape
    assert logits_NV.dtype == torch.float32 and vocab, (logits_NV.dtype, logits_NV.shape)
    if logits_NV.stride(1) != 1:
        logits_NV = logits_NV.contiguous()
    out_N = torch.empty(num_rows, dtype=torch.int64, device=logits_NV.device)
    if not num_rows:
        return out_N
    num_chunks = triton.cdiv(vocab, sizes.chunk)
    key_NS = torch.empty(num_rows, num_chunks, dtype=torch.int32, device=logits_NV.device)
    id_NS = torch.empty_like(key_NS)
    totals_NS = torch.empty(key_NS.shape, dtype=torch.float64, device=key_NS.device)
    stride = logits_NV.stride(0)
    largest_kernel[(num_rows, num_chunks)](
        logits_NV, key_NS, id_NS, stride, vocab, num_chunks,
        CHUNK=sizes.chunk, num_warps=LARGEST_WARPS,
    )  # fmt: skip
    cut = {
        "CHUNK": sizes.chunk,
        "CHUNKS": triton.next_power_of_2(num_chunks),
        "BLOCK": min(BLOCK, sizes.chunk),
        "num_warps": WARPS,
    }
    filters = (
        parameters.temperature_N, parameters.top_k_N, parameters.top_p_N, parameters.min_p_N,
    )  # fmt: skip
    _weigh_kernel[(num_rows, num_chunks)](
        logits_NV, key_NS, id_NS, totals_NS, *filters, stride, vocab, num_chunks, **cut
    )
    _draw_kernel[(num_rows,)](
        logits_NV, key_NS, id_NS, totals_NS, *filters, parameters.uniform_N, out_N, stride, vocab,
        num_chunks, **cut,
    )  # fmt: skip
    surveyed = Surveyed(key_NS=key_NS, id_NS=id_NS, totals_NS=totals_NS)
    draw_filtered(logits_NV, surveyed, parameters, out_N, sizes.chunk, sizes.capacity)
    return out_N


_TYPES = {
    "logits": "*fp32", "best_key": "*i32", "best_id": "*i32", "totals": "*fp64",
    "temperature": "*fp64", "top_k": "*i64", "top_p": "*fp64", "min_p": "*fp64",
    "row_stride": "i32", "vocab": "i32", "num_chunks": "i32",
}  # fmt: skip
_POINTERS = tuple(name for name, kind in _TYPES.items() if kind.startswith("*"))
_CUT = {"CHUNK": CHUNK, "CHUNKS": 16, "BLOCK": BLOCK}
AOT_CASES = (
    AotCase(
        name="weigh logits",
        kernel=_weigh_kernel,
        types=_TYPES,
        constants=_CUT,
        aligned=(*_POINTERS, "row_stride"),
        num_warps=WARPS,
    ),
    AotCase(
        name="draw by id",
        kernel=_draw_kernel,
        types={**_TYPES, "uniform": "*fp64", "out": "*i64"},
        constants=_CUT,
        aligned=(*_POINTERS, "uniform", "out", "row_stride"),
        num_warps=WARPS,
    ),
)  # fmt: skip
