"""Sequences on shuffled pages whose rows choose keys, for kernels in the interpreter.

Pages that no row sees hold NaN, and tables are padded with a page that is not there.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from steps import Row, make_step

from batchmla import kernels
from batchmla.attention.sparse_rows import choosing_rows
from batchmla.kernels.sparse_ops import IndexGroup, Record

NOWHERE = 2**40


@dataclass(frozen=True)
class Choosing:
    """Groups of the rows that see more than `count` keys; by row, the slots that it sees."""

    groups: tuple[IndexGroup, ...]
    seen: list[list[int]]
    num_pages: int
    page_tokens: int

    @property
    def num_rows(self) -> int:
        return len(self.seen)

    @property
    def unseen_pages(self) -> list[int]:
        """Never referenced."""
        used = {slot // self.page_tokens for seen in self.seen for slot in seen}
        return sorted(set(range(self.num_pages)) - used)

    def alone(self, row: int) -> IndexGroup:
        """The group of this row only, on pages of its own."""
        for group in self.groups:
            at = row - group.first_row
            if 0 <= at < group.num_rows:
                pages = group.pages_GP[at if len(group.pages_GP) > 1 else 0][None]
                visible = group.visible_N[at : at + 1]
                return IndexGroup(first_row=0, num_rows=1, num_keys=int(visible),
                                  pages_GP=pages, visible_N=visible)  # fmt: skip
        raise AssertionError(row)


def make_choosing(
    sequences: Sequence[tuple[int, int]], count: int, page_tokens: int = 8
) -> Choosing:
    """Of (tokens of the step, context)."""
    source = random.Random(len(sequences))
    counts = [-(-context // page_tokens) for _, context in sequences]
    pool = list(range(sum(counts) + 3))
    source.shuffle(pool)
    rows = [
        (Row([0] * context, [pool.pop() for _ in range(pages)], computed=context - queries),
         queries)
        for (queries, context), pages in zip(sequences, counts, strict=True)
    ]  # fmt: skip
    choosing = choosing_rows(make_step(rows, page_tokens), count)
    assert choosing is not None
    seen = [
        [row.pages[at // page_tokens] * page_tokens + at % page_tokens for at in range(end)]
        for row, queries in rows
        for end in range(len(row.ids) - queries + 1, len(row.ids) + 1)
    ]
    order = range(len(seen)) if choosing.rows_N is None else choosing.rows_N.tolist()
    groups = tuple(_padded(group, page_tokens) for group in choosing.groups)
    return Choosing(groups, [seen[row] for row in order], sum(counts) + 3, page_tokens)


def _padded(group: IndexGroup, page_tokens: int) -> IndexGroup:
    """Every page behind those that are seen is none."""
    pages = torch.cat((group.pages_GP, torch.zeros_like(group.pages_GP[:, :1])), dim=1)
    if len(pages) == 1:
        pages[0, -(-group.num_keys // page_tokens) :] = NOWHERE
    else:
        for row_P, visible in zip(pages, group.visible_N.tolist(), strict=True):
            row_P[-(-visible // page_tokens) :] = NOWHERE
    return replace(group, pages_GP=pages)


def recorded(rows_XW: torch.Tensor, record: Record, page_tokens: int) -> torch.Tensor:
    """Pages of records of the rows; pages without any number are of bytes that stand for none."""
    shape = (len(rows_XW) // page_tokens, page_tokens, record.num_bytes)
    cache = torch.zeros(shape, dtype=torch.uint8)
    ops, places = kernels.load("torch").sparse, torch.arange(len(rows_XW))
    ops.write_record(cache, places, rows_XW.nan_to_num(), record)
    lost = rows_XW.isnan().any(dim=1).view(-1, page_tokens).all(dim=1)
    cache[lost] = 255
    return cache


def far_pages(page_tokens: int, width: int, dtype: torch.dtype) -> torch.Tensor:
    """Three pages of zeros, the last one behind the first 2^31 elements; memory nobody touches."""
    stride = 2**30 + 64
    elements = 2 * stride + page_tokens * width
    memory = np.zeros(elements * dtype.itemsize, np.uint8)
    flat = torch.from_numpy(memory).view(dtype)
    return flat.as_strided((3, page_tokens, width), (stride, width, 1))
