"""What drawing a token begins with: the order of logits as integers, their weights, and the largest
logit of every chunk of a row. N rows, V vocabulary, S chunks of a row.

Chunks have one length, whatever the batch, so a row's sums are added in one order always.
"""

import triton
import triton.language as tl

from batchmla.kernels.triton.aot import AotCase

CHUNK = 8192  # ids of a chunk
LARGEST_WARPS = 8


@triton.jit
def order_key(logits):
    """int32 in the order of float32 logits; both zeros are equal, NaN is the largest."""
    logits = tl.where(logits == 0.0, 0.0, logits)
    bits = logits.to(tl.int32, bitcast=True)
    key = tl.where(bits >= 0, bits, bits ^ 0x7FFFFFFF)
    return tl.where(logits != logits, 0x7FFFFFFF, key)


@triton.jit
def logit_of(key):
    """The float32 logit of an int32 key."""
    return tl.where(key >= 0, key, key ^ 0x7FFFFFFF).to(tl.float32, bitcast=True)


@triton.jit
def is_finite(key):
    """Whether a row whose largest key this is has weights."""
    return (key < 0x7F800000) & (key > -2139095041)  # the keys of both infinities


@triton.jit
def weight_of(logits, most, inverse):
    """exp((logit - most) · inverse) in float64."""
    return tl.exp((logits.to(tl.float64) - most) * inverse)


@triton.jit
def inverse_of(temperature):
    """Below 1e-30 every logit but the largest has weight 0 anyway."""
    return 1.0 / tl.maximum(temperature, 1e-30)


@triton.jit
def largest_kernel(
    logits, best_key, best_id, row_stride, vocab, num_chunks,
    CHUNK: tl.constexpr,
):  # fmt: skip
    """The largest key of each chunk and the first id that has it; a grid of (rows, chunks)."""
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    ids = chunk * CHUNK + tl.arange(0, CHUNK)
    inside = ids < vocab
    keys = order_key(tl.load(logits + row * row_stride + ids, mask=inside, other=0.0))
    keys = tl.where(inside, keys, -2147483648)
    most = tl.max(keys, axis=0)
    first = tl.min(tl.where(inside & (keys == most), ids, 0x7FFFFFFF), axis=0)
    tl.store(best_key + row * num_chunks + chunk, most)
    tl.store(best_id + row * num_chunks + chunk, first)


@triton.jit
def best_of_row(best_key, best_id, row, num_chunks, CHUNKS: tl.constexpr):
    """(largest key, first id that has it) of a row."""
    chunks = tl.arange(0, CHUNKS)
    inside = chunks < num_chunks
    at = row * num_chunks + chunks
    keys = tl.load(best_key + at, mask=inside, other=-2147483648)
    ids = tl.load(best_id + at, mask=inside, other=0x7FFFFFFF)
    most = tl.max(keys, axis=0)
    return most, tl.min(tl.where(keys == most, ids, 0x7FFFFFFF), axis=0)


AOT_CASES = (
    AotCase(
        name="largest logits",
        kernel=largest_kernel,
        types={
            "logits": "*fp32", "best_key": "*i32", "best_id": "*i32", "row_stride": "i32",
            "vocab": "i32", "num_chunks": "i32",
        },
        constants={"CHUNK": CHUNK},
        aligned=("logits", "best_key", "best_id", "row_stride"),
        num_warps=LARGEST_WARPS,
    ),
)  # fmt: skip
