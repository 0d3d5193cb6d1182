"""MiniMax-M3's feed-forward layers: SwiGLU-OAI, alone and in experts. T tokens, M width, E experts,
A active ones."""

from dataclasses import dataclass

import torch

from batchmla.kernels.block_sparse_ops import OaiGate
from batchmla.kernels.ops import Ops, PackKind, RouterDims
from batchmla.layers.across import sum_over_groups
from batchmla.layers.block import Block, Weight
from batchmla.layers.experts import SpreadExperts
from batchmla.layers.linear import ColLinear, RowLinear
from batchmla.layers.moe import Router
from batchmla.parallel import Par


@dataclass(frozen=True, slots=True, kw_only=True)
class OaiMoeDims:
    """Whole sizes of a routed layer."""

    width: int
    num_experts: int
    expert_width: int
    shared_width: int
    router: RouterDims
    gate: OaiGate


class OaiMlp(Block):
    """gate and up are one product; with `is_summed` false the caller sums over the ranks of a
    group. `group_unit` as for `GatedMlp`."""

    def __init__(
        self,
        par: Par,
        ops: Ops,
        width: int,
        ffn_width: int,
        gate: OaiGate,
        *,
        is_summed: bool = True,
        group_unit: int | None = None,
    ) -> None:
        self.group_unit = group_unit
        self._groups = 1
        if group_unit is not None:
            self._groups = par.placement.common(par.placement.local(ffn_width), group_unit)
        self.up = ColLinear(par, ops, width, ffn_width, ffn_width, groups=self._groups)
        self.down = RowLinear(par, ops, ffn_width, width, is_summed=False, groups=self._groups)
        self._act_mul = ops.blocks.act_mul
        self._gate = gate
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
        return self.down.forward(self._act_mul(self.up.forward(x_TM), self._gate))


class OaiMoe(Block):
    """Σ weight · expert(x) + shared(x); experts are dealt to ranks or cut by ffn width, and
    summed once over the ranks of an attention group."""

    def __init__(self, par: Par, ops: Ops, dims: OaiMoeDims) -> None:
        local = par.placement.local_expert_features(dims.expert_width)
        held = par.placement.local_experts(dims.num_experts)
        share = dims.router.active / dims.num_experts
        self.router = Router(ops, dims.width, dims.num_experts, dims.router, has_bias=True)
        self.experts_up = Weight(
            held, 2 * local, dims.width, kind=PackKind.EXPERTS_UP, active_share=share
        )
        self.experts_down = Weight(
            held, dims.width, local, kind=PackKind.EXPERTS_DOWN, active_share=share
        )
        self.shared = OaiMlp(par, ops, dims.width, dims.shared_width, dims.gate, is_summed=False)
        self.spread = SpreadExperts(par, dims.num_experts, dims.width, dims.router.active)
        self._gate = dims.gate
        self._par = par
        self._experts = ops.blocks.experts

    def forward(self, x_TM: torch.Tensor) -> torch.Tensor:
        """[T, M] → [T, M]."""
        weights_TA, ids_TA = self.router.forward(x_TM)
        out_TM = self.spread.forward(self._run, x_TM, weights_TA, ids_TA)
        return self._par.sum(out_TM + self.shared.forward(x_TM))

    def serve(self, dtype: torch.dtype, device: torch.device) -> None:
        """See `Serving`."""
        self.spread.serve_with(self._run, dtype, device)

    def _run(
        self, x_TM: torch.Tensor, weights_TA: torch.Tensor, ids_TA: torch.Tensor
    ) -> torch.Tensor:
        up, down = self.experts_up.packed, self.experts_down.packed
        return self._experts(x_TM, weights_TA, ids_TA, up, down, self._gate)
