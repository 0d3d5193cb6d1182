"""Makes one entry of a run of tokens by gated pooling, channel by channel (DeepSeek-V4 report, eq.
9-12 and 20-23). All of it is float32 up to the norm.

With overlap a token has two sets of values and gates: one for the entry of its own run, one for the
next. T tokens, M model width, E entries completed, N tokens of an entry, C channels.
"""

import torch
import torch.nn.functional as F

from batchmla.attention.hybrid_parts import HybridDims, LayerKind
from batchmla.attention.hybrid_plan import EntryPlan
from batchmla.kernels.ops import Ops, PackKind, RopeLayout
from batchmla.kernels.sparse_ops import Record
from batchmla.kv.cache import LayerCache
from batchmla.layers.block import Block, Weight
from batchmla.layers.norm import RmsNorm


class Compressor(Block):
    """Entries of a layer's rows and, where it has an indexer, of the indexer's keys.

    One product gives, behind each other: values and gates of rows, values and gates of keys.
    """

    def __init__(
        self, ops: Ops, kind: LayerKind, model_width: int, dims: HybridDims, eps: float
    ) -> None:
        ratio, self._has_index = dims.ratio(kind), kind is LayerKind.CHOSEN
        self._sets = 2 if self._has_index else 1
        self.project = Weight(
            dims.state_width(kind), model_width, kind=PackKind.LINEAR, is_float32=True
        )
        self.bias = Weight(ratio, self._sets * dims.width, is_float32=True)
        self.norm = RmsNorm(ops, dims.width, eps)
        self.index_bias = self.index_norm = None
        if self._has_index:
            self.index_bias = Weight(ratio, self._sets * dims.index_width, is_float32=True)
            self.index_norm = RmsNorm(ops, dims.index_width, eps)
        self._dims = dims
        self._ratio = ratio
        self._ops = ops

    def forward(
        self,
        x_TM: torch.Tensor,
        plan: EntryPlan,
        lanes_S: torch.Tensor,
        cache: LayerCache,
        record: Record | None,
        key_record: Record | None,
    ) -> None:
        """Writes the entries that the step completes, and the state that it leaves."""
        state_TC = self._ops.linear(x_TM.float(), self.project.packed, None)
        width = self._sets * self._dims.width
        state_TC[:, width : 2 * width] += self.bias.tensor[plan.offsets_T]
        if self.index_bias is not None:
            first = 2 * width + self._sets * self._dims.index_width
            state_TC[:, first:] += self.index_bias.tensor[plan.offsets_T]
        if len(plan.slots_E):
            held_XC = cache["state"].index_select(0, lanes_S).flatten(0, 1)
            self._write_entries(torch.cat((held_XC, state_TC)), plan, cache, record, key_record,
                                x_TM.dtype)  # fmt: skip
        kept = plan.kept
        self._ops.write(cache["state"], kept.slots_X, state_TC.index_select(0, kept.rows_X))

    def _write_entries(
        self,
        state_XC: torch.Tensor,
        plan: EntryPlan,
        cache: LayerCache,
        record: Record | None,
        key_record: Record | None,
        dtype: torch.dtype,
    ) -> None:
        border = 2 * self._sets * self._dims.width
        entry_EC = self._pooled(state_XC[:, :border], plan)
        self._write(cache["entries"], entry_EC.to(dtype), self.norm, plan, record)
        if self.index_norm is not None:
            key_EC = self._pooled(state_XC[:, border:], plan)
            self._write(cache["index"], key_EC.to(dtype), self.index_norm, plan, key_record)

    def _pooled(self, both_XC: torch.Tensor, plan: EntryPlan) -> torch.Tensor:
        """[E, C] of values and gates side by side."""
        values_XC, gates_XC = both_XC.chunk(2, dim=1)
        if self._sets == 1:
            values_ENC, gates_ENC = values_XC[plan.places_EN], gates_XC[plan.places_EN]
            return self._ops.hybrid.pool(values_ENC, gates_ENC)
        before_EN, own_EN = plan.places_EN.chunk(2, dim=1)
        width = values_XC.shape[1] // 2
        values_ENC, gates_ENC = (
            torch.cat((part_XC[before_EN, :width], part_XC[own_EN, width:]), dim=1)
            for part_XC in (values_XC, gates_XC)
        )
        is_absent_E1N = F.pad(plan.is_first_E[:, None].expand(-1, self._ratio), (0, self._ratio))
        gates_ENC = gates_ENC.masked_fill(is_absent_E1N[:, :, None], -torch.inf)
        return self._ops.hybrid.pool(values_ENC, gates_ENC)

    def _write(
        self,
        cache_PBD: torch.Tensor,
        entry_EC: torch.Tensor,
        norm: RmsNorm,
        plan: EntryPlan,
        record: Record | None,
    ) -> None:
        """Normed, rotated at the first position of its run, written to its page."""
        row_ED = norm.forward(entry_EC)
        turned_E1R = row_ED[:, None, -self._dims.rope :]
        self._ops.rope(turned_E1R, plan.cos_ER, plan.sin_ER, RopeLayout.INTERLEAVED)
        if record is None:
            self._ops.write(cache_PBD, plan.slots_E, row_ED)
        else:
            self._ops.sparse.write_record(cache_PBD, plan.slots_E, row_ED, record)
