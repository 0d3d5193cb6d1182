"""Grouped-query attention in the interpreter against float64: single queries, chunks, records."""

import pytest
import torch
from triton_case import BOUNDS, error
from triton_spans import Paged, expected_gqa, make_paged, random

from batchmla import kernels
from batchmla.kernels.sparse_ops import Record
from batchmla.kernels.triton.attention import Attention, Device, Limits

TORCH = kernels.load("torch")
SCALE = 0.3
LENGTHS = [(1, n) for n in (1, 63, 0, 64, 65, 130)]
CHUNKS = [(5, 12), (1, 9), (2, 2), (40, 70)]


def run(
    paged: Paged,
    q: torch.Tensor,
    chosen: list[int] | None = None,
    *,
    has_tma: bool = False,
    split_tokens: int = 64,
) -> torch.Tensor:
    device = Device(has_tma=has_tma, codes=torch.float8_e4m3fn)
    made = Attention(
        TORCH, TORCH.sparse.read_record, limits=Limits(split_tokens=split_tokens),
        device_of=lambda _: device,
    )  # fmt: skip
    keys, values = (half.contiguous() for half in paged.cache_PBW.chunk(2, dim=2))
    return made.gqa(q, keys, values, paged.spans(chosen), SCALE)


def queries(paged: Paged, heads: int, width: int, dtype: torch.dtype) -> torch.Tensor:
    """Heads of rows that have more of them, as a fused product leaves them."""
    return random(paged.num_tokens, heads + 3, width, seed=1, dtype=dtype)[:, :heads]


@pytest.mark.parametrize(
    ("heads", "key_heads", "width", "dtype"),
    [
        *((4, 2, 24, dtype) for dtype in BOUNDS),
        (3, 3, 16, torch.bfloat16),
        (24, 1, 32, torch.bfloat16),
    ],
)
@pytest.mark.parametrize("sequences", [LENGTHS, CHUNKS], ids=["single", "chunks"])
def test_gqa(
    sequences: list[tuple[int, int]], heads: int, key_heads: int, width: int, dtype: torch.dtype
) -> None:
    paged = make_paged(sequences, 2 * key_heads * width, dtype, 16)
    q = queries(paged, heads, width, dtype)
    actual = run(paged, q)
    assert error(actual, expected_gqa(paged, q, key_heads, SCALE)) <= BOUNDS[dtype]
    if sequences is LENGTHS:
        assert not actual[2].any()


def test_boxes_read_what_pointers_read() -> None:
    paged = make_paged([(1, 65), (1, 190), (3, 70)], 2 * 2 * 32, torch.bfloat16, 64)
    q = queries(paged, 8, 32, torch.bfloat16)
    by_boxes = run(paged, q, has_tma=True, split_tokens=128)
    assert torch.equal(by_boxes, run(paged, q, split_tokens=128))
    assert error(by_boxes, expected_gqa(paged, q, 2, SCALE)) <= BOUNDS[torch.bfloat16]


def test_a_cache_of_another_dtype() -> None:
    paged = make_paged([(1, 40), (40, 50)], 2 * 2 * 24, torch.float32, 16)
    q = queries(paged, 4, 24, torch.bfloat16)
    paged.rows = [rows.bfloat16() for rows in paged.rows]
    actual = run(paged, q)
    assert error(actual, expected_gqa(paged, q, 2, SCALE)) <= BOUNDS[torch.bfloat16]


@pytest.mark.parametrize("codes", [torch.float8_e4m3fn, torch.uint8], ids=str)
def test_records(codes: torch.dtype) -> None:
    """Codes and the factors of heads stand for the rows that the specification reads."""
    width, key_heads = 32, 2
    record = Record(values=key_heads * width, tile=width, has_e8m0=True)
    reference = kernels.load("reference").sparse
    paged = make_paged([(1, 70), (3, 20), (40, 45)], 2 * key_heads * width, torch.bfloat16, 16)
    rows = paged.cache_PBW.nan_to_num(0).flatten(0, 1)
    rows[:, :width] /= 40  # heads have different factors
    slots, caches, plain = torch.arange(len(rows)), [], []
    for half in rows.chunk(2, dim=1):
        cache = torch.zeros(*paged.cache_PBW.shape[:2], record.num_bytes, dtype=torch.uint8)
        reference.write_record(cache, slots, half, record)
        caches.append(cache)
        plain.append(reference.read_record(cache, slots, record, torch.float32))
    both = torch.cat(plain, dim=1).view(*paged.cache_PBW.shape[:2], -1)
    read = [
        both[pages].flatten(0, 1)[:keys]
        for pages, (_, keys) in zip(paged.pages_SP, paged.sequences, strict=True)
    ]
    q = queries(paged, 8, width, torch.bfloat16)
    device = Device(has_tma=False, codes=codes)
    made = Attention(TORCH, TORCH.sparse.read_record, device_of=lambda _: device)
    actual = made.gqa(q, *caches, paged.spans(), SCALE, record)
    expected = expected_gqa(paged, q, key_heads, SCALE, read)
    assert error(actual, expected) <= BOUNDS[torch.bfloat16]


def test_a_row_does_not_depend_on_others() -> None:
    sequences = [(1, 100), (3, 40), (40, 60), (1, 7)]
    paged = make_paged(sequences, 2 * 2 * 24, torch.bfloat16, 16)
    q = queries(paged, 4, 24, torch.bfloat16)
    together = run(paged, q, split_tokens=32)
    for index, first in enumerate(paged.first_rows()[:-1]):
        rows = slice(first, first + sequences[index][0])
        assert torch.equal(run(paged, q, [index], split_tokens=32)[rows], together[rows])


def test_scores_of_any_size() -> None:
    """One key above all others; scores of +-1e4."""
    paged = make_paged([(1, 90), (3, 70), (40, 50)], 2 * 2 * 24, torch.float32, 16)
    q = queries(paged, 4, 24, torch.float32) * 3e3
    rounding = 1e4 * 2**-24  # of the largest scores, and so of the weights' exponents
    assert error(run(paged, q, split_tokens=32), expected_gqa(paged, q, 2, SCALE)) <= rounding


def test_rows_beyond_two_to_the_31_elements() -> None:
    width, page_tokens, pages = 32, 16, (2**31 // 512 + 5, 2**31 // 512 + 2)
    paged = make_paged([(1, 20)], 2 * width, torch.bfloat16, page_tokens)
    near = [half.contiguous() for half in paged.cache_PBW.chunk(2, dim=2)]
    far = [torch.empty(max(pages) + 1, page_tokens, width, dtype=torch.bfloat16) for _ in near]
    for page, mine in zip(pages, paged.pages_SP[0].tolist(), strict=True):
        for target, source in zip(far, near, strict=True):
            target[page] = source[mine]
    moved = Paged(paged.sequences, paged.cache_PBW, torch.tensor([pages]), paged.rows)
    made = Attention(TORCH, TORCH.sparse.read_record)
    q = queries(paged, 4, 16, torch.bfloat16)
    assert torch.equal(
        made.gqa(q, *far, moved.spans(), SCALE), made.gqa(q, *near, paged.spans(), SCALE)
    )
