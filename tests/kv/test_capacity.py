"""Memory to pages to concurrency, against figures worked out by hand."""

from batchmla.kv.capacity import (
    MemoryBudget,
    kv_capacity_tokens,
    max_concurrency,
    pages_within,
    pool_bytes,
)
from batchmla.kv.layout import KVLayout, KVPart

LATENT = KVPart(name="latent", width=576, dtype="bfloat16")
R1 = KVLayout(layers=((LATENT,),) * 61, page_tokens=64)


def test_forty_gib_of_r1_in_bf16() -> None:
    num_pages = pages_within(R1, 40 * 2**30, num_lanes=8)
    assert num_pages == 9549  # 4,497,408 bytes a page
    assert kv_capacity_tokens(R1, num_pages) == 611_136
    concurrency = max_concurrency(R1, num_pages, (32_768, 64, 65))
    assert concurrency == {32_768: 9549 / 512, 64: 9549.0, 65: 9549 / 2}


def test_lanes_come_out_of_the_pool() -> None:
    window = KVPart(name="window", width=10, dtype="float32", window=128)
    row = KVPart(name="row", width=8, dtype="float32")
    layout = KVLayout(layers=((window, row),), page_tokens=16, state_bytes=88)
    lane_bytes = 128 * 40 + 88
    assert pages_within(layout, 3 * lane_bytes + 10 * 512 + 511, num_lanes=3) == 10
    assert pages_within(layout, 2 * lane_bytes, num_lanes=3) == 0
    assert pool_bytes(layout, 10, 3) == 3 * lane_bytes + 5120


def test_budget_is_what_the_others_leave() -> None:
    budget = MemoryBudget(total_bytes=100, reserve_bytes=8, weights_bytes=50, workspace_bytes=12)
    assert budget.left_bytes == budget.kv_bytes == 30
    tight = MemoryBudget(total_bytes=60, reserve_bytes=8, weights_bytes=50, workspace_bytes=12)
    assert tight.left_bytes == -10 and tight.kv_bytes == 0
