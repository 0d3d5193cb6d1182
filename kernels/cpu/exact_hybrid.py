"""The products of DeepSeek-V4's ops at row counts that agree. Shapes: see
`batchmla.kernels.hybrid_ops`."""

from collections.abc import Callable

import torch
import torch.nn.functional as F

from batchmla.kernels.cpu.exact_sparse import TRIAL_SCALE, blocks
from batchmla.kernels.cpu.hybrid import attend_rows, group_products
from batchmla.kernels.cpu.rows import TRIAL_ROWS, Product, RowTrials, aligned, cancelling
from batchmla.kernels.ops import Packed


class ExactHybrid:
    """A row's result depends on that row and what it reads."""

    def __init__(
        self,
        trials: RowTrials,
        expert_linear: Callable[[torch.Tensor, Packed, int], torch.Tensor],
    ) -> None:
        """`expert_linear` is exact already."""
        self._trials = trials
        self.expert_linear = expert_linear

    def attend(
        self, q_RHD: torch.Tensor, row_RLD: torch.Tensor, bias_RHL: torch.Tensor, scale: float
    ) -> torch.Tensor:
        """softmax(scale · q rowᵀ + bias) row, with the same number of keys for every row."""
        num_heads, width = q_RHD.shape[1:]
        num_keys, dtype = row_RLD.shape[1], q_RHD.dtype

        def make() -> tuple[Product, torch.Tensor]:
            q_XD, row_LD = cancelling(TRIAL_ROWS * num_heads, (num_keys, width), dtype)
            bias = torch.zeros(1, num_heads, num_keys)

            def product(q_RX: torch.Tensor) -> torch.Tensor:
                count = len(q_RX)
                q = q_RX.view(count, num_heads, width)
                row, seen = row_LD.expand(count, -1, -1), bias.expand(count, -1, -1)
                return attend_rows(q, row, seen, TRIAL_SCALE).flatten(1)

            return product, q_XD.view(TRIAL_ROWS, -1)

        counts = self._trials.counts(("hybrid", num_heads, width, num_keys, dtype), make)
        parts = []
        for rows, count in blocks(counts, len(q_RHD)):
            missing = count - (rows.stop - rows.start)
            pad = (0, 0, 0, 0, 0, missing)
            q_CHD = aligned(q_RHD[rows].flatten(1), count).view(count, num_heads, width)
            out_CHD = attend_rows(
                q_CHD, F.pad(row_RLD[rows], pad), F.pad(bias_RHL[rows], pad), scale
            )
            parts.append(out_CHD[: rows.stop - rows.start])
        return torch.cat(parts)

    def group_products(self, x_GTX: torch.Tensor, weight_GOX: torch.Tensor) -> torch.Tensor:
        """One product a group."""

        def make() -> tuple[Product, torch.Tensor]:
            x_TX, w_OX = cancelling(TRIAL_ROWS, tuple(weight_GOX.shape[1:]), weight_GOX.dtype)  # type: ignore[arg-type]
            trial_GOX = w_OX.expand(len(weight_GOX), -1, -1).contiguous()
            x = x_TX.expand(len(weight_GOX), -1, -1).contiguous()
            return lambda block: group_products(block, trial_GOX), x

        key = ("groups", *weight_GOX.shape, weight_GOX.dtype)
        counts = self._trials.counts(key, make)
        return counts.run(x_GTX, lambda block: group_products(block, weight_GOX))
