"""Parts a step at the number of keys that a query reads: earlier positions read all they see, later
ones choose. By position alone, so the same in every batch.

S sequences, T tokens, N rows that choose, P pages.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch

from batchmla.attention.groups import page_table, split_by_length
from batchmla.kernels.sparse_ops import IndexGroup
from batchmla.kv.step import HostInts, Step


@dataclass(frozen=True, slots=True, kw_only=True)
class ChoosingRows:
    """`rows_N` of T, in the order of the groups; None: all rows as they stand."""

    groups: tuple[IndexGroup, ...]
    rows_N: torch.Tensor | None


def first_queries_S(step: Step) -> HostInts:
    """The position of each sequence's first token of the step."""
    first_S: HostInts = step.host_context_S - np.diff(step.host_starts_S1)
    return first_S


def early_part(step: Step, border: int) -> tuple[Step | None, torch.Tensor | None]:
    """The step of the positions below `border`, and their rows of T; None: all of them.

    Without any the step is None.
    """
    starts_S, queries_S = step.host_starts_S1[:-1], np.diff(step.host_starts_S1)
    early_S = np.clip(border - first_queries_S(step), 0, queries_S)
    if (early_S == queries_S).all():
        return step, None
    some = np.flatnonzero(early_S)
    if len(some) == 0:
        return None, None
    device, counts = step.tokens_T.device, early_S[some]
    rows_T = torch.from_numpy(np.concatenate([*_ranges(starts_S[some], counts)])).to(device)
    part = replace(
        step,
        tokens_T=step.tokens_T[rows_T],
        positions_T=step.positions_T[rows_T],
        slots_T=step.slots_T[rows_T],
        pages_SP=step.pages_SP[torch.from_numpy(some).to(device)],
        logits_rows_N=step.logits_rows_N[:0],
        host_starts_S1=np.concatenate(([0], np.cumsum(counts))),
        host_context_S=np.minimum(step.host_context_S[some], border),
        host_prompt_S=step.host_prompt_S[some],
        host_pages_SP=None if step.host_pages_SP is None else step.host_pages_SP[some],
    )
    return part, rows_T


def choosing_rows(step: Step, count: int, stride: int = 1) -> ChoosingRows | None:
    """The rows that see more than `count` keys, of which there is one for every `stride` tokens:
    single ones by the length of their contexts, those of a chunk together; None without any."""
    queries_S = np.diff(step.host_starts_S1)
    late_S = np.clip(step.host_context_S - ((count + 1) * stride - 1), 0, queries_S)
    if not late_S.any():
        return None
    groups, rows, first_row = [], [], 0
    for group, group_rows in _groups(step, late_S, stride):
        groups.append(replace(group, first_row=first_row))
        rows.append(group_rows)
        first_row += group.num_rows
    order = np.concatenate(rows)
    is_all = len(order) == step.host_starts_S1[-1] and bool((np.diff(order) == 1).all())
    rows_N = None if is_all else torch.from_numpy(order).to(step.tokens_T.device)
    return ChoosingRows(groups=tuple(groups), rows_N=rows_N)


def _groups(step: Step, late_S: HostInts, stride: int) -> Iterator[tuple[IndexGroup, HostInts]]:
    """Each with its rows of T."""
    context_S, ends_S = step.host_context_S, step.host_starts_S1[1:]
    single = np.flatnonzero(late_S == 1)
    for bucket in split_by_length(single, context_S[single]):
        yield _group(step, bucket, context_S[bucket] // stride, stride), ends_S[bucket] - 1
    for sequence in np.flatnonzero(late_S > 1):
        count, context = int(late_S[sequence]), int(context_S[sequence])
        seen = (np.arange(context - count, context) + 1) // stride
        rows = np.arange(ends_S[sequence] - count, ends_S[sequence])
        yield _group(step, np.array([sequence]), seen, stride), rows


def _group(step: Step, sequences: HostInts, visible_N: HostInts, stride: int) -> IndexGroup:
    num_keys = int(visible_N.max())
    pages_GP, _ = page_table(step, sequences, num_keys * stride)
    return IndexGroup(
        first_row=0,
        num_rows=len(visible_N),
        num_keys=num_keys,
        pages_GP=pages_GP,
        visible_N=torch.from_numpy(visible_N).to(step.tokens_T.device),
    )


def _ranges(starts: HostInts, counts: HostInts) -> Iterator[HostInts]:
    for start, count in zip(starts.tolist(), counts.tolist(), strict=True):
        yield np.arange(start, start + count)
