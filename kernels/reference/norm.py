"""RMSNorm and rotary embedding, as formulas. Shapes: see `batchmla.kernels.ops`."""

import torch

from batchmla.kernels.ops import RopeLayout


def norm(x_TM: torch.Tensor, weight_M: torch.Tensor, eps: float) -> torch.Tensor:
    """RMSNorm (Zhang and Sennrich 2019, eq. 4)."""
    x = x_TM.float()
    mean_T1 = (x * x).sum(dim=-1, keepdim=True) / x.shape[-1]
    return (weight_M.float() * x / torch.sqrt(mean_T1 + eps)).to(x_TM.dtype)


def add_norm(
    x_TM: torch.Tensor, residual_TM: torch.Tensor, weight_M: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Residual addition, then RMSNorm of the rounded sum."""
    total_TM = (x_TM.float() + residual_TM.float()).to(x_TM.dtype)
    return norm(total_TM, weight_M, eps), total_TM


def rope(
    x_THR: torch.Tensor, cos_TR: torch.Tensor, sin_TR: torch.Tensor, layout: RopeLayout
) -> None:
    """Each pair (a, b) becomes (a cos - b sin, b cos + a sin) (Su et al. 2021, eq. 34)."""
    half = x_THR.shape[-1] // 2
    if layout is RopeLayout.INTERLEAVED:
        first, second = slice(0, None, 2), slice(1, None, 2)
    else:
        first, second = slice(0, half), slice(half, None)
    a, b = x_THR[..., first].float(), x_THR[..., second].float()
    cos_T1R, sin_T1R = cos_TR[:, None], sin_TR[:, None]
    rotated_a, rotated_b = a * cos_T1R - b * sin_T1R, b * cos_T1R + a * sin_T1R
    x_THR[..., first] = rotated_a.to(x_THR.dtype)
    x_THR[..., second] = rotated_b.to(x_THR.dtype)
