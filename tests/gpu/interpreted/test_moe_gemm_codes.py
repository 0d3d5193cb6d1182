"""Products with weights expanded on the way, in every coding, against float64."""

import pytest
import torch
from expert_case import hidden_values, in_order, quantised, row_values
from triton_case import BOUNDS, error

from batchmla.kernels.quant import Coding
from batchmla.kernels.triton.act_mul import Act, Activation
from batchmla.kernels.triton.moe_gemm_codes import (
    down_product,
    down_shape,
    run_length,
    up_product,
    up_shape,
)  # fmt: skip
from batchmla.kernels.triton.sort_experts import sort_experts

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
# coding, block, dtype of scales, outputs that share scales, dtype of rows, rows of a tile
WAYS = [
    (Coding.INT4, 32, BF16, None, BF16, 16),
    (Coding.E2M1, 32, torch.uint8, None, F16, 32),
    (Coding.E2M1, 16, F32, 8, F32, 16),
    (Coding.E4M3, 128, F32, 128, BF16, 64),
    (Coding.E4M3, 48, F32, 32, BF16, 16),
    (Coding.E4M3, 128, torch.uint8, 64, F32, 16),
]


@pytest.mark.parametrize(("coding", "block", "scales", "rows", "dtype", "tokens"), WAYS)
def test_values(
    coding: Coding,
    block: int,
    scales: torch.dtype,
    rows: int | None,
    dtype: torch.dtype,
    tokens: int,
) -> None:
    ids, sizes = torch.tensor([[0, 2], [2, 1], [-1, 2], [0, 9], [2, 0]]), (160, 64)
    up = quantised((3, 2 * sizes[1], sizes[0]), coding, block, scale_dtype=scales, row_block=rows)
    down = quantised((3, *sizes), coding, block, scale_dtype=scales, row_block=rows)
    x = torch.randn(5, sizes[0]).to(dtype)
    tiles, act = sort_experts(ids, 3, tokens), Activation(Act.CLAMPED, 1.5)
    hidden = up_product(x, up, tiles, 2, act, up_shape(tokens, dtype))
    order = in_order(ids, 3)
    wanted = hidden_values(x, up.expanded(dtype), ids, 1.5)
    assert error(hidden[: len(order)], wanted) <= BOUNDS[dtype]
    out = down_product(hidden, down, tiles, down_shape(tokens, dtype))
    assert error(out[sorted(order)], row_values(hidden, down.expanded(dtype), ids)) <= BOUNDS[dtype]


def test_every_code_is_exact() -> None:
    """Rows that pick one input each show every value as it is."""
    for coding, count in ((Coding.E2M1, 16), (Coding.INT4, 16), (Coding.E4M3, 256)):
        weight = quantised((1, 4, count), coding, count)
        every = torch.arange(count, dtype=torch.uint8)
        if coding is Coding.E4M3:
            every[every & 0x7F == 0x7F] = 0  # no numbers
        weight.codes[0, 1] = every if coding is Coding.E4M3 else every[0::2] | every[1::2] << 4
        ids = torch.zeros(count, 1, dtype=torch.int64)
        tiles = sort_experts(ids, 1, 128)
        found = down_product(torch.eye(count), weight, tiles, down_shape(128, F32))
        assert torch.equal(found, weight.expanded(F32)[0].T)


def test_run_length() -> None:
    assert [run_length(block, 64) for block in (32, 128, 48, 7, 64)] == [32, 64, 16, 1, 64]
