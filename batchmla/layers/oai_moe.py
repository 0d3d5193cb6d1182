"""MiniMax-M3's feed-forward layers: SwiGLU-OAI, alone and in experts. T tokens, M width, E experts,
A active ones."""

from dataclasses import dataclass
from functools import partial

import torch

from batchmla.kernels.block_sparse_ops import OaiGate
from batchmla.kernels.ops import Ops, PackKind, RouterDims
from batchmla.layers.block import Block, Weight
from batchmla.layers.experts import SpreadExperts
from batchmla.layers.mlp import GatedMlp
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


def oai_mlp(
    par: Par,
    ops: Ops,
    width: int,
    ffn_width: int,
    gate: OaiGate,
    *,
    is_summed: bool = True,
    group_unit: int | None = None,
) -> GatedMlp:
    """The gated MLP with this gate; options as there."""
    act_mul = partial(ops.blocks.act_mul, gate=gate)
    return GatedMlp(
        par, ops, width, ffn_width,
        is_summed=is_summed, group_unit=group_unit, act_mul=act_mul,
    )  # fmt: skip


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
        self.shared = oai_mlp(par, ops, dims.width, dims.shared_width, dims.gate, is_summed=False)
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
