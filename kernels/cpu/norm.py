"""RMSNorm and rotary embedding in few calls. Shapes: see `batchmla.kernels.ops`."""

import torch

from batchmla.kernels.ops import RopeLayout


def norm(x_TM: torch.Tensor, weight_M: torch.Tensor, eps: float) -> torch.Tensor:
    """RMSNorm; the mean of squares comes from one reduction in float32."""
    width = x_TM.shape[-1]
    length_T1 = torch.linalg.vector_norm(x_TM, dim=-1, keepdim=True, dtype=torch.float32)
    scale_T1 = length_T1.square_().div_(width).add_(eps).rsqrt_()
    return torch.mul(x_TM.float() * scale_T1, weight_M).to(x_TM.dtype)


def add_norm(
    x_TM: torch.Tensor, residual_TM: torch.Tensor, weight_M: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Residual addition, then RMSNorm."""
    total_TM = x_TM + residual_TM
    return norm(total_TM, weight_M, eps), total_TM


def rope(
    x_THR: torch.Tensor, cos_TR: torch.Tensor, sin_TR: torch.Tensor, layout: RopeLayout
) -> None:
    """Rotates in place, both halves from one float32 copy."""
    cos_T1R, sin_T1R = cos_TR[:, None], sin_TR[:, None]
    if layout is RopeLayout.INTERLEAVED:
        first, second = x_THR[..., 0::2], x_THR[..., 1::2]
    else:
        first, second = x_THR.chunk(2, dim=-1)
    a, b = first.float(), second.float()
    rotated = torch.addcmul(a * cos_T1R, b, sin_T1R, value=-1)
    second.copy_(torch.addcmul(b * cos_T1R, a, sin_T1R))
    first.copy_(rotated)
