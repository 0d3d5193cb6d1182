"""RMSNorm, alone and fused with the residual addition. T tokens, M width."""

import torch

from batchmla.kernels.ops import Ops
from batchmla.layers.block import Block, Weight


class RmsNorm(Block):
    """w · x / sqrt(mean(x²) + eps)."""

    def __init__(self, ops: Ops, width: int, eps: float) -> None:
        self.weight = Weight(width)
        self.eps = eps
        self._norm = ops.norm
        self._add_norm = ops.add_norm

    def forward(self, x_TM: torch.Tensor) -> torch.Tensor:
        """The norm of x."""
        return self._norm(x_TM, self.weight.tensor, self.eps)

    def add(
        self, x_TM: torch.Tensor, residual_TM: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(norm(x + residual), x + residual)."""
        return self._add_norm(x_TM, residual_TM, self.weight.tensor, self.eps)
