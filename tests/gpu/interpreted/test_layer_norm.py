"""LayerNorm in the interpreter against float64."""

import pytest
import torch
from triton_case import BOUNDS, error

from batchmla.kernels.triton.layer_norm import layer_norm


@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
@pytest.mark.parametrize(("rows", "width"), [(1, 7), (4, 128), (3, 100), (0, 8)])
def test_layer_norm(rows: int, width: int, dtype: torch.dtype) -> None:
    x = (torch.randn(rows, 2 * width) + 0.5).to(dtype)[:, :width]
    weight, bias = torch.randn(width), torch.randn(width)
    out = layer_norm(x, weight, bias, 1e-6)
    wide = x.double()
    centred = wide - wide.mean(1, keepdim=True)
    variance = centred.square().mean(1, keepdim=True)
    want = centred * torch.rsqrt(variance + 1e-6) * weight.double() + bias.double()
    assert out.dtype == dtype and error(out, want) <= BOUNDS[dtype]


def test_a_row_does_not_depend_on_others() -> None:
    x, weight, bias = torch.randn(5, 128), torch.randn(128), torch.randn(128)
    assert torch.equal(
        layer_norm(x, weight, bias, 1e-6)[2:3], layer_norm(x[2:3], weight, bias, 1e-6)
    )
