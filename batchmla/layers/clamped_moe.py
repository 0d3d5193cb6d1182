"""DeepSeek-V4's experts: gates and ups are clamped, scores are sqrt(softplus), and the first layers
choose by token id. T tokens, M width, E experts, A active ones, V vocabulary."""

from dataclasses import dataclass
from functools import partial

import torch

from batchmla.kernels.ops import Ops, PackKind
from batchmla.layers.block import Block, Weight
from batchmla.layers.experts import SpreadExperts
from batchmla.layers.mlp import GatedMlp
from batchmla.parallel import Par


@dataclass(frozen=True, slots=True, kw_only=True)
class ClampedMoeDims:
    """`limit` bounds gates from above and ups on both sides."""

    width: int
    num_experts: int
    active: int
    expert_width: int
    shared_width: int
    scale: float
    limit: float
    vocab_size: int


class ClampedMoe(Block):
    """Σ weight · expert(x) + shared(x), summed once over the ranks of an attention
    group; experts are dealt to ranks or cut by ffn width."""

    def __init__(self, par: Par, ops: Ops, dims: ClampedMoeDims, *, by_token: bool) -> None:
        """`by_token`: experts follow from a fixed table of token ids, and scores weigh them."""
        local = par.placement.local_expert_features(dims.expert_width)
        held = par.placement.local_experts(dims.num_experts)
        share = dims.active / dims.num_experts
        self.gate = Weight(dims.num_experts, dims.width, kind=PackKind.LINEAR, is_float32=True)
        self.bias = self.table = None
        if by_token:
            self.table = Weight(dims.vocab_size, dims.active, is_integer=True)
        else:
            self.bias = Weight(dims.num_experts, is_float32=True)
        self.experts_up = Weight(
            held, 2 * local, dims.width, kind=PackKind.EXPERTS_UP, active_share=share
        )
        self.experts_down = Weight(
            held, dims.width, local, kind=PackKind.EXPERTS_DOWN, active_share=share
        )
        self.shared = None
        if dims.shared_width:
            act_mul = partial(ops.hybrid.clamped_act_mul, limit=dims.limit)
            self.shared = GatedMlp(
                par, ops, dims.width, dims.shared_width, is_summed=False, act_mul=act_mul
            )
        self.spread = SpreadExperts(par, dims.num_experts, dims.width, dims.active)
        self.dims = dims
        self._par = par
        self._ops = ops

    def forward(self, x_TM: torch.Tensor, tokens_T: torch.Tensor) -> torch.Tensor:
        """[T, M] → [T, M]."""
        hybrid, dims = self._ops.hybrid, self.dims
        logits_TE = self._ops.linear(x_TM.float(), self.gate.packed, None)
        bias_E = None if self.bias is None else self.bias.tensor
        fixed_TA = None if self.table is None else self.table.tensor[tokens_T].long()
        weights_TA, ids_TA = hybrid.route_scores(
            logits_TE, bias_E, fixed_TA, dims.active, dims.scale
        )
        out_TM = self.spread.forward(self._run, x_TM, weights_TA, ids_TA)
        if self.shared is not None:
            out_TM = out_TM + self.shared.forward(x_TM)
        return self._par.sum(out_TM)

    def serve(self, dtype: torch.dtype, device: torch.device) -> None:
        """See `Serving`."""
        self.spread.serve_with(self._run, dtype, device)

    def _run(
        self, x_TM: torch.Tensor, weights_TA: torch.Tensor, ids_TA: torch.Tensor
    ) -> torch.Tensor:
        up, down = self.experts_up.packed, self.experts_down.packed
        run = self._ops.hybrid.clamped_experts
        return run(x_TM, weights_TA, ids_TA, up, down, self.dims.limit)
