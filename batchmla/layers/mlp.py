"""The gated MLP: down( act(gate x) · up x ). T tokens, M width, F ffn width."""

import torch

from batchmla.kernels.ops import ActMulOp, Ops
from batchmla.layers.across import sum_over_groups
from batchmla.layers.block import Block
from batchmla.layers.linear import ColLinear, RowLinear
from batchmla.parallel import Par


class GatedMlp(Block):
    """gate and up are one product; with `is_summed` false the caller sums over the ranks of a
    group. `act_mul` makes [T, 2F] one [T, F], by default by silu.

    With a `group_unit` the attention groups cut it among them, where each gets whole units of its
    features; every rank must call `forward` or `serve` then.
    """

    def __init__(
        self,
        par: Par,
        ops: Ops,
        width: int,
        ffn_width: int,
        *,
        is_summed: bool = True,
        group_unit: int | None = None,
        act_mul: ActMulOp | None = None,
    ) -> None:
        self.group_unit = group_unit
        self._groups = 1
        if group_unit is not None:
            self._groups = par.placement.common(par.placement.local(ffn_width), group_unit)
        self.up = ColLinear(par, ops, width, ffn_width, ffn_width, groups=self._groups)
        self.down = RowLinear(par, ops, ffn_width, width, is_summed=False, groups=self._groups)
        self._act_mul = act_mul or ops.act_mul
        self._par = par
        self._is_summed = is_summed
        self._width = width

    def forward(self, x_TM: torch.Tensor) -> torch.Tensor:
        """[T, M] → [T, M]."""
        y_TM = self._run(x_TM) if self._groups == 1 else self._run_common(x_TM)
        return self._par.sum(y_TM) if self._is_summed else y_TM

    def serve(self, dtype: torch.dtype, device: torch.device) -> None:
        """See `Serving`."""
        if self._groups > 1:
            self._run_common(torch.empty(0, self._width, dtype=dtype, device=device))

    def _run_common(self, x_TM: torch.Tensor) -> torch.Tensor:
        return sum_over_groups(self._par, self._run, x_TM)

    def _run(self, x_TM: torch.Tensor) -> torch.Tensor:
        return self.down.forward(self._act_mul(self.up.forward(x_TM)))
