"""The tables by which kernels find a step's sequences, made on the host once a step.

G sequences, W work items, N rows to merge. All are int32; kernels widen what they multiply.

| table     | columns                                                                       |
| sequences | first_row, num_queries, num_keys, first_page, first_slot, num_splits, 0, 0    |
| items     | sequence, split, block, slot: a block of rows over a split of a sequence's keys |
| merges    | sequence, query: rows whose splits are merged                                 |
| pages     | the page ids of every sequence, one after the other                           |

A sequence's rows are its queries' heads, query by query; `block` numbers blocks of them. The
results of a slot are partial; items of sequences with one split have slot -1 and write results
that are whole. Splits have a fixed length, so those of a sequence do not depend on any other.
"""

from dataclasses import dataclass

import numpy as np
import torch

from batchmla.kernels.groups import HostInts, Spans

SEQUENCE_COLUMNS = 8
ITEM_COLUMNS = 4
MERGE_COLUMNS = 2
ABSENT = -1  # a row that stands for nothing: tables of a fixed size end in them


@dataclass(frozen=True, slots=True, kw_only=True)
class Capacity:
    """Rows of the tables on the device."""

    sequences: int
    items: int
    merges: int
    pages: int
    slots: int


@dataclass(frozen=True, slots=True, kw_only=True)
class HostTables:
    """The tables as they are planned."""

    sequences_GX: HostInts
    items_WX: HostInts
    merges_NX: HostInts
    pages: HostInts
    num_slots: int

    @property
    def capacity(self) -> Capacity:
        """What they take."""
        return Capacity(
            sequences=len(self.sequences_GX),
            items=len(self.items_WX),
            merges=len(self.merges_NX),
            pages=len(self.pages),
            slots=self.num_slots,
        )

    def flat(self, capacity: Capacity) -> torch.Tensor:
        """All of them as one int32 tensor, each filled up to its capacity."""
        mine = self.capacity
        sections = (
            (self.sequences_GX, capacity.sequences - mine.sequences, SEQUENCE_COLUMNS, 0),
            (self.items_WX, capacity.items - mine.items, ITEM_COLUMNS, ABSENT),
            (self.merges_NX, capacity.merges - mine.merges, MERGE_COLUMNS, ABSENT),
            (self.pages, capacity.pages - mine.pages, 1, 0),
        )
        room = min(absent for _, absent, _, _ in sections)
        assert room >= 0 and mine.slots <= capacity.slots, f"{mine} do not fit into {capacity}"
        parts = [
            np.concatenate((table.ravel(), np.full(absent * columns, filler, np.int64)))
            for table, absent, columns, filler in sections
        ]
        return torch.from_numpy(np.concatenate(parts).astype(np.int32))


def put(values: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Numbers of the host where the kernels are; neither waits for the other."""
    if device.type != "cuda" or not values.numel():
        return values.to(device)
    return values.pin_memory().to(device, non_blocking=True)


class DeviceTables:
    """The tables where the kernels are, in one buffer; `refill` keeps its address."""

    def __init__(
        self, host: HostTables, device: torch.device, capacity: Capacity | None = None
    ) -> None:
        self.capacity = capacity = host.capacity if capacity is None else capacity
        self._buffer = put(host.flat(capacity), device)
        sizes = (
            capacity.sequences * SEQUENCE_COLUMNS,
            capacity.items * ITEM_COLUMNS,
            capacity.merges * MERGE_COLUMNS,
            capacity.pages,
        )
        self.sequences, self.items, self.merges, self.pages = self._buffer.split(sizes)

    def refill(self, host: HostTables) -> None:
        """Takes the place of what is there: launches that were recorded read the new tables."""
        self._buffer.copy_(put(host.flat(self.capacity), self._buffer.device))


def plan_splits(
    spans: Spans,
    chosen: HostInts,
    first_row_G: HostInts,
    *,
    query_rows: int,
    block_rows: int,
    split_tokens: int,
) -> HostTables:
    """For the sequences `chosen`, whose first rows are `first_row_G`, with `query_rows` rows a
    query in blocks of `block_rows`."""
    queries_G, keys_G = spans.num_queries_G[chosen], spans.num_keys_G[chosen]
    blocks_G = -(-queries_G * query_rows // block_rows)
    splits_G = np.maximum(1, -(-keys_G // split_tokens))
    is_split_G = splits_G > 1
    slots_G = np.where(is_split_G, blocks_G * splits_G, 0)
    first_slot_G = np.cumsum(slots_G) - slots_G
    pages, first_page_G = _pages(spans, chosen, keys_G)
    columns = (first_row_G, queries_G, keys_G, first_page_G, first_slot_G, splits_G)

    sequence_W, place_W = numbered(blocks_G * splits_G)
    split_W, block_W = np.divmod(place_W, blocks_G[sequence_W])
    slot_W = np.where(is_split_G[sequence_W], first_slot_G[sequence_W] + place_W, ABSENT)
    length_W = np.minimum(keys_G[sequence_W] - split_W * split_tokens, split_tokens)
    longest_first_W = np.argsort(-length_W, kind="stable")
    items_WX = np.stack((sequence_W, split_W, block_W, slot_W), axis=1)[longest_first_W]
    sequence_N, query_N = numbered(np.where(is_split_G, queries_G, 0))
    return HostTables(
        sequences_GX=_sequences(columns),
        items_WX=items_WX,
        merges_NX=np.stack((sequence_N, query_N), axis=1),
        pages=pages,
        num_slots=int(slots_G.sum()),
    )


def plan_tiles(
    spans: Spans, chosen: HostInts, *, query_rows: int, block_rows: int, pages: tuple[int, int]
) -> HostTables:
    """For the sequences `chosen` and their pages from `pages[0]` up to `pages[1]`: an item for
    every block of rows, the costliest first."""
    first_page, last_page = pages
    queries_G, keys_G = spans.num_queries_G[chosen], spans.num_keys_G[chosen]
    start, stop = first_page * spans.page_tokens, last_page * spans.page_tokens
    page_ids, first_page_G = _pages(spans, chosen, np.minimum(keys_G, stop), first_page)
    zeros_G = np.zeros_like(keys_G)
    columns = (spans.first_row_G[chosen], queries_G, keys_G, first_page_G, zeros_G, zeros_G)
    has_keys_G = (keys_G > start) | (first_page == 0)
    sequence_W, block_W = numbered(
        np.where(has_keys_G, -(-queries_G * query_rows // block_rows), 0)
    )
    last_query_W = np.minimum((block_W + 1) * block_rows // query_rows, queries_G[sequence_W])
    seen_W = np.minimum(keys_G[sequence_W] - queries_G[sequence_W] + last_query_W, stop)
    longest_first_W = np.argsort(-seen_W, kind="stable")
    zeros_W = np.zeros_like(block_W)
    items_WX = np.stack((sequence_W, zeros_W, block_W, zeros_W), axis=1)[longest_first_W]
    return HostTables(
        sequences_GX=_sequences(columns),
        items_WX=items_WX,
        merges_NX=np.zeros((0, MERGE_COLUMNS), np.int64),
        pages=page_ids,
        num_slots=0,
    )


def numbered(counts_G: HostInts) -> tuple[HostInts, HostInts]:
    """(g, i) for every i below `counts_G[g]`, in order."""
    owner = np.repeat(np.arange(len(counts_G)), counts_G)
    return owner, np.arange(len(owner)) - (np.cumsum(counts_G) - counts_G)[owner]


def _sequences(columns: tuple[HostInts, ...]) -> HostInts:
    table_GX = np.zeros((len(columns[0]), SEQUENCE_COLUMNS), np.int64)
    table_GX[:, : len(columns)] = np.stack(columns, axis=1)
    return table_GX


def _pages(
    spans: Spans, chosen: HostInts, stop_G: HostInts, first_page: int = 0
) -> tuple[HostInts, HostInts]:
    """The pages of the keys up to `stop_G`, and where those of each sequence begin."""
    counts_G = np.maximum(0, -(-stop_G // spans.page_tokens) - first_page)
    owner, place = numbered(counts_G)
    pages = spans.pages_GP[spans.table_row_G[chosen][owner], first_page + place]
    return pages, np.cumsum(counts_G) - counts_G
