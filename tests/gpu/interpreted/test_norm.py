"""Norms in the interpreter against float64, on odd widths and strided rows."""

import pytest
import torch
from triton_case import BOUNDS, error

from batchmla.kernels.triton.norm import add_norm, norm


def expected(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    x = x.double()
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight.double()


@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
@pytest.mark.parametrize(("rows", "width"), [(1, 1), (3, 64), (5, 100), (2, 1536), (0, 64)])
def test_norm(rows: int, width: int, dtype: torch.dtype) -> None:
    x, weight = torch.randn(rows, 2 * width).to(dtype)[:, :width], torch.randn(width).to(dtype)
    out = norm(x, weight, 1e-6)
    assert out.dtype == dtype and out.shape == x.shape
    assert error(out, expected(x, weight, 1e-6)) <= BOUNDS[dtype]


@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
def test_add_norm_rounds_the_sum_first(dtype: torch.dtype) -> None:
    x, residual = torch.randn(7, 96).to(dtype), torch.randn(7, 96).to(dtype)
    weight = torch.randn(96).to(dtype)
    out, total = add_norm(x, residual, weight, 1e-6)
    assert torch.equal(total, x + residual)
    assert error(out, expected(total, weight, 1e-6)) <= BOUNDS[dtype]


def test_a_row_does_not_depend_on_others() -> None:
    x, weight = torch.randn(9, 640).bfloat16(), torch.randn(640).bfloat16()
    assert torch.equal(norm(x, weight, 1e-6)[4:5], norm(x[4:5], weight, 1e-6))
