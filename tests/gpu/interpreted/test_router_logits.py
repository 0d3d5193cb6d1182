"""A router's logits against float64: weights are not rounded."""

import pytest
import torch
from triton_case import BOUNDS, error

from batchmla.kernels.triton.router_logits import router_logits

BF16 = torch.bfloat16


@pytest.mark.parametrize(
    ("rows", "experts", "width", "part"), [(1, 5, 64, 2048), (35, 70, 100, 2048), (3, 64, 320, 128)]
)
def test_values(rows: int, experts: int, width: int, part: int) -> None:
    x, weight = torch.randn(rows, 2 * width).to(BF16)[:, :width], torch.randn(experts, width)
    parts = router_logits(x, weight, part=part)
    assert parts.shape == (-(-width // part), rows, experts)
    assert error(parts.sum(0), x.double() @ weight.double().T) <= BOUNDS[torch.float32]


def test_small_differences_of_weights_are_seen() -> None:
    """Equal in their first 16 bits, as bfloat16 they would tie."""
    weight = torch.full((2, 64), 1.0)
    weight[1] += 2.0**-20
    logits = router_logits(torch.ones(1, 64, dtype=BF16), weight)[0, 0]
    assert logits[1] - logits[0] == 64 * 2.0**-20


def test_a_row_does_not_depend_on_others() -> None:
    x, weight = torch.randn(40, 192).to(BF16), torch.randn(10, 192)
    among = router_logits(x, weight, is_exact=True)
    assert torch.equal(among[:, 37:38], router_logits(x[37:38], weight, is_exact=True))


def test_no_rows() -> None:
    assert router_logits(torch.empty(0, 64, dtype=BF16), torch.randn(4, 64)).shape == (1, 0, 4)
