"""Router, routed experts and shared expert. T tokens, M width, E experts, A active ones."""

import torch

from batchmla.kernels.ops import Ops, PackKind, RouterDims
from batchmla.layers.block import Block, Weight
from batchmla.layers.experts import SpreadExperts
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
    """Σ weight · expert(x) + shared(x); experts are dealt to ranks or cut by ffn width, and
    summed once over the ranks of an attention group. The shared one is whole in every group: its
    rows stay where they are."""

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
        local = par.placement.local_expert_features(expert_width)
        held, share = par.placement.local_experts(num_experts), router.active / num_experts
        self.router = Router(ops, width, num_experts, router, has_router_bias)
        self.experts_up = Weight(
            held, 2 * local, width, kind=PackKind.EXPERTS_UP, active_share=share
        )
        self.experts_down = Weight(
            held, width, local, kind=PackKind.EXPERTS_DOWN, active_share=share
        )
        self.shared = (
            GatedMlp(par, ops, width, shared_width, is_summed=False) if shared_width else None
        )
        self.spread = SpreadExperts(par, num_experts, width, router.active)
        self._par = par
        self._experts = ops.experts
        self._add = ops.add

    def forward(self, x_TM: torch.Tensor) -> torch.Tensor:
        """[T, M] → [T, M]."""
        weights_TA, ids_TA = self.router.forward(x_TM)
        out_TM = self.spread.forward(self._run, x_TM, weights_TA, ids_TA)
        if self.shared is not None:
            out_TM = self._add(out_TM, self.shared.forward(x_TM))
        return self._par.sum(out_TM)

    def serve(self, dtype: torch.dtype, device: torch.device) -> None:
        """See `Serving`."""
        self.spread.serve_with(self._run, dtype, device)

    def _run(
        self, x_TM: torch.Tensor, weights_TA: torch.Tensor, ids_TA: torch.Tensor
    ) -> torch.Tensor:
        return self._experts(
            x_TM, weights_TA, ids_TA, self.experts_up.packed, self.experts_down.packed
        )
