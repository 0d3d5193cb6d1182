"""The lightning indexer's queries, keys and head weights (DeepSeek-V3.2 report, section 2.1).

T tokens, N rows that choose their keys, M model width, Q query rank, I index heads, D width of an
index head, of which the first R are rotated in halves.
"""

from dataclasses import dataclass

import torch

from batchmla.kernels.ops import Ops, PackKind, RopeLayout
from batchmla.layers.block import Block, Weight
from batchmla.layers.linear import Linear
from batchmla.layers.norm import LayerNorm

KEY_NORM_EPS = 1e-6  # fixed in DeepSeek's code, whatever the model's own


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexerDims:
    """All heads are on every rank, so that every rank chooses the same keys."""

    heads: int
    width: int  # of a head and of a key
    rope: int
    count: int  # keys that a query reads


class Indexer(Block):
    """The projection of keys is part of the attention's first product."""

    def __init__(self, ops: Ops, *, width: int, query_rank: int, dims: IndexerDims) -> None:
        self.dims = dims
        self.query = Linear(ops, query_rank, dims.heads * dims.width)
        self.key_norm = LayerNorm(ops, dims.width, KEY_NORM_EPS)
        self.head_weights = Weight(dims.heads, width, kind=PackKind.LINEAR, is_float32=True)
        self._ops = ops

    def keys(
        self, projected_TD: torch.Tensor, cos_TR: torch.Tensor, sin_TR: torch.Tensor
    ) -> torch.Tensor:
        """Normed, then rotated: what the cache keeps, [T, D]."""
        key_TD = self.key_norm.forward(projected_TD)
        self._rotate(key_TD[:, None], cos_TR, sin_TR)
        return key_TD

    def queries(
        self,
        x_NM: torch.Tensor,
        latent_NQ: torch.Tensor,
        cos_NR: torch.Tensor,
        sin_NR: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(queries [N, I, D], head weights float32 [N, I]); `latent` is the normed one that the
        attention's queries are made of."""
        dims = self.dims
        q_NID = self.query.forward(latent_NQ).view(len(x_NM), dims.heads, dims.width)
        self._rotate(q_NID, cos_NR, sin_NR)
        weights_NI = self._ops.linear(x_NM.float(), self.head_weights.packed, None)
        return q_NID, weights_NI * (dims.heads * dims.width) ** -0.5

    def _rotate(self, x_THD: torch.Tensor, cos_TR: torch.Tensor, sin_TR: torch.Tensor) -> None:
        self._ops.rope(x_THD[..., : self.dims.rope], cos_TR, sin_TR, RopeLayout.HALVES)
