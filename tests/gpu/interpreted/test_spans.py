"""Tables of a step: what they hold, what they leave out, and tables that are refilled in place."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from triton_case import BOUNDS, error
from triton_spans import Paged, expected_gqa, make_paged, random

from batchmla.kernels.triton.gqa_decode import decode_tiling, gqa_decode
from batchmla.kernels.triton.prefill import HeadRows
from batchmla.kernels.triton.spans import DeviceTables, HostTables, plan_splits

HEADS, KEY_HEADS, WIDTH, PAGE_TOKENS, SPLIT = 4, 2, 16, 16, 32
CPU = torch.device("cpu")


def plan(sequences: list[tuple[int, int]], seed: int = 0) -> tuple[HostTables, Paged]:
    paged = make_paged(sequences, 2 * KEY_HEADS * WIDTH, torch.float32, PAGE_TOKENS, seed)
    spans = paged.spans().spans[0]
    host = plan_splits(
        spans, np.arange(len(sequences)), spans.first_row_G,
        query_rows=HEADS // KEY_HEADS, block_rows=16, split_tokens=SPLIT,
    )  # fmt: skip
    return host, paged


def test_items_cover_every_key_once_longest_first() -> None:
    host, _ = plan([(1, 70), (20, 40), (1, 0), (1, 32)])
    sequence, split, block, slot = host.items_WX.T
    found = sorted(zip(sequence.tolist(), split.tolist(), block.tolist(), strict=True))
    wanted = [(0, each, 0) for each in range(3)]
    wanted += [(1, each, place) for each in range(2) for place in range(3)]
    assert found == [*wanted, (2, 0, 0), (3, 0, 0)]
    lengths = np.minimum(np.array([70, 40, 0, 32])[sequence] - split * SPLIT, SPLIT)
    assert (np.diff(lengths) <= 0).all()
    used = slot[slot >= 0]
    assert sorted(used.tolist()) == list(range(host.num_slots)) and host.num_slots == 9
    assert (slot[(sequence == 2) | (sequence == 3)] == -1).all()
    assert len(host.merges_NX) == 21
    assert len(host.pages) == 5 + 3 + 0 + 2


def test_refilled_tables_are_read_where_they_were() -> None:
    """A launch of a fixed size does a smaller step; rows that are absent are left alone."""
    large, _ = plan([(1, 100), (1, 100), (1, 100)])
    tables = DeviceTables(large, CPU)
    address = tables.items.data_ptr()
    host, paged = plan([(1, 20), (1, 75)], seed=1)
    tables.refill(host)
    assert tables.items.data_ptr() == address
    q = random(3, HEADS, WIDTH, seed=1, dtype=torch.float32)
    out = torch.full((3, HEADS, WIDTH), 7.0)
    keys, values = (half.contiguous() for half in paged.cache_PBW.chunk(2, dim=2))
    parts = [
        HeadRows(base=part.flatten(0, 1), stride=part.shape[2], step=WIDTH, width=WIDTH)
        for part in (keys, values)
    ]
    tiling = decode_tiling(HEADS // KEY_HEADS, WIDTH, 4, is_single=True)
    gqa_decode(
        q, *parts, tables, out, 0.3 * np.log2(np.e), replace(tiling, split_tokens=SPLIT),
        key_heads=KEY_HEADS, page_tokens=PAGE_TOKENS, boxes=None,
    )  # fmt: skip
    expected = expected_gqa(paged, q[:2], KEY_HEADS, 0.3)
    assert error(out[:2].flatten(1), expected) <= BOUNDS[torch.float32]
    assert (out[2] == 7).all()


def test_a_step_that_is_too_large_is_refused() -> None:
    small, _ = plan([(1, 20)])
    large, _ = plan([(1, 100)])
    tables = DeviceTables(small, CPU)
    with pytest.raises(AssertionError, match="do not fit"):
        tables.refill(large)
