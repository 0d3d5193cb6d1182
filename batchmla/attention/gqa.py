"""Grouped-query attention over pages of keys and values.

T tokens, H query heads and K kv heads of this rank, D head dim, R rotated width, M model width.
"""

from dataclasses import dataclass
from enum import StrEnum

import numpy as np
import torch

from batchmla.attention.exact_groups import join, make_exact_groups
from batchmla.attention.groups import make_groups
from batchmla.attention.spans import read_in_place, whole_runs
from batchmla.kernels.groups import Groups
from batchmla.kernels.ops import Ops, ReadsPagesOp, RopeLayout, reads_no_pages
from batchmla.kernels.sparse_ops import Record
from batchmla.kv.cache import LayerCache
from batchmla.kv.layout import KVPart
from batchmla.kv.step import Step
from batchmla.layers.block import Block
from batchmla.layers.linear import Linear, RowLinear
from batchmla.layers.norm import FullWidthNorms, RmsNorm
from batchmla.layers.rope import Rope
from batchmla.parallel import Par
from batchmla.placement import Placement

KIND = "gqa"
BYTES = "uint8"
FORMATS = ("fp8",)  # beyond the plain dtypes: rows as records


class QkNorm(StrEnum):
    """What one norm of queries and keys covers; it comes before the rotation."""

    NONE = "none"
    HEAD = "head"  # each head by itself, one weight for all heads
    FULL = "full"  # all heads as one vector, on whatever ranks they are


def head_record(num_kv_heads: int, head_dim: int) -> Record:
    """All heads in e4m3, behind them a power of two for each: 129 bytes a head of 128 values."""
    return Record(values=num_kv_heads * head_dim, tile=head_dim, has_e8m0=True)


def parts(
    num_kv_heads: int, head_dim: int, kv_dtype: str, placement: Placement
) -> tuple[KVPart, ...]:
    """A row of keys and a row of values a token, this rank's heads only, of which ranks that
    outnumber them hold copies; `kv_dtype` is a plain dtype or one of `FORMATS`."""
    local_heads = placement.local_or_copied(num_kv_heads)
    width, dtype = local_heads * head_dim, kv_dtype
    if kv_dtype in FORMATS:
        width, dtype = head_record(local_heads, head_dim).num_bytes, BYTES
    return tuple(KVPart(name=name, width=width, dtype=dtype) for name in ("k", "v"))


@dataclass(frozen=True, slots=True, kw_only=True)
class GqaPlan:
    """One step's groups and rotations, shared by all layers."""

    groups: Groups
    cos_TR: torch.Tensor
    sin_TR: torch.Tensor


def plan(
    step: Step,
    rope: Rope,
    head_dim: int,
    dtype: torch.dtype,
    reads_pages: ReadsPagesOp = reads_no_pages,
) -> GqaPlan:
    """Once a step."""
    cos_TR, sin_TR = rope.at(step.positions_T)
    if reads_pages(dtype, (head_dim,)):
        groups = read_in_place(step, whole_runs(step))
    elif step.is_exact:
        groups = join(*make_exact_groups(step, dtype))
    else:
        groups = make_groups(step, np.arange(step.num_sequences), dtype)
    return GqaPlan(groups=groups, cos_TR=cos_TR, sin_TR=sin_TR)


class GqaAttention(Block):
    """q, k and v are one product; the first R elements of a head are rotated."""

    def __init__(
        self,
        par: Par,
        ops: Ops,
        *,
        width: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        eps: float,
        has_qkv_bias: bool = False,
        qk_norm: QkNorm = QkNorm.NONE,
        norm_offset: float = 0.0,
    ) -> None:
        """Numbers of heads are whole; `eps` is the norms', `norm_offset` that of norms by head."""
        self.num_heads = par.placement.local(num_heads, "attention heads")
        self.num_kv_heads = par.placement.local_or_copied(num_kv_heads)
        self.head_dim = head_dim
        q_width, kv_width = self.num_heads * head_dim, self.num_kv_heads * head_dim
        self.qkv = Linear(ops, width, q_width, kv_width, kv_width, has_bias=has_qkv_bias)
        self.out = RowLinear(par, ops, num_heads * head_dim, width)
        self.q_norm = self.k_norm = self.norms = None
        if qk_norm is QkNorm.HEAD:
            self.q_norm, self.k_norm = (RmsNorm(ops, head_dim, eps, norm_offset) for _ in range(2))
        elif qk_norm is QkNorm.FULL:
            self.norms = FullWidthNorms(par, ops, eps, head_dim, (num_heads, num_kv_heads))
        self._ops = ops
        self._scale = head_dim**-0.5
        self._record = head_record(self.num_kv_heads, head_dim)

    def forward(
        self, x_TM: torch.Tensor, step: Step, plan: GqaPlan, cache: LayerCache
    ) -> torch.Tensor:
        """[T, M] → [T, M]; writes the step's keys and values first."""
        heads, kv_heads, ops = self.num_heads, self.num_kv_heads, self._ops
        qkv_THD = self.qkv.forward(x_TM).view(x_TM.shape[0], heads + 2 * kv_heads, self.head_dim)
        q_THD, k_TKD = qkv_THD[:, :heads], qkv_THD[:, heads : heads + kv_heads]
        rotated, cos_TR, sin_TR = 2 * plan.cos_TR.shape[1], plan.cos_TR, plan.sin_TR
        if self.q_norm is None and self.norms is None:
            both_THR = qkv_THD[:, : heads + kv_heads, :rotated]
            ops.rope(both_THR, cos_TR, sin_TR, RopeLayout.HALVES)
        else:
            q_THD, k_TKD = self._norm(q_THD, k_TKD)
            ops.rope(q_THD[..., :rotated], cos_TR, sin_TR, RopeLayout.HALVES)
            ops.rope(k_TKD[..., :rotated], cos_TR, sin_TR, RopeLayout.HALVES)
        v_TKD = qkv_THD[:, heads + kv_heads :]
        record = self._record if cache["k"].dtype == torch.uint8 else None
        for name, rows_TKD in (("k", k_TKD), ("v", v_TKD)):
            if record is None:
                ops.write(cache[name], step.slots_T, rows_TKD.flatten(1))
            else:
                ops.sparse.write_record(cache[name], step.slots_T, rows_TKD.flatten(1), record)
        out_TX = ops.gqa(q_THD, cache["k"], cache["v"], plan.groups, self._scale, record)
        return self.out.forward(out_TX)

    def _norm(self, q_THD: torch.Tensor, k_TKD: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if self.norms is not None:
            q_TX, k_TX = self.norms.forward(q_THD.flatten(1), k_TKD.flatten(1))
            return q_TX.view_as(q_THD), k_TX.view_as(k_TKD)
        assert self.q_norm is not None and self.k_norm is not None, "no norm to apply"
        return self.q_norm.forward(q_THD), self.k_norm.forward(k_TKD)
