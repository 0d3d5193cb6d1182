"""Products with e4m3 experts and matrices against float64, on the same codes and unquantised."""

import pytest
import torch
from expert_case import hidden_values, in_order, quantised, row_values
from triton_case import BOUNDS, error

from batchmla.kernels.quant import Coding, Quantised
from batchmla.kernels.triton.act_mul import Act, Activation
from batchmla.kernels.triton.moe_gemm_fp8 import (
    dense_product,
    down_product,
    down_shape,
    reads,
    up_product,
    up_shape,
)  # fmt: skip
from batchmla.kernels.triton.quant import quantise
from batchmla.kernels.triton.sort_experts import sort_experts

BF16, F32 = torch.bfloat16, torch.float32
UNQUANTISED = 5e-2  # rows are rounded to e4m3


def as_read(x: torch.Tensor) -> torch.Tensor:
    """The values of rows made e4m3."""
    codes, scales = quantise(x)
    return (codes.double() * scales.double().repeat_interleave(128, 1)[:, : x.shape[1]]).double()


def weight(
    shape: tuple[int, int, int], rows: int | None, scales: torch.dtype = F32
) -> tuple[Quantised, torch.Tensor]:
    made = quantised(shape, Coding.E4M3, 128, scale_dtype=scales, row_block=rows)
    assert reads(made)
    return made, made.expanded(torch.float64)


@pytest.mark.parametrize(
    ("tokens", "width", "ffn", "rows", "scales"),
    [
        (16, 256, 128, 128, F32),
        (32, 384, 64, 128, torch.uint8),
        (64, 200, 72, 8, F32),  # rows that boxes cannot read, and a scale that no tile shares
        (128, 128, 128, 128, torch.bfloat16),
        (16, 136, 48, None, F32),
    ],
)
def test_experts(tokens: int, width: int, ffn: int, rows: int | None, scales: torch.dtype) -> None:
    ids = torch.tensor([[0, 2], [2, 1], [-1, 2], [0, 9], [2, 0]])
    up, up_values = weight((3, 2 * ffn, width), rows, scales)
    down, down_values = weight((3, width, ffn), rows, scales)
    x = torch.randn(5, width).to(BF16)
    tiles, act, order = sort_experts(ids, 3, tokens), Activation(Act.SILU), in_order(ids, 3)
    hidden = up_product(x, up, tiles, 2, act, up_shape(tokens))
    found = hidden[: len(order)]
    assert error(found, hidden_values(as_read(x), up_values, ids)) <= BOUNDS[BF16]
    assert error(found, hidden_values(x, up_values, ids)) <= UNQUANTISED
    out = down_product(hidden, down, tiles, down_shape(tokens))[sorted(order)]
    assert error(out, row_values(as_read(found), down_values, ids)) <= BOUNDS[BF16]
    assert error(out, row_values(found, down_values, ids)) <= UNQUANTISED


@pytest.mark.parametrize(
    ("count", "tokens", "has_bias"), [(1, 16, False), (37, 32, True), (20, 128, True)]
)
def test_one_matrix(count: int, tokens: int, has_bias: bool) -> None:
    made, values = weight((1, 192, 320), 128)
    x, bias = torch.randn(count, 320).to(BF16), torch.randn(192) if has_bias else None
    out = dense_product(x, made.matrix(0), bias, F32, down_shape(tokens))
    wanted = as_read(x) @ values[0].T + (0 if bias is None else bias.double())
    assert out.dtype == F32 and error(out, wanted) <= BOUNDS[F32]


def test_a_row_does_not_depend_on_others() -> None:
    made, _ = weight((1, 128, 256), 128)
    x = torch.randn(40, 256).to(BF16)
    among = dense_product(x, made.matrix(0), None, BF16, down_shape(32))
    alone = dense_product(x[35:36], made.matrix(0), None, BF16, down_shape(32))
    assert torch.equal(among[35:36], alone)


def test_what_is_read() -> None:
    assert not reads(quantised((1, 4, 64), Coding.E4M3, 32))
    assert not reads(quantised((1, 4, 128), Coding.INT4, 128))
