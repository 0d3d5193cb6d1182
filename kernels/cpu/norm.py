"""RMSNorm and rotary embedding in few calls. Shapes: see `batchmla.kernels.ops`."""

import torch

from batchmla.kernels.ops import RopeLayout

REGISTER_FLOATS = 16  # of the widest vector registers torch is built for


def norm(x_TM: torch.Tensor, weight_M: torch.Tensor, eps: float) -> torch.Tensor:
    """RMSNorm; the mean of squares comes from one reduction in float32."""
    wide_TM = x_TM.to(torch.float32, copy=True)
    length_T1 = torch.linalg.vector_norm(wide_TM, dim=-1, keepdim=True)
    scale_T1 = length_T1.square_().div_(x_TM.shape[-1]).add_(eps).rsqrt_()
    return wide_TM.mul_(scale_T1).mul_(weight_M).to(x_TM.dtype)


def add_norm(
    x_TM: torch.Tensor, residual_TM: torch.Tensor, weight_M: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Residual addition, then RMSNorm."""
    total_TM = x_TM + residual_TM
    return norm(total_TM, weight_M, eps), total_TM


def rope(
    x_THR: torch.Tensor, cos_TR: torch.Tensor, sin_TR: torch.Tensor, layout: RopeLayout
) -> None:
    """Rotates in place, from one float32 copy; neighbouring pairs as complex numbers.

    Rows of whole vector registers only: the rest of a register is multiplied with other rounding,
    and a row's bits must not depend on where it stands.
    """
    if layout is RopeLayout.INTERLEAVED and x_THR.shape[-1] % REGISTER_FLOATS == 0:
        wide_THR = x_THR.to(torch.float32, copy=True, memory_format=torch.contiguous_format)
        pairs_THR = torch.view_as_complex(wide_THR.view(*wide_THR.shape[:-1], -1, 2))
        pairs_THR.mul_(torch.complex(cos_TR, sin_TR)[:, None])
        x_THR.copy_(wide_THR)
        return
    rotate_halves(x_THR, cos_TR, sin_TR, layout)


def rotate_halves(
    x_THR: torch.Tensor, cos_TR: torch.Tensor, sin_TR: torch.Tensor, layout: RopeLayout
) -> None:
    """Rotates in place, both halves from one float32 copy; rounds alike wherever a row stands."""
    cos_T1R, sin_T1R = cos_TR[:, None], sin_TR[:, None]
    if layout is RopeLayout.INTERLEAVED:
        first, second = x_THR[..., 0::2], x_THR[..., 1::2]
    else:
        first, second = x_THR.chunk(2, dim=-1)
    a, b = first.float(), second.float()
    rotated = torch.addcmul(a * cos_T1R, b, sin_T1R, value=-1)
    second.copy_(torch.addcmul(b * cos_T1R, a, sin_T1R))
    first.copy_(rotated)
