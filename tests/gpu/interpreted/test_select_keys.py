"""Scores of index keys and the exact choice among them, against float64 and a plain sort."""

import math
from dataclasses import replace

import pytest
import torch
from triton_case import error
from triton_sparse import NOWHERE, Choosing, far_pages, make_choosing, recorded

import batchmla.kernels.triton.sparse as sparse
import batchmla.kernels.triton.topk as topk
from batchmla import kernels
from batchmla.attention.sparse import key_record
from batchmla.kernels.sparse_ops import IndexGroup
from batchmla.kernels.triton.index_scores import IndexKeys, index_scores
from batchmla.kernels.triton.sparse import make_scores, select_keys
from batchmla.kernels.triton.topk import choose

COUNT, HEADS, WIDTH = 8, 4, 32
SEQUENCES = [(1, 9), (3, 40), (1, 100), (1, 1), (1, 64), (2, 65)]


def keys_of(choosing: Choosing, dtype: torch.dtype, width: int = WIDTH) -> torch.Tensor:
    keys = torch.randn(choosing.num_pages * choosing.page_tokens, width).to(dtype)
    keys.view(choosing.num_pages, -1)[choosing.unseen_pages] = torch.nan
    return keys


def queries(choosing: Choosing, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(1)
    return (
        torch.randn(choosing.num_rows, HEADS, WIDTH).to(dtype),
        torch.randn(choosing.num_rows, HEADS),
    )


def expected(q_ID: torch.Tensor, weights_I: torch.Tensor, keys_LD: torch.Tensor) -> torch.Tensor:
    dots = (q_ID.double() @ keys_LD.double().T).clamp(min=0)
    return weights_I.double() @ dots


def ranked(scores: list[float], count: int) -> list[int]:
    numbers = [-math.inf if math.isnan(score) else score for score in scores]
    return sorted(sorted(range(len(numbers)), key=lambda at: (-numbers[at], at))[:count])


@pytest.mark.parametrize("kind", ["float32", "bfloat16", "e4m3", "bytes"])
def test_scores(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Within 1e-5 of float64, and the same bits for a row alone."""
    choosing = make_choosing(SEQUENCES, COUNT)
    dtype = torch.float32 if kind == "float32" else torch.bfloat16
    q, weights = queries(choosing, dtype)
    keys, record = keys_of(choosing, dtype), None
    cache = keys.view(-1, choosing.page_tokens, WIDTH)
    if kind in ("e4m3", "bytes"):
        record = key_record(WIDTH)
        cache = recorded(keys, record, choosing.page_tokens)
        places = torch.arange(len(keys))
        keys = kernels.load("torch").sparse.read_record(cache, places, record, torch.float32)
        if kind == "bytes":
            plain = "batchmla.kernels.triton.index_scores.coded"
            monkeypatch.setattr(plain, lambda bytes_X: bytes_X)
    parts = IndexKeys.of(cache, record)
    for group in choosing.groups:
        rows = slice(group.first_row, group.first_row + group.num_rows)
        scores = make_scores(group.num_rows, group.num_keys, q.device).fill_(7)
        index_scores(q[rows], weights[rows], parts, group.pages_GP, group.visible_N, scores)
        for at, row in enumerate(range(rows.start, rows.stop)):
            seen = choosing.seen[row]
            wanted = expected(q[row], weights[row], keys[seen])
            assert error(scores[at, : len(seen)], wanted) < 1e-5
            assert (scores[at, len(seen) :] == 7).all(), "beyond what the row sees"
        alone = choosing.alone(rows.start)
        own = make_scores(1, alone.num_keys, q.device)
        one = slice(rows.start, rows.start + 1)
        index_scores(q[one], weights[one], parts, alone.pages_GP, alone.visible_N, own)
        assert torch.equal(own[0], scores[0, : alone.num_keys])


def test_keys_are_chosen_by_their_scores(monkeypatch: pytest.MonkeyPatch) -> None:
    """The scores' own sort, also where rows go in blocks."""
    choosing = make_choosing(SEQUENCES, COUNT)
    q, weights = queries(choosing, torch.bfloat16)
    weights[3] = torch.nan
    keys = keys_of(choosing, torch.bfloat16)
    cache = keys.view(-1, choosing.page_tokens, WIDTH)
    slots = select_keys(q, weights, cache, choosing.groups, COUNT, None)
    for row, seen in enumerate(choosing.seen):
        scores = dict(zip(seen, expected(q[row], weights[row], keys[seen]).tolist(), strict=True))
        picked = slots[row].tolist()
        assert picked == [slot for slot in seen if slot in set(picked)], "not in position order"
        if row == 3:
            assert picked == seen[:COUNT]
            continue
        least = min(scores[slot] for slot in picked)
        assert least >= max(s for slot, s in scores.items() if slot not in picked) - 1e-4
    monkeypatch.setattr(sparse, "SCORE_BYTES", 2000)
    again = select_keys(q, weights, cache, choosing.groups, COUNT, None)
    assert torch.equal(again, slots)


def test_equal_scores_go_to_the_lowest_positions() -> None:
    """As the reference chooses; of small integers every score is exact, and most have equals."""
    choosing = make_choosing(SEQUENCES, COUNT)
    source = torch.Generator().manual_seed(1)
    q = torch.randint(-1, 2, (choosing.num_rows, HEADS, 6), generator=source).float()
    weights = torch.randint(-2, 3, (choosing.num_rows, HEADS), generator=source) / 2
    keys = torch.randint(-1, 2, (choosing.num_pages * 8, 6), generator=source).float()
    cache = keys.view(-1, 8, 6)
    reference = kernels.load("reference").sparse
    args = (q, weights, cache, choosing.groups, COUNT, None)
    assert torch.equal(select_keys(*args), reference.select_keys(*args))


SPECIAL = [math.nan, -math.inf, math.inf, 0.0, -0.0, 1e-45, -1e-45, 3.4e38, -3.4e38, 1.0, -1.0]


@pytest.mark.parametrize("case", ["random", "special", "equal", "near", "-inf"])
@pytest.mark.parametrize(("length", "count"), [(9, 8), (700, 512), (5000, 512), (5000, 2048)])
def test_top_k(case: str, length: int, count: int) -> None:
    source = torch.Generator().manual_seed(length)
    scores = torch.randn(3, length + 3, generator=source)[:, :length]
    if case == "special":
        scores[:] = torch.tensor(SPECIAL)[torch.randint(0, 11, scores.shape, generator=source)]
    if case == "equal":
        scores[:] = 2.5
    if case == "near":  # all differ in the last bits only
        bits = torch.randint(0, 50, scores.shape, generator=source).int() + 0x3F800000
        scores[:] = bits.view(torch.float32)
    if case == "-inf":
        scores[:, 5:] = -math.inf
    visible = torch.tensor([length, count, (length + count) // 2])
    places = torch.empty(3, count, dtype=torch.int64)
    choose(scores, visible, places)
    for row, seen in enumerate(visible.tolist()):
        assert places[row].tolist() == ranked(scores[row, :seen].tolist(), count)


@pytest.mark.parametrize("length", [130, 200, 333])
def test_long_rows_are_cut(length: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same choice, also where a chunk has fewer scores than are chosen, or none."""
    monkeypatch.setattr(topk, "CHUNK_SCORES", 64)
    source = torch.Generator().manual_seed(length)
    scores = torch.randint(-20, 20, (2, length), generator=source).float()
    scores[1] = torch.tensor(SPECIAL)[torch.randint(0, 11, (length,), generator=source)]
    visible, pages = torch.tensor([length, 70]), torch.randperm(200)[:100].view(2, 50)
    slots = torch.empty(2, 16, dtype=torch.int64)
    choose(scores, visible, slots, pages_GP=pages, page_tokens=8)
    for row, seen in enumerate(visible.tolist()):
        places = ranked(scores[row, :seen].tolist(), 16)
        assert slots[row].tolist() == [int(pages[row, at // 8]) * 8 + at % 8 for at in places]


@pytest.mark.parametrize("is_record", [False, True])
def test_published_widths(is_record: bool) -> None:
    """64 heads of 128 elements, pages of 64 keys, chunks on shared pages and single rows."""
    choosing = make_choosing([(3, 190), (1, 130), (1, 129)], 128, 64)
    q = torch.randn(choosing.num_rows, 64, 128).bfloat16()
    weights = torch.randn(choosing.num_rows, 64)
    keys, record = keys_of(choosing, torch.bfloat16, 128), None
    cache = keys.view(-1, 64, 128)
    if is_record:
        record = key_record(128)
        cache = recorded(keys, record, 64)
        read = kernels.load("torch").sparse.read_record
        keys = read(cache, torch.arange(len(keys)), record, torch.float32)
    parts = IndexKeys.of(cache, record)
    for group in choosing.groups:
        rows = slice(group.first_row, group.first_row + group.num_rows)
        scores = make_scores(group.num_rows, group.num_keys, q.device)
        index_scores(q[rows], weights[rows], parts, group.pages_GP, group.visible_N, scores)
        for at, row in enumerate(range(rows.start, rows.stop)):
            seen = choosing.seen[row]
            wanted = expected(q[row], weights[row], keys[seen])
            assert error(scores[at, : len(seen)], wanted) < 1e-5


@pytest.mark.parametrize("is_record", [False, True])
def test_pages_may_lie_behind_32_bits(is_record: bool) -> None:
    record = key_record(WIDTH) if is_record else None
    width, dtype = (36, torch.uint8) if is_record else (WIDTH, torch.bfloat16)
    cache, keys = far_pages(8, width, dtype), torch.randn(24, WIDTH).bfloat16()
    assert cache[2].storage_offset() > 2**31
    cache.copy_(keys.view(3, 8, WIDTH) if record is None else recorded(keys, record, 8))
    q, weights = torch.randn(1, HEADS, WIDTH).bfloat16(), torch.randn(1, HEADS)
    pages, visible = torch.tensor([[2, 0, 1, NOWHERE]]), torch.tensor([23])
    group = IndexGroup(first_row=0, num_rows=1, num_keys=23, pages_GP=pages, visible_N=visible)
    slots = select_keys(q, weights, cache, [group], COUNT, record)
    reference = kernels.load("torch").sparse
    nearby = replace(group, pages_GP=pages[:, :3])
    assert torch.equal(
        slots, reference.select_keys(q, weights, cache.contiguous(), [nearby], COUNT, record)
    )
