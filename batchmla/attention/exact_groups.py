"""Groups of exact mode: the shape of a call is a function of positions, never of the schedule.

Prompt positions are attended in blocks of 64 queries that start at multiples of 64, each with the
keys up to its end, absent queries and keys padded. Generated positions are attended one by one,
with keys padded to a length class. How many blocks or sequences share a call makes no difference.

S sequences, T tokens, G sequences of a group, Q queries, L keys.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from batchmla.attention.groups import bias_of, page_table
from batchmla.kernels.ops import Group, Groups
from batchmla.kv.step import HostInts, Step

QUERY_BLOCK = 64
KEY_BLOCK = 64
MAX_GROUP_KEYS = 2048  # keys of one group's sequences together, beyond the first


def key_class(num_keys: int) -> int:
    """The padded length: 64 times 1, 2, 3, 4, 6, 8, 12, 16, 24 …"""
    blocks = -(-num_keys // KEY_BLOCK)
    step = max(1, 1 << (blocks - 1).bit_length() >> 2)
    return -(-blocks // step) * step * KEY_BLOCK


@dataclass(frozen=True, slots=True)
class _Run:
    """Rows first_row … of T that hold consecutive positions of one sequence."""

    sequence: int
    first_row: int
    positions: range


def make_exact_groups(step: Step, dtype: torch.dtype) -> tuple[Groups, Groups]:
    """(generated positions, prompt positions)."""
    prompts, generated = [], []
    for sequence in range(step.num_sequences):
        first_row, end_row = (int(row) for row in step.host_starts_S1[sequence : sequence + 2])
        end = int(step.host_context_S[sequence])
        start = end - (end_row - first_row)
        border = min(max(start, int(step.host_prompt_S[sequence])), end)
        if start < border:
            prompts.append(_Run(sequence, first_row, range(start, border)))
        if border < end:
            generated.append(_Run(sequence, first_row + border - start, range(border, end)))
    return (
        _groups(step, [*_single_groups(step, generated, dtype)]),
        _groups(step, [*_block_groups(step, prompts, dtype)]),
    )


def join(first: Groups, second: Groups) -> Groups:
    """Both as one, for a flavour with one form."""
    if not first.members or not second.members:
        return first if first.members else second
    assert first.rows_N is not None and second.rows_N is not None, "neither covers all rows"
    shift = len(first.rows_N)
    moved = (replace(group, first_row=group.first_row + shift) for group in second.members)
    return Groups(members=(*first.members, *moved), rows_N=torch.cat((first.rows_N, second.rows_N)))


def _groups(step: Step, parts: Sequence[tuple[Group, HostInts]]) -> Groups:
    """Groups in order, from each group and its rows of T."""
    members, first_row = [], 0
    for group, rows in parts:
        members.append(replace(group, first_row=first_row))
        first_row += len(rows)
    order = np.concatenate([rows for _, rows in parts]) if parts else np.zeros(0, np.int64)
    is_all = len(order) == step.host_starts_S1[-1] and bool((np.diff(order) == 1).all())
    rows_N = None if is_all else torch.from_numpy(order).to(step.tokens_T.device)
    return Groups(members=tuple(members), rows_N=rows_N)


def _block_groups(
    step: Step, runs: Sequence[_Run], dtype: torch.dtype
) -> Iterator[tuple[Group, HostInts]]:
    """Runs that touch the same blocks go together."""
    by_blocks: dict[tuple[int, int], list[_Run]] = defaultdict(list)
    for run in runs:
        first, last = run.positions[0] // QUERY_BLOCK, run.positions[-1] // QUERY_BLOCK
        by_blocks[first, last].append(run)
    for (first, last), alike in by_blocks.items():
        num_keys, num_queries = (last + 1) * QUERY_BLOCK, (last + 1 - first) * QUERY_BLOCK
        at_once = max(1, MAX_GROUP_KEYS // num_keys)
        for start in range(0, len(alike), at_once):
            some = alike[start : start + at_once]
            sequences = np.array([run.sequence for run in some])
            places = [
                np.arange(run.positions.start, run.positions.stop)
                + (index * num_queries - first * QUERY_BLOCK)
                for index, run in enumerate(some)
            ]
            rows = [run.first_row + np.arange(len(run.positions)) for run in some]
            pages_GP, first_page = page_table(step, sequences, num_keys)
            grid_N = torch.from_numpy(np.concatenate(places)).to(step.tokens_T.device)
            group = Group(
                num_sequences=len(some),
                num_queries=num_queries,
                num_keys=num_keys,
                first_row=0,
                pages_GP=pages_GP,
                grid_N=None if len(grid_N) == len(some) * num_queries else grid_N,
                bias_GQL=_block_bias(num_keys, dtype, step.tokens_T.device),
                is_causal=True,
                first_page=first_page,
                query_block=QUERY_BLOCK,
            )
            yield group, np.concatenate(rows)


def _block_bias(num_keys: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """[1, 64, L]: the last 64 queries of L positions, each seeing itself and what is before."""
    visible_Q = torch.arange(num_keys - QUERY_BLOCK, num_keys, device=device) + 1
    return bias_of(torch.arange(num_keys, device=device) < visible_Q[None, :, None], dtype)


def _single_groups(
    step: Step, runs: Sequence[_Run], dtype: torch.dtype
) -> Iterator[tuple[Group, HostInts]]:
    """Sequences with one position by class; the positions of each other sequence by class."""
    by_class: dict[int, list[_Run]] = defaultdict(list)
    for run in runs:
        if len(run.positions) == 1:
            by_class[key_class(run.positions[0] + 1)].append(run)
    for num_keys, alike in by_class.items():
        rows = np.array([run.first_row for run in alike])
        lengths = np.array([run.positions[0] + 1 for run in alike])
        sequences = np.array([run.sequence for run in alike])
        yield _single_group(step, sequences, num_keys, lengths, dtype), rows
    for run in runs:
        if len(run.positions) > 1:
            lengths = np.array(run.positions) + 1
            classes = np.array([key_class(int(length)) for length in lengths])
            for num_keys in np.unique(classes).tolist():
                here = np.flatnonzero(classes == num_keys)
                sequence = np.array([run.sequence])
                group = _single_group(step, sequence, num_keys, lengths[here], dtype)
                yield group, run.first_row + here


def _single_group(
    step: Step, sequences: HostInts, num_keys: int, lengths: HostInts, dtype: torch.dtype
) -> Group:
    """One query of each sequence, or several of a single one, each with its own length."""
    pages_GP, first_page = page_table(step, sequences, num_keys)
    seen_NL = torch.from_numpy(np.arange(num_keys) < lengths[:, None]).to(step.tokens_T.device)
    is_many = len(sequences) < len(lengths)
    return Group(
        num_sequences=len(sequences),
        num_queries=len(lengths) if is_many else 1,
        num_keys=num_keys,
        first_row=0,
        pages_GP=pages_GP,
        bias_GQL=bias_of(seen_NL[None] if is_many else seen_NL[:, None], dtype),
        first_page=first_page,
        query_block=1 if is_many else None,
    )
