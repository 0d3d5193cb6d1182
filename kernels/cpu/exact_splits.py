"""Splits of keys that several positions attend in one call, at row counts that agree. Shapes: see
`batchmla.kernels.ops`."""

from collections.abc import Callable, Hashable

import torch

from batchmla.kernels.cpu.rows import TRIAL_ROWS, Product, RowTrials, cancelling
from batchmla.kernels.cpu.sdpa import Attended, flash, sdpa

TRIAL_SCALE = 1e4  # of scores that are nothing but rounding


class SplitAttention:
    """Attention of single queries to keys that all of them see whole; a row's result depends on
    that row and the keys alone."""

    def __init__(self, trials: RowTrials) -> None:
        self._trials = trials

    def attend(
        self, q_GQHD: torch.Tensor, k_GLKD: torch.Tensor, v_GLKW: torch.Tensor, scale: float
    ) -> Attended:
        """Many queries of one sequence, or one of each of many → as `sdpa`."""
        num_seqs, num_queries, num_heads, head_dim = q_GQHD.shape
        width = v_GLKW.shape[-1]
        counts = self._trials.counts(*self._kind(q_GQHD, k_GLKD, width))
        if num_seqs == 1:
            product = _product(k_GLKD, v_GLKW, num_heads, scale)
            both_NX = counts.run(q_GQHD.view(num_queries, -1), product)
            out_NX, lse_NH = both_NX[:, :-num_heads], both_NX[:, -num_heads:]
            return out_NX.reshape(1, num_queries, num_heads, width), lse_NH[None]
        assert num_queries == 1, f"{num_queries} queries of each of {num_seqs} sequences"
        least = counts.counts[0]
        if least > 1:
            padded = q_GQHD.new_zeros(num_seqs, least, num_heads, head_dim)
            padded[:, :1] = q_GQHD
            q_GQHD = padded
        out_GQHW, lse_GQH = sdpa(q_GQHD, k_GLKD, v_GLKW, None, scale, call=flash)
        assert lse_GQH is not None
        return out_GQHW[:, :1], lse_GQH[:, :1]

    def _kind(
        self, q_GQHD: torch.Tensor, k_GLKD: torch.Tensor, width: int
    ) -> tuple[Hashable, Callable[[], tuple[Product, torch.Tensor]]]:
        """The kind of call, and how to make one for a trial."""
        num_heads, head_dim = q_GQHD.shape[2:]
        num_keys, num_kv_heads = k_GLKD.shape[1:3]
        dtype = q_GQHD.dtype

        def make() -> tuple[Product, torch.Tensor]:
            q_XD, k_LD = cancelling(TRIAL_ROWS * num_heads, (num_keys, head_dim), dtype)
            k_1LKD = k_LD[None, :, None].expand(1, -1, num_kv_heads, -1).contiguous()
            v_1LKW = k_1LKD[..., :width]
            if width > head_dim:
                v_1LKW = torch.cat((k_1LKD, k_1LKD[..., : width - head_dim]), dim=-1)
            product = _product(k_1LKD, v_1LKW, num_heads, TRIAL_SCALE)
            return product, q_XD.view(TRIAL_ROWS, -1)

        return ("split", num_heads, num_kv_heads, head_dim, width, num_keys, dtype), make


def _product(k_1LKD: torch.Tensor, v_1LKW: torch.Tensor, num_heads: int, scale: float) -> Product:
    """[N, H*D] → [N, H*W + H] in float32: results, then their log-sum-exps."""

    def product(q_NX: torch.Tensor) -> torch.Tensor:
        q_1NHD = q_NX.view(1, len(q_NX), num_heads, -1)
        out_1NHW, lse_1NH = sdpa(q_1NHD, k_1LKD, v_1LKW, None, scale, call=flash)
        assert lse_1NH is not None
        return torch.cat((out_1NHW[0].flatten(1).float(), lse_1NH[0]), dim=1)

    return product
