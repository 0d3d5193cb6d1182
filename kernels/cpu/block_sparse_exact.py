"""The products of MiniMax-M3's ops at row counts that agree. Shapes: see
`batchmla.kernels.block_sparse_ops`.

A score is a product over one block of 256 keys at a fixed place, whatever else the row sees; every
row attends the same number of keys.
"""

import torch
import torch.nn.functional as F

from batchmla.kernels.cpu.block_sparse import attend_heads
from batchmla.kernels.cpu.exact_sparse import KEY_BLOCK, TRIAL_SCALE, blocks
from batchmla.kernels.cpu.rows import TRIAL_ROWS, Product, RowCounts, RowTrials, aligned, cancelling


class ExactBlocks:
    """A row's result depends on that row and the keys it reads."""

    def __init__(self, trials: RowTrials) -> None:
        self._trials = trials

    def dots(self, q_RKD: torch.Tensor, k_GLD: torch.Tensor) -> torch.Tensor:
        """q · k → [R, K, L], key block by key block."""
        num_heads, width = q_RKD.shape[1:]
        num_seqs, num_keys = k_GLD.shape[:2]
        whole = -(-num_keys // KEY_BLOCK) * KEY_BLOCK
        padded_GLD = k_GLD.new_zeros(num_seqs, whole, width)
        padded_GLD[:, :num_keys] = k_GLD
        parts = []
        for rows, count in blocks(self._dot_counts(num_heads, width), len(q_RKD)):
            q_CKD = _at_count(q_RKD[rows], count)
            k_CLD = padded_GLD if num_seqs == 1 else _at_count(padded_GLD[rows], count)
            found = [_dots(q_CKD, k_CBD) for k_CBD in torch.split(k_CLD, KEY_BLOCK, dim=1)]
            parts.append(torch.cat(found, dim=2)[: rows.stop - rows.start, :, :num_keys])
        return torch.cat(parts)

    def _dot_counts(self, num_heads: int, width: int) -> RowCounts:
        def make() -> tuple[Product, torch.Tensor]:
            q_XD, k_BD = cancelling(TRIAL_ROWS * num_heads, (KEY_BLOCK, width), torch.float32)

            def product(q_RX: torch.Tensor) -> torch.Tensor:
                return _dots(q_RX.view(len(q_RX), num_heads, width), k_BD[None]).flatten(1)

            return product, q_XD.view(TRIAL_ROWS, -1)

        return self._trials.counts(("block dots", num_heads, width), make)

    def attend(
        self,
        q_XHD: torch.Tensor,
        k_XLD: torch.Tensor,
        v_XLD: torch.Tensor,
        bias_XL: torch.Tensor,
        scale: float,
    ) -> torch.Tensor:
        """softmax(scale · q kᵀ + bias) v of every row and kv head."""
        num_heads, width = q_XHD.shape[1:]
        counts = self._attend_counts(num_heads, width, k_XLD.shape[1], q_XHD.dtype)
        parts = []
        for rows, count in blocks(counts, len(q_XHD)):
            k, v, bias = (
                F.pad(x[rows], (0, 0) * (x.dim() - 1) + (0, count - (rows.stop - rows.start)))
                for x in (k_XLD, v_XLD, bias_XL)
            )
            out_CHD = attend_heads(_at_count(q_XHD[rows], count), k, v, bias, scale)
            parts.append(out_CHD[: rows.stop - rows.start])
        return torch.cat(parts)

    def _attend_counts(
        self, num_heads: int, width: int, num_keys: int, dtype: torch.dtype
    ) -> RowCounts:
        def make() -> tuple[Product, torch.Tensor]:
            q_XD, k_LD = cancelling(TRIAL_ROWS * num_heads, (num_keys, width), dtype)
            bias_L = torch.zeros(num_keys, dtype=dtype)

            def product(q_RX: torch.Tensor) -> torch.Tensor:
                count = len(q_RX)
                k_RLD, bias_RL = k_LD.expand(count, -1, -1), bias_L.expand(count, -1)
                q_RHD = q_RX.view(count, num_heads, width)
                return attend_heads(q_RHD, k_RLD, k_RLD, bias_RL, TRIAL_SCALE).flatten(1)

            return product, q_XD.view(TRIAL_ROWS, -1)

        return self._trials.counts(("blocks", num_heads, width, num_keys, dtype), make)


def _dots(q_RKD: torch.Tensor, k_GBD: torch.Tensor) -> torch.Tensor:
    """One product a row."""
    return torch.bmm(q_RKD, k_GBD.expand(len(q_RKD), -1, -1).transpose(1, 2))


def _at_count(x_RXD: torch.Tensor, count: int) -> torch.Tensor:
    """Aligned, with zeros behind the rows."""
    return aligned(x_RXD.flatten(1), count).view(count, *x_RXD.shape[1:])
