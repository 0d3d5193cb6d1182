"""The tiling that published Triton MLA decode kernels share, written anew as a baseline: blocks of
16 heads as rows, tiles of 32 tokens, latents loaded once transposed for scores and once more for
values, a fixed number of splits that a second kernel merges.

H heads of one sequence, C latent, R rope, S splits.
"""

import torch
import triton
import triton.language as tl

HEADS, TOKENS, SPLITS = 16, 32, 4


@triton.jit
def _split_kernel(
    q, cache, pages, lengths, partial, lse, scale, num_heads, table_width,
    C: tl.constexpr, R: tl.constexpr, PAGE: tl.constexpr, SPLITS: tl.constexpr,
    BLOCK_H: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    sequence, split = tl.program_id(0).to(tl.int64), tl.program_id(2)
    heads = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    is_head = heads < num_heads
    columns, tails = tl.arange(0, C), tl.arange(0, R)
    here = q + (sequence * num_heads + heads[:, None]) * (C + R)
    q_latent = tl.load(here + columns[None, :], mask=is_head[:, None], other=0.0)
    q_tail = tl.load(here + C + tails[None, :], mask=is_head[:, None], other=0.0)
    length = tl.load(lengths + sequence)
    per_split = tl.cdiv(length, SPLITS)
    first, stop = per_split * split, tl.minimum(per_split * (split + 1), length)
    most = tl.full([BLOCK_H], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_H], tl.float32)
    z = tl.zeros([BLOCK_H, C], tl.float32)
    for start in range(first, stop, BLOCK_N):
        keys = start + tl.arange(0, BLOCK_N)
        seen = keys < stop
        page = tl.load(pages + sequence * table_width + keys // PAGE, mask=seen, other=0)
        rows = (page.to(tl.int64) * PAGE + keys % PAGE) * (C + R)
        k_latent = tl.load(cache + rows[None, :] + columns[:, None], mask=seen[None, :], other=0.0)
        k_tail = tl.load(cache + rows[None, :] + C + tails[:, None], mask=seen[None, :], other=0.0)
        scores = (tl.dot(q_latent, k_latent) + tl.dot(q_tail, k_tail)) * scale
        scores = tl.where(seen[None, :], scores, float("-inf"))
        values = tl.load(cache + rows[:, None] + columns[None, :], mask=seen[:, None], other=0.0)
        more = tl.maximum(most, tl.max(scores, axis=1))
        shrink = tl.exp(most - more)
        weights = tl.exp(scores - more[:, None])
        z = z * shrink[:, None] + tl.dot(weights.to(values.dtype), values)
        total = total * shrink + tl.sum(weights, axis=1)
        most = more
    place = (sequence * num_heads + heads) * SPLITS + split
    there = partial + place[:, None] * C + columns[None, :]
    tl.store(there, z / total[:, None], mask=is_head[:, None])
    tl.store(lse + place, most + tl.log(total), mask=is_head)


@triton.jit
def _merge_kernel(partial, lse, out, C: tl.constexpr, SPLITS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, C)
    most, total = float("-inf"), 0.0
    z = tl.zeros([C], tl.float32)
    for split in range(SPLITS):
        score = tl.load(lse + row * SPLITS + split)
        part = tl.load(partial + (row * SPLITS + split) * C + columns)
        more = tl.maximum(most, score)
        shrink, weight = tl.exp(most - more), tl.exp(score - more)
        z = z * shrink + part * weight
        total = total * shrink + weight
        most = more
    tl.store(out + row * C + columns, (z / total).to(out.dtype.element_ty))


def baseline_mla_decode(
    q_NHX: torch.Tensor,
    cache_PBX: torch.Tensor,
    pages_NP: torch.Tensor,
    lengths_N: torch.Tensor,
    latent: int,
    scale: float,
) -> torch.Tensor:
    """[N, H, C]; every sequence has at least as many keys as there are splits."""
    num_rows, num_heads, width = q_NHX.shape
    partial = torch.empty(num_rows, num_heads, SPLITS, latent, device=q_NHX.device)
    lse = torch.empty(num_rows, num_heads, SPLITS, device=q_NHX.device)
    out = torch.empty(num_rows, num_heads, latent, dtype=q_NHX.dtype, device=q_NHX.device)
    _split_kernel[(num_rows, triton.cdiv(num_heads, HEADS), SPLITS)](
        q_NHX, cache_PBX, pages_NP, lengths_N, partial, lse, scale, num_heads, pages_NP.shape[1],
        C=latent, R=width - latent, PAGE=cache_PBX.shape[1], SPLITS=SPLITS,
        BLOCK_H=HEADS, BLOCK_N=TOKENS, num_warps=4, num_stages=2,
    )  # fmt: skip
    _merge_kernel[(num_rows * num_heads,)](partial, lse, out, C=latent, SPLITS=SPLITS, num_warps=4)
    return out
