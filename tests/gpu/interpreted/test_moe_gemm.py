"""Products of sorted tokens in the interpreter against float64, tile by tile."""

import pytest
import torch
from triton_case import BOUNDS, error

from batchmla.kernels.triton.act_mul import Act, Activation
from batchmla.kernels.triton.moe_gemm import down_product, down_shape, up_product, up_shape
from batchmla.kernels.triton.sort_experts import sort_experts

BF16 = torch.bfloat16


def places(ids: torch.Tensor, num_experts: int) -> list[int]:
    """Choices in the order of their experts."""
    flat = ids.flatten().tolist()
    known = [choice for choice, expert in enumerate(flat) if 0 <= expert < num_experts]
    return sorted(known, key=lambda choice: flat[choice])


def check(ids: torch.Tensor, sizes: tuple[int, int, int], dtype: torch.dtype, tokens: int) -> None:
    num_experts, width, ffn = sizes
    active, flat = ids.shape[1], ids.flatten().tolist()
    x = torch.randn(len(ids), width).to(dtype)
    up = (torch.randn(num_experts, 2 * ffn, width) / width**0.5).to(dtype)
    down = (torch.randn(num_experts, width, ffn) / ffn**0.5).to(dtype)
    tiles = sort_experts(ids, num_experts, tokens)
    act = Activation(Act.SILU)
    hidden = up_product(x, up, tiles, active, act, up_shape(tokens, dtype))
    assert hidden.dtype == dtype
    order = places(ids, num_experts)
    wanted = torch.zeros(len(order), ffn, dtype=torch.float64)
    rows = torch.zeros(len(flat), width, dtype=torch.float64)
    for place, choice in enumerate(order):
        gate, each = (up[flat[choice]].double() @ x[choice // active].double()).chunk(2)
        wanted[place] = gate * torch.sigmoid(gate) * each
        rows[choice] = down[flat[choice]].double() @ hidden[place].double()
    assert error(hidden[: len(order)], wanted) <= BOUNDS[dtype]
    out = down_product(hidden, down, tiles, down_shape(tokens, dtype))
    assert out.dtype == dtype
    assert error(out[sorted(order)], rows[sorted(order)]) <= BOUNDS[dtype]


@pytest.mark.parametrize("tokens", [16, 32, 64, 128])
def test_every_tile(tokens: int) -> None:
    check(torch.randint(3, (20, 2)), (3, 128, 72), BF16, tokens)


@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
def test_rows_that_cannot_be_read_in_boxes(dtype: torch.dtype) -> None:
    check(torch.randint(4, (5, 2)), (4, 65, 33), dtype, 16)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_other_dtypes(dtype: torch.dtype) -> None:
    check(torch.randint(4, (7, 2)), (4, 64, 96), dtype, 16)


def test_more_than_a_tile_of_an_expert() -> None:
    ids = torch.zeros(19, 2, dtype=torch.int64)
    ids[3, 1] = 2
    check(ids, (3, 64, 64), BF16, 16)


def test_choices_of_no_expert_here() -> None:
    check(torch.tensor([[-1, 1], [0, -7], [9, 2**40], [1, 0]]), (2, 64, 64), BF16, 16)


def test_addresses_beyond_32_bits() -> None:
    """Rows of tokens that lie far apart: the last begins past 2**31 elements."""
    stride = 2**31 // 3 + 8
    x = torch.empty(0)
    try:
        x = torch.empty(3 * stride + 64, dtype=BF16)  # never touched but for four rows
    except RuntimeError:
        pytest.skip("no address space for a tensor of 4 GiB")
    far = x.as_strided((4, 64), (stride, 1))
    far.copy_(torch.randn(4, 64))
    up = (torch.randn(2, 64, 64) / 8).bfloat16()
    ids = torch.tensor([[1], [0], [1], [0]])
    tiles, act, shape = sort_experts(ids, 2, 16), Activation(Act.SILU), up_shape(16, BF16)
    found = up_product(far, up, tiles, 1, act, shape)
    assert torch.equal(found, up_product(far.contiguous(), up, tiles, 1, act, shape))
