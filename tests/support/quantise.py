"""Makes quantised tensors in every published format, and reads them back in float64, value by
value."""

from dataclasses import dataclass

import numpy as np
import torch

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Made:
    """Tensors by the ending of their names, and the float64 values that they stand for."""

    tensors: Tensors
    values: np.ndarray


def e4m3_value(byte: int) -> float:
    """By the definition: bias 7, no infinities."""
    sign = -1.0 if byte & 0x80 else 1.0
    exponent, fraction = byte >> 3 & 15, byte & 7
    if exponent == 0:
        return sign * fraction / 8 * 2.0**-6
    return sign * (1 + fraction / 8) * 2.0 ** (exponent - 7)


def e2m1_value(nibble: int) -> float:
    return -E2M1[nibble & 7] if nibble & 8 else E2M1[nibble]


E4M3_256 = np.array([e4m3_value(byte) for byte in range(256)])
E2M1_16 = np.array([e2m1_value(nibble) for nibble in range(16)])


def spread(scales_SB: np.ndarray, block: tuple[int, int], shape: tuple[int, ...]) -> np.ndarray:
    """A scale for every value."""
    return np.kron(scales_SB, np.ones(block))[: shape[0], : shape[1]]


def block_fp8(
    weight_OI: torch.Tensor,
    block: tuple[int, int] = (128, 128),
    *,
    ending: str = "weight_scale_inv",
    is_e8m0: bool = False,
) -> Made:
    """e4m3 with a float32 or e8m0 scale a block; blocks at the edges may be partial."""
    rows, columns = weight_OI.shape
    counts = -(-rows // block[0]), -(-columns // block[1])
    padded = np.zeros((counts[0] * block[0], counts[1] * block[1]))
    padded[:rows, :columns] = np.abs(weight_OI.double().numpy())
    most_SB = padded.reshape(counts[0], block[0], counts[1], block[1]).max(axis=(1, 3))
    scales_SB = np.maximum(most_SB, 1e-4) / 448
    if is_e8m0:
        exponents_SB = np.ceil(np.log2(scales_SB))
        scales_SB = 2.0**exponents_SB
        held = torch.from_numpy((exponents_SB + 127).astype(np.uint8)).view(torch.float8_e8m0fnu)
    else:
        held = torch.from_numpy(scales_SB).float()
        scales_SB = held.double().numpy()
    scaled = weight_OI.double().numpy() / spread(scales_SB, block, weight_OI.shape)
    codes = torch.from_numpy(scaled).float().to(torch.float8_e4m3fn)
    values = E4M3_256[codes.view(torch.uint8).numpy()]
    return Made({"weight": codes, ending: held}, values * spread(scales_SB, block, weight_OI.shape))


def _nearest(values: np.ndarray, table: np.ndarray) -> np.ndarray:
    return np.abs(values[..., None] - table).argmin(axis=-1).astype(np.uint8)


def group_fp4(weight_OI: torch.Tensor, *, is_compressed: bool = False, group: int = 32) -> Made:
    """e2m1, two a byte, with an e8m0 scale for every 32 columns of a row."""
    rows, columns = weight_OI.shape
    wide = weight_OI.double().numpy()
    most = np.abs(wide).reshape(rows, -1, group).max(axis=2)
    exponents = np.ceil(np.log2(np.maximum(most, 1e-6) / 6))
    factors = spread(2.0**exponents, (1, group), (rows, columns))
    nibbles = _nearest(wide / factors, E2M1_16)
    packed = torch.from_numpy(nibbles[:, 0::2] | nibbles[:, 1::2] << 4)
    scales = torch.from_numpy((exponents + 127).astype(np.uint8))
    if is_compressed:
        tensors = {"weight_packed": packed, "weight_scale": scales}
    else:
        tensors = {
            "weight": packed.view(torch.int8),
            "scale": scales.view(torch.float8_e8m0fnu),
        }
    return Made(tensors, E2M1_16[nibbles] * factors)


def group_int4(
    weight_OI: torch.Tensor, group: int = 32, scale_dtype: torch.dtype = torch.bfloat16
) -> Made:
    """Eight integers from -8 to 7 in an int32, the first in its lowest bits."""
    rows, columns = weight_OI.shape
    wide = weight_OI.double().numpy()
    most = np.abs(wide).reshape(rows, -1, group).max(axis=2)
    held = torch.from_numpy(np.maximum(most, 1e-6) / 7.5).to(scale_dtype)
    factors = spread(held.double().numpy(), (1, group), (rows, columns))
    integers = np.clip(np.rint(wide / factors), -8, 7)
    words = np.zeros((rows, columns // 8), np.int64)
    for place in range(8):
        words |= (integers[:, place::8].astype(np.int64) + 8) << 4 * place
    tensors = {
        "weight_packed": torch.from_numpy(words.astype(np.uint32).view(np.int32)),
        "weight_scale": held,
        "weight_shape": torch.tensor([rows, columns], dtype=torch.int64),
    }
    return Made(tensors, integers * factors)
