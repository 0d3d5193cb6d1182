"""Groups of exact mode: the shape of a call is a function of positions, never of the schedule.

Prompt positions are attended in blocks of 64 queries that start at multiples of 64, each with the
keys up to its end, absent queries and keys padded. Generated positions are attended one by one, as
`exact_splits` says. How many blocks or sequences share a call makes no difference.

S sequences, T tokens, G sequences of a group, Q queries, L keys.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from batchmla.attention.exact_splits import Positions, split_groups
from batchmla.attention.groups import bias_of, page_table
from batchmla.attention.prefixes import shared_prefixes
from batchmla.kernels.groups import Group, Groups
from batchmla.kv.step import HostInts, Step

QUERY_BLOCK = 64
MAX_GROUP_KEYS = 2048  # keys of one group's sequences together, beyond the first


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
    parts = [*_block_groups(step, prompts, dtype)]
    blocks = Groups(members=tuple(_placed(parts)))
    rows = [rows for _, rows in parts]
    return _generated_groups(step, generated, dtype), _covering(step, blocks, rows)


def _generated_groups(step: Step, runs: Sequence[_Run], dtype: torch.dtype) -> Groups:
    if not runs:
        return Groups(members=(), is_split=True)
    lengths = [len(run.positions) for run in runs]
    found = Positions(
        rows_N=np.concatenate([run.first_row + np.arange(len(run.positions)) for run in runs]),
        sequences_N=np.repeat([run.sequence for run in runs], lengths),
        positions_N=np.concatenate([np.array(run.positions) for run in runs]),
    )
    groups, rows = split_groups(step, found, dtype)
    return _covering(step, groups, [rows])


def join(first: Groups, second: Groups) -> Groups:
    """Both as one, for a flavour with one form."""
    if not first.members or not second.members:
        return first if first.members else second
    assert first.rows_N is not None and second.rows_N is not None, "neither covers all rows"
    shift = len(first.rows_N)
    moved = (replace(group, first_row=group.first_row + shift) for group in second.members)
    return replace(
        first,
        members=(*first.members, *moved),
        rows_N=torch.cat((first.rows_N, second.rows_N)),
    )


def _placed(parts: Sequence[tuple[Group, HostInts]]) -> Iterator[Group]:
    """Each group behind the rows of those before it."""
    first_row = 0
    for group, rows in parts:
        yield replace(group, first_row=first_row)
        first_row += len(rows)


def _covering(step: Step, groups: Groups, rows: Sequence[HostInts]) -> Groups:
    """The groups with their rows of T."""
    order = np.concatenate(rows) if rows else np.zeros(0, np.int64)
    is_all = len(order) == step.host_starts_S1[-1] and bool((np.diff(order) == 1).all())
    rows_N = None if is_all else torch.from_numpy(order).to(step.tokens_T.device)
    return replace(groups, rows_N=rows_N)


def _block_groups(
    step: Step, runs: Sequence[_Run], dtype: torch.dtype
) -> Iterator[tuple[Group, HostInts]]:
    """Runs that touch the same blocks go together, those that share keys next to each other."""
    shared_S = np.zeros(step.num_sequences, np.int64)
    cluster_S = np.zeros(step.num_sequences, np.int64)
    clusters = shared_prefixes(step, np.array([run.sequence for run in runs], np.int64))
    for index, cluster in enumerate(clusters):
        shared_S[cluster.sequences], cluster_S[cluster.sequences] = cluster.num_shared, index
    by_blocks: dict[tuple[int, int, int], list[_Run]] = defaultdict(list)
    for run in sorted(runs, key=lambda run: int(cluster_S[run.sequence])):
        first, last = run.positions[0] // QUERY_BLOCK, run.positions[-1] // QUERY_BLOCK
        by_blocks[int(cluster_S[run.sequence]), first, last].append(run)
    for (_, first, last), alike in by_blocks.items():
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
            pages_GP, page_run = page_table(step, sequences, num_keys)
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
                page_run=page_run,
                query_block=QUERY_BLOCK,
                num_shared=int(shared_S[sequences[0]]),
            )
            yield group, np.concatenate(rows)


def _block_bias(num_keys: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """[1, 64, L]: the last 64 queries of L positions, each seeing itself and what is before."""
    visible_Q = torch.arange(num_keys - QUERY_BLOCK, num_keys, device=device) + 1
    return bias_of(torch.arange(num_keys, device=device) < visible_Q[None, :, None], dtype)
