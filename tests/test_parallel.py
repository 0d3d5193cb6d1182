"""Small sums through shared memory, with buffers and sums of this process."""

import pytest
import torch

from batchmla.parallel import SMALL_SUM_BYTES, SmallSums


def sums_of_three(made: list[torch.dtype]) -> SmallSums:
    """Three ranks that all hold the same."""

    def make_buffer(dtype: torch.dtype) -> torch.Tensor:
        made.append(dtype)
        return torch.full((SMALL_SUM_BYTES // dtype.itemsize,), 1e4, dtype=dtype)

    return SmallSums(make_buffer, lambda part: part * 3)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_sums_in_place_with_one_buffer_a_dtype(dtype: torch.dtype) -> None:
    made: list[torch.dtype] = []
    small = sums_of_three(made)
    for shape in [(1, 64), (8, 256), (4, 64)]:
        x = torch.randint(-9, 9, shape).to(dtype)
        before = x.clone()
        assert small.takes(x)
        assert small.sum(x) is x
        assert torch.equal(x, before * 3)
    assert made == [dtype]


def test_what_a_ring_is_for() -> None:
    small = sums_of_three([])
    assert small.takes(torch.zeros(128, 1024, dtype=torch.bfloat16))
    assert not small.takes(torch.zeros(129, 1024, dtype=torch.bfloat16))
    assert not small.takes(torch.zeros(3, 1, dtype=torch.bfloat16))
    assert not small.takes(torch.zeros(0, 1024))
