"""Cuts a step's sequences into the groups that attention is called for; pure host arithmetic.

S sequences, T tokens, G sequences of a group, Q queries, L keys, B tokens per page.
"""

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import torch
import torch.nn.functional as F

from batchmla.kernels.ops import Group, Groups
from batchmla.kv.step import HostInts, Step

MAX_DECODE_GROUPS = 4
MAX_CHUNK_KEYS = 2048  # of chunks attended together; more keys outgrow the caches
GROUP_COST_KEYS = (
    512  # what one more call costs, in gathered keys (about 60 µs against 0.1 µs a key)
)


def make_groups(step: Step, sequences: HostInts, dtype: torch.dtype) -> Groups:
    """Groups that cover `sequences`: those with one query by length, chunks with those
    of the same size and context."""
    queries_S = np.diff(step.host_starts_S1)
    decodes = sequences[queries_S[sequences] == 1]
    chunks = sequences[queries_S[sequences] > 1]
    members, rows, first_row = [], [np.zeros(0, np.int64)], 0
    for bucket in split_by_length(decodes, step.host_context_S[decodes]):
        members.append(_decode_group(step, bucket, first_row, dtype))
        rows.append(step.host_starts_S1[bucket])
        first_row += len(bucket)
    for alike in _alike(chunks, queries_S, step.host_context_S):
        num_queries = int(queries_S[alike[0]])
        members.append(_chunk_group(step, alike, num_queries, first_row, dtype))
        rows.append((step.host_starts_S1[alike][:, None] + np.arange(num_queries)).ravel())
        first_row += len(alike) * num_queries
    order = np.concatenate(rows)
    is_all = len(order) == step.host_starts_S1[-1] and bool((np.diff(order) == 1).all())
    rows_N = None if is_all else torch.from_numpy(order).to(step.tokens_T.device)
    return Groups(members=tuple(members), rows_N=rows_N)


def split_by_length(sequences: HostInts, lengths: HostInts) -> Sequence[HostInts]:
    """At most MAX_DECODE_GROUPS buckets with the least padding plus cost of calls.

    Dynamic programming over the distinct lengths, thinned to 32 of them.
    """
    if len(sequences) == 0:
        return []
    order = np.argsort(lengths, kind="stable")
    ordered = lengths[order]
    if ordered[0] == ordered[-1]:
        return [sequences]
    ends = np.flatnonzero(np.diff(ordered, append=-1)) + 1  # a bucket may end after these many
    if len(ends) > 32:
        ends = np.unique(ends[np.linspace(0, len(ends) - 1, 32).astype(np.int64)])
    starts = np.concatenate(([0], ends[:-1]))
    counts = ends[None, :] - starts[:, None]
    cost = np.where(
        counts > 0, counts * ordered[ends - 1] + GROUP_COST_KEYS, np.iinfo(np.int64).max
    )
    best = cost[0].astype(np.float64)
    tables: list[HostInts] = []
    for _ in range(MAX_DECODE_GROUPS - 1):
        # choices[j, i]: buckets before end j at their best, then one bucket from j to i
        choices = np.concatenate((best[None, :], best[:-1, None] + cost[1:].astype(np.float64)))
        tables.append(choices.argmin(axis=0))
        best = choices.min(axis=0)
    cuts, at = [len(ends) - 1], len(ends) - 1
    for table in reversed(tables):
        if table[at]:
            at = int(table[at]) - 1
            cuts.append(at)
    borders = [0, *(int(ends[cut]) for cut in reversed(cuts))]
    return [np.sort(sequences[order[first:last]]) for first, last in pairwise(borders)]


def _decode_group(step: Step, sequences: HostInts, first_row: int, dtype: torch.dtype) -> Group:
    lengths = step.host_context_S[sequences]
    num_keys = int(lengths.max())
    bias = None
    if lengths.min() < num_keys:
        seen_GL = np.arange(num_keys) < lengths[:, None]
        bias = bias_of(torch.from_numpy(seen_GL).to(step.tokens_T.device)[:, None], dtype)
    pages_GP, first_page = page_table(step, sequences, num_keys)
    return Group(
        num_sequences=len(sequences),
        num_queries=1,
        num_keys=num_keys,
        first_row=first_row,
        pages_GP=pages_GP,
        bias_GQL=bias,
        first_page=first_page,
    )


def _alike(chunks: HostInts, queries_S: HostInts, context_S: HostInts) -> Sequence[HostInts]:
    """Chunks with the same numbers of queries and keys, up to MAX_CHUNK_KEYS keys together."""
    sizes: dict[tuple[int, int], list[int]] = {}
    for sequence in chunks.tolist():
        sizes.setdefault((int(queries_S[sequence]), int(context_S[sequence])), []).append(sequence)
    parts = []
    for (_, num_keys), members in sizes.items():
        most = max(1, MAX_CHUNK_KEYS // num_keys)
        parts += [np.array(members[at : at + most]) for at in range(0, len(members), most)]
    return parts


def _chunk_group(
    step: Step, sequences: HostInts, num_queries: int, first_row: int, dtype: torch.dtype
) -> Group:
    num_keys = int(step.host_context_S[sequences[0]])
    bias = None
    if num_keys > num_queries:
        device = step.tokens_T.device
        visible_Q = torch.arange(num_keys - num_queries + 1, num_keys + 1, device=device)
        seen_QL = torch.arange(num_keys, device=device) < visible_Q[:, None]
        bias = bias_of(seen_QL[None], dtype).expand(len(sequences), -1, -1)
    pages_GP, first_page = page_table(step, sequences, num_keys)
    return Group(
        num_sequences=len(sequences),
        num_queries=num_queries,
        num_keys=num_keys,
        first_row=first_row,
        pages_GP=pages_GP,
        bias_GQL=bias,
        is_causal=bias is None,
        first_page=first_page,
    )


def bias_of(seen_GQL: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """0 where a query sees a key, -inf elsewhere."""
    bias = torch.zeros(seen_GQL.shape, dtype=dtype, device=seen_GQL.device)
    return bias.masked_fill_(~seen_GQL, float("-inf"))


def page_table(step: Step, sequences: HostInts, num_keys: int) -> tuple[torch.Tensor, int | None]:
    """[G, P] page ids, page 0 beyond the table, and the first when one sequence has consecutive
    ones."""
    device = step.tokens_T.device
    num_pages = -(-num_keys // step.page_tokens)
    if len(sequences) == step.num_sequences:
        pages_GP = step.pages_SP[:, :num_pages]
    else:
        pages_GP = step.pages_SP[torch.from_numpy(sequences).to(device), :num_pages]
    if pages_GP.shape[1] < num_pages:
        pages_GP = F.pad(pages_GP, (0, num_pages - pages_GP.shape[1]))
    if len(sequences) > 1 or device.type != "cpu":
        return pages_GP, None
    ids = pages_GP[0].numpy()
    is_consecutive = num_pages == 1 or bool((np.diff(ids) == 1).all())
    return pages_GP, int(ids[0]) if is_consecutive else None
