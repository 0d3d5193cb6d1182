"""Weights as codes and scales: a value is code times scale, rounded to the dtype asked for.

Shapes: O outputs, I inputs, S rows of scales, B blocks of columns, one scale each.
"""

import math
from dataclasses import dataclass, replace
from enum import StrEnum

import torch
import torch.nn.functional as F

E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # then the same with a minus sign
INT4_OFFSET = 8
FRACTION_BITS = 23  # of float32, whose exponents have the bias of e8m0


class Coding(StrEnum):
    """How a byte holds values. Of two, the one of the even column is in the low four bits."""

    E4M3 = "e4m3"  # one: sign, 4 bits of exponent with bias 7, 3 of fraction; no infinities
    E2M1 = "e2m1"  # two: sign, 2 bits of exponent with bias 1, 1 of fraction
    INT4 = "int4"  # two: the value plus 8

    @property
    def values_per_byte(self) -> int:
        return 1 if self is Coding.E4M3 else 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Scheme:
    """The form of one matrix, or of every matrix of a stack.

    `block` columns of a row share a scale; `scale_rows` are the distinct rows of scales. Scales are
    float32, bfloat16, or uint8 for powers of two with bias 127 (e8m0). `dtype` is the one that the
    values stand for. Outputs from one multiple of `row_unit` to the next share their scales.
    """

    coding: Coding
    block: int
    scale_rows: int
    scale_dtype: torch.dtype
    dtype: torch.dtype
    row_unit: int = 1

    def nbytes(self, shape: tuple[int, ...]) -> int:
        """Bytes of codes, scales and the map from outputs to scales."""
        *stack, outputs, inputs = shape
        codes = outputs * inputs // self.coding.values_per_byte
        scales = self.scale_rows * -(-inputs // self.block) * self.scale_dtype.itemsize
        mapped = 0 if self.scale_rows == outputs else 4 * outputs
        return math.prod(stack) * (codes + scales) + mapped


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Quantised:
    """`codes` uint8 [..., O, I / values per byte], `scales` [..., S, B].

    `scale_row_O` int32 names the row of scales of each output; None: its own.
    """

    scheme: Scheme
    codes: torch.Tensor
    scales: torch.Tensor
    scale_row_O: torch.Tensor | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the values."""
        return (*self.codes.shape[:-1], self.codes.shape[-1] * self.scheme.coding.values_per_byte)

    @property
    def device(self) -> torch.device:
        return self.codes.device

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """All that is held."""
        mapped = () if self.scale_row_O is None else (self.scale_row_O,)
        return (self.codes, self.scales, *mapped)

    def matrix(self, index: int) -> "Quantised":
        """One of a stack."""
        return replace(self, codes=self.codes[index], scales=self.scales[index])

    def outputs(self, start: int, stop: int) -> "Quantised":
        """Some of a matrix's outputs; a view."""
        if self.scale_row_O is None:
            return replace(self, codes=self.codes[start:stop], scales=self.scales[start:stop])
        some_O = self.scale_row_O[start:stop]
        return replace(self, codes=self.codes[start:stop], scale_row_O=some_O)

    def expanded(self, dtype: torch.dtype | None = None) -> torch.Tensor:
        """The values [..., O, I], multiplied in float32 and rounded once."""
        values = decode(self.codes, self.scheme.coding)
        factors = scale_factors(self.scales)
        if self.scale_row_O is not None:
            factors = factors.index_select(-2, self.scale_row_O)
        block = self.scheme.block
        whole = values.shape[-1] // block
        blocks = values[..., : whole * block].view(*values.shape[:-1], whole, block)
        blocks.mul_(factors[..., :whole, None])
        if whole < factors.shape[-1]:
            values[..., whole * block :].mul_(factors[..., whole:])
        return values.to(self.scheme.dtype if dtype is None else dtype)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CodePanels:
    """A quantised weight in an order of compiled kernels; of a stack one matrix after the other.

    `is_within`: no product of a code and a scale is beyond bfloat16's normal numbers.
    """

    scheme: Scheme
    codes: torch.Tensor
    scales: torch.Tensor
    is_within: bool = False

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """All that is held."""
        return (self.codes, self.scales)

    def matrix(self, index: int) -> "CodePanels":
        """One of a stack."""
        return replace(self, codes=self.codes[index], scales=self.scales[index])


def decode(codes: torch.Tensor, coding: Coding) -> torch.Tensor:
    """Bytes [..., X] as float32 values, [..., X] or [..., 2 * X]; exact."""
    if coding is Coding.E4M3:
        return codes.view(torch.float8_e4m3fn).to(torch.float32)
    if coding is Coding.E2M1:
        magnitudes = torch.tensor(E2M1_VALUES, device=codes.device)
        values_16 = torch.cat((magnitudes, -magnitudes))
    else:
        values_16 = torch.arange(16, device=codes.device, dtype=torch.float32) - INT4_OFFSET
    pairs_256 = torch.stack((values_16.repeat(16), values_16.repeat_interleave(16)), dim=1)
    return F.embedding(codes.to(torch.int32), pairs_256).flatten(-2)


def scale_factors(scales: torch.Tensor) -> torch.Tensor:
    """Scales as float32; bytes are exponents. The byte 255, which stands for no number, must have
    been refused."""
    if scales.dtype != torch.uint8:
        return scales.to(torch.float32)
    bits = scales.to(torch.int32) << FRACTION_BITS
    bits.masked_fill_(scales == 0, 1 << (FRACTION_BITS - 1))  # 2**-127 is no normal number
    return bits.view(torch.float32)
