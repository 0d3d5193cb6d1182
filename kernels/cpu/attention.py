"""Attention over the paged cache: one gather and one SDPA a group. Shapes: see
`batchmla.kernels.ops`.

CPU SDPA reaches its flash kernel when keys and values have one width: the absorbed form passes the
latent row as both and drops the tail of the result, the expanded form pads the values.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from batchmla.kernels.cpu.linear import one_linear
from batchmla.kernels.cpu.norm import norm, rope
from batchmla.kernels.ops import Group, MlaDims, Packed, RopeLayout


def write(cache_PBW: torch.Tensor, slots_T: torch.Tensor, rows_TW: torch.Tensor) -> None:
    """One indexed copy."""
    cache_PBW.flatten(0, 1).index_copy_(0, slots_T, rows_TW.to(cache_PBW.dtype))


def write_latent(
    cache_PBW: torch.Tensor,
    slots_T: torch.Tensor,
    latent_TX: torch.Tensor,
    weight_C: torch.Tensor,
    eps: float,
    cos_TR: torch.Tensor,
    sin_TR: torch.Tensor,
) -> None:
    """norm ‖ rope, then one indexed copy."""
    width = weight_C.shape[0]
    pe_TR = latent_TX[:, width:].clone()
    rope(pe_TR[:, None], cos_TR, sin_TR, RopeLayout.INTERLEAVED)
    rows_TX = torch.cat((norm(latent_TX[:, :width], weight_C, eps), pe_TR), dim=1)
    write(cache_PBW, slots_T, rows_TX)


def _queries(q_THD: torch.Tensor, group: Group) -> torch.Tensor:
    """The group's rows as a padded grid [G, Q, H, D]."""
    q = q_THD if group.is_every_row else q_THD.index_select(0, group.rows_N)
    shape = (group.num_sequences, group.num_queries, *q_THD.shape[1:])
    if group.grid_N is None:
        return q.view(shape)
    grid = q.new_zeros(shape)
    grid.flatten(0, 1).index_copy_(0, group.grid_N, q)
    return grid


def _keys(cache_PBW: torch.Tensor, group: Group, dtype: torch.dtype) -> torch.Tensor:
    """The group's cached rows [G, L, W]; consecutive pages are not copied."""
    width = cache_PBW.shape[-1]
    num_pages = group.pages_GP.shape[1]
    if group.first_page is not None:
        pages = cache_PBW[group.first_page : group.first_page + num_pages]
    else:
        pages = cache_PBW.index_select(0, group.pages_GP.flatten())
    rows_GLW = pages.view(group.num_sequences, -1, width)[:, : group.num_keys]
    return rows_GLW.to(dtype)


def _put(out_TX: torch.Tensor | None, rows_XX: torch.Tensor, group: Group) -> torch.Tensor:
    """Adds a group's result [G*Q, X] to the rows of T it belongs to."""
    if group.grid_N is not None:
        rows_XX = rows_XX.index_select(0, group.grid_N)
    if group.is_every_row:
        return rows_XX
    assert out_TX is not None
    return out_TX.index_copy_(0, group.rows_N, rows_XX)


def _attend(
    q_GQHD: torch.Tensor,
    k_GLKD: torch.Tensor,
    v_GLKD: torch.Tensor,
    group: Group,
    scale: float,
) -> torch.Tensor:
    """SDPA with H/K query heads a kv head → [G, Q, H, D], without copying keys where it can."""
    num_seqs, num_queries, num_heads, head_dim = q_GQHD.shape
    num_kv_heads = k_GLKD.shape[2]
    share = num_heads // num_kv_heads
    k, v = k_GLKD.transpose(1, 2), v_GLKD.transpose(1, 2)  # [G, K, L, D]
    bias = None if group.bias_GQL is None else group.bias_GQL[:, None]
    if num_queries == 1:
        q = q_GQHD.view(num_seqs, num_kv_heads, share, head_dim)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=bias, scale=scale)
        return out.reshape(num_seqs, 1, num_heads, head_dim)
    if num_kv_heads == num_heads:
        q = q_GQHD.transpose(1, 2)
    elif num_kv_heads == 1:
        q = q_GQHD.transpose(1, 2)
        k, v = (part.expand(-1, num_heads, -1, -1) for part in (k, v))
    elif num_seqs == 1:
        q = q_GQHD.view(num_queries, num_kv_heads, share, head_dim).permute(1, 2, 0, 3)
        k, v = (part[0, :, None].expand(-1, share, -1, -1) for part in (k, v))
    else:
        q = q_GQHD.transpose(1, 2)
        k, v = (part.repeat_interleave(share, dim=1) for part in (k, v))
    out = F.scaled_dot_product_attention(
        q, k, v, attn_mask=bias, is_causal=group.is_causal, scale=scale
    )
    if num_seqs == 1:
        return out.reshape(1, num_heads, num_queries, head_dim).transpose(1, 2)
    return out.transpose(1, 2)


def gqa(
    q_THD: torch.Tensor,
    key_PBW: torch.Tensor,
    value_PBW: torch.Tensor,
    groups: Sequence[Group],
    scale: float,
) -> torch.Tensor:
    """Grouped-query attention."""
    head_dim = q_THD.shape[-1]
    out = None if groups[0].is_every_row else q_THD.new_empty(q_THD.shape[0], q_THD[0].numel())
    for group in groups:
        k_GLKD, v_GLKD = (
            keys_GLW.view(*keys_GLW.shape[:2], -1, head_dim)
            for keys_GLW in (_keys(part, group, q_THD.dtype) for part in (key_PBW, value_PBW))
        )
        result = _attend(_queries(q_THD, group), k_GLKD, v_GLKD, group, scale)
        out = _put(out, result.flatten(0, 1).flatten(1), group)
    assert out is not None
    return out


def mla(
    q_THD: torch.Tensor,
    cache_PBW: torch.Tensor,
    kv_b: Packed,
    absorbed: Sequence[Group],
    expanded: Sequence[Group],
    dims: MlaDims,
) -> torch.Tensor:
    """Multi-head latent attention in both forms."""
    first = absorbed[0] if absorbed else expanded[0]
    width = dims.heads * dims.value
    out = None if first.is_every_row else q_THD.new_empty(q_THD.shape[0], width)
    for group in absorbed:
        out = _put(out, _absorbed(q_THD, cache_PBW, kv_b, group, dims), group)
    for group in expanded:
        out = _put(out, _expanded(q_THD, cache_PBW, kv_b, group, dims), group)
    assert out is not None
    return out


def _absorbed(
    q_THD: torch.Tensor, cache_PBW: torch.Tensor, kv_b: Packed, group: Group, dims: MlaDims
) -> torch.Tensor:
    """All heads read the latent rows themselves; the up-projections move to the query and
    result."""
    assert kv_b.plain is not None
    up_HXC = kv_b.plain.view(dims.heads, dims.nope + dims.value, dims.latent)
    q_GQHD = _queries(q_THD, group)
    q_NHD = q_GQHD.flatten(0, 1)
    q_HNC = torch.bmm(q_NHD[..., : dims.nope].transpose(0, 1), up_HXC[:, : dims.nope])
    q_NHX = torch.cat((q_HNC.transpose(0, 1), q_NHD[..., dims.nope :]), dim=-1)
    row_GL1X = _keys(cache_PBW, group, q_THD.dtype)[:, :, None]
    z_GQHX = _attend(q_NHX.view(*q_GQHD.shape[:3], -1), row_GL1X, row_GL1X, group, dims.scale)
    z_HNC = z_GQHX.flatten(0, 1)[..., : dims.latent].transpose(0, 1)
    out_HNW = torch.bmm(z_HNC, up_HXC[:, dims.nope :].transpose(1, 2))
    return out_HNW.transpose(0, 1).flatten(1)


def _expanded(
    q_THD: torch.Tensor, cache_PBW: torch.Tensor, kv_b: Packed, group: Group, dims: MlaDims
) -> torch.Tensor:
    """Keys and values of every head are made from the latent rows, used once and dropped."""
    row_GLX = _keys(cache_PBW, group, q_THD.dtype)
    kv_XX = one_linear(row_GLX[..., : dims.latent].flatten(0, 1), kv_b, 0)
    kv_GLHX = kv_XX.view(*row_GLX.shape[:2], dims.heads, dims.nope + dims.value)
    pe_GLHR = row_GLX[:, :, None, dims.latent :].expand(-1, -1, dims.heads, -1)
    k_GLHD = torch.cat((kv_GLHX[..., : dims.nope], pe_GLHR), dim=-1)
    v_GLHD = F.pad(kv_GLHX[..., dims.nope :], (0, max(0, dims.nope + dims.rope - dims.value)))
    out_GQHD = _attend(_queries(q_THD, group), k_GLHD, v_GLHD, group, dims.scale)
    return out_GQHD[..., : dims.value].flatten(0, 1).flatten(1)
