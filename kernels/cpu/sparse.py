"""DeepSeek Sparse Attention: scores of many rows in one product, an exact choice, one SDPA over the
gathered rows. Shapes: see `batchmla.kernels.sparse_ops`.

Rows go in blocks whose scores and gathered keys stay within a few MiB. R rows of a block, G
sequences of its keys: R of them, or one.
"""

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F

from batchmla.kernels.cpu.attention import LatentProducts
from batchmla.kernels.cpu.records import dequantise, page_parts, read_record, write_record
from batchmla.kernels.cpu.scratch import Scratch
from batchmla.kernels.cpu.sdpa import sdpa
from batchmla.kernels.ops import MlaDims, Packed
from batchmla.kernels.sparse_ops import IndexGroup, Record, SparseOps

BLOCK_VALUES = 2**21  # scores, or gathered elements, of a block of rows

Scores = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""(q_RID, weights_RI, k_GLD), all float32 → [R, L]."""
Attend = Callable[[torch.Tensor, torch.Tensor, float], torch.Tensor]
"""(q_RHX, row_RKX, scale) → softmax(scale · q rowᵀ) row, [R, H, X]."""


def layer_norm(
    x_TM: torch.Tensor, weight_M: torch.Tensor, bias_M: torch.Tensor, eps: float
) -> torch.Tensor:
    """torch's, in float32."""
    width = x_TM.shape[-1:]
    return F.layer_norm(x_TM.float(), width, weight_M.float(), bias_M.float(), eps).to(x_TM.dtype)


def index_scores(
    q_RID: torch.Tensor, weights_RI: torch.Tensor, k_GLD: torch.Tensor
) -> torch.Tensor:
    """Σ_i w_i relu(q_i · k) → [R, L]."""
    num_rows, num_heads, width = q_RID.shape
    if len(k_GLD) == 1:
        dots_RIL = (q_RID.reshape(-1, width) @ k_GLD[0].T).view(num_rows, num_heads, -1)
    else:
        dots_RIL = torch.bmm(q_RID, k_GLD.transpose(1, 2))
    return torch.bmm(weights_RI[:, None], dots_RIL.relu_())[:, 0]


def choose(scores_RL: torch.Tensor, visible_R: torch.Tensor, count: int) -> torch.Tensor:
    """Positions [R, count], rising, of the largest scores among the first `visible`; of equals the
    lowest. Changes the scores in place."""
    device = scores_RL.device
    is_beyond_RL = torch.arange(scores_RL.shape[1], device=device) >= visible_R[:, None]
    scores_RL.nan_to_num_(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf)
    scores_RL.masked_fill_(is_beyond_RL, -torch.inf)
    least_R1 = scores_RL.topk(count, dim=1, sorted=False).values.amin(dim=1, keepdim=True)
    is_chosen_RL = scores_RL >= least_R1
    if int(is_chosen_RL.sum()) > count * len(scores_RL):
        is_above_RL = scores_RL > least_R1
        is_equal_RL = is_chosen_RL & ~is_above_RL
        wanted_R1 = count - is_above_RL.sum(dim=1, keepdim=True)
        is_chosen_RL = is_above_RL | (is_equal_RL & (is_equal_RL.cumsum(dim=1) <= wanted_R1))
    return is_chosen_RL.nonzero()[:, 1].view(-1, count)


def attend_rows(q_RHX: torch.Tensor, row_RKX: torch.Tensor, scale: float) -> torch.Tensor:
    """All heads of a row as queries of its one key head."""
    row_RK1X = row_RKX[:, :, None]
    return sdpa(q_RHX[:, None], row_RK1X, row_RK1X, None, scale)[0][:, 0]


class SparseAttention:
    """select_keys and sparse_mla of one back end; gathered rows share one scratch."""

    def __init__(
        self,
        scratch: Scratch,
        products: LatentProducts | None = None,
        scores: Scores = index_scores,
        attend: Attend = attend_rows,
    ) -> None:
        self._scratch = scratch
        self._products = products or LatentProducts()
        self._scores = scores
        self._attend = attend

    def select_keys(
        self,
        q_NID: torch.Tensor,
        weights_NI: torch.Tensor,
        key_PBD: torch.Tensor,
        groups: Sequence[IndexGroup],
        count: int,
        record: Record | None,
    ) -> torch.Tensor:
        """Block by block: scores, positions, cache rows."""
        page_tokens, num_heads, parts = key_PBD.shape[1], q_NID.shape[1], []
        for group in groups:
            is_shared = len(group.pages_GP) == 1
            shared_GLD = self._keys(key_PBD, group.pages_GP, record) if is_shared else None
            width = num_heads if is_shared else num_heads + q_NID.shape[2]
            block = max(1, BLOCK_VALUES // (width * group.num_keys))
            for first in range(0, group.num_rows, block):
                inside = slice(first, min(first + block, group.num_rows))
                rows = slice(group.first_row + inside.start, group.first_row + inside.stop)
                pages_GP = group.pages_GP if is_shared else group.pages_GP[inside]
                k_GLD = self._keys(key_PBD, pages_GP, record) if shared_GLD is None else shared_GLD
                scores_RL = self._scores(
                    q_NID[rows].float(), weights_NI[rows], k_GLD[:, : group.num_keys]
                )
                places_RK = choose(scores_RL, group.visible_N[inside], count)
                pages_RP = pages_GP.expand(len(places_RK), -1)
                pages_RK = pages_RP.gather(1, places_RK // page_tokens)
                parts.append(pages_RK * page_tokens + places_RK % page_tokens)
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _keys(
        self, key_PBD: torch.Tensor, pages_GP: torch.Tensor, record: Record | None
    ) -> torch.Tensor:
        """All keys of the pages, float32 [G, P*B, D]."""
        num_seqs, num_pages = pages_GP.shape
        shape = (num_seqs * num_pages, *key_PBD.shape[1:])
        pages = self._scratch.take("index keys", shape, key_PBD)
        torch.index_select(key_PBD, 0, pages_GP.flatten(), out=pages)
        if record is None:
            return pages.view(num_seqs, -1, key_PBD.shape[2]).float()
        values, scales = page_parts(pages, record)
        return dequantise(values, scales, record, torch.float32).view(num_seqs, -1, record.width)

    def sparse_mla(
        self,
        q_NHD: torch.Tensor,
        cache_PBX: torch.Tensor,
        slots_NK: torch.Tensor,
        kv_b: Packed,
        dims: MlaDims,
        record: Record | None,
    ) -> torch.Tensor:
        """The absorbed form of latent attention, each row over its own gathered rows."""
        assert kv_b.plain is not None, "a latent weight without its plain form"
        up_HXC = kv_b.plain.view(dims.heads, dims.nope + dims.value, dims.latent)
        q_HNX = q_NHD[..., : dims.nope].transpose(0, 1).contiguous()
        q_HNC = self._products.to_latent(q_HNX, up_HXC, dims)
        q_NHX = torch.cat((q_HNC.transpose(0, 1), q_NHD[..., dims.nope :]), dim=-1)
        count = slots_NK.shape[1]
        block = max(1, BLOCK_VALUES // (count * q_NHX.shape[2]))
        parts = []
        for first in range(0, len(q_NHX), block):
            slots_RK = slots_NK[first : first + block]
            row_XX = self._gathered(cache_PBX, slots_RK.flatten(), record, q_NHD.dtype)
            row_RKX = row_XX.view(len(slots_RK), count, -1)
            out_RHX = self._attend(q_NHX[first : first + block], row_RKX, dims.scale)
            parts.append(out_RHX[..., : dims.latent])
        z_HNC = torch.cat(parts).transpose(0, 1).contiguous()
        out_HNW = self._products.from_latent(z_HNC, up_HXC, dims)
        return out_HNW.transpose(0, 1).flatten(1)

    def _gathered(
        self,
        cache_PBX: torch.Tensor,
        slots_X: torch.Tensor,
        record: Record | None,
        dtype: torch.dtype,
    ) -> torch.Tensor:
        if record is not None:
            return read_record(cache_PBX, slots_X, record, dtype)
        rows = self._scratch.take("chosen", (len(slots_X), cache_PBX.shape[2]), cache_PBX)
        torch.index_select(cache_PBX.flatten(0, 1), 0, slots_X, out=rows)
        return rows.to(dtype)


def make_sparse(attention: SparseAttention) -> SparseOps:
    """These ops as one value."""
    return SparseOps(
        layer_norm=layer_norm,
        select_keys=attention.select_keys,
        sparse_mla=attention.sparse_mla,
        write_record=write_record,
        read_record=read_record,
    )
