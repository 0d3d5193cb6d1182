"""Attention over the paged cache: one gather and one SDPA a group. Shapes: see
`batchmla.kernels.ops`.

CPU SDPA reaches its flash kernel when keys and values have one width: the absorbed form passes the
latent row as both and drops the tail of the result, the expanded form pads the values.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F

from batchmla.kernels.cpu.cached import CachedRows
from batchmla.kernels.cpu.head_blocks import MAX_EXPANDED_BYTES, split_heads
from batchmla.kernels.cpu.linear import one_linear
from batchmla.kernels.cpu.norm import norm, rope
from batchmla.kernels.cpu.scratch import Scratch
from batchmla.kernels.cpu.sdpa import Attended, flash, plain, sdpa
from batchmla.kernels.groups import Group, Groups
from batchmla.kernels.ops import MlaDims, Packed, RopeLayout
from batchmla.kernels.sparse_ops import Record


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


def _ordered(q_THD: torch.Tensor, groups: Groups) -> torch.Tensor:
    """The rows of all groups in their order."""
    return q_THD if groups.rows_N is None else q_THD.index_select(0, groups.rows_N)


def _grid(q_NHD: torch.Tensor, group: Group) -> torch.Tensor:
    """The group's rows as a padded grid [G, Q, H, D]."""
    q = q_NHD[group.first_row : group.first_row + group.num_rows]
    shape = (group.num_sequences, group.num_queries, *q_NHD.shape[1:])
    if group.grid_N is None:
        return q.view(shape)
    grid = q.new_zeros(shape)
    grid.flatten(0, 1).index_copy_(0, group.grid_N, q)
    return grid


def _rows(out_GQHD: torch.Tensor, group: Group) -> torch.Tensor:
    """The rows [N, H, D] of a padded grid."""
    out = out_GQHD.flatten(0, 1)
    return out if group.grid_N is None else out.index_select(0, group.grid_N)


def _join(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(tuple(parts))


class _Results:
    """Rows [N, H, W] of a set of groups, member by member, and the prefixes merged into them.

    Softmaxes over parts of the keys, with results x and log-sum-exps l, make the one over all of
    them: the mean of x weighted by exp(l) (Milakov and Gimelshein, arXiv:1805.02867).
    """

    def __init__(self, groups: Groups) -> None:
        self.has_lse = groups.is_split or bool(groups.prefixes)
        self._outs: list[torch.Tensor] = []
        self._lses: list[torch.Tensor] = []

    def add(self, attended: Attended, group: Group, width: int) -> None:
        """A member's result, of which the first `width` values count."""
        out_GQHW, lse_GQH = attended
        self._outs.append(_rows(out_GQHW[..., :width], group))
        if lse_GQH is not None:
            self._lses.append(lse_GQH.flatten(0, 1))

    def merged(self, prefixes: Sequence[tuple[Group, Attended]]) -> torch.Tensor:
        """All rows; the rows of prefixes come first."""
        out_NHW = _join(self._outs)
        if not prefixes:
            return out_NHW
        count = max(group.first_row + group.num_rows for group, _ in prefixes)
        lse_NH = _join(self._lses)[:count]
        most_NH = lse_NH.clone()
        parts = []
        for group, (part_GQHW, part_lse_GQH) in prefixes:
            assert part_lse_GQH is not None
            rows = slice(group.first_row, group.first_row + group.num_rows)
            part_NHW = part_GQHW[..., : out_NHW.shape[-1]].flatten(0, 1)
            parts.append((rows, part_NHW, part_lse_GQH.flatten(0, 1)))
            most_NH[rows] = torch.maximum(most_NH[rows], parts[-1][2])
        own_NH = (lse_NH - most_NH).exp_()
        sum_NH = own_NH.clone()
        shares = []
        for rows, _, part_lse_NH in parts:
            shares.append((part_lse_NH - most_NH[rows]).exp_())
            sum_NH[rows] += shares[-1]
        merged_NHW = out_NHW[:count].float().mul_((own_NH / sum_NH)[..., None])
        for (rows, part_NHW, _), share_NH in zip(parts, shares, strict=True):
            share_NH1 = (share_NH / sum_NH[rows])[..., None]
            merged_NHW[rows] += part_NHW.float().mul(share_NH1)
        out_NHW[:count] = merged_NHW
        return out_NHW


def _attend(
    q_GQHD: torch.Tensor,
    k_GLKD: torch.Tensor,
    v_GLKW: torch.Tensor,
    group: Group,
    scale: float,
    *,
    has_lse: bool = False,
) -> Attended:
    """One SDPA for the group → [G, Q, H, W]; its log-sum-exp [G, Q, H] where wanted.

    Or one for each of its query blocks, without."""
    block, num_queries = group.query_block, group.num_queries
    if block is None:
        bias, is_causal = group.bias_GQL, group.is_causal
        call = flash if has_lse else plain
        return sdpa(q_GQHD, k_GLKD, v_GLKW, bias, scale, is_causal=is_causal, call=call)
    parts = []
    for start in range(0, num_queries, block):
        seen = group.num_keys - num_queries + start + block
        assert group.bias_GQL is not None
        bias = group.bias_GQL[:, :, group.num_keys - seen :]
        q = q_GQHD[:, start : start + block]
        parts.append(sdpa(q, k_GLKD[:, :seen], v_GLKW[:, :seen], bias, scale)[0])
    return (parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)), None


class _SharedKeys:
    """Expanded keys of the pages that a group shares with those before it."""

    def __init__(self, page_tokens: int) -> None:
        self._page_tokens = page_tokens
        self._pages_P = torch.zeros(0, dtype=torch.int64)
        self._kv_1LHX = torch.zeros(0)

    def expanded(
        self,
        group: Group,
        row_GLX: torch.Tensor,
        expand: Callable[[torch.Tensor], torch.Tensor],
    ) -> torch.Tensor:
        """`expand` of the rows; of rows that are shared, once."""
        count = group.num_shared
        if count == 0:
            return expand(row_GLX)
        pages_P = group.pages_GP[0, : count // self._page_tokens]
        if not torch.equal(pages_P, self._pages_P):
            self._pages_P, self._kv_1LHX = pages_P, expand(row_GLX[:1, :count])
        shared_GLHX = self._kv_1LHX.expand(len(row_GLX), -1, -1, -1)
        return torch.cat((shared_GLHX, expand(row_GLX[:, count:])), dim=1)


def to_latent(q_HNX: torch.Tensor, up_HXC: torch.Tensor, dims: MlaDims) -> torch.Tensor:
    """UKᵀ q_nope of every head."""
    return torch.bmm(q_HNX, up_HXC[:, : dims.nope])


def from_latent(z_HNC: torch.Tensor, up_HXC: torch.Tensor, dims: MlaDims) -> torch.Tensor:
    """UV z of every head; the whole weight, since a slice of it would be copied first."""
    return torch.bmm(z_HNC, up_HXC.transpose(1, 2))[..., dims.nope :]


@dataclass(frozen=True, slots=True)
class LatentProducts:
    """The products with kv_b: of latent rows, and per head of queries and of results.

    `max_expanded_bytes` bounds the keys and values of latent rows, down to one head at a time; None
    where the heads' products must not be cut."""

    expand: Callable[[torch.Tensor, Packed], torch.Tensor] = lambda x, kv_b: one_linear(x, kv_b, 0)
    to_latent: Callable[[torch.Tensor, torch.Tensor, MlaDims], torch.Tensor] = to_latent
    from_latent: Callable[[torch.Tensor, torch.Tensor, MlaDims], torch.Tensor] = from_latent
    max_expanded_bytes: int | None = MAX_EXPANDED_BYTES


class Attention:
    """gqa and mla of one back end; gathered keys share one scratch."""

    def __init__(
        self,
        scratch: Scratch,
        products: LatentProducts | None = None,
        attend_prefix: Callable[..., Attended] | None = None,
    ) -> None:
        """`attend_prefix` (q_GQHD, k_GLKD, v_GLKW, scale) is given where rows must not mix."""
        self._scratch = scratch
        self._products = products or LatentProducts()
        self._attend_prefix = attend_prefix or partial(sdpa, bias_GQL=None, call=flash)

    def gqa(
        self,
        q_THD: torch.Tensor,
        key_PBW: torch.Tensor,
        value_PBW: torch.Tensor,
        groups: Groups,
        scale: float,
        record: Record | None = None,
    ) -> torch.Tensor:
        """Grouped-query attention."""
        head_dim, dtype = q_THD.shape[-1], q_THD.dtype
        cached_keys = CachedRows(key_PBW, record, self._scratch, "keys")
        cached_values = CachedRows(value_PBW, record, self._scratch, "values")
        q_NHD = _ordered(q_THD, groups)

        def keys(group: Group) -> tuple[torch.Tensor, torch.Tensor]:
            k_GLW, v_GLW = cached_keys.of(group, dtype), cached_values.of(group, dtype)
            k_GLKD, v_GLKD = (part.view(*part.shape[:2], -1, head_dim) for part in (k_GLW, v_GLW))
            return k_GLKD, v_GLKD

        out_NX = self._attend(q_NHD, groups, keys, head_dim, scale).flatten(1)
        if groups.rows_N is None:
            return out_NX
        return torch.empty_like(out_NX).index_copy_(0, groups.rows_N, out_NX)

    def mla(
        self,
        q_THD: torch.Tensor,
        cache_PBW: torch.Tensor,
        kv_b: Packed,
        absorbed: Groups,
        expanded: Groups,
        dims: MlaDims,
        record: Record | None = None,
    ) -> torch.Tensor:
        """Multi-head latent attention in both forms."""
        cached = CachedRows(cache_PBW, record, self._scratch, "keys")
        out_TX: torch.Tensor | None = None
        for groups, attend in ((absorbed, self._absorbed), (expanded, self._expanded)):
            if groups.members:
                out_NX = attend(_ordered(q_THD, groups), cached, kv_b, groups, dims)
                if groups.rows_N is None:
                    return out_NX
                if out_TX is None:
                    out_TX = out_NX.new_empty(q_THD.shape[0], out_NX.shape[1])
                out_TX.index_copy_(0, groups.rows_N, out_NX)
        assert out_TX is not None, "a step without sequences"
        return out_TX

    def _attend(
        self,
        q_NHD: torch.Tensor,
        groups: Groups,
        keys: Callable[[Group], tuple[torch.Tensor, torch.Tensor]],
        width: int,
        scale: float,
    ) -> torch.Tensor:
        """All groups → [N, H, W]; `keys` gives keys and values, `width` of which count."""
        results = _Results(groups)
        for group in groups.members:
            attended = _attend(
                _grid(q_NHD, group), *keys(group), group, scale, has_lse=results.has_lse
            )
            results.add(attended, group, width)
        prefixes = [
            (group, self._attend_prefix(_grid(q_NHD, group), *keys(group), scale=scale))
            for group in groups.prefixes
        ]
        return results.merged(prefixes)

    def _absorbed(
        self,
        q_NHD: torch.Tensor,
        cached: CachedRows,
        kv_b: Packed,
        groups: Groups,
        dims: MlaDims,
    ) -> torch.Tensor:
        """All heads read the latent rows; the up-projections move to queries and results."""
        assert kv_b.plain is not None
        up_HXC = kv_b.plain.view(dims.heads, dims.nope + dims.value, dims.latent)
        q_HNX = q_NHD[..., : dims.nope].transpose(0, 1).contiguous()
        q_HNC = self._products.to_latent(q_HNX, up_HXC, dims)
        q_NHX = torch.cat((q_HNC.transpose(0, 1), q_NHD[..., dims.nope :]), dim=-1)

        def keys(group: Group) -> tuple[torch.Tensor, torch.Tensor]:
            row_GL1X = cached.of(group, q_NHD.dtype)[:, :, None]
            return row_GL1X, row_GL1X

        z_NHC = self._attend(q_NHX, groups, keys, dims.latent, dims.scale)
        out_HNW = self._products.from_latent(z_NHC.transpose(0, 1).contiguous(), up_HXC, dims)
        return out_HNW.transpose(0, 1).flatten(1)

    def _expanded(
        self,
        q_NHD: torch.Tensor,
        cached: CachedRows,
        kv_b: Packed,
        groups: Groups,
        dims: MlaDims,
    ) -> torch.Tensor:
        """Keys and values are made from the latent rows, used once and dropped: those of all heads
        together, or of as many as may be."""
        most_bytes = self._products.max_expanded_bytes
        if most_bytes is None:
            return self._expanded_at_once(q_NHD, cached, kv_b, groups, dims)
        parts = split_heads(q_NHD, kv_b, groups, dims, most_bytes)
        outs = [
            self._expanded_at_once(q, cached, weight, groups, some) for q, weight, some in parts
        ]
        return outs[0] if len(outs) == 1 else torch.cat(outs, dim=1)

    def _expanded_at_once(
        self,
        q_NHD: torch.Tensor,
        cached: CachedRows,
        kv_b: Packed,
        groups: Groups,
        dims: MlaDims,
    ) -> torch.Tensor:
        """Keys and values of all these heads."""

        shared = _SharedKeys(cached.page_tokens)

        def expand(row_GLX: torch.Tensor) -> torch.Tensor:
            kv_XX = self._products.expand(row_GLX[..., : dims.latent].flatten(0, 1), kv_b)
            return kv_XX.view(*row_GLX.shape[:2], dims.heads, dims.nope + dims.value)

        def keys(group: Group) -> tuple[torch.Tensor, torch.Tensor]:
            row_GLX = cached.of(group, q_NHD.dtype)
            kv_GLHX = shared.expanded(group, row_GLX, expand)
            pe_GLHR = row_GLX[:, :, None, dims.latent :].expand(-1, -1, dims.heads, -1)
            k_GLHD = torch.cat((kv_GLHX[..., : dims.nope], pe_GLHR), dim=-1)
            pad = max(0, dims.nope + dims.rope - dims.value)
            return k_GLHD, F.pad(kv_GLHX[..., dims.nope :], (0, pad))

        return self._attend(q_NHD, groups, keys, dims.value, dims.scale).flatten(1)
