"""Rotation in the interpreter against float64: strided views, odd widths, both layouts."""

import pytest
import torch
from triton_case import BOUNDS, error

from batchmla.kernels.ops import RopeLayout
from batchmla.kernels.reference.norm import rope as plain_rope
from batchmla.kernels.triton.rope import rope


def angles(tokens: int, half: int) -> tuple[torch.Tensor, torch.Tensor]:
    turns = torch.rand(tokens, half) * 1000
    return turns.cos(), turns.sin()


def expected(
    x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, layout: RopeLayout
) -> torch.Tensor:
    """By complex numbers, float64."""
    half = x.shape[2] // 2
    turn = torch.complex(cos.double(), sin.double())[:, None]
    if layout is RopeLayout.HALVES:
        turned = torch.complex(x[..., :half].double(), x[..., half:].double()) * turn
        return torch.cat((turned.real, turned.imag), dim=2)
    pairs = torch.complex(x[..., ::2].double(), x[..., 1::2].double()) * turn
    return torch.view_as_real(pairs).flatten(2)


@pytest.mark.parametrize("layout", RopeLayout)
@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
@pytest.mark.parametrize(("tokens", "heads", "width"), [(3, 1, 64), (2, 5, 24), (2, 70, 32)])
def test_rotates_a_view_in_place(
    tokens: int, heads: int, width: int, dtype: torch.dtype, layout: RopeLayout
) -> None:
    whole = torch.randn(tokens, heads + 1, width + 10).to(dtype)
    before = whole.clone()
    x = whole[:, :heads, 6 : 6 + width]
    cos, sin = angles(tokens, width // 2)
    want = expected(x, cos, sin, layout)
    assert rope(x, cos, sin, layout) is None
    assert error(x, want) <= BOUNDS[dtype]
    x.copy_(before[:, :heads, 6 : 6 + width])
    assert torch.equal(whole, before), "something beside the view was written"


@pytest.mark.parametrize("layout", RopeLayout)
def test_follows_the_reference_to_a_rounding(layout: RopeLayout) -> None:
    x = torch.randn(4, 3, 64)
    cos, sin = angles(4, 32)
    want, out = x.clone(), x.clone()
    plain_rope(want, cos, sin, layout)
    rope(out, cos, sin, layout)
    assert (out - want).abs().max() <= 1e-6


def test_a_token_does_not_depend_on_others() -> None:
    x = torch.randn(6, 3, 64).bfloat16()
    cos, sin = angles(6, 32)
    alone, whole = x[4:5].clone(), x.clone()
    rope(alone, cos[4:5], sin[4:5], RopeLayout.INTERLEAVED)
    rope(whole, cos, sin, RopeLayout.INTERLEAVED)
    assert torch.equal(whole[4:5], alone)


def test_no_tokens() -> None:
    rope(torch.zeros(0, 3, 64), torch.zeros(0, 32), torch.zeros(0, 32), RopeLayout.HALVES)
