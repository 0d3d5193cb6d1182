"""Index scores and attention over chosen rows at row counts that agree. Shapes: see
`batchmla.kernels.sparse_ops`.

A score is a product over one block of 256 keys at a fixed place, whatever else the row sees; every
row attends the same number of keys in the order of their positions.
"""

from itertools import pairwise

import numpy as np
import torch
import torch.nn.functional as F

from batchmla.kernels.cpu.rows import TRIAL_ROWS, Product, RowCounts, RowTrials, aligned, cancelling
from batchmla.kernels.cpu.sparse import attend_rows

KEY_BLOCK = 256
TRIAL_SCALE = 1e4  # of scores that are nothing but rounding


class ExactSparse:
    """The two products of sparse attention; a row's result depends on that row and its keys."""

    def __init__(self, trials: RowTrials) -> None:
        self._trials = trials

    def scores(
        self, q_RID: torch.Tensor, weights_RI: torch.Tensor, k_GLD: torch.Tensor
    ) -> torch.Tensor:
        """Σ_i w_i relu(q_i · k) → [R, L], key block by key block."""
        num_heads, width = q_RID.shape[1:]
        num_keys, is_shared = k_GLD.shape[1], len(k_GLD) == 1
        k_GLD = F.pad(k_GLD, (0, 0, 0, -num_keys % KEY_BLOCK))
        parts = []
        for rows, count in blocks(self._score_counts(num_heads, width), len(q_RID)):
            taken = rows.stop - rows.start
            q_CX = aligned(q_RID[rows].flatten(1), count)
            w_CI = aligned(weights_RI[rows], count)
            k_CLD = k_GLD if is_shared else _padded(k_GLD[rows], count)
            key_blocks = torch.split(k_CLD, KEY_BLOCK, dim=1)
            both_CX = torch.cat((q_CX, w_CI), dim=1)
            scored = [_score(both_CX, k_CKD, num_heads)[:taken] for k_CKD in key_blocks]
            parts.append(torch.cat(scored, dim=1)[:, :num_keys])
        return torch.cat(parts)

    def _score_counts(self, num_heads: int, width: int) -> RowCounts:
        def make() -> tuple[Product, torch.Tensor]:
            q_XD, k_KD = cancelling(TRIAL_ROWS * num_heads, (KEY_BLOCK, width), torch.float32)
            weights_NI = torch.linspace(-2, 2, num_heads).expand(TRIAL_ROWS, -1)
            both_NX = torch.cat((q_XD.view(TRIAL_ROWS, -1), weights_NI), dim=1)
            return lambda both_RX: _score(both_RX, k_KD[None], num_heads), both_NX

        return self._trials.counts(("index", num_heads, width), make)

    def attend(self, q_RHX: torch.Tensor, row_RKX: torch.Tensor, scale: float) -> torch.Tensor:
        """softmax(scale · q rowᵀ) row of every row → [R, H, X]."""
        num_heads, width = q_RHX.shape[1:]
        parts = []
        counts = self._attend_counts(num_heads, width, row_RKX.shape[1], q_RHX.dtype)
        for rows, count in blocks(counts, len(q_RHX)):
            q_CHX = aligned(q_RHX[rows].flatten(1), count).view(count, num_heads, width)
            out_CHX = attend_rows(q_CHX, _padded(row_RKX[rows], count), scale)
            parts.append(out_CHX[: rows.stop - rows.start])
        return torch.cat(parts)

    def _attend_counts(
        self, num_heads: int, width: int, num_keys: int, dtype: torch.dtype
    ) -> RowCounts:
        def make() -> tuple[Product, torch.Tensor]:
            q_XX, row_KX = cancelling(TRIAL_ROWS * num_heads, (num_keys, width), dtype)

            def product(q_RX: torch.Tensor) -> torch.Tensor:
                row_RKX = row_KX.expand(len(q_RX), -1, -1)
                return attend_rows(q_RX.view(-1, num_heads, width), row_RKX, TRIAL_SCALE).flatten(1)

            return product, q_XX.view(TRIAL_ROWS, -1)

        return self._trials.counts(("chosen", num_heads, width, num_keys, dtype), make)


def _score(both_RX: torch.Tensor, k_GKD: torch.Tensor, num_heads: int) -> torch.Tensor:
    """[R, I*D + I], queries then weights, over one block of keys → [R, K]."""
    q_RX, weights_RI = both_RX[:, :-num_heads], both_RX[:, -num_heads:]
    q_RID = q_RX.reshape(len(q_RX), num_heads, -1)
    dots_RIK = torch.bmm(q_RID, k_GKD.expand(len(q_RID), -1, -1).transpose(1, 2))
    return torch.bmm(weights_RI[:, None], dots_RIK.relu_())[:, 0]


def blocks(counts: RowCounts, num_rows: int) -> list[tuple[slice, int]]:
    """Which rows go in one call, and padded to how many."""
    cut = counts.cut(num_rows)
    borders = [0, *np.cumsum(cut).tolist()]
    return [
        (slice(first, min(end, num_rows)), count)
        for (first, end), count in zip(pairwise(borders), cut, strict=True)
    ]


def _padded(x_RKX: torch.Tensor, count: int) -> torch.Tensor:
    """Zeros behind the rows."""
    missing = count - len(x_RKX)
    return F.pad(x_RKX, (0, 0, 0, 0, 0, missing)) if missing else x_RKX
