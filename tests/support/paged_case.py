"""Sequences on shuffled pages of a cache, and dense attention over them in float64."""

from dataclasses import dataclass

import numpy as np
import torch

from batchmla.kv.step import Step

PAGE_TOKENS = 8
# (queries, context) of each sequence
BATCHES = {
    "one token": [(1, 1)],
    "one decode": [(1, 100)],
    "decodes": [(1, n) for n in (1, 7, 8, 9, 63, 64, 100, 257)],
    "equal decodes": [(1, 40)] * 5,
    "whole prompts": [(2, 2), (63, 63), (100, 100)],
    "late chunks": [(5, 12), (8, 64), (31, 257)],
    "mixed": [(1, 9), (17, 40), (1, 257), (63, 63), (1, 1), (2, 100)],
}
# sequences whose first so many pages are those of the first of them
PREFIXES: dict[str, list[tuple[range, int]]] = {}
for name, sequences, prefixes in (
    ("decodes behind one prefix", [(1, 150 + n) for n in range(9)], [(range(9), 16)]),
    ("chunks behind one prefix", [(5, 140)] * 5 + [(7, 170)] * 5, [(range(10), 16)]),
    ("all sorts", [(1, 150), (9, 140), (1, 300), (140, 140)] * 6, [(range(0, 21), 1)]),
    (
        "nested",
        [(1, 300)] * 7 + [(3, 290)] * 6 + [(1, 20)] * 3,
        [(range(13), 10), (range(6), 30), (range(7, 13), 30)],
    ),
    ("two prefixes", [(1, 200)] * 14, [(range(7), 24), (range(7, 14), 24)]),
):
    BATCHES[name], PREFIXES[name] = sequences, prefixes


@dataclass
class Case:
    """Sequences on shuffled pages of a cache whose unused rows are large."""

    step: Step
    rows: list[torch.Tensor]  # per sequence: its cached rows [L, W]
    cache: torch.Tensor


def make_case(
    batch: str,
    width: int,
    dtype: torch.dtype,
    is_shuffled: bool = True,
    page_tokens: int = PAGE_TOKENS,
) -> Case:
    """One of BATCHES; prefixes are shared where PREFIXES says so."""
    generator = torch.Generator().manual_seed(len(batch))
    sequences = BATCHES[batch]
    counts = [-(-context // page_tokens) for _, context in sequences]
    order = torch.randperm(sum(counts) + 3, generator=generator)
    if not is_shuffled:
        order = order.sort().values
    cache = torch.full((len(order), page_tokens, width), 1e4, dtype=dtype)
    pages = torch.zeros(len(sequences), max(counts), dtype=torch.int64)
    rows, first = [], 0
    for index, ((_, context), count) in enumerate(zip(sequences, counts, strict=True)):
        mine = order[first : first + count]
        pages[index, :count] = mine
        values = torch.randn(context, width, generator=generator).to(dtype)
        for at in range(context):
            cache[mine[at // page_tokens], at % page_tokens] = values[at]
        rows.append(values)
        first += count
    for members, num_pages in PREFIXES.get(batch, []):
        num_pages = num_pages * PAGE_TOKENS // page_tokens
        shared = rows[members[0]][: num_pages * page_tokens]
        for index in members[1:]:
            pages[index, :num_pages] = pages[members[0], :num_pages]
            rows[index] = torch.cat((shared, rows[index][len(shared) :]))
    starts = np.cumsum([0, *(queries for queries, _ in sequences)])
    num_tokens = int(starts[-1])
    step = Step(
        tokens_T=torch.zeros(num_tokens, dtype=torch.int64),
        positions_T=torch.zeros(num_tokens, dtype=torch.int64),
        slots_T=torch.zeros(num_tokens, dtype=torch.int64),
        pages_SP=pages,
        logits_rows_N=torch.zeros(0, dtype=torch.int64),
        page_tokens=page_tokens,
        host_starts_S1=starts.astype(np.int64),
        host_context_S=np.array([context for _, context in sequences], dtype=np.int64),
        host_prompt_S=np.array([context for _, context in sequences], dtype=np.int64),
    )
    return Case(step, rows, cache)


def dense(
    q_QHD: torch.Tensor, k_LHD: torch.Tensor, v_LHW: torch.Tensor, scale: float
) -> torch.Tensor:
    """Causal attention of the last Q of L positions, float64."""
    scores = torch.einsum("qhd,lhd->hql", q_QHD, k_LHD) * scale
    num_queries, num_keys = scores.shape[1:]
    seen = torch.ones(num_queries, num_keys, dtype=torch.bool).tril(num_keys - num_queries)
    weights = scores.masked_fill(~seen, float("-inf")).softmax(-1)
    return torch.einsum("hql,lhw->qhw", weights, v_LHW)
