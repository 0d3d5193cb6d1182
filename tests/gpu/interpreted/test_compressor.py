"""Gated pooling in the interpreter against float64."""

import pytest
import torch
from triton_case import error

from batchmla.kernels.reference.hybrid import pool as plain
from batchmla.kernels.triton.compressor import pool

F32 = 1e-6


@pytest.mark.parametrize(("entries", "places", "width"), [(3, 8, 512), (2, 128, 100), (1, 1, 16),
                                                          (2, 6, 48), (0, 8, 64)])  # fmt: skip
def test_pool(entries: int, places: int, width: int) -> None:
    values = torch.randn(entries, places + 1, width + 3)[:, 1:, :width]
    gates = torch.randn(entries, places, width) * 5
    found = pool(values, gates)
    assert found.dtype == torch.float32
    assert error(found, plain(values.double(), gates.double())) <= F32


def test_what_is_left_out_is_not_read() -> None:
    values, gates = torch.randn(2, 8, 64), torch.randn(2, 8, 64)
    gates[0, :4] = -torch.inf
    wanted = plain(values.double(), gates.double())
    values[0, :4] = torch.nan
    assert error(pool(values, gates), wanted) <= F32


def test_gates_far_apart() -> None:
    values, gates = torch.randn(1, 8, 32), torch.randn(1, 8, 32) * 1e4
    assert error(pool(values, gates), plain(values.double(), gates.double())) <= F32


def test_an_entry_does_not_depend_on_others() -> None:
    values, gates = torch.randn(4, 8, 64), torch.randn(4, 8, 64)
    assert torch.equal(pool(values, gates)[2:3], pool(values[2:3], gates[2:3]))
