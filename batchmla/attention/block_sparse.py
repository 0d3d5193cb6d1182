"""Grouped-query attention over blocks of keys that an indexer chooses (MiniMax-M3).

A layer keeps three rows a token: keys, values and the indexer's key. Every kv head has an index
head of its own and reads the blocks which that one chooses; a row that sees no more keys than it
may read sees them all. T tokens, N rows that choose, H query heads and K kv heads of this rank, D
width of a head or of an index head, R rotated width, M model width.
"""

from dataclasses import dataclass

import torch

from batchmla.attention import gqa
from batchmla.attention.gqa import GqaPlan
from batchmla.attention.sparse_rows import ChoosingRows, choosing_rows, early_part
from batchmla.kernels.block_sparse_ops import BlockDims
from batchmla.kernels.groups import Groups
from batchmla.kernels.ops import Ops, ReadsPagesOp, RopeLayout, reads_no_pages
from batchmla.kv.cache import LayerCache
from batchmla.kv.layout import KVPart
from batchmla.kv.step import Step
from batchmla.layers.block import Block
from batchmla.layers.linear import Linear, RowLinear
from batchmla.layers.norm import RmsNorm
from batchmla.layers.rope import Rope
from batchmla.parallel import Par
from batchmla.placement import Placement

KIND = "block_sparse"


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockSparseWidths:
    """Whole sizes of a layer; heads are shared among ranks, the index key is on all of them."""

    model: int
    num_heads: int
    num_kv_heads: int  # and index heads
    head_dim: int
    index_dim: int


def parts(widths: BlockSparseWidths, kv_dtype: str, placement: Placement) -> tuple[KVPart, ...]:
    """k and v of this rank's heads, and the index key."""
    key = KVPart(name="index", width=widths.index_dim, dtype=kv_dtype)
    return *gqa.parts(widths.num_kv_heads, widths.head_dim, kv_dtype, placement), key


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockSparsePlan:
    """One step's early rows, which read every key, and those that choose."""

    cos_TR: torch.Tensor
    sin_TR: torch.Tensor
    early: Groups | None  # they cover the early rows in their order
    early_rows_T: torch.Tensor | None  # None: all
    choosing: ChoosingRows | None


def plan(
    step: Step,
    whole: GqaPlan,
    rope: Rope,
    head_dim: int,
    dims: BlockDims,
    dtype: torch.dtype,
    reads_pages: ReadsPagesOp = reads_no_pages,
) -> BlockSparsePlan:
    """Once a step; `whole` is that of all its rows where nobody chooses."""
    early_step, early_rows_T = early_part(step, dims.num_keys)
    early = None
    if early_step is step:
        early = whole.groups
    elif early_step is not None:
        early = gqa.plan(early_step, rope, head_dim, dtype, reads_pages).groups
    return BlockSparsePlan(
        cos_TR=whole.cos_TR,
        sin_TR=whole.sin_TR,
        early=early,
        early_rows_T=early_rows_T,
        choosing=choosing_rows(step, dims.num_keys),
    )


class BlockSparseAttention(Block):
    """q, k, v and the indexer's q and k are one product; every head is normed by itself, and its
    first R elements are rotated."""

    def __init__(
        self,
        par: Par,
        ops: Ops,
        *,
        widths: BlockSparseWidths,
        dims: BlockDims,
        eps: float,
        norm_offset: float = 0.0,
    ) -> None:
        placement, head_dim = par.placement, widths.head_dim
        self.num_heads = placement.local(widths.num_heads, "attention heads")
        self.num_kv_heads = placement.local_or_copied(widths.num_kv_heads)
        self.widths = widths
        self.dims = dims
        self.qkv = Linear(
            ops, widths.model, self.num_heads * head_dim, self.num_kv_heads * head_dim,
            self.num_kv_heads * head_dim, self.num_kv_heads * widths.index_dim, widths.index_dim,
        )  # fmt: skip
        self.q_norm, self.k_norm = (RmsNorm(ops, head_dim, eps, norm_offset) for _ in range(2))
        self.index_q_norm, self.index_k_norm = (
            RmsNorm(ops, widths.index_dim, eps, norm_offset) for _ in range(2)
        )
        self.out = RowLinear(par, ops, widths.num_heads * head_dim, widths.model)
        self._ops = ops
        self._scale = head_dim**-0.5

    def forward(
        self, x_TM: torch.Tensor, step: Step, plan: BlockSparsePlan, cache: LayerCache
    ) -> torch.Tensor:
        """[T, M] → [T, M]; writes the step's keys, values and index keys first."""
        ops, heads, kv_heads = self._ops, self.num_heads, self.num_kv_heads
        q_TX, k_TX, v_TX, index_q_TX, index_k_TD = torch.split(
            self.qkv.forward(x_TM), [*self.qkv.parts], dim=1
        )
        q_THD = self._rotated(self.q_norm, q_TX, heads, plan.cos_TR, plan.sin_TR)
        k_TKD = self._rotated(self.k_norm, k_TX, kv_heads, plan.cos_TR, plan.sin_TR)
        key_T1D = self._rotated(self.index_k_norm, index_k_TD, 1, plan.cos_TR, plan.sin_TR)
        ops.write(cache["k"], step.slots_T, k_TKD.flatten(1))
        ops.write(cache["v"], step.slots_T, v_TX)
        ops.write(cache["index"], step.slots_T, key_T1D[:, 0])
        if plan.choosing is None:
            return self.out.forward(self._attend_all(q_THD, plan, cache))
        late_NX = self._attend_chosen(index_q_TX, q_THD, plan.choosing, plan, cache)
        if plan.choosing.rows_N is None:
            return self.out.forward(late_NX)
        out_TX = late_NX.new_empty(len(x_TM), late_NX.shape[1])
        out_TX.index_copy_(0, plan.choosing.rows_N, late_NX)
        if plan.early_rows_T is not None:
            early_NX = self._attend_all(q_THD.index_select(0, plan.early_rows_T), plan, cache)
            out_TX.index_copy_(0, plan.early_rows_T, early_NX)
        return self.out.forward(out_TX)

    def _attend_all(
        self, q_NHD: torch.Tensor, plan: BlockSparsePlan, cache: LayerCache
    ) -> torch.Tensor:
        """Rows that read every key they see."""
        assert plan.early is not None, "no row reads all its keys"
        return self._ops.gqa(q_NHD, cache["k"], cache["v"], plan.early, self._scale)

    def _attend_chosen(
        self,
        index_q_TX: torch.Tensor,
        q_THD: torch.Tensor,
        choosing: ChoosingRows,
        plan: BlockSparsePlan,
        cache: LayerCache,
    ) -> torch.Tensor:
        """Rows over the blocks that their index heads choose, in the groups' order."""
        blocks, rows_N = self._ops.blocks, choosing.rows_N

        def taken(x: torch.Tensor) -> torch.Tensor:
            return x if rows_N is None else x.index_select(0, rows_N)

        q_NKD = self._rotated(
            self.index_q_norm, taken(index_q_TX), self.num_kv_heads, taken(plan.cos_TR),
            taken(plan.sin_TR),
        )  # fmt: skip
        blocks_NKU = blocks.select(q_NKD, cache["index"], choosing.groups, self.dims)
        return blocks.attend(
            taken(q_THD), cache["k"], cache["v"], choosing.groups, blocks_NKU, self.dims,
            self._scale,
        )  # fmt: skip

    def _rotated(
        self,
        norm: RmsNorm,
        x_TX: torch.Tensor,
        num_heads: int,
        cos_TR: torch.Tensor,
        sin_TR: torch.Tensor,
    ) -> torch.Tensor:
        """Heads normed, then rotated: [T, num_heads, D]."""
        x_THD = norm.forward(x_TX.reshape(len(x_TX), num_heads, -1))
        rotated = 2 * cos_TR.shape[1]
        self._ops.rope(x_THD[..., :rotated], cos_TR, sin_TR, RopeLayout.HALVES)
        return x_THD
