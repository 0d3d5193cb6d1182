"""Which sequences are attended together behind keys they share."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from batchmla.attention.groups import make_groups
from batchmla.attention.mla import expanded_keys
from batchmla.attention.prefixes import MIN_SAVED_KEYS, shared_prefixes
from batchmla.kv.step import Step

PAGE_TOKENS = 16


def make_step(shapes: list[tuple[int, int]], shared: list[list[int]]) -> Step:
    """(queries, context) of each sequence; `shared` holds their leading page ids."""
    num_pages = max(-(-context // PAGE_TOKENS) for _, context in shapes)
    pages = np.zeros((len(shapes), num_pages), np.int64)
    fresh = 1000
    for row, (_, context) in enumerate(shapes):
        count = -(-context // PAGE_TOKENS)
        ids = shared[row][:count]
        own = list(range(fresh, fresh + count - len(ids)))
        fresh += len(own) + 1
        pages[row, :count] = ids + own
    starts = np.cumsum([0, *(queries for queries, _ in shapes)])
    context = np.array([context for _, context in shapes])
    zeros = torch.zeros(int(starts[-1]), dtype=torch.int64)
    return Step(
        tokens_T=zeros,
        positions_T=zeros,
        slots_T=zeros,
        pages_SP=torch.from_numpy(pages),
        logits_rows_N=zeros,
        page_tokens=PAGE_TOKENS,
        host_starts_S1=starts,
        host_context_S=context,
        host_prompt_S=context,
    )


def clusters(step: Step) -> list[tuple[list[int], int]]:
    found = shared_prefixes(step, np.arange(step.num_sequences))
    return [(cluster.sequences.tolist(), cluster.num_shared) for cluster in found]


LONG = list(range(1, 61))  # 960 tokens


@pytest.mark.parametrize(
    ("shapes", "shared", "expected"),
    [
        pytest.param([(1, 1000)], [LONG], [([0], 0)], id="alone"),
        pytest.param([(1, 1000)] * 3, [[]] * 3, [([0, 1, 2], 0)], id="nothing shared"),
        pytest.param([(1, 1000)] * 3, [LONG] * 3, [([0, 1, 2], 960)], id="all share"),
        pytest.param(
            [(1, 1000)] * 4, [LONG, [], LONG, LONG], [([0, 2, 3], 960), ([1], 0)], id="one apart"
        ),
        pytest.param([(1, 100)] * 3, [[1, 2]] * 3, [([0, 1, 2], 0)], id="too little to gain"),
        pytest.param(
            [(1, 900), (40, 900), (300, 900)],
            [LONG] * 3,
            [([0, 1, 2], 592)],
            id="only tokens before every query",
        ),
        pytest.param(
            [(1, 1000)] * 6,
            [LONG] * 3 + [[*LONG[:2], *range(100, 160)]] * 3,
            [([0, 1, 2], 960), ([3, 4, 5], 992)],
            id="two deep prefixes beat a short common one",
        ),
        pytest.param(
            [(1, 1000)] * 6,
            [[*LONG, 90], [*LONG, 90]] + [LONG] * 4,
            [([0, 1, 2, 3, 4, 5], 960)],
            id="one common prefix beats a longer one of two",
        ),
        pytest.param(
            [(960, 960), (1, 1000), (1, 1000), (1, 1000)],
            [[0] * 60, LONG, LONG, LONG],
            [([1, 2, 3], 960), ([0], 0)],
            id="a whole prompt shares nothing",
        ),
    ],
)
def test_clusters(
    shapes: list[tuple[int, int]], shared: list[list[int]], expected: list[tuple[list[int], int]]
) -> None:
    assert clusters(make_step(shapes, shared)) == expected


def test_groups_hold_every_row_once_and_a_prefix_its_cluster() -> None:
    shapes = [(1, 1000), (3, 990), (1, 980), (1, 50), (8, 8)]
    step = make_step(shapes, [LONG, LONG, LONG, [], []])
    groups = make_groups(step, np.arange(5), torch.float32)
    (prefix,) = groups.prefixes
    assert (prefix.num_keys, prefix.num_queries, prefix.first_row) == (960, 5, 0)
    assert prefix.pages_GP.tolist() == [LONG]
    assert groups.rows_N is not None
    assert sorted(groups.rows_N.tolist()) == list(range(14))
    assert sorted(groups.rows_N[:5].tolist()) == [0, 1, 2, 3, 4]
    assert sum(group.num_rows for group in groups.members) == 14
    assert max(group.num_keys for group in groups.members) == 50


def test_a_shared_key_is_expanded_once() -> None:
    shapes = [(10, 1000), (20, 1000), (1, 1000), (30, 64), (9, 970)]
    step = make_step(shapes, [LONG, LONG, LONG, [], LONG])
    assert expanded_keys(step).tolist() == [40 + 320, 40 + 320, 1000, 64, 10 + 320]


def most_saved(pages: list[list[int]], depth: int = 0) -> int:
    """Keys that clusters save at best, by trying at every branch whether to part there."""
    branches: dict[int, list[list[int]]] = {}
    for ids in pages:
        if len(ids) > depth:
            branches.setdefault(ids[depth], []).append(ids)
    together = (len(pages) - 1) * depth * PAGE_TOKENS
    apart = sum(most_saved(branch, depth + 1) for branch in branches.values())
    return max(apart, together if together >= MIN_SAVED_KEYS else 0)


def test_clusters_save_the_most_keys() -> None:
    rng = np.random.default_rng(0)
    num_clusters = 0
    for _ in range(200):
        count, depth = int(rng.integers(2, 40)), int(rng.integers(1, 14))
        steps = (rng.random((count, depth)) < rng.choice([0.02, 0.1, 0.3])).cumsum(axis=1)
        table = (steps + 50 * np.arange(depth)).tolist()  # a page has one place in all prefixes
        shared = [row[: int(rng.integers(depth // 2, depth + 1))] for row in table]
        step = make_step([(1, depth * PAGE_TOKENS + 1)] * count, shared)
        found = [(members, keys) for members, keys in clusters(step) if keys]
        num_clusters += len(found)
        pages = step.pages_SP.numpy()
        for members, keys in found:
            assert len(np.unique(pages[members, : keys // PAGE_TOKENS], axis=0)) == 1
        placed = [member for members, _ in found for member in members]
        assert len(placed) == len(set(placed))
        saved = sum((len(members) - 1) * keys for members, keys in found)
        assert saved == most_saved([row[:-1] for row in pages.tolist()])
    assert num_clusters > 40


def test_sequences_may_branch_at_every_page() -> None:
    """Each prompt goes on where the one before it ends, more of them than calls may be nested."""
    count = 1200
    pages = np.arange(1, count + 2)
    context = np.arange(1, count + 1) * PAGE_TOKENS + 1
    step = make_step([(1, PAGE_TOKENS)] * 2, [[]] * 2)
    table = np.where(np.arange(count + 1) < np.arange(1, count + 1)[:, None], pages, 0)
    table[np.arange(count), np.arange(1, count + 1)] = count + 2 + np.arange(count)
    step = replace(
        step, tokens_T=torch.zeros(count, dtype=torch.int64), pages_SP=torch.from_numpy(table),
        host_starts_S1=np.arange(count + 1), host_context_S=context, host_prompt_S=context,
    )  # fmt: skip
    (behind, shared), (rest, nothing) = clusters(step)
    assert (behind, shared) == (list(range(599, count)), 600 * PAGE_TOKENS)
    assert (rest, nothing) == (list(range(599)), 0)
