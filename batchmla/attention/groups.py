"""Cuts a step's sequences into the groups that attention is called for; pure host arithmetic.

S sequences, T tokens, G sequences of a group, Q queries, L keys, B tokens per page.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np
import torch
import torch.nn.functional as F

from batchmla.attention.prefixes import shared_prefixes
from batchmla.kernels.groups import Group, Groups, PageRun
from batchmla.kv.step import HostInts, Step

MAX_DECODE_GROUPS = 4
MAX_CHUNK_KEYS = 2048  # of chunks attended together; more keys outgrow the caches
GROUP_COST_KEYS = (
    512  # what one more call costs, in gathered keys (about 60 µs against 0.1 µs a key)
)


def make_groups(step: Step, sequences: HostInts, dtype: torch.dtype) -> Groups:
    """Groups that cover `sequences`: those with one query by length, chunks with those
    of the same size and context; keys that many of them share are a prefix, attended once."""
    members: list[Group] = []
    prefixes: list[Group] = []
    rows = [np.zeros(0, np.int64)]
    first_row = 0
    for cluster in shared_prefixes(step, sequences):
        parts = _cluster_groups(step, cluster.sequences, cluster.num_shared, dtype)
        start_row = first_row
        for group, group_rows in parts:
            members.append(replace(group, first_row=first_row))
            rows.append(group_rows)
            first_row += len(group_rows)
        if cluster.num_shared:
            prefixes.append(
                _prefix_group(
                    step, cluster.sequences[:1], cluster.num_shared, range(start_row, first_row)
                )
            )
    order = np.concatenate(rows)
    is_all = len(order) == step.host_starts_S1[-1] and bool((np.diff(order) == 1).all())
    rows_N = None if is_all else torch.from_numpy(order).to(step.tokens_T.device)
    return Groups(members=tuple(members), rows_N=rows_N, prefixes=tuple(prefixes))


def _cluster_groups(
    step: Step, sequences: HostInts, num_shared: int, dtype: torch.dtype
) -> Iterator[tuple[Group, HostInts]]:
    """Groups over the keys from `num_shared` on, each with its rows of T."""
    queries_S = np.diff(step.host_starts_S1)
    own_S = step.host_context_S - num_shared
    decodes = sequences[queries_S[sequences] == 1]
    chunks = sequences[queries_S[sequences] > 1]
    for bucket in split_by_length(decodes, own_S[decodes]):
        yield _decode_group(step, bucket, num_shared, dtype), step.host_starts_S1[bucket]
    for alike in _alike(chunks, queries_S, own_S):
        num_queries = int(queries_S[alike[0]])
        rows = step.host_starts_S1[alike][:, None] + np.arange(num_queries)
        yield _chunk_group(step, alike, num_queries, num_shared, dtype), rows.ravel()


def _prefix_group(step: Step, sequence: HostInts, num_shared: int, rows: range) -> Group:
    """The shared keys, as those of one sequence with a query for each row."""
    pages_GP, page_run = page_table(step, sequence, num_shared)
    return Group(
        num_sequences=1,
        num_queries=len(rows),
        num_keys=num_shared,
        first_row=rows.start,
        pages_GP=pages_GP,
        page_run=page_run,
    )


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


def _decode_group(step: Step, sequences: HostInts, num_shared: int, dtype: torch.dtype) -> Group:
    lengths = step.host_context_S[sequences] - num_shared
    num_keys = int(lengths.max())
    bias = None
    if lengths.min() < num_keys:
        seen_GL = np.arange(num_keys) < lengths[:, None]
        bias = bias_of(torch.from_numpy(seen_GL).to(step.tokens_T.device)[:, None], dtype)
    pages_GP, page_run = page_table(step, sequences, num_keys, num_shared)
    return Group(
        num_sequences=len(sequences),
        num_queries=1,
        num_keys=num_keys,
        first_row=0,
        pages_GP=pages_GP,
        bias_GQL=bias,
        page_run=page_run,
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
    step: Step, sequences: HostInts, num_queries: int, num_shared: int, dtype: torch.dtype
) -> Group:
    num_keys = int(step.host_context_S[sequences[0]]) - num_shared
    bias = None
    if num_keys > num_queries:
        device = step.tokens_T.device
        visible_Q = torch.arange(num_keys - num_queries + 1, num_keys + 1, device=device)
        seen_QL = torch.arange(num_keys, device=device) < visible_Q[:, None]
        bias = bias_of(seen_QL[None], dtype).expand(len(sequences), -1, -1)
    pages_GP, page_run = page_table(step, sequences, num_keys, num_shared)
    return Group(
        num_sequences=len(sequences),
        num_queries=num_queries,
        num_keys=num_keys,
        first_row=0,
        pages_GP=pages_GP,
        bias_GQL=bias,
        is_causal=bias is None,
        page_run=page_run,
    )


def bias_of(seen_GQL: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """0 where a query sees a key, -inf elsewhere."""
    bias = torch.zeros(seen_GQL.shape, dtype=dtype, device=seen_GQL.device)
    return bias.masked_fill_(~seen_GQL, float("-inf"))


def page_table(
    step: Step, sequences: HostInts, num_keys: int, first_key: int = 0
) -> tuple[torch.Tensor, PageRun | None]:
    """[G, P] page ids of the keys from `first_key`, the start of a page, on; page 0 beyond the
    table; and the run they form, if they do."""
    device = step.tokens_T.device
    num_pages, start = -(-num_keys // step.page_tokens), first_key // step.page_tokens
    pages_GP = step.pages_SP[:, start : start + num_pages]
    if len(sequences) < step.num_sequences:
        pages_GP = pages_GP[torch.from_numpy(sequences).to(device)]
    if pages_GP.shape[1] < num_pages:
        pages_GP = F.pad(pages_GP, (0, num_pages - pages_GP.shape[1]))
    return pages_GP, _even_run(pages_GP) if device.type == "cpu" else None


def _even_run(pages_GP: torch.Tensor) -> PageRun | None:
    """Where the pages lie if they need no gathering."""
    ids_GP = pages_GP.numpy()
    firsts_G = ids_GP[:, 0]
    stride = int(firsts_G[1] - firsts_G[0]) if len(firsts_G) > 1 else 0
    is_even = (np.diff(firsts_G) == stride).all() and (np.diff(ids_GP, axis=1) == 1).all()
    return PageRun(int(firsts_G[0]), stride) if is_even and stride >= 0 else None
