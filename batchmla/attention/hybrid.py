"""DeepSeek-V4's attention: a window of rows, and of what lies before it one entry for every few
tokens, all of them or those an indexer chooses (DeepSeek-V4 report, section 2.3).

A row is key and value in one and the same for all heads; its last elements are rotated, so those of
the result are turned back. T tokens, H heads of this rank, D row width, R rope width, M model
width, E entries completed in the step, C channels pooled, X rows in lanes and step.
"""

from dataclasses import dataclass

import torch

from batchmla.attention.compressor import Compressor
from batchmla.attention.hybrid_parts import HybridDims, LayerKind, hybrid_record, index_record
from batchmla.attention.hybrid_plan import HybridPlan
from batchmla.kernels.hybrid_ops import HybridRows
from batchmla.kernels.ops import Ops, PackKind, RopeLayout
from batchmla.kernels.sparse_ops import Record
from batchmla.kv.cache import LayerCache
from batchmla.kv.step import Step
from batchmla.layers.block import Block, Weight
from batchmla.layers.linear import ColLinear, Linear, RowLinear
from batchmla.layers.norm import RmsNorm
from batchmla.parallel import Par


@dataclass(frozen=True, slots=True, kw_only=True)
class HybridWidths:
    """Whole sizes of an attention layer; heads and groups are shared among ranks."""

    model: int
    heads: int
    query_rank: int
    groups: int
    group_rank: int
    index_heads: int
    chosen: int  # entries that an indexer chooses
    eps: float


class HybridAttention(Block):
    """One layer of a kind."""

    def __init__(
        self, par: Par, ops: Ops, kind: LayerKind, widths: HybridWidths, dims: HybridDims
    ) -> None:
        heads = par.placement.local(widths.heads, "attention heads")
        groups = par.placement.local(widths.groups, "output groups")
        self.kind = kind
        self.heads = heads
        self.dims = dims
        self.down = Linear(ops, widths.model, widths.query_rank, dims.width)
        self.q_norm = RmsNorm(ops, widths.query_rank, widths.eps)
        self.q_up = ColLinear(par, ops, widths.query_rank, widths.heads * dims.width)
        self.row_norm = RmsNorm(ops, dims.width, widths.eps)
        self.sinks = Weight(heads, is_float32=True)
        group_width = widths.heads * dims.width // widths.groups
        self.group_up = Weight(groups * widths.group_rank, group_width)
        self.out = RowLinear(par, ops, widths.groups * widths.group_rank, widths.model)
        self.compressor = self.index_query = self.index_weights = None
        if kind is not LayerKind.WINDOW:
            self.compressor = Compressor(ops, kind, widths.model, dims, widths.eps)
        if kind is LayerKind.CHOSEN:
            wide = widths.index_heads * dims.index_width
            self.index_query = Linear(ops, widths.query_rank, wide)
            self.index_weights = Weight(
                widths.index_heads, widths.model, kind=PackKind.LINEAR, is_float32=True
            )
        self._groups = groups
        self._widths = widths
        self._record = hybrid_record(dims.width, dims.rope)
        self._key_record = index_record(dims.index_width)
        self._ops = ops

    def forward(
        self, x_TM: torch.Tensor, step: Step, plan: HybridPlan, cache: LayerCache
    ) -> torch.Tensor:
        """[T, M] → [T, M]; writes entries first and lanes last."""
        ops, dims = self._ops, self.dims
        down_TX = self.down.forward(x_TM)
        q_TX, row_TD = torch.split(down_TX, [*self.down.parts], dim=1)
        latent_TX = self.q_norm.forward(q_TX)
        q_THD = self.q_up.forward(latent_TX).view(len(x_TM), self.heads, dims.width)
        q_THD = ops.norm(q_THD, q_THD.new_ones(dims.width), self._widths.eps)
        row_TD = self.row_norm.forward(row_TD)
        self._rotate(q_THD, plan.cos_TR, plan.sin_TR)
        self._rotate(row_TD[:, None], plan.cos_TR, plan.sin_TR)
        window_XD = self._window(row_TD, plan, cache["window"])
        if self.compressor is not None:
            assert plan.entries is not None, f"a plan without entries for a {self.kind} layer"
            record, key_record = self._record_of(cache)
            self.compressor.forward(x_TM, plan.entries, plan.lanes_S, cache, record, key_record)
        out_THD = self._attend(x_TM, latent_TX, q_THD, window_XD, plan, cache)
        self._keep(row_TD, plan, cache["window"])
        self._rotate(out_THD, plan.cos_TR, -plan.sin_TR)
        out_TGX = out_THD.reshape(len(x_TM), self._groups, -1)
        weight_GOX = self.group_up.tensor.view(self._groups, -1, out_TGX.shape[2])
        mixed_TGO = ops.hybrid.group_linear(out_TGX, weight_GOX)
        return self.out.forward(mixed_TGO.flatten(1))

    def _attend(
        self,
        x_TM: torch.Tensor,
        latent_TX: torch.Tensor,
        q_THD: torch.Tensor,
        window_XD: torch.Tensor,
        plan: HybridPlan,
        cache: LayerCache,
    ) -> torch.Tensor:
        """Group by group, then the rows that choose."""
        entries, record = cache.get("entries"), self._record_of(cache)[0]
        out_THD = torch.empty_like(q_THD)

        def attend(rows_N: torch.Tensor | None, read: HybridRows) -> None:
            q_NHD = q_THD if rows_N is None else q_THD.index_select(0, rows_N)
            found_NHD = self._ops.hybrid.attend(
                q_NHD, window_XD, entries, read, self.sinks.tensor, self.dims.width**-0.5, record
            )
            if rows_N is None:
                out_THD.copy_(found_NHD)
            else:
                out_THD.index_copy_(0, rows_N, found_NHD)

        for rows_N, read in plan.groups:
            attend(rows_N, read)
        if plan.choosing is not None:
            assert plan.choosing_window is not None
            slots_NK = self._choose(x_TM, latent_TX, plan, cache)
            near = plan.choosing_window
            read = HybridRows(
                window_NW=near.window_NW,
                window_count_N=near.window_count_N,
                slots_NK=slots_NK,
                entry_count_N=torch.full_like(near.window_count_N, slots_NK.shape[1]),
            )
            attend(plan.choosing.rows_N, read)
        return out_THD

    def _choose(
        self, x_TM: torch.Tensor, latent_TX: torch.Tensor, plan: HybridPlan, cache: LayerCache
    ) -> torch.Tensor:
        """Flat rows [N, K] of the entries that the choosing rows read."""
        assert plan.choosing is not None
        assert self.index_query is not None and self.index_weights is not None
        rows_N, dims = plan.choosing.rows_N, self.dims

        def taken(x: torch.Tensor) -> torch.Tensor:
            return x if rows_N is None else x.index_select(0, rows_N)

        x_NM = taken(x_TM)
        q_NX = self.index_query.forward(taken(latent_TX))
        q_NID = q_NX.view(len(x_NM), -1, dims.index_width)
        self._rotate(q_NID, taken(plan.cos_TR), taken(plan.sin_TR))
        weights_NI = self._ops.linear(x_NM.float(), self.index_weights.packed, None)
        weights_NI = weights_NI * (q_NID.shape[1] * dims.index_width) ** -0.5
        return self._ops.sparse.select_keys(
            q_NID, weights_NI, cache["index"], plan.choosing.groups, self._widths.chosen,
            self._record_of(cache)[1],
        )  # fmt: skip

    def _window(self, row_TD: torch.Tensor, plan: HybridPlan, lanes: torch.Tensor) -> torch.Tensor:
        """[X, D]: what the sequences have in their lanes, then the step's rows as a lane would
        give them back."""
        num_rows, size = len(row_TD), lanes.shape[1]
        if lanes.dtype != torch.uint8:
            held_SWD = lanes.index_select(0, plan.lanes_S).to(row_TD.dtype)
            return torch.cat((held_SWD.flatten(0, 1), row_TD.to(lanes.dtype).to(row_TD.dtype)))
        sparse = self._ops.sparse
        places_W = torch.arange(size, device=row_TD.device)
        slots_X = (plan.lanes_S[:, None] * size + places_W).flatten()
        held_XD = sparse.read_record(lanes, slots_X, self._record, row_TD.dtype)
        written = lanes.new_zeros(1, num_rows, self._record.num_bytes)
        places_T = torch.arange(num_rows, device=row_TD.device)
        sparse.write_record(written, places_T, row_TD, self._record)
        read_TD = sparse.read_record(written, places_T, self._record, row_TD.dtype)
        return torch.cat((held_XD, read_TD))

    def _keep(self, row_TD: torch.Tensor, plan: HybridPlan, lanes: torch.Tensor) -> None:
        rows_XD = row_TD.index_select(0, plan.kept.rows_X)
        if lanes.dtype == torch.uint8:
            self._ops.sparse.write_record(lanes, plan.kept.slots_X, rows_XD, self._record)
        else:
            self._ops.write(lanes, plan.kept.slots_X, rows_XD)

    def _rotate(self, x_THD: torch.Tensor, cos_TR: torch.Tensor, sin_TR: torch.Tensor) -> None:
        self._ops.rope(x_THD[..., -self.dims.rope :], cos_TR, sin_TR, RopeLayout.INTERLEAVED)

    def _record_of(self, cache: LayerCache) -> tuple[Record | None, Record | None]:
        """How rows and index keys lie in the cache, None where plainly."""
        has_bytes = cache["window"].dtype == torch.uint8
        return (self._record, self._key_record) if has_bytes else (None, None)
