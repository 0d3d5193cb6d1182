"""Rows of all attention groups through what the groups hold together: out to every share of it, and
back from there.

T rows of this rank's group, G groups, R rows of all of them, M width, X values a row. Only ranks
with the same place in their groups exchange rows; what the ranks of a group make of them is added
or put together there. How many rows each group brings is known to all ranks before a step, so that
no rank has to ask another one or its device. A rank whose group has none takes part all the same.
"""

from collections.abc import Callable, Iterator, Sequence

import torch

from batchmla.parallel import Par

PIECE_ROWS = 4096  # of all groups together, in a sum at a time: what keeps a GPU busy


def to_all(par: Par, rows_TX: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
    """[T, X] → [R, X]: the rows of all groups one after the other, `counts[g]` of group g."""
    num_rows, groups = len(rows_TX), len(counts)
    assert counts[par.placement.group] == num_rows, f"{num_rows} rows, told were {counts}"
    sent = [num_rows] * groups
    return par.swap_rows(rows_TX.repeat(groups, 1), sent, list(counts), "to all")


def back(par: Par, made_RX: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
    """[R, X] → [G, T, X]: what every group made of this one's rows."""
    num_rows, groups = counts[par.placement.group], len(counts)
    received = [num_rows] * groups
    got = par.swap_rows(made_RX, list(counts), received, "back")
    return got.view(groups, num_rows, made_RX.shape[1])


def sum_over_groups(
    par: Par, make: Callable[[torch.Tensor], torch.Tensor], x_TM: torch.Tensor
) -> torch.Tensor:
    """[T, M] → [T, M]: the sum, in float32, of what `make` gives for the rows in every group."""
    found = []
    for first, counts in pieces(par.group_rows):
        own = counts[par.placement.group]
        made_RM = make(to_all(par, x_TM[first : first + own], counts))
        found.append(back(par, made_RM, counts).sum(dim=0, dtype=torch.float32).to(x_TM.dtype))
    return found[0] if len(found) == 1 else torch.cat(found)


def pieces(rows: Sequence[int]) -> Iterator[tuple[int, list[int]]]:
    """Where a piece of every group's rows begins, and how many each has in it."""
    each = piece_rows(len(rows))
    for first in range(0, max(rows), each):
        yield first, [min(max(count - first, 0), each) for count in rows]


def piece_rows(groups: int) -> int:
    """Rows of a piece that one of so many groups brings, at most."""
    return max(1, PIECE_ROWS // groups)
