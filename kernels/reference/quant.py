"""Quantised weights, block by block. Shapes: see `batchmla.kernels.quant`."""

import torch

from batchmla.kernels.quant import E2M1_VALUES, INT4_OFFSET, Coding, Quantised


def expand(weight: Quantised) -> torch.Tensor:
    """The values, float32."""
    if weight.codes.dim() > 2:
        return torch.stack([expand(weight.matrix(at)) for at in range(len(weight.codes))])
    outputs, inputs = weight.shape
    values_OI = _values(weight)
    block, expanded_OI = weight.scheme.block, torch.empty(outputs, inputs)
    for output in range(outputs):
        row = output if weight.scale_row_O is None else int(weight.scale_row_O[output])
        for at in range(0, inputs, block):
            scale = _scale(weight.scales[row, at // block])
            expanded_OI[output, at : at + block] = values_OI[output, at : at + block] * scale
    return expanded_OI.to(weight.device)


def _values(weight: Quantised) -> torch.Tensor:
    """Every code on its own."""
    codes, coding = weight.codes.cpu(), weight.scheme.coding
    if coding is Coding.E4M3:
        return codes.view(torch.float8_e4m3fn).float()
    nibbles = torch.stack((codes % 16, codes // 16), dim=-1).flatten(1)
    if coding is Coding.INT4:
        return nibbles.float() - INT4_OFFSET
    magnitudes = torch.tensor(E2M1_VALUES)[(nibbles % 8).long()]
    return torch.where(nibbles >= 8, -magnitudes, magnitudes)


def _scale(scale: torch.Tensor) -> float:
    """A byte is an exponent with bias 127."""
    value = scale.item()
    return float(2.0 ** (value - 127)) if scale.dtype == torch.uint8 else float(value)
