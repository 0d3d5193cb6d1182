"""Blocks of keys: the choice against a plain sort, attention and experts against float64."""

import random
from dataclasses import dataclass

import pytest
import torch
from compare import assert_close
from steps import Row, make_step

from batchmla import kernels
from batchmla.attention.sparse_rows import ChoosingRows, choosing_rows
from batchmla.kernels.block_sparse_ops import BlockDims, OaiGate
from batchmla.kernels.ops import Ops, PackKind
from batchmla.kv.step import Step

BACKENDS = ("cpu", "reference", "exact")
DTYPES = (torch.float32, torch.bfloat16)
# blocks within pages, blocks of pages, and neither
SIZES = [(4, 16), (16, 4), (6, 8), (8, 8)]  # (tokens of a block, of a page)
# (tokens of the step, context) of each sequence; all of them choose some rows
SEQUENCES = [(1, 30), (40, 60), (1, 257), (31, 31), (1, 1), (2, 100), (9, 25), (1, 100)]
HEADS, WIDTH, SHARE, HEAD_DIM = 2, 24, 3, 32


def load(backend: str) -> Ops:
    return kernels.load("cpu", exact=True) if backend == "exact" else kernels.load(backend)


@dataclass
class Batch:
    """Sequences on shuffled pages; by choosing row the slots of the keys that it sees."""

    step: Step
    choosing: ChoosingRows
    seen: list[list[int]]
    num_pages: int

    @staticmethod
    def make(dims: BlockDims, page_tokens: int) -> "Batch":
        source = random.Random(page_tokens)
        counts = [-(-context // page_tokens) for _, context in SEQUENCES]
        pool = list(range(sum(counts) + 2))
        source.shuffle(pool)
        rows = [
            (Row([0] * context, [pool.pop() for _ in range(count)], computed=context - queries),
             queries)
            for (queries, context), count in zip(SEQUENCES, counts, strict=True)
        ]  # fmt: skip
        step = make_step(rows, page_tokens)
        choosing = choosing_rows(step, dims.num_keys)
        assert choosing is not None and choosing.rows_N is not None
        seen = [
            [row.pages[at // page_tokens] * page_tokens + at % page_tokens for at in range(end)]
            for row, queries in rows
            for end in range(len(row.ids) - queries + 1, len(row.ids) + 1)
        ]
        order = choosing.rows_N.tolist()
        return Batch(step, choosing, [seen[row] for row in order], sum(counts) + 2)

    @property
    def num_rows(self) -> int:
        return len(self.seen)


def best_blocks(scores: list[float], dims: BlockDims) -> list[int]:
    """The first blocks by score, the last ones forced, of equals the lowest."""
    starts = range(0, len(scores), dims.block_tokens)
    best = [max(scores[start : start + dims.block_tokens]) for start in starts]
    free = len(best) - dims.forced
    ranked = sorted(range(len(best)), key=lambda block: (block < free, -best[block], block))
    return sorted(ranked[: dims.count])


@pytest.mark.parametrize("forced", [0, 1, 2])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("backend", BACKENDS)
def test_equal_scores_go_to_the_lowest_blocks(
    backend: str, sizes: tuple[int, int], forced: int
) -> None:
    """Small integers: every score is exact, and most are equal to others."""
    dims = BlockDims(block_tokens=sizes[0], count=2, forced=forced)
    batch, source = Batch.make(dims, sizes[1]), torch.Generator().manual_seed(1)
    q_NKD = torch.randint(-1, 2, (batch.num_rows, HEADS, 6), generator=source).float()
    keys = torch.randint(-1, 2, (batch.num_pages * sizes[1], 6), generator=source).float()
    blocks = load(backend).blocks.select(
        q_NKD, keys.view(-1, sizes[1], 6), batch.choosing.groups, dims
    )
    unforced = 0
    for row, seen in enumerate(batch.seen):
        for head in range(HEADS):
            scores = (keys[seen].double() @ q_NKD[row, head].double()).tolist()
            wanted = best_blocks(scores, dims)
            assert blocks[row, head].tolist() == wanted, (row, head)
            own = (len(seen) - 1) // dims.block_tokens
            unforced += any(block <= own - forced for block in wanted)
    assert unforced or forced == dims.count


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("backend", BACKENDS)
def test_the_blocks_with_the_largest_scores_are_chosen(backend: str, dtype: torch.dtype) -> None:
    dims = BlockDims(block_tokens=6, count=3, forced=1)
    batch, source = Batch.make(dims, 8), torch.Generator().manual_seed(2)
    q_NKD = torch.randn(batch.num_rows, HEADS, WIDTH, generator=source).to(dtype)
    keys = torch.randn(batch.num_pages * 8, WIDTH, generator=source).to(dtype)
    blocks = load(backend).blocks.select(
        q_NKD, keys.view(-1, 8, WIDTH), batch.choosing.groups, dims
    )
    differing = 0
    for row, seen in enumerate(batch.seen):
        for head in range(HEADS):
            scores = (keys[seen].double() @ q_NKD[row, head].double()).tolist()
            assert blocks[row, head].tolist() == best_blocks(scores, dims), (row, head)
        differing += blocks[row, 0].tolist() != blocks[row, 1].tolist()
    assert differing > batch.num_rows / 2, "the heads choose alike"


@pytest.mark.parametrize("backend", BACKENDS)
def test_bad_numbers_stay_with_their_row(backend: str) -> None:
    """A row of no numbers gets its own block and the first ones, the others what they had."""
    dims = BlockDims(block_tokens=4, count=3, forced=1)
    batch, ops = Batch.make(dims, 8), load(backend).blocks
    q_NKD = torch.randn(batch.num_rows, HEADS, WIDTH)
    cache = torch.randn(batch.num_pages, 8, WIDTH)
    before = ops.select(q_NKD, cache, batch.choosing.groups, dims)
    q_NKD[3, 0] = torch.nan
    q_NKD[4, 1] = 1e38  # scores beyond float32: infinite, and still behind the forced block
    after = ops.select(q_NKD, cache, batch.choosing.groups, dims)
    own = [(len(seen) - 1) // 4 for seen in batch.seen]
    assert after[3, 0].tolist() == [0, 1, own[3]]
    assert own[4] in after[4, 1].tolist()
    others = torch.arange(batch.num_rows).lt(3) | torch.arange(batch.num_rows).gt(4)
    assert torch.equal(after[others], before[others])
    assert torch.equal(after[3, 1], before[3, 1])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("backend", BACKENDS)
def test_attention_reads_the_seen_keys_of_each_heads_blocks(
    backend: str, sizes: tuple[int, int], dtype: torch.dtype
) -> None:
    """Rows of the cache that no query may see are not finite."""
    dims = BlockDims(block_tokens=sizes[0], count=3, forced=0)
    batch, source = Batch.make(dims, sizes[1]), torch.Generator().manual_seed(3)
    q_NHD = torch.randn(batch.num_rows, HEADS * SHARE, HEAD_DIM, generator=source).to(dtype)
    num_slots, width = batch.num_pages * sizes[1], HEADS * HEAD_DIM
    k_XW, v_XW = (torch.randn(num_slots, width, generator=source).to(dtype) for _ in range(2))
    unseen = sorted(set(range(num_slots)) - {slot for seen in batch.seen for slot in seen})
    k_XW[unseen], v_XW[unseen] = torch.nan, torch.nan
    chosen = [
        [sorted(random.Random(row * HEADS + head).sample(
            range((len(seen) - 1) // sizes[0] + 1), dims.count)) for head in range(HEADS)]
        for row, seen in enumerate(batch.seen)
    ]  # fmt: skip
    caches = (cache.view(-1, sizes[1], width) for cache in (k_XW, v_XW))
    actual = load(backend).blocks.attend(
        q_NHD, *caches, batch.choosing.groups, torch.tensor(chosen), dims, 0.2
    )
    expected = torch.empty(batch.num_rows, HEADS * SHARE, HEAD_DIM, dtype=torch.float64)
    for row, seen in enumerate(batch.seen):
        for head in range(HEADS * SHARE):
            wanted = set(chosen[row][head // SHARE])
            read = [slot for at, slot in enumerate(seen) if at // sizes[0] in wanted]
            columns = slice(head // SHARE * HEAD_DIM, (head // SHARE + 1) * HEAD_DIM)
            scores = k_XW[read, columns].double() @ q_NHD[row, head].double() * 0.2
            expected[row, head] = scores.softmax(0) @ v_XW[read, columns].double()
    assert_close("blocks", actual, expected.flatten(1), scale=2)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("backend", BACKENDS)
def test_gates_and_ups_are_clamped_and_experts_add_up(backend: str, dtype: torch.dtype) -> None:
    ops, source = load(backend), torch.Generator().manual_seed(4)
    gate = OaiGate(alpha=1.702, limit=0.5)

    def hidden(both: torch.Tensor) -> torch.Tensor:
        first, second = both.chunk(2, dim=-1)
        first, second = first.clamp(max=gate.limit), second.clamp(-gate.limit, gate.limit)
        return first * torch.sigmoid(gate.alpha * first) * (second + 1)

    both = (torch.randn(37, 66, generator=source) * 2).to(dtype)
    assert_close("gate", ops.blocks.act_mul(both, gate), hidden(both.double()), scale=2)
    up, down = torch.randn(6, 64, 32, generator=source), torch.randn(6, 32, 32, generator=source)
    up, down, x = up.to(dtype), (down * 0.2).to(dtype), torch.randn(40, 32).to(dtype)
    weights = torch.rand(40, 2, generator=source)
    ids = torch.stack([torch.randperm(6, generator=source)[:2] for _ in range(40)])
    packed = ops.pack(PackKind.EXPERTS_UP, up), ops.pack(PackKind.EXPERTS_DOWN, down)
    actual = ops.blocks.experts(x, weights, ids, *packed, gate)
    expected = torch.zeros(40, 32, dtype=torch.float64)
    for token in range(40):
        for weight, expert in zip(weights[token].double(), ids[token].tolist(), strict=True):
            made = hidden(up[expert].double() @ x[token].double())
            expected[token] += weight * (down[expert].double() @ made)
    assert_close("experts", actual, expected, scale=3)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_exact_rows_do_not_depend_on_their_batch(dtype: torch.dtype) -> None:
    """The same rows alone, among others and behind others: the same blocks, the same bits."""
    ops, dims, page_tokens = load("exact"), BlockDims(block_tokens=6, count=4, forced=1), 8
    contexts, source = [70, 300, 64, 257, 90], random.Random(0)
    pages = source.sample(range(120), 120)
    lists = [[pages.pop() for _ in range(-(-context // page_tokens))] for context in contexts]
    index = torch.randn(120, page_tokens, WIDTH).to(dtype)
    width = HEADS * HEAD_DIM
    k, v = (torch.randn(120, page_tokens, width).to(dtype) for _ in range(2))
    q = {n: torch.randn(300, HEADS * SHARE, HEAD_DIM).to(dtype) for n in range(5)}
    index_q = {n: torch.randn(300, HEADS, WIDTH).to(dtype) for n in range(5)}

    def run(schedule: list[tuple[int, int, int]]) -> dict[tuple[int, int], torch.Tensor]:
        """(sequence, first position, tokens) of one step → blocks and results by place."""
        rows = [
            (Row([0] * contexts[n], lists[n], computed=start), count)
            for n, start, count in schedule
        ]
        choosing = choosing_rows(make_step(rows, page_tokens), dims.num_keys)
        assert choosing is not None
        everyone = [(n, at) for n, start, count in schedule for at in range(start, start + count)]
        order = range(len(everyone)) if choosing.rows_N is None else choosing.rows_N.tolist()
        keys = [everyone[row] for row in order]
        q_NKD = torch.stack([index_q[n][at] for n, at in keys])
        blocks = ops.blocks.select(q_NKD, index, choosing.groups, dims)
        q_NHD = torch.stack([q[n][at] for n, at in keys])
        out = ops.blocks.attend(q_NHD, k, v, choosing.groups, blocks, dims, 0.2)
        both = torch.cat((blocks.flatten(1).double(), out.double()), 1)
        return dict(zip(keys, both, strict=True))

    whole = run([(n, 20, contexts[n] - 20) for n in range(5)])
    others = [
        [(n, contexts[n] - 1, 1) for n in (3, 1, 0, 4)],
        [(1, 299, 1)],
        [(1, 100, 7), (3, 50, 130), (2, 63, 1), (0, 30, 40)],
        [(4, 22, 5)],
    ]
    for schedule in others:
        found = run(schedule)
        assert found
        for place, row in found.items():
            assert torch.equal(whole[place], row), (schedule, place)
