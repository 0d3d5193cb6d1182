"""One place for tolerances."""

import torch

# largest error allowed, as a share of the largest expected magnitude
TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
LOGITS_TOLERANCE = 1e-4  # fp32 logits against transformers, absolute


def assert_close(name: str, actual: torch.Tensor, expected: torch.Tensor, scale: float = 1) -> None:
    """Values within `scale` tolerances of `actual`'s dtype; not finite in the same places."""
    assert actual.shape == expected.shape, f"{name}: {tuple(actual.shape)}, {tuple(expected.shape)}"
    actual64, expected64 = actual.double(), expected.double()
    assert torch.equal(actual64.isfinite(), expected64.isfinite()), f"{name}: not finite alike"
    finite = expected64.isfinite()
    if not finite.any():
        return
    error = (actual64 - expected64)[finite].abs().max().item()
    size = max(expected64[finite].abs().max().item(), 1.0)
    allowed = TOLERANCE[actual.dtype] * scale * size
    assert error <= allowed, f"{name}: error {error:.3g} over {allowed:.3g}"


def assert_logits(name: str, actual: torch.Tensor, expected: torch.Tensor) -> None:
    """Absolute difference within the bound the project promises."""
    assert actual.shape == expected.shape, f"{name}: {tuple(actual.shape)}, {tuple(expected.shape)}"
    assert actual.dtype == torch.float32, f"{name}: {actual.dtype}"
    error = (actual - expected).abs().max().item()
    assert error <= LOGITS_TOLERANCE, f"{name}: error {error:.3g}"
