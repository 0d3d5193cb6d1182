"""Router, routed experts and shared expert. T tokens, M width, E experts, A active ones."""

import torch

from batchmla.kernels.ops import Ops, PackKind, RouterDims
from batchmla.layers.block import Block, Weight
from batchmla.layers.mlp import GatedMlp
from batchmla.parallel import Par


class Router(Block):
    """Sigmoid scores with a correction bias for the choice; the same on every rank."""

    def __init__(self, ops: Ops, width: int, num_experts: int, dims: RouterDims) -> None:
        self.weight = Weight(num_experts, width, is_float32=True)
        self.bias = Weight(num_experts, is_float32=True)
        self.dims = dims
        self._route = ops.route

    def forward(self, x_TM: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(weights_TA float32, ids_TA)."""
        return self._route(x_TM, self.weight.tensor, self.bias.tensor, self.dims)


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
    ) -> None:
        local = par.placement.local(expert_width, "expert features")
        share = router.active / num_experts
        self.router = Router(ops, width, num_experts, router)
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
