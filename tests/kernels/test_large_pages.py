"""Weights in large pages: what is kept, and where it lies."""

import pytest
import torch

from batchmla.kernels.cpu.large_pages import (
    CHUNK_BYTES,
    LARGE_PAGE_BYTES,
    LINE_BYTES,
    WeightMemory,
    large_pages,
)


def test_what_is_kept_equals_what_was_given() -> None:
    memory = WeightMemory()
    given = [
        torch.randn(3, 5).to(torch.bfloat16),
        torch.randn(7, 11),
        torch.randn(8, 6).t(),  # not contiguous
        torch.randint(-9, 9, (2, 3, 4), dtype=torch.int8),
    ]
    kept = [memory.keep(weight) for weight in given]
    for weight, copy in zip(given, kept, strict=True):
        assert copy.dtype == weight.dtype and torch.equal(copy, weight)
        assert copy.is_contiguous() and copy.data_ptr() % LINE_BYTES == 0


def test_small_weights_share_a_large_page() -> None:
    memory = WeightMemory()
    places = [memory.keep(torch.ones(100)).data_ptr() for _ in range(50)]
    assert len({place // LARGE_PAGE_BYTES for place in places}) == 1
    assert len(set(places)) == 50


def test_a_kept_weight_does_not_touch_its_neighbours() -> None:
    memory = WeightMemory()
    first, second, third = (memory.keep(torch.full((33,), value)) for value in (1.0, 2.0, 3.0))
    second.fill_(9)
    assert torch.equal(first, torch.full((33,), 1.0))
    assert torch.equal(third, torch.full((33,), 3.0))


def test_more_than_a_chunk_lies_in_one_piece() -> None:
    memory = WeightMemory()
    before = memory.keep(torch.ones(10))
    wide = torch.arange(CHUNK_BYTES // 4 + 1000, dtype=torch.int32)
    assert torch.equal(memory.keep(wide), wide)
    after = memory.keep(torch.full((10,), 2.0))
    assert torch.equal(before, torch.ones(10)) and torch.equal(after, torch.full((10,), 2.0))


def test_memory_begins_at_a_large_page_and_is_zero() -> None:
    memory = large_pages(LARGE_PAGE_BYTES + 5)
    assert memory.data_ptr() % LARGE_PAGE_BYTES == 0
    assert len(memory) == LARGE_PAGE_BYTES + 5 and not bool(memory.any())


def test_more_than_there_can_be_is_no_memory() -> None:
    with pytest.raises(MemoryError, match="bytes could not be allocated"):
        large_pages(1 << 60)
