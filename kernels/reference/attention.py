"""Attention over the paged cache, one sequence at a time. Shapes: see `batchmla.kernels.ops`."""

from collections.abc import Iterator

import torch
import torch.nn.functional as F

from batchmla.kernels.groups import Groups
from batchmla.kernels.ops import MlaDims, Packed, RopeLayout
from batchmla.kernels.reference.linear import plain
from batchmla.kernels.reference.norm import norm, rope
from batchmla.kernels.reference.sparse import read_record
from batchmla.kernels.sparse_ops import Record


def write(cache_PBW: torch.Tensor, slots_T: torch.Tensor, rows_TW: torch.Tensor) -> None:
    """One row after the other."""
    flat_XW = cache_PBW.view(-1, cache_PBW.shape[-1])
    for slot, row_W in zip(slots_T.tolist(), rows_TW, strict=True):
        flat_XW[slot] = row_W


def write_latent(
    cache_PBW: torch.Tensor,
    slots_T: torch.Tensor,
    latent_TX: torch.Tensor,
    weight_C: torch.Tensor,
    eps: float,
    cos_TR: torch.Tensor,
    sin_TR: torch.Tensor,
) -> None:
    """norm ‖ rope, then `write`."""
    width = weight_C.shape[0]
    rows_TX = latent_TX.clone()
    rows_TX[:, :width] = norm(latent_TX[:, :width], weight_C, eps)
    rope(rows_TX[:, None, width:], cos_TR, sin_TR, RopeLayout.INTERLEAVED)
    write(cache_PBW, slots_T, rows_TX)


def _sequences(
    groups: Groups, cache_PBW: torch.Tensor
) -> Iterator[tuple[list[int], torch.Tensor, torch.Tensor]]:
    """Per sequence: its rows of T, its cached rows [L, W], and which of them each query sees
    [Q, L]."""
    for group in groups.members:
        order = range(group.first_row, group.first_row + group.num_rows)
        rows = list(order) if groups.rows_N is None else groups.rows_N[order].tolist()
        grid = list(range(group.num_rows)) if group.grid_N is None else group.grid_N.tolist()
        for index in range(group.num_sequences):
            first = index * group.num_queries
            places = range(first, first + group.num_queries)
            here = [(row, at - first) for row, at in zip(rows, grid, strict=True) if at in places]
            seen_QL = torch.ones(group.num_queries, group.num_keys, dtype=torch.bool)
            if group.is_causal:
                seen_QL = seen_QL.tril(group.num_keys - group.num_queries)
            elif group.bias_GQL is not None:
                seen_QL = group.bias_GQL[index].cpu() == 0
            seen_QL = seen_QL[[query for _, query in here]]
            row_LW = cache_PBW[group.pages_GP[index]].flatten(0, 1)[: group.num_keys]
            for prefix in groups.prefixes:
                offset = group.first_row + grid.index(here[0][1] + first) - prefix.first_row
                if 0 <= offset < prefix.num_rows:
                    pages_P = prefix.pages_GP[offset if prefix.num_sequences > 1 else 0]
                    shared_LW = cache_PBW[pages_P].flatten(0, 1)[: prefix.num_keys]
                    row_LW = torch.cat((shared_LW, row_LW))
                    seen_QL = F.pad(seen_QL, (prefix.num_keys, 0), value=True)
            yield [row for row, _ in here], row_LW, seen_QL


def _plain(cache_PBX: torch.Tensor, record: Record | None) -> torch.Tensor:
    """The rows that a cache of records stands for, in float32; another cache as it is."""
    if record is None:
        return cache_PBX
    num_pages, page_tokens = cache_PBX.shape[:2]
    slots_N = torch.arange(num_pages * page_tokens)
    rows_NX = read_record(cache_PBX, slots_N, record, torch.float32)
    return rows_NX.view(num_pages, page_tokens, record.width)


def _attend(
    q_QHD: torch.Tensor,
    k_LHD: torch.Tensor,
    v_LHW: torch.Tensor,
    seen_QL: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """softmax(scale · q kᵀ) v where seen; float32 in and out."""
    scores_HQL = torch.einsum("qhd,lhd->hql", q_QHD, k_LHD) * scale
    scores_HQL = scores_HQL.masked_fill(~seen_QL.to(q_QHD.device), float("-inf"))
    weights_HQL = torch.exp(scores_HQL - scores_HQL.amax(dim=-1, keepdim=True))
    weights_HQL = weights_HQL / weights_HQL.sum(dim=-1, keepdim=True)
    return torch.einsum("hql,lhw->qhw", weights_HQL, v_LHW)


def gqa(
    q_THD: torch.Tensor,
    key_PBW: torch.Tensor,
    value_PBW: torch.Tensor,
    groups: Groups,
    scale: float,
    record: Record | None = None,
) -> torch.Tensor:
    """Grouped-query attention (Ainslie et al. 2023)."""
    num_heads, head_dim = q_THD.shape[1:]
    out_THD = torch.empty_like(q_THD)
    both = torch.cat((_plain(key_PBW, record), _plain(value_PBW, record)), dim=-1)
    num_kv_heads = both.shape[-1] // 2 // head_dim
    for rows, row_LX, seen_QL in _sequences(groups, both):
        k_LHD, v_LHD = (
            half.float()
            .reshape(-1, num_kv_heads, head_dim)
            .repeat_interleave(num_heads // num_kv_heads, dim=1)
            for half in row_LX.chunk(2, dim=1)
        )
        out = _attend(q_THD[rows].float(), k_LHD, v_LHD, seen_QL, scale)
        out_THD[rows] = out.to(q_THD.dtype)
    return out_THD.flatten(1)


def mla(
    q_THD: torch.Tensor,
    cache_PBW: torch.Tensor,
    kv_b: Packed,
    absorbed: Groups,
    expanded: Groups,
    dims: MlaDims,
    record: Record | None = None,
) -> torch.Tensor:
    """Multi-head latent attention (DeepSeek-V2 report, eq. 9-19 and appendix C)."""
    cache_PBW = _plain(cache_PBW, record)
    up_HXC = plain(kv_b).float().view(dims.heads, dims.nope + dims.value, dims.latent)
    uk_HNC, uv_HWC = up_HXC[:, : dims.nope], up_HXC[:, dims.nope :]
    out_THW = q_THD.new_empty(q_THD.shape[0], dims.heads, dims.value)
    for is_absorbed, groups in ((True, absorbed), (False, expanded)):
        for rows, cached_LX, seen_QL in _sequences(groups, cache_PBW):
            q_QHD, row_LX = q_THD[rows].float(), cached_LX.float()
            latent_LC, pe_LR = row_LX[:, : dims.latent], row_LX[:, dims.latent :]
            if is_absorbed:
                q_QHC = torch.einsum("qhn,hnc->qhc", q_QHD[..., : dims.nope], uk_HNC)
                q_QHX = torch.cat((q_QHC, q_QHD[..., dims.nope :]), dim=-1)
                k_LHX = row_LX[:, None].expand(-1, dims.heads, -1)
                z_QHC = _attend(q_QHX, k_LHX, k_LHX[..., : dims.latent], seen_QL, dims.scale)
                out = torch.einsum("qhc,hwc->qhw", z_QHC, uv_HWC)
            else:
                k_LHN = torch.einsum("lc,hnc->lhn", latent_LC, uk_HNC)
                v_LHW = torch.einsum("lc,hwc->lhw", latent_LC, uv_HWC)
                pe_LHR = pe_LR[:, None].expand(-1, dims.heads, -1)
                k_LHD = torch.cat((k_LHN, pe_LHR), dim=-1)
                out = _attend(q_QHD, k_LHD, v_LHW, seen_QL, dims.scale)
            out_THW[rows] = out.to(q_THD.dtype)
    return out_THW.flatten(1)
