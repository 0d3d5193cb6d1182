"""RMSNorm: alone, with a residual addition, over a width that ranks share; LayerNorm. T tokens, M
width."""

import torch

from batchmla.kernels.ops import Ops
from batchmla.layers.block import Block, Weight
from batchmla.parallel import Par


class RmsNorm(Block):
    """w · x / sqrt(mean(x²) + eps).

    With an `offset` the checkpoint holds w - offset; w is kept in float32 then, for a sum near 1
    would lose what is small in it.
    """

    def __init__(self, ops: Ops, width: int, eps: float, offset: float = 0.0) -> None:
        self.weight = Weight(width, is_float32=bool(offset), offset=offset)
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


class FullWidthNorms(Block):
    """RMSNorms of several vectors, each over its whole width, of which a rank holds its share.

    One sum over ranks serves all of them.
    """

    def __init__(
        self, par: Par, ops: Ops, eps: float, head_dim: int, heads: tuple[int, ...]
    ) -> None:
        """`heads` of each vector, on all ranks; of those that ranks outnumber they hold copies."""
        placement = par.placement
        self.weights = tuple(
            Weight(placement.local_or_copied(each, "heads") * head_dim) for each in heads
        )
        self.eps = eps
        self._summed = [each * placement.copies(each) * head_dim for each in heads]
        self._par = par
        self._norm = ops.norm

    def forward(self, *shares: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """A norm of each [T, M], M this rank's."""
        pairs = list(zip(shares, self.weights, strict=True))
        if self._par.placement.tensor == 1:
            return tuple(self._norm(x_TM, weight.tensor, self.eps) for x_TM, weight in pairs)
        squares_TN = self._par.sum(
            torch.stack([x_TM.float().square().sum(dim=1) for x_TM in shares], dim=1)
        )
        means_TN = squares_TN / squares_TN.new_tensor(self._summed)
        scales_TN1 = means_TN.add_(self.eps).rsqrt_()[:, :, None]
        return tuple(
            (x_TM.float() * scales_TN1[:, index] * weight.tensor.float()).to(x_TM.dtype)
            for index, (x_TM, weight) in enumerate(pairs)
        )


class LayerNorm(Block):
    """w · (x - mean) / sqrt(variance + eps) + b."""

    def __init__(self, ops: Ops, width: int, eps: float) -> None:
        self.weight = Weight(width)
        self.bias = Weight(width)
        self.eps = eps
        self._norm = ops.sparse.layer_norm

    def forward(self, x_TM: torch.Tensor) -> torch.Tensor:
        """The norm of x."""
        return self._norm(x_TM, self.weight.tensor, self.bias.tensor, self.eps)
