"""Small sums through shared memory, with buffers and sums of this process; what NCCL is told."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from batchmla import parallel
from batchmla.parallel import MAX_CHANNELS, SMALL_SUM_BYTES, Par, SmallSums


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


def test_every_group_of_nccl_is_told_how_many_channels_it_gets(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A group writes into the options that it is made with: each has its own."""

    def make() -> Any:
        return SimpleNamespace(config=SimpleNamespace(max_ctas=None))

    backend = SimpleNamespace(Options=make)
    monkeypatch.setattr(parallel.dist, "ProcessGroupNCCL", backend, raising=False)
    first, second = parallel._options("nccl"), parallel._options("nccl")
    assert first is not second
    assert first.config.max_ctas == second.config.max_ctas == MAX_CHANNELS
    assert MAX_CHANNELS & (MAX_CHANNELS - 1) == 0, "exchanges round up to a power of two"
    assert parallel._options("gloo") is None


def test_a_fault_of_another_rank_is_raised_once_it_is_known() -> None:
    par = Par.single()
    par.check()
    par.fault = lambda: ValueError("rank 1 is gone")
    with pytest.raises(ValueError, match="rank 1 is gone"):
        par.check()
