"""Linears with e4m3 weights in blocks of 128 inputs: torch's block-scaled product where a device
has it, else our own. T rows, O outputs, I inputs, S rows of scales, B blocks of inputs.

Which layout of a weight's scales torch's product takes differs between releases: both are tried
once a device on a small case, and what is wrong there or raises is not used.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F

from batchmla.kernels.ops import LinearOp, Packed, PackKind
from batchmla.kernels.quant import Coding, Quantised, Scheme
from batchmla.kernels.triton.expert_tiles import EXACT_TOKENS, TOKENS
from batchmla.kernels.triton.moe_gemm_fp8 import BLOCK_K, dense_product, down_shape, reads
from batchmla.kernels.triton.quant import quantise

ALIGNMENT = 16  # of features, in bytes of codes
MULTIPLE = 4  # of rows and of blocks of inputs: what 16 bytes of scales hold
TRIAL_ROWS, TRIAL_SHAPE, TRIAL_ERROR = 16, (384, 512), 1e-2

Product = Callable[
    [torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.dtype], torch.Tensor
]
"""(codes [T, I], scales [T, B], codes [I, O], scales of those, dtype) → [T, O]."""
Layout = Callable[[torch.Tensor], torch.Tensor]
"""Scales [S, B] of a weight as the product takes them."""


def block_product(
    codes_TI: torch.Tensor,
    scales_TB: torch.Tensor,
    codes_IO: torch.Tensor,
    scales: torch.Tensor,
    dtype: torch.dtype,
) -> torch.Tensor:
    """torch's; raises where it has none."""
    if not hasattr(F, "scaled_mm"):
        return torch._scaled_mm(codes_TI, codes_IO, scales_TB, scales, out_dtype=dtype)
    kinds = F.ScalingType
    return F.scaled_mm(
        codes_TI, codes_IO, scales_TB, kinds.BlockWise1x128, scales, kinds.BlockWise128x128,
        output_dtype=dtype,
    )  # fmt: skip


LAYOUTS: tuple[Layout, ...] = (torch.Tensor.t, torch.Tensor.contiguous)


class Fp8Linears:
    """`LinearOp` over quantised weights; what these products do not serve goes to `others`."""

    def __init__(
        self, others: LinearOp, *, is_exact: bool = False, product: Product = block_product
    ) -> None:
        """`is_exact`: a row's result does not depend on how many others there are."""
        self._others = others
        self._is_exact = is_exact
        self._product = product
        self._layouts: dict[torch.device, Layout | None] = {}

    def linear(
        self, x_TI: torch.Tensor, weight: Packed, bias_O: torch.Tensor | None
    ) -> torch.Tensor:
        """See `LinearOp`."""
        quantised = weight.quantised
        if quantised is None or len(weight.shape) != 2 or not reads(quantised):
            return self._others(x_TI, weight, bias_O)
        is_logits = weight.kind is PackKind.LOGITS
        if not is_logits and not self._is_exact and bias_O is None and is_square(x_TI, quantised):
            layout = self._layout(x_TI.device)
            if layout is not None:
                return self._multiply(x_TI, quantised, layout)
        dtype = torch.float32 if is_logits else x_TI.dtype
        tokens = EXACT_TOKENS if self._is_exact else _tokens(len(x_TI))
        return dense_product(x_TI, quantised, bias_O, dtype, down_shape(tokens))

    def _multiply(self, x_TI: torch.Tensor, weight: Quantised, layout: Layout) -> torch.Tensor:
        codes_TI, scales_TB = quantise(x_TI)
        codes_IO = weight.codes.view(torch.float8_e4m3fn).t()
        return self._product(codes_TI, scales_TB, codes_IO, layout(weight.scales), x_TI.dtype)

    def _layout(self, device: torch.device) -> Layout | None:
        """The one that works there, tried once."""
        if device not in self._layouts:
            if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
                return None  # a trial reads its result
            self._layouts[device] = self._try(device)
        return self._layouts[device]

    def _try(self, device: torch.device) -> Layout | None:
        weight, x_TI = _trial(device)
        wanted_TO = dense_product(x_TI, weight, None, torch.float32, down_shape(TOKENS[0]))
        for layout in LAYOUTS:
            try:
                found_TO = self._multiply(x_TI, weight, layout).float()
            except (RuntimeError, ValueError, TypeError, NotImplementedError):
                continue
            if (found_TO - wanted_TO).norm() <= TRIAL_ERROR * wanted_TO.norm():
                return layout
        return None


def is_square(x_TI: torch.Tensor, weight: Quantised) -> bool:
    """Whether scales are float32, one for 128 x 128 values from the first on, and all sizes are
    such that torch's product can read them."""
    outputs, inputs = weight.shape
    scheme = weight.scheme
    return (
        scheme.scale_dtype == torch.float32
        and (scheme.row_unit % BLOCK_K == 0 or scheme.row_unit == outputs <= BLOCK_K)
        and scheme.scale_rows == -(-outputs // BLOCK_K)
        and x_TI.dtype == torch.bfloat16
        and not (outputs % ALIGNMENT or inputs % BLOCK_K)
        and not (len(x_TI) % MULTIPLE or inputs // BLOCK_K % MULTIPLE)
        and len(x_TI) > 0
    )


def _tokens(num_rows: int) -> int:
    return next((tokens for tokens in TOKENS if num_rows <= tokens), TOKENS[-1])


def _trial(device: torch.device) -> tuple[Quantised, torch.Tensor]:
    """A matrix whose blocks' scales differ by much, and rows."""
    outputs, inputs = TRIAL_SHAPE
    rows, blocks = outputs // BLOCK_K, inputs // BLOCK_K
    values_OI = torch.linspace(-3, 3, outputs * inputs, device=device).view(outputs, inputs)
    steps = torch.arange(rows * blocks, device=device, dtype=torch.float32)
    scheme = Scheme(
        coding=Coding.E4M3, block=BLOCK_K, scale_rows=rows, scale_dtype=torch.float32,
        dtype=torch.bfloat16, row_unit=BLOCK_K,
    )  # fmt: skip
    weight = Quantised(
        scheme=scheme,
        codes=values_OI.cos().to(torch.float8_e4m3fn).view(torch.uint8),
        scales=(1 + steps * 5 % 7).view(rows, blocks),
        scale_row_O=torch.arange(outputs, device=device, dtype=torch.int32) // BLOCK_K,
    )
    x_TI = torch.linspace(0, 99, TRIAL_ROWS * inputs, device=device).view(-1, inputs).sin()
    return weight, x_TI.to(torch.bfloat16)
