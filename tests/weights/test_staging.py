"""Slices through two small buffers: a device that has what was sent only once it is waited for."""

import pytest
import torch

from batchmla.weights.staging import Staging

BUFFER_BYTES = 256


class Arrivals:
    """Events that count how often they are waited for, and how many are under way at once."""

    def __init__(self) -> None:
        self.under_way = 0
        self.most_under_way = 0
        self.num_waits = 0

    def make(self) -> "Arrivals._One":
        return Arrivals._One(self)

    class _One:
        def __init__(self, all_of: "Arrivals") -> None:
            self._all = all_of

        def record(self) -> None:
            self._all.under_way += 1
            self._all.most_under_way = max(self._all.under_way, self._all.most_under_way)

        def synchronize(self) -> None:
            self._all.under_way -= 1
            self._all.num_waits += 1


@pytest.mark.parametrize("shape", [(1,), (300,), (7, 9), (3, 1000), (5, 4, 70), (0, 4), ()])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8])
def test_every_value_arrives(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    arrivals = Arrivals()
    staging = Staging(torch.device("cpu"), buffer_bytes=BUFFER_BYTES, make_arrival=arrivals.make)
    source = torch.randint(0, 200, shape).to(dtype)
    target = torch.zeros(shape, dtype=dtype)
    staging.copy(target, source)
    assert torch.equal(target, source)
    assert arrivals.most_under_way <= 2, "a buffer is filled again before it has been sent"


def test_a_cut_of_columns_takes_the_dtype_of_its_place() -> None:
    arrivals = Arrivals()
    staging = Staging(torch.device("cpu"), buffer_bytes=BUFFER_BYTES, make_arrival=arrivals.make)
    whole, place = torch.randn(40, 64), torch.zeros(50, 20, dtype=torch.bfloat16)
    staging.copy(place[5:45], whole[:, 30:50])
    assert torch.equal(place[5:45], whole[:, 30:50].bfloat16())
    assert not place[:5].any() and not place[45:].any()
    assert arrivals.num_waits > 5


def test_the_host_needs_no_buffers() -> None:
    target = torch.zeros(3, 3)
    Staging(torch.device("cpu")).copy(target, torch.ones(3, 3))
    assert target.sum() == 9


def test_another_shape_is_an_error() -> None:
    with pytest.raises(AssertionError, match="filled"):
        Staging(torch.device("cpu")).copy(torch.zeros(2, 3), torch.zeros(3, 2))
