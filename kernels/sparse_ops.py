"""The signature of the ops that DeepSeek Sparse Attention adds (DeepSeek-V3.2 report, section 2.1).

Shapes as in `batchmla.kernels.ops`, and: N rows that choose their keys, I index heads, D width of
an index head, K keys chosen, X width of a latent row (C + R), Y bytes of a record.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from batchmla.kernels.ops import MlaDims, Packed

SCALE_BYTES = 4
TAIL_BYTES = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """The bytes of one cached row: values in e4m3 with a float32 factor for each tile, then a tail.

    | part   | bytes                 | content                                       |
    | values | values                | e4m3                                          |
    | scales | 4 * ceil(values/tile) | float32; value = e4m3 * scale of its tile     |
    | tail   | 2 * tail              | bfloat16, as it is                            |

    A latent row of DeepSeek-V3.2 has 512 values in tiles of 128 and a tail of 64: 656 bytes.
    With `scales_last` the parts of a page lie apart: values and tails of its rows, then the scales
    of its rows (the index keys: 128 + 4 bytes a row). `has_e8m0` scales are one byte each, the
    exponent of a power of two plus 127, and `pad` zeros follow a row's scales (DeepSeek-V4's rows:
    448 values in tiles of 64, a tail of 64, 7 scales and 1 zero: 576 + 8 bytes).
    """

    values: int
    tile: int
    tail: int = 0
    scales_last: bool = False
    has_e8m0: bool = False
    pad: int = 0

    @property
    def num_tiles(self) -> int:
        return -(-self.values // self.tile)

    @property
    def width(self) -> int:
        """Elements of the row that a record stands for."""
        return self.values + self.tail

    @property
    def tail_bytes(self) -> int:
        return TAIL_BYTES * self.tail

    @property
    def scale_bytes(self) -> int:
        """Of one row, zeros behind them included."""
        return (1 if self.has_e8m0 else SCALE_BYTES) * self.num_tiles + self.pad

    @property
    def num_bytes(self) -> int:
        return self.values + self.scale_bytes + self.tail_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexGroup:
    """Rows that choose among keys in one call.

    They follow each other from `first_row` of the N rows; row i sees the first `visible_N[i]` keys
    of its pages. `pages_GP` has one sequence for each row, or one that all of them belong to;
    padded with page 0, of their P*B keys the first `num_keys` count.
    """

    first_row: int
    num_rows: int
    num_keys: int
    pages_GP: torch.Tensor
    visible_N: torch.Tensor  # int64


class LayerNormOp(Protocol):
    def __call__(
        self, x_TM: torch.Tensor, weight_M: torch.Tensor, bias_M: torch.Tensor, eps: float
    ) -> torch.Tensor:
        """w · (x - mean) / sqrt(variance + eps) + b over the last dimension, float32 inside."""
        ...


class SelectKeysOp(Protocol):
    def __call__(
        self,
        q_NID: torch.Tensor,
        weights_NI: torch.Tensor,
        key_PBD: torch.Tensor,
        groups: Sequence[IndexGroup],
        count: int,
        record: Record | None,
    ) -> torch.Tensor:
        """Flat cache rows int64 [N, count] of the keys with the largest Σ_i w_i relu(q_i · k), in
        the order of their positions; of equals those at the lowest positions.

        Scores are float32 (so are the weights); one that is no number counts as the smallest. Each
        row sees at least `count` keys. With a `record` the cache holds bytes."""
        ...


class SparseMlaOp(Protocol):
    def __call__(
        self,
        q_NHD: torch.Tensor,
        cache_PBX: torch.Tensor,
        slots_NK: torch.Tensor,
        kv_b: Packed,
        dims: MlaDims,
        record: Record | None,
    ) -> torch.Tensor:
        """Attention in latent space (see `MlaOp`) of each row over its own cached rows → [N,
        H*W]."""
        ...


class WriteRecordOp(Protocol):
    def __call__(
        self, cache_PBY: torch.Tensor, slots_T: torch.Tensor, rows_TX: torch.Tensor, record: Record
    ) -> None:
        """Writes rows as records into the flat cache rows `slots`, in place.

        A tile's factor is the least power of two with which its largest magnitude (taken as at
        least 1e-4) stays within the 448 of e4m3."""
        ...


class ReadRecordOp(Protocol):
    def __call__(
        self, cache_PBY: torch.Tensor, slots_N: torch.Tensor, record: Record, dtype: torch.dtype
    ) -> torch.Tensor:
        """The rows [N, X] that the records of the flat cache rows `slots` stand for."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class SparseOps:
    """One back end's."""

    layer_norm: LayerNormOp
    select_keys: SelectKeysOp
    sparse_mla: SparseMlaOp
    write_record: WriteRecordOp
    read_record: ReadRecordOp
