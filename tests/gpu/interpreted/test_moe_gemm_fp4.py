"""Products with e2m1 experts against float64 on the same values."""

import pytest
import torch
from expert_case import hidden_values, in_order, quantised, row_values
from triton_case import BOUNDS, error

from batchmla.kernels.quant import Coding
from batchmla.kernels.triton.act_mul import Act, Activation
from batchmla.kernels.triton.moe_gemm_fp4 import (
    down_product,
    down_shape,
    reads,
    up_product,
    up_shape,
)  # fmt: skip
from batchmla.kernels.triton.sort_experts import sort_experts

BF16, BYTES = torch.bfloat16, torch.uint8


@pytest.mark.parametrize(
    ("tokens", "width", "ffn"),
    [(16, 256, 96), (32, 128, 128), (64, 160, 64), (128, 128, 64), (16, 96, 32)],
)
def test_values(tokens: int, width: int, ffn: int) -> None:
    """The last sizes have rows of bytes that boxes cannot read."""
    ids = torch.tensor([[0, 2], [2, 1], [-1, 2], [0, 9], [2, 0]])
    up = quantised((3, 2 * ffn, width), Coding.E2M1, 32, scale_dtype=BYTES)
    down = quantised((3, width, ffn), Coding.E2M1, 32, scale_dtype=BYTES)
    assert reads(up, BF16) and reads(down, BF16)
    x = torch.randn(5, width).to(BF16)
    tiles, act = sort_experts(ids, 3, tokens), Activation(Act.CLAMPED, 1.5)
    hidden = up_product(x, up, tiles, 2, act, up_shape(tokens))
    order = in_order(ids, 3)
    wanted = hidden_values(x, up.expanded(torch.float64), ids, 1.5)
    assert error(hidden[: len(order)], wanted) <= BOUNDS[BF16]
    out = down_product(hidden, down, tiles, down_shape(tokens))
    wanted = row_values(hidden, down.expanded(torch.float64), ids)
    assert error(out[sorted(order)], wanted) <= BOUNDS[BF16]


def test_what_is_read() -> None:
    plain = quantised((1, 4, 64), Coding.E2M1, 32, scale_dtype=BYTES)
    assert not reads(plain, torch.float16)
    assert not reads(quantised((1, 4, 64), Coding.E2M1, 16, scale_dtype=BYTES), BF16)
    assert not reads(quantised((1, 4, 64), Coding.E2M1, 32), BF16)
    assert not reads(quantised((1, 4, 64), Coding.INT4, 32, scale_dtype=BYTES), BF16)
