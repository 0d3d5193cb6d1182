"""Reads quantised matrices: a rank's share of codes and scales, kept as they are or expanded."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from batchmla.errors import JobError
from batchmla.kernels.quant import Coding, Quantised, Scheme, scale_factors
from batchmla.weights.checkpoint import Checkpoint
from batchmla.weights.faults import AGAIN
from batchmla.weights.quant import Stored, scale_slices
from batchmla.weights.rules import Piece
from batchmla.weights.staging import Staging

NO_EXPONENT = 255  # the byte of e8m0 that is no number


@dataclass(frozen=True, slots=True)
class Part:
    """A piece's codes uint8 [O, I / values per byte], scales [S, B] and each output's row of
    them."""

    codes: torch.Tensor
    scales: torch.Tensor
    scale_row_O: torch.Tensor


def read_part(checkpoint: Checkpoint, piece: Piece, stored: Stored) -> Part:
    """This rank's share. Raises `JobError` for codes and scales that are no numbers."""
    form, (rows, columns) = stored.form, piece.slices
    if stored.shape is not None:
        _check_shape(checkpoint, piece, stored.shape)
    per, scale_slice = stored.values_per_element, scale_slices(piece, form)
    some = (rows, slice(columns.start // per, -(-columns.stop // per)))
    codes = checkpoint.read(stored.codes, some).contiguous().view(torch.uint8)
    scales = checkpoint.read(stored.scales, scale_slice)
    if form.scale_dtype == torch.uint8:
        scales = scales.view(torch.uint8)
        is_number = not bool((scales == NO_EXPONENT).any())
    else:
        scales = scales.to(form.scale_dtype)
        is_number = bool(scales.isfinite().all())
    if not is_number:
        raise JobError(f"{stored.scales} holds scales that are no numbers: {AGAIN}")
    if form.coding is Coding.E4M3 and _has_nan(codes):
        raise JobError(f"{stored.codes} holds values that are no numbers: {AGAIN}")
    scale_row_O = torch.arange(rows.start, rows.stop) // form.block_rows - scale_slice[0].start
    return Part(codes, scales, scale_row_O)


def _check_shape(checkpoint: Checkpoint, piece: Piece, name: str) -> None:
    given = checkpoint.read(name, (slice(0, 2),)).tolist()
    if given != list(piece.shape):
        raise JobError(f"{name} says {given}, not {list(piece.shape)}: {AGAIN}")


def _has_nan(codes: torch.Tensor) -> bool:
    """Of e4m3: the largest byte of either sign. Two reductions, no copy."""
    if codes.numel() == 0:
        return False
    return int(codes.max()) == 0xFF or int(codes.view(torch.int8).max()) == 0x7F


def read_expanded(
    checkpoint: Checkpoint, piece: Piece, stored: Stored, dtype: torch.dtype
) -> torch.Tensor:
    """The piece's values in `dtype`, wherever they begin and end."""
    rows, columns = piece.slices
    block = stored.form.block_columns
    first, last = columns.start // block * block, -(-columns.stop // block) * block
    wide = slice(first, min(last, piece.shape[1]))
    part = read_part(checkpoint, replace(piece, slices=(rows, wide)), stored)
    scheme = Scheme(
        coding=stored.form.coding,
        block=stored.form.block_columns,
        scale_rows=len(part.scales),
        scale_dtype=part.scales.dtype,
        dtype=dtype,
    )
    weight = Quantised(
        scheme=scheme,
        codes=part.codes,
        scales=part.scales,
        scale_row_O=part.scale_row_O.to(torch.int32),
    )
    return weight.expanded()[:, columns.start - first : columns.stop - first]


def read_quantised(
    checkpoint: Checkpoint,
    pieces: Sequence[Piece],
    stored: Sequence[Stored],
    scheme: Scheme,
    shape: tuple[int, ...],
    device: torch.device,
    staging: Staging,
) -> Quantised:
    """The weight of `shape` that the pieces make, stacked in their order."""
    *stack, outputs, inputs = shape
    per = scheme.coding.values_per_byte
    blocks = -(-inputs // scheme.block)
    codes = torch.empty(*stack, outputs, inputs // per, dtype=torch.uint8, device=device)
    scales = torch.empty(*stack, scheme.scale_rows, blocks, dtype=scheme.scale_dtype, device=device)
    scale_row_O = torch.empty(outputs, dtype=torch.int32)
    places: dict[int | None, tuple[int, int]] = {}
    for piece, each in zip(pieces, stored, strict=True):
        part = read_part(checkpoint, piece, each)
        row, scale_row = places.get(piece.expert, (0, 0))
        stop, scale_stop = row + len(part.codes), scale_row + len(part.scales)
        at = (slice(None),) if piece.expert is None else (piece.expert,)
        staging.copy(codes[at][row:stop], part.codes)
        staging.copy(scales[at][scale_row:scale_stop], _as(part.scales, scheme.scale_dtype))
        scale_row_O[row:stop] = part.scale_row_O + scale_row
        places[piece.expert] = (stop, scale_stop)
    wanted = {(outputs, scheme.scale_rows)}
    assert set(places.values()) == wanted, f"{pieces[0].target}: {places} of {wanted}"
    is_own = scheme.scale_rows == outputs
    return Quantised(
        scheme=scheme,
        codes=codes,
        scales=scales,
        scale_row_O=None if is_own else scale_row_O.to(device),
    )


def _as(scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Exponents become the powers that they stand for where the others are no exponents."""
    is_exponent = scales.dtype == torch.uint8 and dtype != torch.uint8
    return scale_factors(scales) if is_exponent else scales
