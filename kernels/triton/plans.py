"""Which kernel serves which sequences of a step, and the tables for it, made once and kept with the
spans. G sequences of spans, U distinct pages."""

from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch

from batchmla.kernels.groups import HostInts, Spans
from batchmla.kernels.triton.gqa_decode import SHORT_ROWS, DecodeTiling
from batchmla.kernels.triton.mla_decode import NARROW_HEADS, LatentTiling
from batchmla.kernels.triton.prefill import PrefillTiling
from batchmla.kernels.triton.spans import (
    DeviceTables,
    HostTables,
    numbered,
    plan_splits,
    plan_tiles,
    put,
)

NO_LIMIT = 2**31 - 1  # keys: beyond every sequence


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """Pages whose keys are expanded together, and the tables of the sequences that have some."""

    pages_U: torch.Tensor
    tables: DeviceTables
    keys: tuple[int, int]


def latent_splits(
    spans: Spans,
    heads: int,
    tiling: LatentTiling,
    device: torch.device,
    *,
    is_narrow: bool,
    is_part: bool,
) -> DeviceTables:
    """Of single queries with few heads, which the narrow kernel serves, or of the others.

    `is_part`: their rows follow each other in the spans' order, instead of lying in T.
    """

    def plan(spans: Spans) -> HostTables:
        first_row_G = spans.first_row_G
        if is_part:
            first_row_G = np.cumsum(spans.num_queries_G) - spans.num_queries_G
        is_narrow_G = (spans.num_queries_G == 1) & (heads <= NARROW_HEADS)
        chosen = np.flatnonzero(is_narrow_G == is_narrow)
        return plan_splits(
            spans, chosen, first_row_G[chosen],
            query_rows=heads, block_rows=tiling.rows, split_tokens=tiling.split_tokens,
        )  # fmt: skip

    key = ("latent splits", heads, tiling, is_narrow, is_part)
    return _kept_tables(spans, key, plan, device)


def gqa_splits(
    spans: Spans, group: int, tiling: DecodeTiling, device: torch.device, *, is_single: bool
) -> DeviceTables:
    """Of sequences with one query, or of those with few more."""

    def plan(spans: Spans) -> HostTables:
        is_single_G = spans.num_queries_G == 1
        chosen = np.flatnonzero(is_single_G if is_single else _is_short(spans, group))
        return plan_splits(
            spans, chosen, spans.first_row_G[chosen],
            query_rows=group, block_rows=tiling.rows, split_tokens=tiling.split_tokens,
        )  # fmt: skip

    return _kept_tables(spans, ("gqa splits", group, tiling, is_single), plan, device)


def gqa_tiles(
    spans: Spans, group: int, tiling: PrefillTiling, device: torch.device
) -> DeviceTables:
    """Of the sequences with many queries."""

    def plan(spans: Spans) -> HostTables:
        chosen = np.flatnonzero((spans.num_queries_G > 1) & ~_is_short(spans, group))
        return plan_tiles(
            spans, chosen,
            query_rows=group, block_rows=tiling.rows, pages=(0, spans.pages_GP.shape[1]),
        )  # fmt: skip

    return _kept_tables(spans, ("gqa tiles", group, tiling), plan, device)


def _kept_tables(
    spans: Spans, key: Hashable, plan: Callable[[Spans], HostTables], device: torch.device
) -> DeviceTables:
    """The tables that `plan` makes of the spans, which those of other spans can replace."""

    def make() -> DeviceTables:
        tables = DeviceTables(plan(spans), device)
        spans.kept.follow(lambda others: tables.refill(plan(others)))
        return tables

    made: DeviceTables = spans.kept.get((key, device), make)
    return made


def expanded_chunks(
    spans: Spans, num_pages: int, tiling: PrefillTiling, device: torch.device
) -> list[Chunk]:
    """Runs of `num_pages` pages of every sequence, until none has more; each run of as many
    sequences at a time as have no more pages than that together. Where a sequence's runs begin does
    not depend on the others."""

    def make() -> list[Chunk]:
        most = int(-(-spans.num_keys_G.max() // spans.page_tokens))
        return [
            _chunk(spans, chosen, first, first + num_pages, tiling, device)
            for first in range(0, max(most, 1), num_pages)
            for chosen in _together(spans, first, num_pages)
        ]

    made: list[Chunk] = spans.kept.get(("expanded", num_pages, tiling, device), make)
    return made


def _together(spans: Spans, first: int, num_pages: int) -> Iterator[HostInts]:
    """Neighbours whose runs from page `first` on are at most `num_pages` different pages."""
    counts_G = np.clip(-(-spans.num_keys_G // spans.page_tokens) - first, 0, num_pages)
    chosen: list[int] = []
    pages: set[int] = set()
    for sequence, count in enumerate(counts_G.tolist()):
        row_P = spans.pages_GP[spans.table_row_G[sequence]]
        own = set(row_P[first : first + count].tolist())
        if chosen and len(pages | own) > num_pages:
            yield np.array(chosen)
            chosen, pages = [], set()
        chosen.append(sequence)
        pages |= own
    yield np.array(chosen)


def _is_short(spans: Spans, group: int) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    """[G]: more than one query, but few enough to be split by keys."""
    queries_G = spans.num_queries_G
    return (queries_G > 1) & (queries_G * group <= SHORT_ROWS)


def _chunk(
    spans: Spans,
    chosen: HostInts,
    first: int,
    stop: int,
    tiling: PrefillTiling,
    device: torch.device,
) -> Chunk:
    """The pages from `first` up to `stop` of some sequences."""
    assert spans.pages_U is not None, "expanded sequences name the pages they expand"
    counts_G = np.zeros_like(spans.num_keys_G)
    keys_C = spans.num_keys_G[chosen]
    counts_G[chosen] = np.clip(-(-keys_C // spans.page_tokens) - first, 0, stop - first)
    owner, place = numbered(counts_G)
    rows, columns = spans.table_row_G[owner], first + place
    used, places = np.unique(spans.pages_GP[rows, columns], return_inverse=True)
    table_GP: HostInts = np.zeros_like(spans.pages_GP)
    table_GP[rows, columns] = places
    host = plan_tiles(
        replace(spans, pages_GP=table_GP), chosen,
        query_rows=1, block_rows=tiling.rows, pages=(first, stop),
    )  # fmt: skip
    return Chunk(
        pages_U=put(spans.pages_U.cpu()[torch.from_numpy(used)], device),
        tables=DeviceTables(host, device),
        keys=(first * spans.page_tokens, min(stop * spans.page_tokens, NO_LIMIT)),
    )
