"""Blocks of keys: the choice against a plain sort, attention against float64."""

import random
from collections.abc import Callable

import pytest
import torch
from triton_case import BOUNDS, error
from triton_sparse import NOWHERE, Choosing, far_pages, make_choosing

from batchmla import kernels
from batchmla.kernels.block_sparse_ops import BlockDims
from batchmla.kernels.sparse_ops import IndexGroup
from batchmla.kernels.triton.block_sparse import attend, select

SEQUENCES = [(1, 30), (3, 40), (1, 1), (1, 65)]
SIZES = [(4, 16), (16, 4), (6, 8), (8, 8)]  # (tokens of a block, of a page)
HEADS, WIDTH, SHARE, HEAD_DIM = 2, 24, 3, 32


def best_blocks(scores: list[float], dims: BlockDims) -> list[int]:
    """The first blocks by score, the last ones forced, of equals the lowest."""
    starts = range(0, len(scores), dims.block_tokens)
    best = [max(scores[start : start + dims.block_tokens]) for start in starts]
    free = len(best) - dims.forced
    ranked = sorted(range(len(best)), key=lambda block: (block < free, -best[block], block))
    return sorted(ranked[: dims.count])


def cached(choosing: Choosing, width: int, dtype: torch.dtype) -> torch.Tensor:
    """Rows that no row may see hold NaN."""
    rows = torch.randn(choosing.num_pages * choosing.page_tokens, width).to(dtype)
    seen = {slot for slots in choosing.seen for slot in slots}
    rows[sorted(set(range(len(rows))) - seen)] = torch.nan
    return rows


@pytest.mark.parametrize(
    ("sizes", "forced"), [((4, 16), 0), ((16, 4), 1), ((6, 8), 2), ((8, 8), 1)], ids=str
)
def test_equal_scores_go_to_the_lowest_blocks(sizes: tuple[int, int], forced: int) -> None:
    """Small integers: every score is exact, and most are equal to others."""
    dims = BlockDims(block_tokens=sizes[0], count=2, forced=forced)
    choosing = make_choosing(SEQUENCES, dims.num_keys, sizes[1])
    source = torch.Generator().manual_seed(1)
    q = torch.randint(-1, 2, (choosing.num_rows, HEADS, 6), generator=source).float()
    keys = torch.randint(-1, 2, (choosing.num_pages * sizes[1], 6), generator=source).float()
    blocks = select(q, keys.view(-1, sizes[1], 6), choosing.groups, dims)
    for row, seen in enumerate(choosing.seen):
        for head in range(HEADS):
            scores = (keys[seen].double() @ q[row, head].double()).tolist()
            assert blocks[row, head].tolist() == best_blocks(scores, dims), (row, head)


@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
def test_the_blocks_with_the_largest_scores_are_chosen(dtype: torch.dtype) -> None:
    dims = BlockDims(block_tokens=6, count=3, forced=1)
    choosing = make_choosing(SEQUENCES, dims.num_keys)
    torch.manual_seed(3)
    q = torch.randn(choosing.num_rows, HEADS, WIDTH).to(dtype)
    keys = cached(choosing, WIDTH, dtype)
    blocks = select(q, keys.view(-1, 8, WIDTH), choosing.groups, dims)
    for row, seen in enumerate(choosing.seen):
        for head in range(HEADS):
            scores = (keys[seen].double() @ q[row, head].double()).tolist()
            assert blocks[row, head].tolist() == best_blocks(scores, dims), (row, head)


def test_bad_numbers_stay_with_their_row() -> None:
    """A row of no numbers gets its own block and the first ones, the others what they had."""
    dims = BlockDims(block_tokens=4, count=3, forced=1)
    choosing = make_choosing(SEQUENCES, dims.num_keys)
    q = torch.randn(choosing.num_rows, HEADS, WIDTH)
    cache = torch.randn(choosing.num_pages, 8, WIDTH)
    before = select(q, cache, choosing.groups, dims)
    q[3, 0] = torch.nan
    q[4, 1] = 1e38  # scores beyond float32: infinite, and still behind the forced block
    after = select(q, cache, choosing.groups, dims)
    own = [(len(seen) - 1) // 4 for seen in choosing.seen]
    assert after[3, 0].tolist() == [0, 1, own[3]]
    assert own[4] in after[4, 1].tolist()
    others = torch.arange(choosing.num_rows).lt(3) | torch.arange(choosing.num_rows).gt(4)
    assert torch.equal(after[others], before[others])
    assert torch.equal(after[3, 1], before[3, 1])


def some_blocks(choosing: Choosing, dims: BlockDims) -> torch.Tensor:
    return torch.tensor(
        [
            [
                sorted(
                    random.Random(row * HEADS + head).sample(
                        range((len(seen) - 1) // dims.block_tokens + 1), dims.count
                    )
                )
                for head in range(HEADS)
            ]
            for row, seen in enumerate(choosing.seen)
        ]
    )


def expected(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    seen: Callable[[int], list[int]],
    blocks: torch.Tensor,
    dims: BlockDims,
) -> torch.Tensor:
    out = torch.empty(q.shape, dtype=torch.float64)
    for row in range(len(q)):
        for head in range(q.shape[1]):
            wanted = set(blocks[row, head // SHARE].tolist())
            slots = seen(row)
            read = [slot for at, slot in enumerate(slots) if at // dims.block_tokens in wanted]
            columns = slice(head // SHARE * HEAD_DIM, (head // SHARE + 1) * HEAD_DIM)
            scores = k[read, columns].double() @ q[row, head].double() * 0.2
            out[row, head] = scores.softmax(0) @ v[read, columns].double()
    return out.flatten(1)


@pytest.mark.parametrize(
    ("dtype", "sizes"),
    [(torch.float32, (6, 8)), (torch.float16, (8, 8)),
     *((torch.bfloat16, sizes) for sizes in [*SIZES[:3], (100, 8)])],
    ids=str,
)  # fmt: skip
def test_attention_reads_the_seen_keys_of_each_heads_blocks(
    sizes: tuple[int, int], dtype: torch.dtype
) -> None:
    """Logits of every size; a row alone has the same bits."""
    dims = BlockDims(block_tokens=sizes[0], count=3 if sizes[0] < 100 else 1, forced=0)
    sequences = SEQUENCES if sizes[0] < 100 else [(1, 101), (2, 130), (1, 199)]
    choosing = make_choosing(sequences, dims.num_keys, sizes[1])
    q = torch.randn(choosing.num_rows, HEADS * SHARE, HEAD_DIM).to(dtype)
    q[::3] *= 1e4
    k, v = (cached(choosing, HEADS * HEAD_DIM, dtype) for _ in range(2))
    blocks = some_blocks(choosing, dims)
    caches = [cache.view(-1, sizes[1], HEADS * HEAD_DIM) for cache in (k, v)]
    out = attend(q, *caches, choosing.groups, blocks, dims, 0.2)
    wanted = expected(q, k, v, lambda row: choosing.seen[row], blocks, dims)
    bound = 4e-6 if dtype == torch.float32 else BOUNDS[dtype]  # of scores of 1e4
    assert out.dtype == dtype and error(out, wanted) <= bound
    for row in (0, choosing.num_rows - 1):
        one = slice(row, row + 1)
        alone = attend(q[one], *caches, [choosing.alone(row)], blocks[one], dims, 0.2)
        assert torch.equal(alone, out[one])


def test_pages_may_lie_behind_32_bits() -> None:
    dims, width = BlockDims(block_tokens=4, count=3, forced=1), HEADS * HEAD_DIM
    keys = torch.randn(24, WIDTH).bfloat16()
    k, v = (torch.randn(24, width).bfloat16() for _ in range(2))
    group = IndexGroup(
        first_row=0, num_rows=1, num_keys=23, pages_GP=torch.tensor([[2, 0, 1, NOWHERE]]),
        visible_N=torch.tensor([23]),
    )  # fmt: skip
    far = []
    for rows in (keys, k, v):
        far.append(far_pages(8, rows.shape[1], torch.bfloat16))
        far[-1].copy_(rows.view(3, 8, -1))
    q = torch.randn(1, HEADS, WIDTH).bfloat16()
    blocks = select(q, far[0], [group], dims)
    nearby = IndexGroup(
        first_row=0, num_rows=1, num_keys=23, pages_GP=torch.tensor([[2, 0, 1]]),
        visible_N=group.visible_N,
    )  # fmt: skip
    reference = kernels.load("reference").blocks
    assert torch.equal(blocks, reference.select(q, keys.view(3, 8, -1), [nearby], dims))
    q = torch.randn(1, HEADS * SHARE, HEAD_DIM).bfloat16()
    out = attend(q, far[1], far[2], [group], blocks, dims, 0.2)
    slots = [*range(16, 24), *range(8), *range(8, 15)]
    wanted = expected(q, k, v, lambda row: slots, blocks, dims)
    assert error(out, wanted) <= BOUNDS[torch.bfloat16]
