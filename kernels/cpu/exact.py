"""The CPU back end in exact mode: a row's results depend on that row alone. Shapes: see
`batchmla.kernels.ops`.

Products run at row counts that agree with each other (`rows.py`), a token's experts are summed in
one order, and no function is used that rounds a value by its place in a tensor. Attention is exact
by its groups: `batchmla.attention.exact_groups` cuts them by position alone.
"""

from dataclasses import replace
from functools import partial
from typing import Literal

import numpy as np
import torch
import torch.nn.functional as F

from batchmla.kernels.cpu.attention import (
    Attention,
    LatentProducts,
    from_latent,
    to_latent,
    write,
)
from batchmla.kernels.cpu.block_sparse import BlockSparse, make_block_sparse
from batchmla.kernels.cpu.block_sparse_exact import ExactBlocks
from batchmla.kernels.cpu.exact_hybrid import ExactHybrid
from batchmla.kernels.cpu.exact_sparse import ExactSparse
from batchmla.kernels.cpu.exact_splits import SplitAttention
from batchmla.kernels.cpu.hybrid import Hybrid, make_hybrid
from batchmla.kernels.cpu.kda import delta_by_tokens, make_kda
from batchmla.kernels.cpu.linear import Linears, act_mul, one_linear
from batchmla.kernels.cpu.moe import choose
from batchmla.kernels.cpu.norm import norm, rotate_halves
from batchmla.kernels.cpu.quant import with_values
from batchmla.kernels.cpu.rows import (
    FEW_ROWS,
    MANY_ROWS,
    TRIAL_ROWS,
    Product,
    RowCounts,
    RowTrials,
    aligned,
    cancelling,
)
from batchmla.kernels.cpu.scratch import Scratch
from batchmla.kernels.cpu.sparse import SparseAttention, make_sparse
from batchmla.kernels.cpu.table import ExpertLinear, make_torch_ops, over_torch
from batchmla.kernels.ops import MlaDims, Ops, Packed, PackKind, RopeLayout, RouterDims


def exact_act_mul(gate_up_TF: torch.Tensor) -> torch.Tensor:
    """silu(gate) · up. torch rounds silu of float32 differently at the end of a run of values, so
    it is written out there; narrower dtypes give one result for each value."""
    if gate_up_TF.dtype != torch.float32:
        return act_mul(gate_up_TF)
    gate_TF, up_TF = gate_up_TF.chunk(2, dim=-1)
    return gate_TF.neg().exp_().add_(1).reciprocal_().mul_(gate_TF).mul_(up_TF)


def exact_write_latent(
    cache_PBW: torch.Tensor,
    slots_T: torch.Tensor,
    latent_TX: torch.Tensor,
    weight_C: torch.Tensor,
    eps: float,
    cos_TR: torch.Tensor,
    sin_TR: torch.Tensor,
) -> None:
    """norm ‖ rope into the cache. Complex products round the end of a thread's share differently,
    so both ropes of exact mode rotate halves."""
    width = weight_C.shape[0]
    pe_TR = latent_TX[:, width:].clone()
    rotate_halves(pe_TR[:, None], cos_TR, sin_TR, RopeLayout.INTERLEAVED)
    rows_TX = torch.cat((norm(latent_TX[:, :width], weight_C, eps), pe_TR), dim=1)
    write(cache_PBW, slots_T, rows_TX)


class ExactProducts:
    """Every matrix product of the back end, at row counts that agree."""

    def __init__(self, linears: Linears) -> None:
        self._linears = linears
        self._trials = RowTrials()
        self.splits = SplitAttention(self._trials)
        self.sparse = ExactSparse(self._trials)
        self.blocks = ExactBlocks(self._trials)
        self.hybrid = ExactHybrid(self._trials, self._expert_linear)

    def linear(
        self, x_TI: torch.Tensor, weight: Packed, bias_O: torch.Tensor | None
    ) -> torch.Tensor:
        """x·Wᵀ + b."""
        counts = self._counts(weight, x_TI.dtype, bias_O)
        return counts.run(x_TI, lambda block: self._linears.linear(block, weight, bias_O))

    def route(
        self,
        x_TM: torch.Tensor,
        weight_EM: torch.Tensor,
        bias_E: torch.Tensor | None,
        dims: RouterDims,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits in float32, then the choice row by row."""

        def make() -> tuple[Product, torch.Tensor]:
            num_experts, width = weight_EM.shape
            x, w = cancelling(TRIAL_ROWS, (num_experts, width), torch.float32)
            return lambda block: F.linear(block, w), x

        counts = self._trials.counts(("route", *weight_EM.shape), make)
        logits_TE = counts.run(x_TM.float(), lambda block: F.linear(block, weight_EM))
        return choose(logits_TE, bias_E, dims)

    def experts(
        self,
        x_TM: torch.Tensor,
        weights_TA: torch.Tensor,
        ids_TA: torch.Tensor,
        up: Packed,
        down: Packed,
    ) -> torch.Tensor:
        """Each expert over its tokens in blocks; a token's experts are summed as it chose them.

        The blocks of all experts lie one after the other in one gathered tensor; token 0 pads them.
        """
        up_counts, down_counts = (self._counts(weight, x_TM.dtype) for weight in (up, down))
        ids_X = ids_TA.flatten().numpy()
        order_X = np.argsort(ids_X.astype(np.uint16), kind="stable")
        received_E = np.bincount(ids_X, minlength=up.shape[0])
        blocks_E = [up_counts.cut(received) for received in received_E.tolist()]
        sizes_E = np.array([sum(blocks) for blocks in blocks_E])
        shift_E = (np.cumsum(sizes_E) - sizes_E) - (np.cumsum(received_E) - received_E)
        place_X = np.arange(len(ids_X)) + np.repeat(shift_E, received_E)
        token_N = np.zeros(int(sizes_E.sum()), np.int64)
        token_N[place_X] = order_X // ids_TA.shape[1]
        row_X = np.empty_like(place_X)
        row_X[order_X] = place_X

        rows_NM, hidden, start = x_TM.index_select(0, torch.from_numpy(token_N)), [], 0
        for expert, blocks in enumerate(blocks_E):
            for count in blocks:
                block_XM = aligned(rows_NM[start : start + count], count)
                hidden.append(one_linear(block_XM, up, expert))
                start += count
        hidden_NF, out, start = exact_act_mul(torch.cat(hidden)), [], 0
        for expert, size in enumerate(sizes_E.tolist()):
            if size:
                x_XF = hidden_NF[start : start + size]
                out.append(down_counts.run(x_XF, partial(one_linear, weight=down, index=expert)))
                start += size
        return F.embedding_bag(
            torch.from_numpy(row_X).view(ids_TA.shape),
            torch.cat(out),
            mode="sum",
            per_sample_weights=weights_TA.to(x_TM.dtype),
        )

    def _expert_linear(self, x_NI: torch.Tensor, weight: Packed, expert: int) -> torch.Tensor:
        counts = self._counts(weight, x_NI.dtype)
        return counts.run(x_NI, partial(one_linear, weight=weight, index=expert))

    def latent_products(self) -> LatentProducts:
        """The products of latent attention."""
        return LatentProducts(
            expand=lambda latent_NC, kv_b: self.linear(latent_NC, kv_b, None),
            to_latent=self._to_latent,
            from_latent=self._from_latent,
            max_expanded_bytes=None,
        )

    def _to_latent(self, q_HNX: torch.Tensor, up_HXC: torch.Tensor, dims: MlaDims) -> torch.Tensor:
        counts = self._head_counts(up_HXC, dims, is_up=True)
        return counts.run(q_HNX, lambda block: to_latent(block, up_HXC, dims))

    def _from_latent(
        self, z_HNC: torch.Tensor, up_HXC: torch.Tensor, dims: MlaDims
    ) -> torch.Tensor:
        counts = self._head_counts(up_HXC, dims, is_up=False)
        return counts.run(z_HNC, lambda block: from_latent(block, up_HXC, dims))

    def _counts(
        self, weight: Packed, dtype: torch.dtype, bias_O: torch.Tensor | None = None
    ) -> RowCounts:
        """Of a linear or of one expert of this shape; an expert gets few rows of a step."""
        is_expert = len(weight.shape) == 3
        kind = PackKind.LINEAR if is_expert else weight.kind
        out_features, in_features = weight.shape[-2:]
        is_quantised = weight.quantised is not None

        def make() -> tuple[Product, torch.Tensor]:
            x_TI, w_OI = cancelling(TRIAL_ROWS, (out_features, in_features), dtype)
            trial = self._linears.pack(kind, with_values(w_OI) if is_quantised else w_OI)
            return lambda block: self._linears.linear(block, trial, bias_O), x_TI

        key = (weight.kind, is_quantised, out_features, in_features, dtype, bias_O is not None)
        return self._trials.counts(key, make, FEW_ROWS if is_expert else MANY_ROWS)

    def _head_counts(self, up_HXC: torch.Tensor, dims: MlaDims, *, is_up: bool) -> RowCounts:
        """Of the products of all heads with UK or with UV."""

        def make() -> tuple[Product, torch.Tensor]:
            shape = (dims.latent, dims.nope) if is_up else (dims.value, dims.latent)
            x_TI, w_OI = cancelling(TRIAL_ROWS, shape, up_HXC.dtype)
            trial_HXC = torch.zeros_like(up_HXC)
            if is_up:
                trial_HXC[:, : dims.nope] = w_OI.T
            else:
                trial_HXC[:, dims.nope :] = w_OI
            product = to_latent if is_up else from_latent
            x_HTI = x_TI.expand(dims.heads, -1, -1).contiguous()
            return lambda block: product(block, trial_HXC, dims), x_HTI

        return self._trials.counts((is_up, up_HXC.dtype, dims), make)


def make_exact(form: Literal["cpu", "torch"]) -> Ops:
    """The CPU back end with everything replaced that mixes rows; compiled kernels mix none."""
    linears = Linears(lays_side_by_side=False)
    products = ExactProducts(linears)

    def make_plain(latent: LatentProducts, expert_linear: ExpertLinear) -> Ops:
        scratch, hybrid, exact = Scratch(), products.hybrid, products.blocks
        attention = Attention(scratch, latent, products.splits.attend)
        sparse = SparseAttention(scratch, latent, products.sparse.scores, products.sparse.attend)
        return replace(
            make_torch_ops(latent, expert_linear),
            pack=linears.pack,
            packed_bytes=linears.packed_bytes,
            linear=products.linear,
            gqa=attention.gqa,
            mla=attention.mla,
            route=products.route,
            experts=products.experts,
            act_mul=exact_act_mul,
            rope=rotate_halves,
            write_latent=exact_write_latent,
            sparse=make_sparse(sparse),
            hybrid=make_hybrid(Hybrid(hybrid.attend, expert_linear, hybrid.group_products)),
            kda=make_kda(delta_by_tokens),
            blocks=make_block_sparse(BlockSparse(scratch, expert_linear, exact.dots, exact.attend)),
        )

    latent, expert_linear = products.latent_products(), products.hybrid.expert_linear
    if form == "torch":
        return make_plain(latent, expert_linear)
    return over_torch(make_plain, latent, expert_linear)
