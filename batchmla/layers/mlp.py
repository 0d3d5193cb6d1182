"""The gated MLP: down( silu(gate x) · up x ). T tokens, M width, F ffn width."""

import torch

from batchmla.kernels.ops import Ops
from batchmla.layers.block import Block
from batchmla.layers.linear import ColLinear, RowLinear
from batchmla.parallel import Par


class GatedMlp(Block):
    """gate and up are one product; with `is_summed` false the caller sums over ranks."""

    def __init__(
        self, par: Par, ops: Ops, width: int, ffn_width: int, *, is_summed: bool = True
    ) -> None:
        self.up = ColLinear(par, ops, width, ffn_width, ffn_width)
        self.down = RowLinear(par, ops, ffn_width, width, is_summed=is_summed)
        self._act_mul = ops.act_mul

    def forward(self, x_TM: torch.Tensor) -> torch.Tensor:
        """[T, M] → [T, M]."""
        return self.down.forward(self._act_mul(self.up.forward(x_TM)))
