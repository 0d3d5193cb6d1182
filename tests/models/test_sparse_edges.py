"""Families that choose their keys, at the edges of windows, entries and choices: after preemption,
on a prefix hit and on two ranks. Logits and chosen keys equal transformers'."""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from choices import NUM_LANES, NUM_PAGES, PAGE_TOKENS, Case, Watched, oracle_choices, run_watched
from compare import assert_logits
from ranks import logits_on_ranks
from steps import Row
from tiny import oracle_logits, write_tiny

from batchmla import kernels
from batchmla.kernels.ops import Ops
from batchmla.kv.cache import LayerCache

# all edges lie behind the first page, so that a prefix hit comes before them: a window of 24,
# entries of 4 tokens (5 of them chosen: a sixth is there from 24 on) and of 16
LATE_V4 = {
    "sliding_window": 24, "index_topk": 5,
    "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 16},
}  # fmt: skip


@dataclass(frozen=True)
class Edges:
    """A tiny model, what its layers read, and the lengths around that."""

    name: str
    changes: dict[str, Any]
    stride: int  # tokens behind a key
    count: int  # keys chosen
    lengths: tuple[int, ...]


EDGES = {
    "v32": Edges("v32", {}, 1, 8, (1, 7, 8, 9, 10, 33)),
    "v32_wide": Edges("v32_wide", {}, 1, 40, (17, 39, 40, 41, 42, 97)),
    "v4": Edges("v4", {}, 4, 2, (1, 3, 4, 5, 7, 8, 9, 11, 12, 13, 15, 16, 17, 37)),
    "v4_late": Edges(
        "v4", LATE_V4, 4, 5, (17, 19, 20, 21, 22, 23, 24, 25, 26, 31, 32, 33, 47, 48, 49)
    ),
}


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Case]:
    made = {}
    for name, edges in EDGES.items():
        folder = tmp_path_factory.mktemp(name)
        made[name] = Case(folder, write_tiny(folder, edges.name, **edges.changes), edges.stride)
    return made


def make_texts(lengths: Sequence[int], seed: int) -> list[list[int]]:
    source = random.Random(seed)
    return [[source.randrange(256) for _ in range(length)] for length in lengths]


class Places:
    """Pages and lanes in random order."""

    def __init__(self, seed: int) -> None:
        source = random.Random(seed)
        self.pages, self.lanes = list(range(NUM_PAGES)), list(range(NUM_LANES))
        source.shuffle(self.pages)
        source.shuffle(self.lanes)

    def take(self, num_tokens: int) -> list[int]:
        return [self.pages.pop() for _ in range(-(-num_tokens // PAGE_TOKENS))]


def load(case: Case, ops: Ops) -> tuple[Watched, Any, tuple[LayerCache, ...]]:
    watched = Watched(ops)
    return watched, case.model(watched.ops), case.cache("float32")


def check(case: Case, edges: Edges, rows: Sequence[Row], firsts: Sequence[int], found: Any) -> int:
    """Logits and choices of each row from its first position on; how many sets were compared."""
    num_sets = 0
    for index, (row, first) in enumerate(zip(rows, firsts, strict=True)):
        expected = oracle_logits(case.oracle, row.ids)[first:]
        assert_logits(f"{len(row.ids)} tokens from {first}", torch.cat(row.logits), expected)
        for layer, wanted in enumerate(oracle_choices(case.oracle, row.ids)):
            for position in range(first, len(row.ids)):
                chosen = found[index, position][0][layer]
                if (position + 1) // edges.stride <= edges.count:
                    assert chosen == frozenset(), "an early position reads all its keys"
                else:
                    assert chosen == wanted[position], (index, position, layer)
                    num_sets += 1
    return num_sets


@pytest.mark.parametrize("sizes", [(1, 7, 64), (5, 1000, 2)], ids=str)
@pytest.mark.parametrize("name", EDGES)
def test_preempted_rows_begin_again_in_other_places(
    cases: dict[str, Case], name: str, sizes: tuple[int, ...]
) -> None:
    """Every second row loses what it has; it gets the place of another that lost its own."""
    case, edges = cases[name], EDGES[name]
    watched, model, cache = load(case, kernels.load("cpu"))
    texts, places = make_texts(edges.lengths, seed=sizes[0]), Places(sizes[0])
    held = [(places.take(max(edges.lengths)), places.lanes.pop()) for _ in texts]
    cuts = [len(ids) - len(ids) // 3 - (len(ids) == 1) for ids in texts]
    begun = [
        Row(ids[:cut], pages, lane=lane)
        for ids, cut, (pages, lane) in zip(texts, cuts, held, strict=True)
    ]
    chunks = [sizes[index % len(sizes)] for index in range(len(texts))]
    run_watched(case, model, watched, cache, begun, chunks)
    lost = list(range(0, len(texts), 2))
    others = dict(zip(lost, [*lost[1:], lost[0]], strict=True))
    firsts = [0 if index in others else cut for index, cut in enumerate(cuts)]
    rows = []
    for index, (ids, first) in enumerate(zip(texts, firsts, strict=True)):
        pages, lane = held[others.get(index, index)]
        rows.append(Row(ids, pages, computed=first, lane=lane))
    found = run_watched(case, model, watched, cache, rows, chunks[::-1])
    assert check(case, edges, rows, firsts, found) > 0


@pytest.mark.parametrize("sizes", [(1, 7, 64), (2, 1000, 3)], ids=str)
@pytest.mark.parametrize("name", ["v32_wide", "v4_late"])
def test_a_prefix_hit_goes_on_before_every_edge(
    cases: dict[str, Case], name: str, sizes: tuple[int, ...]
) -> None:
    """Rows with a common beginning read one row's pages, and begin with a copy of its lane."""
    case, edges = cases[name], EDGES[name]
    watched, model, cache = load(case, kernels.load("cpu"))
    places = Places(sizes[0])
    prefix = make_texts([PAGE_TOKENS], seed=9)[0]
    first = Row(prefix, places.take(PAGE_TOKENS), lane=places.lanes.pop())
    run_watched(case, model, watched, cache, [first], [sizes[0]])
    rows = []
    for ids in make_texts([length - PAGE_TOKENS for length in edges.lengths], seed=1):
        row = Row(prefix + ids, [*first.pages, *places.take(len(ids))], computed=PAGE_TOKENS)
        row.lane = places.lanes.pop()
        for layer in cache:
            for part in ("window", "state"):
                if part in layer:
                    layer[part][row.lane] = layer[part][first.lane]
        rows.append(row)
    chunks = [sizes[index % len(sizes)] for index in range(len(rows))]
    found = run_watched(case, model, watched, cache, rows, chunks)
    assert check(case, edges, rows, [PAGE_TOKENS] * len(rows), found) > 0


def test_two_ranks_at_the_edges(cases: dict[str, Case], tmp_path: Path) -> None:
    lengths = sorted({length for edges in EDGES.values() for length in edges.lengths})
    texts = make_texts(lengths, seed=2)
    by_rank = logits_on_ranks([case.folder for case in cases.values()], texts, tmp_path, 2)
    for index, (name, case) in enumerate(cases.items()):
        for place, ids in enumerate(texts):
            expected = oracle_logits(case.oracle, ids)
            for results in by_rank:
                assert_logits(f"{name}, {len(ids)} tokens", results[index][place], expected)
