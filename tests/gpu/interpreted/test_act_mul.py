"""Gated activations in the interpreter against float64."""

import pytest
import torch

from batchmla.kernels.block_sparse_ops import OaiGate
from batchmla.kernels.triton.act_mul import act_mul, clamped_act_mul, oai_act_mul

LIMIT, ALPHA = 1.25, 1.702
ROUNDING = {torch.float32: 1e-6, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}
SMALLEST = 2.0**-25  # half the step of float16 near 0


def silu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    return gate * torch.sigmoid(gate) * up


def clamped(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    return silu(gate.clamp(max=LIMIT), up.clamp(-LIMIT, LIMIT))


def oai(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    gate = gate.clamp(max=LIMIT)
    return gate * torch.sigmoid(ALPHA * gate) * (up.clamp(-LIMIT, LIMIT) + 1)


WAYS = {
    "silu": (act_mul, silu),
    "clamped": (lambda x: clamped_act_mul(x, LIMIT), clamped),
    "oai": (lambda x: oai_act_mul(x, OaiGate(alpha=ALPHA, limit=LIMIT)), oai),
}


@pytest.mark.parametrize("dtype", ROUNDING, ids=str)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("rows", "width"), [(3, 100), (2, 1025), (0, 8)])
def test_values(rows: int, width: int, way: str, dtype: torch.dtype) -> None:
    actual, expected = WAYS[way]
    wide = (torch.randn(rows, 3 * width) * 2).to(dtype)[:, : 2 * width]
    out = actual(wide)
    assert out.dtype == dtype and out.shape == (rows, width)
    wanted = expected(*wide.double().chunk(2, dim=1))
    allowed = ROUNDING[dtype] * 1.001 * wanted.abs() + SMALLEST
    assert ((out.double() - wanted).abs() <= allowed).all()


def test_leading_dimensions_stay() -> None:
    x = torch.randn(2, 3, 8)
    assert torch.equal(act_mul(x), act_mul(x.view(6, 8)).view(2, 3, 4))


@pytest.mark.filterwarnings("ignore:overflow encountered")
@pytest.mark.parametrize("way", WAYS)
def test_far_values_and_what_is_no_number(way: str) -> None:
    gate = torch.tensor([[1e4, -1e4, float("nan"), 1.0, -3e38]])
    up = torch.tensor([[1e4, -1e4, 1.0, float("nan"), 1.0]])
    actual, expected = WAYS[way]
    wanted = expected(gate.double(), up.double()).float()
    torch.testing.assert_close(actual(torch.cat((gate, up), dim=1)), wanted, equal_nan=True)


def test_a_row_does_not_depend_on_others() -> None:
    x = torch.randn(9, 200).bfloat16()
    assert torch.equal(act_mul(x)[4:5], act_mul(x[4:5]))
