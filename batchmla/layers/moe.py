"""Router, routed experts and shared expert. T tokens, M width, E experts, A active ones."""

import torch

from batchmla.kernels.ops import Ops, PackKind, RouterDims
from batchmla.layers.block import Block, Weight
from batchmla.layers.mlp import GatedMlp
from batchmla.parallel import Par


class Router(Block):
    """Scores of all experts, with a bias for the choice where there is one; the same on every
    rank."""

    def __init__(
        self, ops: Ops, width: int, num_experts: int, dims: RouterDims, has_bias: bool
    ) -> None:
        self.weight = Weight(num_experts, width, is_float32=True)
        self.bias = Weight(num_experts, is_float32=True) if has_bias else None
        self.dims = dims
        self._route = ops.route

    def forward(self, x_TM: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(weights_TA float32, ids_TA)."""
        bias_E = None if self.bias is None else self.bias.tensor
        return self._route(x_TM, self.weight.tensor, bias_E, self.dims)


class Moe(Block):
    """Σ weight · expert(x) + shared(x); experts are cut by ffn width, summed once over ranks."""

    def __init__(
        self,
        par: Par,
        ops: Ops,
        *,
        width: int,
        num_experts: int,
        expert_width: int,
        shared_width: int,
        router: RouterDims,
        has_router_bias: bool,
    ) -> None:
        local = par.placement.local(expert_width, "expert features")
        share = router.active / num_experts
        self.router = Router(ops, width, num_experts, router, has_router_bias)
        self.experts_up = Weight(
            num_experts, 2 * local, width, kind=PackKind.EXPERTS_UP, active_share=share
        )
        self.experts_down = Weight(
            num_experts, width, local, kind=PackKind.EXPERTS_DOWN, active_share=share
        )
        self.shared = (
            GatedMlp(par, ops, width, shared_width, is_summed=False) if shared_width else None
        )
        self._par = par
        self._experts = ops.experts

    def forward(self, x_TM: torch.Tensor) -> torch.Tensor:
        """[T, M] → [T, M]."""
        weights_TA, ids_TA = self.router.forward(x_TM)
        out_TM = self._experts(
            x_TM, weights_TA, ids_TA, self.experts_up.packed, self.experts_down.packed
        )
        if self.shared is not None:
            out_TM = out_TM + self.shared.forward(x_TM)
        return self._par.sum(out_TM)
