"""The signature of the ops that MiniMax-M3 adds: attention over blocks of keys that an indexer
chooses, and SwiGLU-OAI.

Shapes as in `batchmla.kernels.ops`, and: N rows that choose, K kv heads of this rank, each with an
index head of its own, D width of a head or of an index head, U blocks chosen.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from batchmla.kernels.ops import Packed
from batchmla.kernels.sparse_ops import IndexGroup


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockDims:
    """Keys stand in blocks of `block_tokens`, counted from the start of a sequence. A row reads
    `count` of those it sees, among them the last `forced`."""

    block_tokens: int
    count: int
    forced: int

    @property
    def num_keys(self) -> int:
        """The most keys that a head reads."""
        return self.count * self.block_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class OaiGate:
    """SwiGLU-OAI: `alpha` multiplies the gate inside the sigmoid, `limit` bounds gates from above
    and ups on both sides."""

    alpha: float
    limit: float


class SelectBlocksOp(Protocol):
    def __call__(
        self,
        q_NKD: torch.Tensor,
        key_PBD: torch.Tensor,
        groups: Sequence[IndexGroup],
        dims: BlockDims,
    ) -> torch.Tensor:
        """Numbers int64 [N, K, U] of each index head's blocks with the largest scores, rising; of
        equals the lowest.

        A block's score is the largest q · k of those of its keys that the row sees, in float32; the
        forced ones come before all others, one that is no number behind all. Each row sees more
        than `dims.num_keys` keys."""
        ...


class AttendBlocksOp(Protocol):
    def __call__(
        self,
        q_NHD: torch.Tensor,
        key_PBW: torch.Tensor,
        value_PBW: torch.Tensor,
        groups: Sequence[IndexGroup],
        blocks_NKU: torch.Tensor,
        dims: BlockDims,
        scale: float,
    ) -> torch.Tensor:
        """softmax(scale · q kᵀ) v over the keys that a row sees in the blocks of the head's kv head
        → [N, H*D]."""
        ...


class OaiActMulOp(Protocol):
    def __call__(self, gate_up_TF: torch.Tensor, gate: OaiGate) -> torch.Tensor:
        """g · sigmoid(alpha · g) · (u + 1) with g = min(first half, limit) and u = second half
        within ±limit, of [T, 2*F] → [T, F], float32 inside."""
        ...


class OaiExpertsOp(Protocol):
    def __call__(
        self,
        x_TM: torch.Tensor,
        weights_TA: torch.Tensor,
        ids_TA: torch.Tensor,
        up: Packed,
        down: Packed,
        gate: OaiGate,
    ) -> torch.Tensor:
        """Σ_a weight_a · down_a( act_mul(up_a x) ) → [T, M]."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockSparseOps:
    """One back end's."""

    select: SelectBlocksOp
    attend: AttendBlocksOp
    act_mul: OaiActMulOp
    experts: OaiExpertsOp
