"""Cached rows as records of bytes, all rows of a call at once. Shapes: see
`batchmla.kernels.sparse_ops`."""

import torch
import torch.nn.functional as F

from batchmla.kernels.sparse_ops import Record

E4M3_MOST = 448.0
LEAST_MAGNITUDE = 1e-4
FLOAT_BIAS, FLOAT_FRACTION_BITS = 127, 23  # of float32


def tile_exponents(tiles_NXT: torch.Tensor) -> torch.Tensor:
    """[N, tiles] int32, biased: of the least power of two that brings each tile's magnitudes within
    e4m3."""
    most_NX = tiles_NXT.abs().amax(dim=-1).clamp_(min=LEAST_MAGNITUDE) / E4M3_MOST
    mantissa_NX, exponent_NX = torch.frexp(most_NX)  # most = mantissa * 2**exponent, from 0.5 on
    exponent_NX = exponent_NX - (mantissa_NX == 0.5).to(torch.int32)
    return (exponent_NX + FLOAT_BIAS).clamp_(1, 2 * FLOAT_BIAS)


def powers_of_two(exponents_NX: torch.Tensor) -> torch.Tensor:
    """float32 of biased exponents."""
    return (exponents_NX << FLOAT_FRACTION_BITS).view(torch.float32)


def write_record(
    cache_PBY: torch.Tensor, slots_T: torch.Tensor, rows_TX: torch.Tensor, record: Record
) -> None:
    """Quantised as tiles, laid side by side as bytes, copied by index."""
    wide_TX = rows_TX.float()
    pad = record.num_tiles * record.tile - record.values
    padded_TX = F.pad(wide_TX[:, : record.values], (0, pad))
    tiles_TXT = padded_TX.view(len(wide_TX), -1, record.tile)
    exponents_TX = tile_exponents(tiles_TXT)
    scales_TX = powers_of_two(exponents_TX)
    codes_TX = (tiles_TXT / scales_TX[..., None]).flatten(1)[:, : record.values]
    values_TX = codes_TX.to(torch.float8_e4m3fn).view(torch.uint8)
    tail_TX = wide_TX[:, record.values :].to(torch.bfloat16).contiguous().view(torch.uint8)
    bytes_TX = exponents_TX.to(torch.uint8) if record.has_e8m0 else scales_TX.view(torch.uint8)
    scale_bytes_TX = F.pad(bytes_TX, (0, record.pad))
    if record.scales_last:
        data_PBX, scales_PBX = page_parts(cache_PBY, record)
        pages_T, places_T = slots_T // cache_PBY.shape[1], slots_T % cache_PBY.shape[1]
        data_PBX[pages_T, places_T] = torch.cat((values_TX, tail_TX), dim=1)
        scales_PBX[pages_T, places_T] = scale_bytes_TX
        return
    rows_TY = torch.cat((values_TX, scale_bytes_TX, tail_TX), dim=1)
    cache_PBY.flatten(0, 1).index_copy_(0, slots_T, rows_TY)


def page_parts(cache_PBY: torch.Tensor, record: Record) -> tuple[torch.Tensor, torch.Tensor]:
    """Views of data [P, B, values + tail bytes] and scales [P, B, scale bytes] that lie apart in
    each page."""
    num_pages, num_rows, row_bytes = cache_PBY.shape
    flat_PX = cache_PBY.view(num_pages, num_rows * row_bytes)
    border = num_rows * (record.values + record.tail_bytes)
    return (
        flat_PX[:, :border].view(num_pages, num_rows, record.values + record.tail_bytes),
        flat_PX[:, border:].view(num_pages, num_rows, record.scale_bytes),
    )


def read_record(
    cache_PBY: torch.Tensor, slots_N: torch.Tensor, record: Record, dtype: torch.dtype
) -> torch.Tensor:
    """One gather, one product."""
    if record.scales_last:
        pages_N, places_N = slots_N // cache_PBY.shape[1], slots_N % cache_PBY.shape[1]
        data_NX, scales_NX = (part[pages_N, places_N] for part in page_parts(cache_PBY, record))
        return dequantise(data_NX, scales_NX, record, dtype)
    return plain_rows(cache_PBY.flatten(0, 1).index_select(0, slots_N), record, dtype)


def plain_rows(rows_NY: torch.Tensor, record: Record, dtype: torch.dtype) -> torch.Tensor:
    """Records whose scales lie within the row, over the last dimension."""
    assert not record.scales_last, "scales behind the page's rows are not the row's"
    border = record.values + record.scale_bytes
    data_NX = rows_NY[..., : record.values]
    if record.tail:
        data_NX = torch.cat((data_NX, rows_NY[..., border:]), dim=-1)
    return dequantise(data_NX, rows_NY[..., record.values : border], record, dtype)


def dequantise(
    data_NX: torch.Tensor, scale_bytes_NX: torch.Tensor, record: Record, dtype: torch.dtype
) -> torch.Tensor:
    """e4m3 times the factor of its tile, then the tail, over the last dimension."""
    codes_NX = data_NX[..., : record.values].contiguous().view(torch.float8_e4m3fn).float()
    scales_NX = scale_bytes_NX[..., : record.scale_bytes - record.pad].contiguous()
    if record.has_e8m0:
        factors_NX = powers_of_two(scales_NX.to(torch.int32))
    else:
        factors_NX = scales_NX.view(torch.float32)
    if record.num_tiles == 1:
        values_NX = codes_NX.mul_(factors_NX).to(dtype)
    else:
        pad = record.num_tiles * record.tile - record.values
        tiles = F.pad(codes_NX, (0, pad)).view(*codes_NX.shape[:-1], -1, record.tile)
        values_NX = tiles.mul(factors_NX[..., None]).flatten(-2)[..., : record.values].to(dtype)
    if record.tail == 0:
        return values_NX
    tail_NX = data_NX[..., record.values :].contiguous().view(torch.bfloat16).to(dtype)
    return torch.cat((values_NX, tail_NX), dim=-1)
