"""Stacks of quantised matrices, and float64 products over sorted choices."""

import torch

from batchmla.kernels.quant import Coding, Quantised, Scheme
from batchmla.kernels.reference.quant import expand

VALUES = {Coding.E4M3: 448.0, Coding.E2M1: 6.0, Coding.INT4: 7.0}


def quantised(
    shape: tuple[int, int, int],
    coding: Coding,
    block: int,
    *,
    scale_dtype: torch.dtype = torch.float32,
    row_block: int | None = None,
) -> Quantised:
    """Random codes and scales, so that a product's result is near 1; outputs in blocks of
    `row_block` share their scales, None: each has its own."""
    experts, outputs, inputs = shape
    if coding is Coding.E4M3:
        wide = (torch.randn(shape) * 100).clamp(-448, 448)
        codes = wide.to(torch.float8_e4m3fn).view(torch.uint8)
    else:
        codes = torch.randint(256, (experts, outputs, inputs // 2), dtype=torch.uint8)
    rows = outputs if row_block is None else -(-outputs // row_block)
    scales = torch.rand(experts, rows, -(-inputs // block)) + 0.5
    scales *= 3 / VALUES[coding] / inputs**0.5
    if scale_dtype == torch.uint8:
        scales = (torch.round(torch.log2(scales)) + 127).to(torch.uint8)
    else:
        scales = scales.to(scale_dtype)
    rows_O = None
    if row_block is not None:
        rows_O = (torch.arange(outputs) // row_block).to(torch.int32)
    scheme = Scheme(
        coding=coding, block=block, scale_rows=rows, scale_dtype=scale_dtype,
        dtype=torch.bfloat16, row_unit=row_block or 1,
    )  # fmt: skip
    return Quantised(scheme=scheme, codes=codes, scales=scales, scale_row_O=rows_O)


def values(weight: Quantised) -> torch.Tensor:
    """float64, by the specification."""
    return expand(weight).double()


def in_order(ids_TA: torch.Tensor, num_experts: int) -> list[int]:
    """Choices in the order of their experts; those of no expert are left out."""
    flat = ids_TA.flatten().tolist()
    known = [choice for choice, expert in enumerate(flat) if 0 <= expert < num_experts]
    return sorted(known, key=lambda choice: flat[choice])


def hidden_values(
    x_TM: torch.Tensor, up_EFM: torch.Tensor, ids_TA: torch.Tensor, limit: float = float("inf")
) -> torch.Tensor:
    """silu(gate) · up of every known choice in its place, float64; both within the limit."""
    order, flat = in_order(ids_TA, len(up_EFM)), ids_TA.flatten().tolist()
    rows = []
    for choice in order:
        both = up_EFM[flat[choice]].double() @ x_TM[choice // ids_TA.shape[1]].double()
        gate, each = both.chunk(2)
        gate, each = gate.clamp(max=limit), each.clamp(-limit, limit)
        rows.append(gate * torch.sigmoid(gate) * each)
    return torch.stack(rows)


def row_values(
    hidden_XF: torch.Tensor, down_EMF: torch.Tensor, ids_TA: torch.Tensor
) -> torch.Tensor:
    """The expert's row of every known choice, in rising order of the choices, float64."""
    order, flat = in_order(ids_TA, len(down_EMF)), ids_TA.flatten().tolist()
    rows = {
        choice: down_EMF[flat[choice]].double() @ hidden_XF[place].double()
        for place, choice in enumerate(order)
    }
    return torch.stack([rows[choice] for choice in sorted(order)])
