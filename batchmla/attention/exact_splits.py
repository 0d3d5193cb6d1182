"""Exact mode's groups for generated positions: a tail of keys and whole splits before it.

A position sees the splits [0, 256), [256, 512) … that end before it and a tail of the keys that
are left, padded to a multiple of 64. Each is attended by itself and merged in this order, always,
so that positions that hold the same split, of one sequence or of many, can be attended together.

N positions, S sequences, P pages, G sequences of a group, L keys.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import torch

from batchmla.attention.groups import bias_of
from batchmla.kernels.groups import Group, Groups
from batchmla.kv.step import HostInts, Step

SPLIT_KEYS = 256  # or a page, where that is larger
KEY_BLOCK = 64
MAX_ROWS = 64  # positions of one group


@dataclass(frozen=True, slots=True)
class Positions:
    """Generated positions of a step, each with its row of T and its sequence."""

    rows_N: HostInts
    sequences_N: HostInts
    positions_N: HostInts


def split_groups(step: Step, found: Positions, dtype: torch.dtype) -> tuple[Groups, HostInts]:
    """The groups and their rows of T in the groups' order; `rows_N` is left to the caller."""
    split_keys = max(SPLIT_KEYS, step.page_tokens)
    whole_N = found.positions_N // split_keys
    tails_N = found.positions_N + 1 - whole_N * split_keys
    classes_N = -(-tails_N // KEY_BLOCK) * KEY_BLOCK
    split_pages = split_keys // step.page_tokens
    pages_NP = step.pages_SP.cpu().numpy()[found.sequences_N]
    last_pages_NX = pages_NP[:, split_pages - 1 :: split_pages]
    last_pages_NX = np.where(np.arange(last_pages_NX.shape[1]) < whole_N[:, None], last_pages_NX, 0)
    order = np.lexsort((found.rows_N, classes_N, *last_pages_NX.T[::-1], -whole_N))
    table = _Table(step, pages_NP[order], split_pages)
    members = tuple(_tails(table, whole_N[order], tails_N[order], classes_N[order], dtype))
    splits = tuple(_splits(table, whole_N[order], split_keys))
    return Groups(members=members, prefixes=splits, is_split=True), found.rows_N[order]


class _Table:
    """The page tables of the positions in the groups' order."""

    def __init__(self, step: Step, pages_NP: HostInts, split_pages: int) -> None:
        self.pages_NP = pages_NP
        self.page_tokens = step.page_tokens
        self.split_pages = split_pages
        self.device = step.tokens_T.device

    def cut(self, rows: slice, first_page: int | HostInts, num_keys: int) -> torch.Tensor:
        """[G, P] pages of `num_keys` keys from `first_page` on; page 0 beyond the table."""
        num_pages = -(-num_keys // self.page_tokens)
        pages_GP = self.pages_NP[rows]
        columns = np.reshape(first_page, (-1, 1)) + np.arange(num_pages)
        is_there = columns < pages_GP.shape[1]
        taken = np.take_along_axis(
            pages_GP, np.broadcast_to(np.where(is_there, columns, 0), (len(pages_GP), num_pages)), 1
        )
        return torch.from_numpy(np.where(is_there, taken, 0)).to(self.device)


def _runs(starts_N: npt.NDArray[np.bool_], most: int) -> Iterator[slice]:
    """Runs of positions; one begins wherever `starts_N` is set, and none is longer than `most`."""
    borders = [*np.flatnonzero(starts_N).tolist(), len(starts_N)]
    for first, end in pairwise(borders):
        for start in range(first, end, most):
            yield slice(start, min(start + most, end))


def _tails(
    table: _Table, whole_N: HostInts, tails_N: HostInts, classes_N: HostInts, dtype: torch.dtype
) -> Iterator[Group]:
    """Neighbours of one class go together."""
    starts_N = np.diff(classes_N, prepend=-1) != 0
    for rows in _runs(starts_N, MAX_ROWS):
        num_keys = int(classes_N[rows.start])
        seen_GL = np.arange(num_keys) < tails_N[rows, None]
        bias_GL = bias_of(torch.from_numpy(seen_GL).to(table.device), dtype)
        yield Group(
            num_sequences=rows.stop - rows.start,
            num_queries=1,
            num_keys=num_keys,
            first_row=rows.start,
            pages_GP=table.cut(rows, whole_N[rows] * table.split_pages, num_keys),
            bias_GQL=bias_GL[:, None],
        )


def _splits(table: _Table, whole_N: HostInts, split_keys: int) -> Iterator[Group]:
    """Split by split, of the positions that have it: those with the same pages as one sequence
    with many queries, the others as many with one."""
    for index in range(int(whole_N.max(initial=0))):
        count = int((whole_N > index).sum())
        first_page = index * table.split_pages
        pages_NP = table.pages_NP[:count, first_page : first_page + table.split_pages]
        is_new_N = np.ones(count, bool)
        is_new_N[1:] = (pages_NP[1:] != pages_NP[:-1]).any(1)
        sizes = np.diff(np.flatnonzero(np.append(is_new_N, True)))
        is_shared_N = np.repeat(sizes > 1, sizes)
        starts_N = (is_new_N & is_shared_N) | (np.diff(is_shared_N, prepend=True) != 0)
        starts_N[0] = True
        for rows in _runs(starts_N, MAX_ROWS):
            is_shared, num_rows = bool(is_shared_N[rows.start]), rows.stop - rows.start
            held = slice(rows.start, rows.start + 1) if is_shared else rows
            yield Group(
                num_sequences=1 if is_shared else num_rows,
                num_queries=num_rows if is_shared else 1,
                num_keys=split_keys,
                first_row=rows.start,
                pages_GP=table.cut(held, first_page, split_keys),
            )
