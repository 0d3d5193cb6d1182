"""Bounds of kernels against float64 on the same rounded inputs: relative Frobenius error."""

import torch

BOUNDS = {torch.float32: 1e-6, torch.float16: 3e-4, torch.bfloat16: 2.5e-3}


def error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """|actual - expected| / |expected|; 0 where both are empty or zero."""
    assert actual.shape == expected.shape, (actual.shape, expected.shape)
    difference = (actual.double() - expected.double()).norm()
    if not difference > 0:
        return float(difference)  # NaN stays NaN and fails every bound
    return float(difference / expected.double().norm())
