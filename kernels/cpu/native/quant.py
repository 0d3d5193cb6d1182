"""Quantised weights in the order of the panels: codes are decoded while they are multiplied, into
the bits of the expanded values. Layouts: codes.h."""

import ctypes

import torch
import torch.nn.functional as F

from batchmla.kernels.cpu.quant import KEPT
from batchmla.kernels.ops import PackKind
from batchmla.kernels.quant import (
    E2M1_VALUES,
    INT4_OFFSET,
    CodePanels,
    Coding,
    Quantised,
    Scheme,
    scale_factors,
)

PANEL, TILE, DEPTH = 32, 16, 32
FOUR_BITS = {
    Coding.E2M1: (*E2M1_VALUES, *(-value for value in E2M1_VALUES)),
    Coding.INT4: tuple(float(code - INT4_OFFSET) for code in range(16)),
}
HALF_FLOAT = 0  # of codes.h: one scale for the 16 outputs of half a panel
ROW_SMALL_E8M0 = 4  # powers of two that are added to the exponents of four bits
LEAST_EXPONENT, MOST_EXPONENT = 8, 247  # biased, for that
ROW_FORMS = {torch.float32: 1, torch.bfloat16: 2, torch.uint8: 3}


class Codes(ctypes.Structure):
    """`Codes` of codes.h."""

    _fields_ = [
        ("codes", ctypes.c_void_p),
        ("scales", ctypes.c_void_p),
        ("steps", ctypes.c_long),
        ("block_steps", ctypes.c_long),
        ("coding", ctypes.c_long),
        ("scale_form", ctypes.c_long),
        ("table", ctypes.c_float * 16),
    ]


def serves_codes(kind: PackKind, shape: tuple[int, ...], scheme: Scheme) -> bool:
    """Whether a quantised weight can be packed in panels; up and down of the same experts alike."""
    unit = {PackKind.EXPERTS_UP: 2 * PANEL, PackKind.EXPERTS_DOWN: PANEL}.get(kind, 1)
    return (
        kind in KEPT
        and scheme.dtype == torch.bfloat16
        and shape[-2] % unit == 0
        and shape[-1] % DEPTH == 0
        and scheme.block % DEPTH == 0
    )


def code_bytes(shape: tuple[int, ...], scheme: Scheme) -> int:
    """What `lay_out_codes` leaves in memory."""
    *stack, outputs, inputs = shape
    num_matrices = stack[0] if stack else 1
    panels, blocks = -(-outputs // PANEL), -(-inputs // scheme.block)
    codes = panels * PANEL * inputs // scheme.coding.values_per_byte
    a_scale = 2 * 4 if _shares(scheme) else PANEL * scheme.scale_dtype.itemsize
    return num_matrices * (codes + panels * blocks * a_scale)


def _shares(scheme: Scheme) -> bool:
    """Whether every half of a panel has one scale."""
    return scheme.row_unit % TILE == 0


def lay_out_codes(kind: PackKind, weight: Quantised) -> CodePanels:
    """Of experts' up weights a panel is 16 gates and their ups. The codes of a stack are laid out
    where they lie."""
    outputs = weight.shape[-2]
    padded = -(-outputs // PANEL) * PANEL
    order_N = torch.arange(padded).clamp_(max=outputs - 1)
    if kind is PackKind.EXPERTS_UP:
        order_N = order_N.view(2, -1, TILE).transpose(0, 1).flatten()
    if weight.codes.dim() == 3:
        for codes_OX in weight.codes:
            codes_OX.view(-1).copy_(_ordered(codes_OX[order_N], weight.scheme.coding))
        codes = weight.codes
    else:
        codes = _ordered(F.pad(weight.codes, (0, 0, 0, padded - outputs)), weight.scheme.coding)
    rows_N = order_N if weight.scale_row_O is None else weight.scale_row_O[order_N]
    scales = weight.scales.index_select(-2, rows_N)
    scales = scales.unflatten(-2, (-1, PANEL)).transpose(-2, -1)  # type: ignore[no-untyped-call]
    if _shares(weight.scheme):
        scales = scale_factors(scales[..., ::TILE])
    return CodePanels(
        scheme=weight.scheme,
        codes=codes,
        scales=scales.contiguous(),
        is_within=_is_within(weight.scheme.coding, scales),
    )


def _is_within(coding: Coding, scales: torch.Tensor) -> bool:
    """Whether exponents of e2m1's scales are far from both ends."""
    if coding is not Coding.E2M1 or scales.dtype != torch.uint8:
        return False
    least, most = (int(each) for each in scales.aminmax())
    return least >= LEAST_EXPONENT and most <= MOST_EXPONENT


def _ordered(codes_NX: torch.Tensor, coding: Coding) -> torch.Tensor:
    """The bytes of a matrix whose rows are those of its panels, flat."""
    panels, steps = len(codes_NX) // PANEL, codes_NX.shape[1] * coding.values_per_byte // DEPTH
    if coding is not Coding.E4M3:  # panel, half, n, step, pair → panel, step, half, pair, n
        return codes_NX.view(panels, 2, TILE, steps, TILE).permute(0, 3, 1, 4, 2).flatten()
    # panel, half, n = (j, i), step, pair = (q, p), k → panel, step, half, q, j, p, i, k
    return codes_NX.view(panels, 2, 4, 4, steps, 8, 2, 2).permute(0, 4, 1, 5, 2, 6, 3, 7).flatten()


def codes_of(panels: CodePanels, depth: int) -> Codes:
    """What the kernels are told; `panels` must outlive it."""
    scheme = panels.scheme
    has_table = scheme.coding is not Coding.E4M3
    values = FOUR_BITS[scheme.coding] if has_table else (0.0,) * 16
    return Codes(
        codes=panels.codes.data_ptr(),
        scales=panels.scales.data_ptr(),
        steps=depth // DEPTH,
        block_steps=scheme.block // DEPTH,
        coding=int(has_table),
        scale_form=_scale_form(panels),
        table=(ctypes.c_float * 16)(*values),
    )


def _scale_form(panels: CodePanels) -> int:
    if _shares(panels.scheme):
        return HALF_FLOAT
    return ROW_SMALL_E8M0 if panels.is_within else ROW_FORMS[panels.scales.dtype]
