"""Random quantised weights, for planning and for measuring without a checkpoint."""

import torch

from batchmla.kernels.quant import Coding, Quantised, Scheme

E4M3_SPREAD = 64.0  # standard deviation of the codes' values, far from both ends
# of values drawn evenly from the 16 that four bits hold
FOUR_BIT_SPREAD = {Coding.E2M1: 2.93, Coding.INT4: 4.64}


def random_quantised(
    scheme: Scheme, shape: tuple[int, ...], generator: torch.Generator, device: torch.device
) -> Quantised:
    """Values of about the variance 1/in, all scales alike."""
    *stack, outputs, inputs = shape
    if scheme.coding is Coding.E4M3:
        values = torch.empty(*stack, outputs, inputs).normal_(0, E4M3_SPREAD, generator=generator)
        codes, spread = values.to(torch.float8_e4m3fn).view(torch.uint8), E4M3_SPREAD
    else:
        packed = (*stack, outputs, inputs // scheme.coding.values_per_byte)
        codes = torch.randint(0, 256, packed, dtype=torch.uint8, generator=generator)
        spread = FOUR_BIT_SPREAD[scheme.coding]
    scale = torch.tensor(inputs**-0.5 / spread)
    blocks = (*stack, scheme.scale_rows, -(-inputs // scheme.block))
    if scheme.scale_dtype == torch.uint8:
        scale = (scale.log2().round() + 127).to(torch.uint8)
    rows = torch.arange(outputs, dtype=torch.int32) * scheme.scale_rows // outputs
    return Quantised(
        scheme=scheme,
        codes=codes.to(device),
        scales=scale.to(scheme.scale_dtype).expand(blocks).contiguous().to(device),
        scale_row_O=None if scheme.scale_rows == outputs else rows.to(torch.int32).to(device),
    )
