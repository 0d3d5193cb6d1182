"""DeepSeek Sparse Attention: latent attention over the keys that an indexer chooses (DeepSeek-V3.2
report, section 2.1).

A layer keeps two rows a token: the latent one of `mla`, and the indexer's key. Each is kept as it
is or as a record of bytes. T tokens, N rows that choose, H heads of this rank, M model width, C
latent width, R rope width, D width of an index key, K keys chosen.
"""

from dataclasses import dataclass

import torch

from batchmla.attention import mla
from batchmla.attention.mla import (
    BYTES,
    MlaForms,
    MlaPlan,
    latent_record,
    write_latent_record,
)
from batchmla.attention.sparse_rows import ChoosingRows, choosing_rows, early_part
from batchmla.kernels.ops import (
    MlaDims,
    Ops,
    PackKind,
    ReadsPagesOp,
    RopeLayout,
    reads_no_pages,
)
from batchmla.kernels.sparse_ops import Record
from batchmla.kv.cache import LayerCache
from batchmla.kv.layout import KVPart
from batchmla.kv.step import Step
from batchmla.layers.block import Block, Weight
from batchmla.layers.indexer import Indexer, IndexerDims
from batchmla.layers.linear import ColLinear, Linear, RowLinear
from batchmla.layers.norm import RmsNorm
from batchmla.layers.rope import Rope
from batchmla.parallel import Par

KIND = "dsa"
FORMATS = ("fp8_index", "fp8")  # beyond the plain dtypes: the key as a record, or both rows


def key_record(width: int) -> Record:
    """The index key in e4m3, the scales of a page behind its keys: 132 bytes of 128 values."""
    return Record(values=width, tile=width, scales_last=True)


def parts(latent: int, rope: int, index_width: int, kv_dtype: str) -> tuple[KVPart, ...]:
    """`kv_dtype` is a plain dtype or one of `FORMATS`; "fp8_index" keeps latents in bfloat16."""
    key = KVPart(name="index", width=index_width, dtype=kv_dtype)
    if kv_dtype in FORMATS:
        key = KVPart(name="index", width=key_record(index_width).num_bytes, dtype=BYTES)
    if kv_dtype == "fp8":
        record = latent_record(latent, rope)
        return KVPart(name="latent", width=record.num_bytes, dtype=BYTES), key
    plain = "bfloat16" if kv_dtype in FORMATS else kv_dtype
    return KVPart(name="latent", width=latent + rope, dtype=plain), key


@dataclass(frozen=True, slots=True, kw_only=True)
class SparsePlan:
    """One step's early rows, which read every key, and those that choose."""

    cos_TR: torch.Tensor
    sin_TR: torch.Tensor
    early: MlaPlan | None  # its groups cover the early rows in their order
    early_rows_T: torch.Tensor | None  # None: all
    choosing: ChoosingRows | None


def plan(
    step: Step,
    rope: Rope,
    dims: MlaDims,
    count: int,
    forms: MlaForms,
    dtype: torch.dtype,
    reads_pages: ReadsPagesOp = reads_no_pages,
) -> SparsePlan:
    """Once a step. Position `count` - 1 is the last one that sees no more than `count` keys."""
    cos_TR, sin_TR = rope.at(step.positions_T)
    early_step, early_rows_T = early_part(step, count)
    early = None
    if early_step is not None:
        early = mla.plan(early_step, rope, dims, forms, dtype, reads_pages)
    return SparsePlan(
        cos_TR=cos_TR,
        sin_TR=sin_TR,
        early=early,
        early_rows_T=early_rows_T,
        choosing=choosing_rows(step, count),
    )


class SparseMlaAttention(Block):
    """Weights as in `mla.MlaAttention`, with the indexer's keys in the first product too."""

    def __init__(
        self,
        par: Par,
        ops: Ops,
        *,
        width: int,
        query_rank: int,
        dims: MlaDims,
        index: IndexerDims,
        eps: float,
    ) -> None:
        """`dims` are this rank's, `index` the same on every rank."""
        all_heads = dims.heads * par.placement.tensor
        head_width = dims.nope + dims.rope
        self.dims = dims
        self.down = Linear(ops, width, query_rank, dims.latent + dims.rope, index.width)
        self.q_norm = RmsNorm(ops, query_rank, eps)
        self.q_up = ColLinear(par, ops, query_rank, all_heads * head_width)
        self.latent_norm = RmsNorm(ops, dims.latent, eps)
        self.kv_b = Weight(dims.heads * (dims.nope + dims.value), dims.latent, kind=PackKind.LATENT)
        self.indexer = Indexer(ops, width=width, query_rank=query_rank, dims=index)
        self.out = RowLinear(par, ops, all_heads * dims.value, width)
        self._ops = ops
        self._latent_record = latent_record(dims.latent, dims.rope)
        self._key_record = key_record(index.width)

    def forward(
        self, x_TM: torch.Tensor, step: Step, plan: SparsePlan, cache: LayerCache
    ) -> torch.Tensor:
        """[T, M] → [T, M]; writes the step's latents and index keys first."""
        ops, dims = self._ops, self.dims
        q_TX, latent_TX, key_TD = torch.split(self.down.forward(x_TM), [*self.down.parts], dim=1)
        self._write_latent(latent_TX, step, plan, cache["latent"])
        self._write_key(key_TD, step, plan, cache["index"])
        q_TX = self.q_norm.forward(q_TX)
        q_THD = self.q_up.forward(q_TX).view(len(x_TM), dims.heads, dims.nope + dims.rope)
        ops.rope(q_THD[..., dims.nope :], plan.cos_TR, plan.sin_TR, RopeLayout.INTERLEAVED)
        if plan.choosing is None:
            return self.out.forward(self._attend_all(q_THD, plan, cache))
        late_NX = self._attend_chosen(x_TM, q_TX, q_THD, plan.choosing, plan, cache)
        if plan.choosing.rows_N is None:
            return self.out.forward(late_NX)
        out_TX = late_NX.new_empty(len(x_TM), late_NX.shape[1])
        out_TX.index_copy_(0, plan.choosing.rows_N, late_NX)
        if plan.early_rows_T is not None:
            early_NX = self._attend_all(q_THD.index_select(0, plan.early_rows_T), plan, cache)
            out_TX.index_copy_(0, plan.early_rows_T, early_NX)
        return self.out.forward(out_TX)

    def _attend_all(self, q_NHD: torch.Tensor, plan: SparsePlan, cache: LayerCache) -> torch.Tensor:
        """Rows that read every key they see."""
        assert plan.early is not None, "no row reads all its keys"
        return self._ops.mla(
            q_NHD, cache["latent"], self.kv_b.packed, plan.early.absorbed, plan.early.expanded,
            self.dims, _record_of(cache["latent"], self._latent_record),
        )  # fmt: skip

    def _attend_chosen(
        self,
        x_TM: torch.Tensor,
        latent_TQ: torch.Tensor,
        q_THD: torch.Tensor,
        choosing: ChoosingRows,
        plan: SparsePlan,
        cache: LayerCache,
    ) -> torch.Tensor:
        """Rows over the keys that their indexer chooses, in the groups' order."""
        sparse, rows_N = self._ops.sparse, choosing.rows_N

        def taken(x: torch.Tensor) -> torch.Tensor:
            return x if rows_N is None else x.index_select(0, rows_N)

        q_NID, weights_NI = self.indexer.queries(
            taken(x_TM), taken(latent_TQ), taken(plan.cos_TR), taken(plan.sin_TR)
        )
        slots_NK = sparse.select_keys(
            q_NID, weights_NI, cache["index"], choosing.groups, self.indexer.dims.count,
            _record_of(cache["index"], self._key_record),
        )  # fmt: skip
        return sparse.sparse_mla(
            taken(q_THD), cache["latent"], slots_NK, self.kv_b.packed, self.dims,
            _record_of(cache["latent"], self._latent_record),
        )  # fmt: skip

    def _write_latent(
        self, latent_TX: torch.Tensor, step: Step, plan: SparsePlan, cache_PBX: torch.Tensor
    ) -> None:
        ops, slots_T, norm = self._ops, step.slots_T, self.latent_norm
        angles, record = (plan.cos_TR, plan.sin_TR), _record_of(cache_PBX, self._latent_record)
        if record is None:
            ops.write_latent(cache_PBX, slots_T, latent_TX, norm.weight.tensor, norm.eps, *angles)
        else:
            write_latent_record(ops, cache_PBX, slots_T, latent_TX, norm, angles, record)

    def _write_key(
        self, projected_TD: torch.Tensor, step: Step, plan: SparsePlan, cache_PBD: torch.Tensor
    ) -> None:
        key_TD = self.indexer.keys(projected_TD, plan.cos_TR, plan.sin_TR)
        if cache_PBD.dtype == torch.uint8:
            self._ops.sparse.write_record(cache_PBD, step.slots_T, key_TD, self._key_record)
        else:
            self._ops.write(cache_PBD, step.slots_T, key_TD)


def _record_of(cache_PBX: torch.Tensor, record: Record) -> Record | None:
    """`record` where the cache holds bytes."""
    return record if cache_PBX.dtype == torch.uint8 else None
