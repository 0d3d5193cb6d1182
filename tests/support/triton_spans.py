"""Sequences on shuffled pages, and what attention over them is in float64."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from paged_case import dense

from batchmla.kernels.groups import Groups, Spans
from batchmla.kernels.ops import MlaDims, Packed, PackKind

SPARE_PAGES = 3  # that no sequence holds


@dataclass
class Paged:
    """(queries, keys) of each sequence, its pages and its cached rows [L, W]."""

    sequences: list[tuple[int, int]]
    cache_PBW: torch.Tensor
    pages_SP: torch.Tensor
    rows: list[torch.Tensor]

    @property
    def num_tokens(self) -> int:
        return sum(queries for queries, _ in self.sequences)

    def first_rows(self) -> list[int]:
        """Of T, where each sequence begins."""
        return np.cumsum([0, *(queries for queries, _ in self.sequences)]).tolist()

    def spans(self, chosen: list[int] | None = None, *, is_expanded: bool = False) -> Groups:
        """Some or all sequences, to be read in place or expanded."""
        some = np.array(range(len(self.sequences)) if chosen is None else chosen)
        queries, keys = np.array(self.sequences).T[:, some]
        table_GP, pages_U = self.pages_SP.numpy(), None
        if is_expanded:
            ids, places = np.unique(self.pages_SP.numpy(), return_inverse=True)
            table_GP, pages_U = places.reshape(table_GP.shape), torch.from_numpy(ids)
        spans = Spans(
            first_row_G=np.array(self.first_rows())[some],
            num_queries_G=queries,
            num_keys_G=keys,
            table_row_G=some,
            pages_GP=table_GP,
            page_tokens=self.cache_PBW.shape[1],
            pages_U=pages_U,
        )
        return Groups(members=(), spans=(spans,))


def make_paged(
    sequences: list[tuple[int, int]],
    width: int,
    dtype: torch.dtype,
    page_tokens: int,
    seed: int = 0,
) -> Paged:
    """Pages are shuffled, those that nobody holds are NaN, rows past a sequence's end are large;
    tables are filled up with a page that nobody holds."""
    generator = torch.Generator().manual_seed(seed)
    counts = [-(-keys // page_tokens) for _, keys in sequences]
    order = torch.randperm(sum(counts) + SPARE_PAGES, generator=generator)
    cache = torch.full((len(order), page_tokens, width), float("nan"), dtype=dtype)
    pages = torch.full((len(sequences), max(1, *counts)), int(order[-1]))
    rows, first = [], 0
    for index, ((_, keys), count) in enumerate(zip(sequences, counts, strict=True)):
        mine = order[first : first + count]
        first += count
        pages[index, :count] = mine
        values = torch.full((count * page_tokens, width), 1e4, dtype=dtype)
        values[:keys] = torch.randn(keys, width, generator=generator).to(dtype)
        cache[mine] = values.view(count, page_tokens, width)
        rows.append(values[:keys])
    return Paged(sequences, cache, pages, rows)


def random(*shape: int, seed: int, dtype: torch.dtype, scale: float = 1.0) -> torch.Tensor:
    """Normal values."""
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(shape, generator=generator) * scale).to(dtype)


def latent_weight(dims: MlaDims, dtype: torch.dtype) -> Packed:
    """kv_b."""
    shape = dims.heads * (dims.nope + dims.value), dims.latent
    return Packed(
        PackKind.LATENT, shape, random(*shape, seed=9, dtype=dtype, scale=dims.latent**-0.5)
    )


def expected_mla(
    paged: Paged, q_THD: torch.Tensor, kv_b: torch.Tensor, dims: MlaDims, rows: Any = None
) -> torch.Tensor:
    """[T, H*W] in float64; `rows` stand in for the cached ones."""
    up_HXC = kv_b.double().view(dims.heads, -1, dims.latent)
    out = torch.zeros(len(q_THD), dims.heads, dims.value, dtype=torch.float64)
    parts = zip(paged.first_rows(), paged.sequences, rows or paged.rows, strict=False)
    for first, (queries, keys), cached in parts:
        if not keys:
            continue
        latent, pe = cached.double().split((dims.latent, dims.rope), dim=1)
        kv = torch.einsum("lc,hxc->lhx", latent, up_HXC)
        pe = pe[:, None].expand(-1, dims.heads, -1)
        k = torch.cat((kv[..., : dims.nope], pe), dim=-1)
        q = q_THD[first : first + queries].double()
        out[first : first + queries] = dense(q, k, kv[..., dims.nope :], dims.scale)
    return out.flatten(1)


def expected_gqa(
    paged: Paged, q_THD: torch.Tensor, key_heads: int, scale: float, rows: Any = None
) -> torch.Tensor:
    """[T, H*D] in float64, of rows that hold keys, then values."""
    heads, width = q_THD.shape[1:]
    out = torch.zeros(len(q_THD), heads, width, dtype=torch.float64)
    parts = zip(paged.first_rows(), paged.sequences, rows or paged.rows, strict=False)
    for first, (queries, keys), cached in parts:
        if not keys:
            continue
        k, v = (
            half.double().view(keys, key_heads, width).repeat_interleave(heads // key_heads, dim=1)
            for half in cached.chunk(2, dim=1)
        )
        q = q_THD[first : first + queries].double()
        out[first : first + queries] = dense(q, k, v, scale)
    return out.flatten(1)
