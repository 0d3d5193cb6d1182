"""Quantised activations in the interpreter: within the format's error, codes bit for bit."""

import pytest
import torch
from triton_case import error

from batchmla.kernels.triton.norm import add_norm, norm
from batchmla.kernels.triton.quant import GROUP, add_norm_quantise, norm_quantise, quantise

QUANTISED = 3e-2  # of e4m3 with a scale for 128 values


def values(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    wide = scales.repeat_interleave(GROUP, dim=1)[:, : codes.shape[1]]
    return codes.float() * wide


def wanted_scales(x: torch.Tensor) -> torch.Tensor:
    groups = torch.nn.functional.pad(x.float(), (0, -x.shape[1] % GROUP)).unflatten(1, (-1, GROUP))
    return groups.abs().amax(2).clamp(min=1e-4) / 448


@pytest.mark.parametrize(("rows", "width"), [(1, 128), (3, 4224), (5, 200), (0, 128)])
def test_quantise(rows: int, width: int) -> None:
    x = torch.randn(rows, width + 3).bfloat16()[:, :width] * torch.logspace(-8, 3, width)
    codes, scales = quantise(x)
    assert codes.dtype == torch.float8_e4m3fn and codes.shape == x.shape
    assert scales.shape == (rows, -(-width // GROUP)) and scales.stride(0) == 1
    torch.testing.assert_close(scales, wanted_scales(x), rtol=2e-7, atol=0)
    assert error(values(codes, scales), x) <= QUANTISED
    exact = (x / scales.repeat_interleave(GROUP, dim=1)[:, :width]).to(torch.float8_e4m3fn)
    assert torch.equal(codes.view(torch.uint8), exact.view(torch.uint8))


def test_a_group_of_zeros_and_numbers_that_are_none() -> None:
    x = torch.zeros(2, 256)
    x[1, 5], x[1, 200] = torch.nan, torch.inf
    codes, scales = quantise(x)
    assert not codes[0].float().any() and torch.isfinite(scales[0]).all()
    assert codes[1, 5].float().isnan()
    assert not torch.isfinite(values(codes, scales)[1, 200])


@pytest.mark.parametrize("width", [256, 200])
def test_norm_quantise_is_one_after_the_other(width: int) -> None:
    x, weight = torch.randn(3, width + 4).bfloat16()[:, 4:], torch.randn(width).bfloat16()
    codes, scales = norm_quantise(x, weight, 1e-6)
    wide = x.double()
    want = wide * torch.rsqrt(wide.square().mean(1, keepdim=True) + 1e-6) * weight.double()
    assert error(values(codes, scales), want) <= QUANTISED
    apart, _ = quantise(norm(x, weight, 1e-6))
    assert (codes.view(torch.uint8) == apart.view(torch.uint8)).float().mean() > 0.99


def test_add_norm_quantise_keeps_the_sum() -> None:
    x, residual, weight = (torch.randn(*shape).bfloat16() for shape in ((4, 384), (4, 384), (384,)))
    codes, scales, total = add_norm_quantise(x, residual, weight, 1e-6)
    plain, wanted = add_norm(x, residual, weight, 1e-6)
    assert torch.equal(total, wanted) and error(values(codes, scales), plain) <= QUANTISED


def test_a_row_does_not_depend_on_others() -> None:
    x, weight = torch.randn(6, 640).bfloat16(), torch.randn(640).bfloat16()
    for whole, alone in zip(norm_quantise(x, weight, 1e-6), norm_quantise(x[2:3], weight, 1e-6),
                            strict=True):  # fmt: skip
        assert torch.equal(whole[2:3].float(), alone.float())
